"""The policy: a frozen base model with a LoRA adapter, and the numbers training needs from it.

Base weights are float32 on CPU and bfloat16 on a GPU unless `precision` says otherwise; adapters,
logits and losses are float32 always. The reference policy is the base without an adapter, or with
a frozen copy of the adapter the run started from.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from engine.core.files import read_object
from engine.core.hardware import driver
from engine.models import hub
from engine.records.settings import CommonSettings
from engine.worker.core import pulse, switched_off
from engine.worker.core.batch import Row
from engine.worker.core.failures import WorkerFailure
from engine.worker.network import comparisons
from engine.worker.network.adapter import Adapter, LoraSpec, read_adapter
from engine.worker.network.decoder import TOLERANCE, Decoder
from engine.worker.network.network import DecoderNetwork, Network, PackedOrPadded
from engine.worker.network.shape import layer_sizes, unsupported
from engine.worker.ops import fused_ops
from engine.worker.ops.fused_ops import TORCH, Choice
from engine.worker.ops.packing import pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What transformers raises if it cannot load a folder. OSError: a missing or broken file;
# ValueError: a configuration it refuses; KeyError: a key or a class it does not know; ImportError:
# a package that the model needs.
LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError)


@dataclass(frozen=True)
class Base:
    """A loaded base model without adapters, its tokenizer, and the ids that end a turn."""

    network: Network
    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]
    path: Path

    @property
    def pad_id(self) -> int:
        """The id that fills rows up to one length. Padded positions are masked, so any id will
        do."""
        pad = self.tokenizer.pad_token_id
        return int(pad) if isinstance(pad, int) else self.stop_ids[0]

    @property
    def vocab(self) -> int:
        """How many ids have a token: those from 0 up to this number. The model's output may be
        padded to more."""
        return self.network.vocab


def pick_device(name: str) -> torch.device:
    """Return the torch device for `name`, which is `cpu` or `cuda:N`.

    A run is given one device when it starts, and its process sees only that GPU. So N, the GPU's
    number in the machine, does not matter: the result is "cuda", the only GPU in sight.

    Raises:
        WorkerFailure: kind infra, if `name` is a GPU and torch sees none. The run does not go on
            with a CPU, which would take days for what was planned in hours.
    """
    if not name.startswith("cuda"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs alone"
        raise WorkerFailure(
            "infra",
            f"torch cannot use {name}, the GPU of this run.",
            evidence=f"torch {torch.__version__} is built for {built_for}; here is {driver()}",
            hint="Install a driver that serves this CUDA (580 or newer for CUDA 13), or a torch "
            "built for the CUDA of the driver, by `honesmith setup --again`; then resume the run.",
        )
    return torch.device("cuda")


def pick_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the number format for a setting `precision`: float32, bfloat16, or auto.

    `auto` is bfloat16 on a GPU that passed the trial of bfloat16 products, and float32 otherwise.
    On a CPU, bfloat16 is slower for small models.
    """
    if precision == "auto":
        has_bfloat16 = device.type == "cuda" and not switched_off.is_off("bfloat16")
        return torch.bfloat16 if has_bfloat16 else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


def load_base(
    path: Path,
    device: torch.device,
    precision: str,
    quantization: str = "none",
    *,
    comparisons_file: Path | None = None,
    steps: int = 0,
) -> Base:
    """Load a base model and its tokenizer from the folder `path`; weights must be safetensors. Code
    in the folder is never run. Our own forward is used if it supports the model and its logits
    agree with transformers'; otherwise the model runs through transformers.

    Args:
        device: where the model computes.
        precision: float32, bfloat16, or auto (bfloat16 on a GPU that passed its trial).
        quantization: `nf4` rounds the weights of the layers' projections to 4 bits while loading,
            `none` does not.
        comparisons_file: keeps the results of comparisons, so that each is made once; None keeps
            none.
        steps: the number of optimizer steps that will follow, as far as known. It decides whether
            compiling functions is worth the time.

    Raises:
        WorkerFailure: kind config, if the folder holds no model that can be loaded.
    """
    hub.ensure_weights(path)
    tokenizer, config = _load_tokenizer_and_config(path)
    vocab = known_ids(config, tokenizer)
    stop_ids = stop_ids_of(config, tokenizer, path)
    # The reason why our own forward cannot be used; "" while it may. HubNetwork records the reason.
    why_not_ours = "4-bit weights" if quantization != "none" else unsupported(config)
    model: PreTrainedModel | None = None
    if not why_not_ours:
        network, why_not_ours, model = _load_decoder_network(
            path, config, vocab, device, precision, comparisons_file, steps=steps
        )
        if network is not None:
            return Base(network, tokenizer, stop_ids, path)
    if model is None:
        model, _ = load_transformers(path, device, precision, quantization)
    # Imported late: PEFT takes a second and over 100 MB, and our own forward does without it.
    from engine.worker.network.hub_network import HubNetwork  # noqa: PLC0415

    return Base(HubNetwork(model, vocab, why_not_ours), tokenizer, stop_ids, path)


def _load_decoder_network(
    path: Path,
    config: Any,
    vocab: int,
    device: torch.device,
    precision: str,
    comparisons_file: Path | None,
    *,
    steps: int,
) -> "tuple[DecoderNetwork | None, str, PreTrainedModel | None]":
    """Load the model in `path` for our own forward, and compare its logits with transformers'. They
    are compared once for each model; later loads trust the result in `comparisons_file`.

    Returns (the network, "", None) if the logits agree. Otherwise returns (None, the reason,
    transformers' model); the model is None if its weights could not be given back to it.

    Args:
        config: transformers' configuration of the model; our own forward supports it.
        vocab: the number of ids that have a token.
        path, device, precision, comparisons_file, steps: see `load_base`.
    """
    dtype = pick_dtype(precision, device)
    choice = fused_ops.choose(layer_sizes(config), dtype, device, steps)
    # The rotary positions that an earlier comparison stored, if the logits agreed. With them the
    # files are read directly: transformers' model classes take over 100 MB and a second to import.
    known_rope = comparisons.recall(comparisons_file, path, dtype, choice.functions.name, device)
    if known_rope is not None:
        # KeyError: weights under names that only transformers can map. The model is then loaded
        # through transformers below, and compared again.
        with contextlib.suppress(KeyError):
            decoder = Decoder.read(path, config, known_rope, dtype, device)
            return DecoderNetwork(decoder, vocab, choice), "", None
    model, decoder, used_choice, difference = _load_and_compare(
        path, vocab, device, precision, choice
    )
    if difference <= TOLERANCE[decoder.dtype]:
        name, rope = used_choice.functions.name, decoder.rotary
        comparisons.remember(comparisons_file, path, dtype, name, rope, difference, device)
        return DecoderNetwork(decoder, vocab, used_choice), "", None
    why_not = f"logits differ from transformers' by {difference:.1e}"
    whole_model = model if decoder.return_weights(model) else None
    return None, why_not, whole_model


def _load_and_compare(
    path: Path, vocab: int, device: torch.device, precision: str, choice: Choice
) -> "tuple[PreTrainedModel, Decoder, Choice, float]":
    """Load the model in `path` with transformers, make our own decoder of it, and compare the
    logits of both on a few ids. `choice` is the set of functions (norms, rotations, gates) to try
    in the decoder. If its results are wrong, torch's functions take its place.

    Returns four values: the model, whose weights the decoder took; the decoder; the choice that the
    decoder now uses; and the difference of its logits from transformers', relative to the latter.
    """
    model, _ = load_transformers(path, device, precision)
    probe = probe_ids(vocab)
    with torch.no_grad():
        expected = model(torch.tensor([probe], device=device)).logits[0].float()
    decoder = Decoder.from_transformers(model)
    choice, difference = _try_choice(decoder, choice, probe, expected)
    return model, decoder, choice, difference


def _load_tokenizer_and_config(path: Path) -> tuple[PreTrainedTokenizerBase, Any]:
    """Load (tokenizer, configuration) of the model in `path`.

    Raises WorkerFailure (kind config) if transformers cannot load one of them.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        return tokenizer, AutoConfig.from_pretrained(path, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise _load_failure(path, error) from error


def _load_failure(path: Path, error: Exception) -> WorkerFailure:
    """Make the failure (kind config) of a run whose model in the folder `path` cannot be loaded.
    The type and first line of `error` are its evidence."""
    return WorkerFailure(
        "config",
        f"The model in {path} could not be loaded.",
        evidence=f"{type(error).__name__}: {str(error).splitlines()[0]}",
        hint="Check that the folder holds config.json, safetensors weights and a tokenizer.",
    )


def load_base_with(path: Path, make_network: Callable[[int], Network]) -> Base:
    """Load tokenizer and stop ids of the base in the folder `path`; the network comes from the
    caller. `make_network` is called with the number of ids that have a token."""
    tokenizer, config = _load_tokenizer_and_config(path)
    stop_ids = stop_ids_of(config, tokenizer, path)
    return Base(make_network(known_ids(config, tokenizer)), tokenizer, stop_ids, path)


def empty_transformers(path: Path, precision: str, runs_on: torch.device) -> "PreTrainedModel":
    """Make the model in the folder `path` with transformers' own classes, frozen, without its
    weights: its tensors have shapes, but no memory yet (torch's device "meta"). Their number format
    is that of `precision` on the device `runs_on`; see `pick_dtype`."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    with torch.device("meta"):
        model = _model_class(path).from_config(config, dtype=pick_dtype(precision, runs_on))
    model.requires_grad_(False)
    model.eval()
    _forbid_repacking(model)
    return model


def load_transformers(
    path: Path,
    device: torch.device,
    precision: str,
    quantization: str = "none",
    *,
    runs_on: torch.device | None = None,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model with transformers' own classes. Returns (the model, frozen and on the device;
    its tokenizer).

    Args:
        precision: float32, bfloat16, or auto (bfloat16 on a GPU that passed its trial).
        quantization: "nf4" loads 4-bit weights, "none" those of the precision.
        runs_on: the device that the model will compute on, which decides the number format; None:
            `device`.

    Raises:
        WorkerFailure: kind config, if the folder holds no model that can be loaded.
    """
    hub.ensure_weights(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model = _model_class(path).from_pretrained(
            path,
            dtype=pick_dtype(precision, runs_on or device),
            use_safetensors=True,
            trust_remote_code=False,
            **_placement_arguments(device, quantization),
        )
    except LOAD_ERRORS as error:
        raise _load_failure(path, error) from error
    model.requires_grad_(False)
    model.eval()
    if quantization == "none":  # quantized weights are on the device already
        # torch's `to`, because the type annotations of transformers' own `to` fit no call.
        torch.nn.Module.to(model, device)
    _forbid_repacking(model)
    return model, tokenizer


def _forbid_repacking(model: torch.nn.Module) -> None:
    """Keep modules from repacking their weights for inference, by clearing the flag that allows it.
    On a CPU with AVX512-BF16 they would do so at the first pass in eval mode, and never undo it.
    After that, training would silently get no gradients through them."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            vars(module)["support_avx512bf16_for_cpu"] = False


def _model_class(path: Path) -> Any:
    """Return the transformers class that loads the model in `path`: the class for causal language
    models if that knows the family. Otherwise it is the class for models that also see pictures,
    which read text alone too."""
    # Imported late, as our own forward does without them.
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: PLC0415
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    is_causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def _placement_arguments(device: torch.device, quantization: str) -> dict[str, Any]:
    """Arguments that make transformers load weights straight to a GPU, not through the machine's
    memory, which may be smaller. Quantized weights become 4-bit NormalFloat with doubly quantized
    scales (QLoRA, arXiv 2305.14314); products are computed in bfloat16.

    Raises:
        WorkerFailure: kind config, if the weights are to be quantized and the trial of 4-bit
            weights failed on this device.
    """
    on_device = {"device_map": {"": str(device)}}  # "": all modules
    if quantization == "none":
        return {} if device.type == "cpu" else on_device
    if switched_off.is_off("four_bits"):
        raise WorkerFailure(
            "config",
            f'quantization = "{quantization}" does not work on this device.',
            evidence=switched_off.why_off("four_bits"),
            hint='Train with quantization = "none", or mend what `honesmith doctor --gpu` names.',
        )
    from transformers import BitsAndBytesConfig  # noqa: PLC0415 - rarely used, dear to import

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": config, **on_device}


def probe_ids(vocab: int) -> list[int]:
    """Return 24 ids from all over the vocabulary, on which two forward passes are compared. They
    are the same in every run."""
    # 7919 is a prime, so the steps hit different ids in any vocabulary.
    return [(7 + 7919 * index) % vocab for index in range(24)]


def _try_choice(
    decoder: Decoder, choice: Choice, probe: Sequence[int], expected: torch.Tensor
) -> tuple[Choice, float]:
    """Compare our logits, computed with the chosen set of functions, with transformers'. If they
    differ too much, set `decoder` to torch's functions and compare again.

    Args:
        probe: the ids to compare on.
        expected: transformers' logits for these ids.

    Returns (the set that `decoder` now uses, the relative difference with that set).
    """
    decoder.functions = choice.functions
    difference = _relative_difference(decoder, probe, expected)
    if choice.functions is TORCH or difference <= TOLERANCE[decoder.dtype]:
        return choice, difference
    reason = f"{choice.functions.name}: logits differ from transformers' by {difference:.1e}"
    decoder.functions = TORCH
    return Choice(TORCH, reason), _relative_difference(decoder, probe, expected)


def _relative_difference(decoder: Decoder, probe: Sequence[int], expected: torch.Tensor) -> float:
    """Measure how far our results are from transformers' logits `expected` for the ids `probe`: the
    norm of the difference over the norm of the expected values. Compared are the logits, and the
    log-probabilities where rows share a prompt (the path that GRPO trains through); the larger
    difference counts."""
    ours = decoder.logits(torch.tensor(probe, device=decoder.device), decoder.weights(None))
    logits_difference = float((ours - expected).norm() / expected.norm())
    return max(logits_difference, _difference_with_shared_prompt(decoder, probe, expected))


@torch.no_grad()
def _difference_with_shared_prompt(
    decoder: Decoder, probe: Sequence[int], expected: torch.Tensor
) -> float:
    """Measure how far our log-probabilities are from those of the logits `expected`, relative to
    the latter, where rows share a prompt. Two rows share the first half of the ids `probe` as their
    prompt; the log-probabilities of the second half are compared."""
    half = len(probe) // 2
    ids = list(probe)
    whole_row = Row(ids, [0] * half + [1] * (len(ids) - half), prefix_len=half)
    # The second row is shorter, so that rows of different lengths are compared too.
    shorter = Row(ids[:-2], whole_row.loss_mask[:-2], prefix_len=half)
    batch = pack([whole_row, shorter], decoder.padding_multiple).to(decoder.device)
    our_logprobs, _ = decoder.logprobs(batch, decoder.weights(None), vocab=expected.shape[-1])
    whole_logprobs = _logprobs_from(expected, ids, half)
    expected_logprobs = torch.cat([whole_logprobs, whole_logprobs[:-2]])  # of both rows
    return float((our_logprobs - expected_logprobs).norm() / expected_logprobs.norm())


def _logprobs_from(logits: torch.Tensor, ids: Sequence[int], first: int) -> torch.Tensor:
    """Compute the log-probabilities of the ids from number `first` on, [len(ids) - first], from the
    `logits` [len(ids), vocab] of the sequence `ids`."""
    logprobs = logits[first - 1 : -1].log_softmax(-1)  # the logits at a token predict the next one
    labels = torch.tensor(ids[first:], device=logprobs.device)
    return logprobs.gather(1, labels[:, None])[:, 0]


def known_ids(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the ids that have a token in the model and in the tokenizer. That is the smaller of two
    sizes: the model's vocabulary may be padded with ids that have no token, and the tokenizer may
    have tokens that the model lacks. `config` is the model's configuration."""
    return min(len(tokenizer), int(config.get_text_config().vocab_size))


def stop_ids_of(config: Any, tokenizer: PreTrainedTokenizerBase, path: Path) -> list[int]:
    """Collect the ids that end a turn, each once: the tokenizer's end token first, then every other
    one that the model's configuration or `path`/generation_config.json names.

    Raises:
        WorkerFailure: kind config, if none of the three names one.
    """
    generation = read_object(path / "generation_config.json")
    ids: list[int] = []
    configured = getattr(config.get_text_config(), "eos_token_id", None)
    # Each is an id, a list of ids, or None.
    for value in (tokenizer.eos_token_id, configured, generation.get("eos_token_id")):
        tokens = value if isinstance(value, list) else [value]
        for token in tokens:
            if isinstance(token, int) and token not in ids:
                ids.append(token)
    if not ids:
        raise WorkerFailure("config", "The model names no token that ends a turn (eos_token_id).")
    return ids


class Policy:
    """A base model with one trained adapter.

    Attributes:
        base: its weights are never changed.
        reference: a frozen copy of the start adapter; None if the base alone is the reference.
    """

    def __init__(
        self, base: Base, settings: CommonSettings, start_adapter: Path | None = None
    ) -> None:
        """Put a new adapter on the base, as the settings say. If `start_adapter` (a PEFT folder) is
        given, the new adapter and the frozen reference get the weights in that folder.

        Raises:
            WorkerFailure: kind config, if the start adapter cannot be read or does not fit.
        """
        self.base = base
        self.checkpointing = settings.gradient_checkpointing
        spec = LoraSpec.from_settings(settings)
        self.adapter = base.network.new_adapter(spec, settings.seed)
        self.reference: Adapter | None = None  # the base alone
        if start_adapter is not None:
            state = read_adapter(start_adapter)
            self.adapter.load(state)
            self.reference = base.network.new_adapter(spec, settings.seed)
            self.reference.load(state)

    @property
    def device(self) -> torch.device:
        """The device that base and adapter are on."""
        return self.base.network.device

    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained tensors, in a fixed order; all float32."""
        return self.adapter.parameters()

    def collate(self, rows: Sequence[Row]) -> PackedOrPadded:
        """Make one microbatch of `rows`, in the form that `logprobs` reads."""
        return self.base.network.collate(rows)

    def split(self, rows: Sequence[Row], budget: int) -> list[list[int]]:
        """Divide `rows` into microbatches of at most `budget` tokens. Returns for each microbatch
        the indices of its rows."""
        return self.base.network.split(rows, budget)

    def logprobs(
        self, batch: PackedOrPadded, temperature: float = 1.0, *, entropies: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probabilities and entropies of a batch's trained tokens, for training:
        with gradients and with the adapter's dropout.

        Args:
            batch: made by `collate`.
            temperature: at which the tokens were sampled; 0 (greedy) counts as 1.
            entropies: whether the entropies are needed; otherwise they may be zeros.

        Returns:
            (log-probabilities, entropies), both [tokens] float32; only log-probabilities carry
                gradients.
        """
        pulse.beat()  # a sign of life for each microbatch: this process is not stuck
        return self.base.network.logprobs(
            batch,
            self.adapter,
            inverse_temperature=_inverse_temperature(temperature),
            entropies=entropies,
            checkpointing=self.checkpointing,
            training=True,
        )

    @torch.no_grad()
    def reference_logprobs(self, batch: PackedOrPadded, temperature: float = 1.0) -> torch.Tensor:
        """Compute the log-probabilities of a batch's trained tokens under the reference, the policy
        that the run started from. Returns [tokens] float32, without gradient.

        `temperature` is that at which the tokens were sampled; 0 (greedy) counts as 1.
        """
        logprobs, _ = self.base.network.logprobs(
            batch,
            self.reference,
            inverse_temperature=_inverse_temperature(temperature),
        )
        return logprobs


def _inverse_temperature(temperature: float) -> float:
    """Return the factor that logits are multiplied by at a temperature: its inverse, or 1 at
    temperature 0 (greedy), where there is no inverse."""
    return 1.0 / temperature if temperature else 1.0

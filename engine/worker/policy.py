"""The policy: a frozen base model with a LoRA adapter, and the numbers training needs from it.

Base weights are float32 on CPU and bfloat16 on a GPU unless `precision` says otherwise; adapters,
logits and losses are float32 always. The reference policy is the base with its adapter switched
off, or a frozen copy of the adapter the run started from.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine import hub
from engine.worker.batch import Batch
from engine.worker.failures import WorkerFailure

TRAINED = "default"
REFERENCE = "reference"
# Rows of logits made at once: bounds the largest tensor there is, [chunk, vocabulary] float32.
HEAD_CHUNK = 4096
# Models that change the hidden state on its way to the logits cannot use the short way round.
SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier")


@dataclass(frozen=True)
class Base:
    """A loaded base model without adapters, its tokenizer, and the ids that end a turn."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]
    path: Path

    @property
    def pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad) if isinstance(pad, int) else self.stop_ids[0]

    @property
    def vocab(self) -> int:
        """Ids that have a token; a padded vocabulary goes beyond them."""
        return min(len(self.tokenizer), int(self.model.config.get_text_config().vocab_size))


def pick_device(name: str) -> torch.device:
    """The torch device for a leased device id (`cpu` or `cuda:N`; the lease sets visibility)."""
    return torch.device("cuda" if name.startswith("cuda") and torch.cuda.is_available() else "cpu")


def pick_dtype(precision: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on CPU, where bfloat16 is slower for small models."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


def load_base(path: Path, device: torch.device, precision: str) -> Base:
    """Load safetensors weights and tokenizer from a folder. Never runs code from the folder.

    Raises:
        WorkerFailure: kind config, when the folder holds no model that can be loaded.
    """
    hub.ensure_weights(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=pick_dtype(precision, device),
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError) as error:
        raise WorkerFailure(
            "config",
            f"The model in {path} could not be loaded.",
            evidence=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            hint="Check that the folder holds config.json, safetensors weights and a tokenizer.",
        ) from error
    model.requires_grad_(False)
    torch.nn.Module.to(model, device)  # transformers' own `to` is typed for no caller
    return Base(model, tokenizer, _stop_ids(model, tokenizer), path)


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokenizer's end token first, then every other one the model's configuration names."""
    found: list[int] = []
    generation = getattr(model, "generation_config", None)
    for source in (tokenizer, model.config, generation):
        for name in ("eos_token_id",):
            value = getattr(source, name, None)
            for token in value if isinstance(value, list) else [value]:
                if isinstance(token, int) and token not in found:
                    found.append(token)
    if not found:
        raise WorkerFailure("config", "The model names no token that ends a turn (eos_token_id).")
    return found


class Policy:
    """A base model with one trained adapter.

    Args:
        base: consumed; its linear layers are wrapped in place.
        settings: the resolved settings (lora_rank, lora_alpha, lora_dropout, lora_targets,
            gradient_checkpointing, seed).
        start_adapter: a PEFT folder whose adapter the run continues a copy of.
    """

    def __init__(
        self, base: Base, settings: dict[str, Any], start_adapter: Path | None = None
    ) -> None:
        self.base = base
        torch.manual_seed(settings["seed"])  # the adapter's A matrices
        config = LoraConfig(
            r=settings["lora_rank"],
            lora_alpha=settings["lora_alpha"],
            lora_dropout=settings["lora_dropout"],
            target_modules=_targets(settings["lora_targets"]),
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(base.model, config, adapter_name=TRAINED)
        if not isinstance(model, PeftModel):
            raise TypeError(f"expected a PeftModel, got {type(model).__name__}")
        self.model = model
        self.has_reference_copy = start_adapter is not None
        if start_adapter is not None:
            state = read_adapter(start_adapter)
            self.load_adapter_state(state)
            self.model.add_adapter(REFERENCE, config)
            set_adapter_state(self.model, state, REFERENCE)
            self.model.set_adapter(TRAINED)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(f".{TRAINED}." in name)
        if settings["gradient_checkpointing"]:
            base.model.activation_checkpointing_enable({"use_reentrant": False})
            base.model.enable_input_require_grads()

    @property
    def device(self) -> torch.device:
        return self.base.model.device

    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained tensors, in a fixed order; all float32."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """The trained adapter under PEFT's names, detached copies on CPU."""
        state = _state(self.model, TRAINED)
        return {k: v.detach().to("cpu", torch.float32).clone() for k, v in state.items()}

    def load_adapter_state(self, state: dict[str, torch.Tensor]) -> None:
        """Put adapter weights in place.

        Raises:
            WorkerFailure: kind config, when a tensor is missing, left over or of another shape.
        """
        set_adapter_state(self.model, state, TRAINED)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Inside, the model is the reference policy; nothing is recorded for gradients."""
        with torch.no_grad():
            if self.has_reference_copy:
                self.model.set_adapter(REFERENCE)
                try:
                    yield
                finally:
                    self.model.set_adapter(TRAINED)
                    for name, parameter in self.model.named_parameters():
                        parameter.requires_grad_(f".{TRAINED}." in name)
            else:
                with self.model.disable_adapter():
                    yield

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies of a batch's trained tokens.

        Args:
            temperature: what the tokens were sampled at; 0 (greedy) counts as 1.

        Returns:
            ([tokens], [tokens]) float32; gradients flow through the first only. The head runs on
            the trained rows alone, a chunk at a time.
        """
        batch = batch.to(self.device)
        inverse = 1.0 / temperature if temperature else 1.0
        return token_logprobs(self.base, batch, inverse)


def token_logprobs(
    base: Base, batch: Batch, inverse_temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Policy.logprobs`; works on a base with or without adapters in it."""
    model = base.model
    if any(getattr(model.config, name, None) for name in SCALED_LOGITS):
        logits = model(input_ids=batch.ids, use_cache=False).logits.flatten(0, 1)[batch.source]
        return _score(logits[:, : base.vocab], batch.labels, inverse_temperature)
    hidden = model.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
    rows = hidden.flatten(0, 1)[batch.source]  # [tokens, hidden]
    head = model.get_output_embeddings()
    if head is None:
        raise WorkerFailure("config", "The model has no output head.")
    parts = [
        _score(head(chunk)[:, : base.vocab], labels, inverse_temperature)
        for chunk, labels in zip(
            rows.split(HEAD_CHUNK), batch.labels.split(HEAD_CHUNK), strict=True
        )
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _score(
    logits: torch.Tensor, labels: torch.Tensor, inverse_temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float()
    if inverse_temperature != 1.0:
        logits = logits * inverse_temperature
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, labels[:, None])[:, 0], entropy


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT folder; safetensors only.

    Raises:
        WorkerFailure: kind config, when there are none or they hold NaN or infinity.
    """
    file = folder / "adapter_model.safetensors"
    try:
        state = load_file(file)
    except (OSError, ValueError) as error:
        raise WorkerFailure(
            "config", f"The adapter in {folder.name} cannot be read.", evidence=str(error)
        ) from error
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise WorkerFailure("config", f"The adapter holds NaN or infinity in {name}.")
    return state


def set_adapter_state(model: PeftModel, state: dict[str, torch.Tensor], adapter: str) -> None:
    """Put `state` into the adapter called `adapter`.

    Raises:
        WorkerFailure: kind config, when a tensor is missing, left over or of another shape.
    """
    wanted = _state(model, adapter)
    missing, extra = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    wrong = [k for k in wanted.keys() & state.keys() if wanted[k].shape != state[k].shape]
    if missing or extra or wrong:
        # Loading what fits and ignoring the rest would train or serve the base in silence.
        raise WorkerFailure(
            "config",
            "The adapter does not belong to this model and these LoRA settings.",
            evidence=f"{len(missing)} missing, {len(extra)} left over, {len(wrong)} of other shape:"
            f" {(missing + extra + wrong)[0]}",
            hint="Start from the base the adapter was trained on, with its rank and targets.",
        )
    set_peft_model_state_dict(model, state, adapter_name=adapter)


def _state(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    # Embeddings are never trained here; left to itself PEFT looks the base up on the network.
    return get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)


def _targets(targets: str | Sequence[str]) -> str | list[str]:
    return targets if isinstance(targets, str) else list(targets)

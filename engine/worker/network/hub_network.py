"""Any causal language model that transformers can load, with adapters by PEFT: the fallback for
models that our own forward does not know.

This is a module of its own, imported only if a model needs it, because importing PEFT takes a
process a second and over a hundred megabytes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from transformers import PreTrainedModel

from engine.models.families import NOT_ADAPTED
from engine.worker.core import switched_off
from engine.worker.core.batch import Batch, Row, collate, microbatches
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.trajectory import Completion
from engine.worker.network.adapter import Adapter, LoraSpec, require_same_shapes
from engine.worker.network.hub_cache import Capture, CudaGraph
from engine.worker.network.hub_sampler import HubSampler
from engine.worker.network.network import PackedOrPadded
from engine.worker.network.sampler import Sampler, SamplerNeeds, SamplingParams
from engine.worker.network.shape import Shape
from engine.worker.ops.kernels import TokenLogprobs
from engine.worker.ops.matmul import OutputLayer

# The attribute of a PEFT layer that `_compute_in_dtype` clears.
CASTS_INPUTS = "cast_input_dtype_enabled"
# Tokens whose logits are computed at once.
HUB_HEAD_ROWS = 1024
# Settings of models that compute more than the head between hidden state and logits: their
# log-probabilities cannot be computed in chunks from the hidden state.
SCALED_LOGITS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)
PROBE = (1, 3, 2, 5)  # ids on which the head alone is compared with the model's own logits
# The sampler is compared with the forward pass on PROBE_TOKENS tokens from each of these prompts,
# which have different lengths. Rounding explains differences of log-probabilities up to
# SAME_LOGPROBS.
PROBE_PROMPTS = ((1, 3, 2, 5, 4, 7, 6), (3, 2))
# The third token is the first that a captured step gives, the fourth the first of one repeated.
PROBE_TOKENS = 4
SAME_LOGPROBS = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.1}
SAME_LOGITS = 1e-3  # the largest difference of both, as a share of the logits' norm


def lora_config(spec: LoraSpec) -> LoraConfig:
    """Make PEFT's configuration for a trainable LoRA adapter of the shape `spec`."""
    alpha: Any = spec.alpha
    if spec.alpha == int(spec.alpha):
        alpha = int(spec.alpha)  # PEFT's type; a fraction works too
    return LoraConfig(
        r=spec.rank,
        lora_alpha=alpha,
        lora_dropout=spec.dropout,
        target_modules=spec.named_targets,
        exclude_modules=spec.excluded or None,
        task_type="CAUSAL_LM",
    )


class HubAdapter:
    """An adapter inside a PEFT model, which stores it under `name`."""

    def __init__(self, network: "HubNetwork", name: str, spec: LoraSpec) -> None:
        """Refer to the adapter of the shape `spec` that the PEFT model of `network` stores under
        `name`; the weights stay there."""
        self.network = network
        self.name = name
        self.spec = spec

    @property
    def version(self) -> int:
        """A number that changes whenever the weights do. torch counts the changes of each tensor;
        this is the sum of their counts."""
        return sum(parameter._version for parameter in self.parameters())

    def parameters(self) -> list[torch.nn.Parameter]:
        """The adapter's tensors, which the optimizer moves."""
        return [parameter for _, parameter in self._named_parameters()]

    def clear_gradients(self) -> None:
        """Drop the gradients that backward passes have added up."""
        for parameter in self.parameters():
            parameter.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that backward passes have added up, under the names of `state`. A
        tensor without a gradient is left out."""
        gradients = {}
        for name, parameter in self._named_parameters():
            if parameter.grad is not None:
                # The names of `state` lack the adapter's name, such as "lora_A.adapter0.weight".
                gradients[name.replace(f".{self.name}.", ".")] = parameter.grad
        return gradients

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the adapter's tensors, float32 on the CPU, under PEFT's names."""
        return {
            name: tensor.detach().to("cpu", torch.float32).clone()
            for name, tensor in self._named_tensors().items()
        }

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the weights by the tensors of `state`, which have PEFT's names. Raises
        WorkerFailure (config) if names or shapes differ from the adapter's."""
        require_same_shapes(self._named_tensors(), state)
        set_peft_model_state_dict(self.network.peft, state, adapter_name=self.name)

    def _named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield (name, parameter) for each parameter of this adapter, under its name in the PEFT
        model. That name contains the adapter's name, such as "...lora_A.adapter0.weight"."""
        for name, parameter in self.network.peft.named_parameters():
            if f".{self.name}." in name:
                yield name, parameter

    def _named_tensors(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors under the names that PEFT writes to files, on their device."""
        # Embeddings are never trained. By default PEFT would look the base up on the Hub for them.
        return get_peft_model_state_dict(
            self.network.peft, adapter_name=self.name, save_embedding_layers=False
        )


class HubNetwork:
    """Any causal language model that transformers can load, with adapters by PEFT.

    Args:
        model: its linear layers are wrapped in place when the first adapter is made.
        vocab: how many ids have a token.
        why: what ruled out our own forward.
    """

    forward = "transformers"
    kernels, kernels_why = "transformers", ""

    def __init__(self, model: PreTrainedModel, vocab: int, why: str) -> None:
        """Keep the model and switch off its own dropout.

        Args:
            vocab: how many ids have a token; the model's output may have more columns.
            why: the reason why our own forward cannot run this model.
        """
        self.model = model
        self.vocab = vocab
        self.why = why
        self.shape = Shape.from_config(model.config)
        disable_dropout(model)
        self._head = self._plain_head()
        self._sampling_checked = False
        # How a step of sampling is captured; None: it is not, for the reason `capture_why`.
        self._capture: Capture | None = None
        self.capture_why = ""
        self._recomputes = False  # whether backward passes recompute activations
        self._peft: PeftModel | None = None
        self._adapters_made = 0  # the next adapter's number, part of its name
        self._first_adapter: HubAdapter | None = None
        # Called before each pass, with whether a backward pass follows. It waits for other ranks if
        # the model's layers are sharded over them.
        self.take_turn: Callable[[bool], None] = _without_waiting

    @property
    def peft(self) -> PeftModel:
        """The model as PEFT has wrapped it. There must be an adapter, because the first one wraps
        the model."""
        assert self._peft is not None, "no adapter has been made"
        return self._peft

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The number format that the model computes in: its output layer's, since the other
        weights may be in 4 bits."""
        head = self.model.get_output_embeddings()
        return head.weight.dtype if isinstance(head, torch.nn.Linear) else self.model.dtype

    def new_adapter(self, spec: LoraSpec, seed: int) -> HubAdapter:
        """Make a new adapter of the shape `spec`, initialised by the seed. The first one wraps the
        model's layers in PEFT's modules.

        Raises:
            WorkerFailure: kind config, if the model has no layer of a name in `spec.targets`.
        """
        torch.manual_seed(seed)  # PEFT draws from torch's own generator
        name = f"adapter{self._adapters_made}"
        self._adapters_made += 1
        spec = replace(spec, excluded=self._exclusion_pattern(spec))
        config = lora_config(spec)
        try:
            if self._peft is None:
                peft_model = get_peft_model(self.model, config, adapter_name=name)
                assert isinstance(peft_model, PeftModel)
                self._peft = peft_model
            else:
                self._peft.add_adapter(name, config)
        except ValueError as error:  # PEFT: no layer is among the targets
            raise WorkerFailure(
                "config", "The model takes no such adapter.", evidence=str(error)
            ) from error
        if self.dtype in (torch.bfloat16, torch.float16):
            _compute_in_dtype(self.dtype, self._peft)
        adapter = HubAdapter(self, name, spec)
        if self._first_adapter is None:
            self._first_adapter = adapter  # `empty_pass` uses it
        return adapter

    def empty_pass(self, *, trains: bool) -> None:
        """Run one token through the layers, and if `trains` also back. No result is used and no
        gradient changes. Ranks (processes of one run) that hold parts of the layers must do all
        passes together; a rank without work does empty ones.

        With `trains` there must be an adapter, whose gradients get zeros added.
        """
        self.model.eval()
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        if not trains:
            with torch.no_grad():
                self.model(input_ids=ids, use_cache=False)
            return
        with self.with_adapter(self._first_adapter):
            logits = self.model(input_ids=ids, use_cache=False).logits
            (0.0 * logits.float().sum()).backward()  # 0.0: all gradients of this pass are zero

    def _exclusion_pattern(self, spec: LoraSpec) -> str:
        """Return NOT_ADAPTED, the pattern of modules that get no adapter (such as those that see
        pictures), if it matches a module that the targets of `spec` name. Otherwise return ""."""
        for name, module in self.model.named_modules():
            _, _, last_name = name.rpartition(".")
            if "all-linear" in spec.targets:
                is_target = isinstance(module, torch.nn.Linear)
            else:
                is_target = last_name in spec.targets
            if is_target and re.fullmatch(NOT_ADAPTED, name):
                return NOT_ADAPTED
        return ""

    def drop_adapter(self, adapter: Adapter) -> None:
        """Delete an adapter from the PEFT model; an adapter that is not there is ignored. If it was
        the last one, unwrap the model's layers too."""
        name = _require_hub(adapter).name
        if self._peft is not None and name in self._peft.peft_config:
            self._peft.delete_adapter(name)
            if not self._peft.peft_config:
                self._peft.unload()
                self._peft = None

    def collate(self, rows: Sequence[Row]) -> Batch:
        """Make one batch of `rows`, padded on the right to one length."""
        return collate(rows, pad=0)  # any id will do, because no token sees what is on its right

    def split(self, rows: Sequence[Row], budget: int) -> list[list[int]]:
        """Divide `rows` into microbatches of at most `budget` tokens, padding included. Returns
        for each microbatch the indices of its rows."""
        return microbatches([len(row.ids) for row in rows], budget)

    def logprobs(
        self,
        batch: PackedOrPadded,
        adapter: Adapter | None,
        *,
        inverse_temperature: float = 1.0,
        entropies: bool = False,
        checkpointing: bool = False,
        training: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probabilities and entropies of the batch's T trained tokens, two tensors
        [T] float32; only log-probabilities carry gradients.

        Args:
            batch: made by `collate`.
            adapter: None runs the base alone.
            inverse_temperature: factor of the logits.
            entropies: whether they are needed; otherwise they may be zeros.
            checkpointing: recompute activations in backward passes, from now on.
            training: switches dropout on.

        If the logits are nothing but the head applied to the hidden states, the head runs in chunks
        on the trained tokens alone. Otherwise the model computes all logits, and entropies are
        computed even if they are not needed.
        """
        assert isinstance(batch, Batch)  # as `collate` makes it
        batch = batch.to(self.device)
        if checkpointing:
            self.enable_checkpointing()
        # If the layers are sharded, this waits until all ranks do such a pass.
        self.take_turn(adapter is not None and torch.is_grad_enabled())
        with self.with_adapter(adapter):
            self.model.train(training)
            if self._head is None:
                return self._from_all_logits(batch, inverse_temperature)
            hidden = self._hidden(batch.ids)
            return TokenLogprobs.apply(
                hidden.flatten(0, 1)[batch.source],
                OutputLayer(self._head.weight[: self.vocab]),
                batch.labels,
                inverse_temperature,
                HUB_HEAD_ROWS,
                entropies,
            )

    def enable_checkpointing(self) -> None:
        """Make the model recompute activations in every backward pass from now on, to save
        memory."""
        if self._recomputes:
            return
        # Up to transformers 5.22 the method has the second name only, from 6 on the first only.
        if hasattr(self.model, "activation_checkpointing_enable"):
            enable = self.model.activation_checkpointing_enable
        else:
            enable = self.model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        self.model.enable_input_require_grads()
        self._recomputes = True

    @torch.no_grad()
    def _plain_head(self) -> torch.nn.Linear | None:
        """Return the model's output layer (head) if the logits are nothing but its matrix applied
        to the hidden states; otherwise None.

        Some configurations say that the logits are scaled or capped as well. For all others, the
        head's results are compared with the model's logits on a few ids.
        """
        head = self.model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or head.bias is not None:
            return None  # more than a matrix
        config = self.model.config.get_text_config()
        if any(getattr(config, name, None) for name in SCALED_LOGITS):
            return None
        return head if self._gives_the_logits(head) else None

    def _gives_the_logits(self, head: torch.nn.Linear) -> bool:
        """Whether `head`, applied to the hidden states of a few ids, gives the model's logits."""
        self.model.eval()
        ids = torch.tensor([PROBE], device=self.device) % self.vocab
        logits = self.model(input_ids=ids, use_cache=False).logits
        try:
            logits_of_head = head(self._hidden(ids))
        # AttributeError: `get_decoder` gives the whole model (Llama-4), which has no hidden states.
        # RuntimeError: its hidden states are of another size than the head reads.
        except (AttributeError, RuntimeError):
            return False
        if logits_of_head.shape != logits.shape:
            return False
        difference = (logits_of_head - logits).float().norm()
        return bool(difference <= SAME_LOGITS * logits.float().norm())

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute the hidden states [rows, length, hidden] after the last norm, for ids [rows,
        length]."""
        decoder: Any = self.model.get_decoder()  # the model without its output layer
        return decoder(input_ids=ids, use_cache=False).last_hidden_state

    def _from_all_logits(
        self, batch: Batch, inverse_temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute (log-probabilities, entropies) of the batch's T trained tokens from all logits of
        the model, multiplied by `inverse_temperature`.

        Both are [T] float32; only log-probabilities carry gradients.
        """
        all_logits = self.model(input_ids=batch.ids, use_cache=False).logits.flatten(0, 1)
        # Keep the tokens that predict a trained one, and the ids that have a token.
        logits = all_logits[batch.source][:, : self.vocab].float() * inverse_temperature
        logprobs = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, batch.labels[:, None])[:, 0], entropy

    @torch.no_grad()
    def logits(self, ids: Sequence[int], adapter: Adapter | None) -> torch.Tensor:
        """Compute the logits of one sequence, [ids, vocab] float32, without gradient. With
        `adapter` None they are those of the base. Leaves the model in evaluation mode."""
        self.take_turn(False)
        with self.with_adapter(adapter):
            self.model.eval()
            return self.model(torch.tensor([ids], device=self.device)).logits[0].float()

    def sampler(self, needs: SamplerNeeds) -> Sampler:
        """Make a sampler on this model. The first call also checks, on a few tokens, that sampling
        with a key-value cache gives the same log-probabilities as the model's forward pass over
        whole rows.

        Raises:
            WorkerFailure: kind config, if it gives other log-probabilities, or if the model cannot
                sample with a cache at all.
        """
        if not self._sampling_checked:
            self._capture = CudaGraph if self._may_capture() else None
            if self._capture is not None:
                self._check_capture(needs)
            if self._capture is None:
                self._check_sampling(self._new_sampler(needs))
            self._sampling_checked = True
        return self._new_sampler(needs)

    def _new_sampler(self, needs: SamplerNeeds) -> HubSampler:
        """Make a sampler, whose steps are captured if `_capture` is set."""
        return HubSampler(
            self.model,
            needs,
            self.vocab,
            self.with_adapter,
            self._before_read,
            capture=self._capture,
        )

    def _may_capture(self) -> bool:
        """Whether steps of sampling may be captured as CUDA graphs: on a GPU, unless that is
        switched off. Layers that are shared with other ranks must be gathered before each step."""
        is_sharded = any(hasattr(parameter, "device_mesh") for parameter in self.model.parameters())
        is_off = switched_off.is_off("transformers_graph")
        return self.device.type == "cuda" and not is_sharded and not is_off

    def _check_capture(self, needs: SamplerNeeds) -> None:
        """Check sampling with captured steps as `_check_sampling` does. If this model's steps
        cannot be captured, or then give other numbers, they are not captured from now on."""
        probe = self._new_sampler(needs)
        try:
            self._check_sampling(probe)
            self.capture_why = probe.why_not_captured
        except WorkerFailure as error:
            self.capture_why = error.evidence
        if self.capture_why:
            self._capture = None

    def _before_read(self) -> None:
        """Announce a pass without gradients to the other ranks (processes of the run), if the
        model's layers are shared among them."""
        self.take_turn(False)

    def _check_sampling(self, sampler: HubSampler) -> None:
        """Sample a few tokens from prompts of different lengths, and compute their
        log-probabilities again without a cache. Raises WorkerFailure (config) if they differ by
        more than rounding, or if the model cannot sample with a cache."""
        sampler.prompts_at_once = 1  # so that later prompts join rows under way, as in a run
        # %: the vocabulary may be smaller than the ids of the prompts.
        prompts = [[token % self.vocab for token in prompt] for prompt in PROBE_PROMPTS]
        greedy = SamplingParams(max_tokens=PROBE_TOKENS, temperature=0.0)
        try:
            groups = sampler.generate(prompts, n=2, params=greedy)
        # ValueError, TypeError: the model does not take such a cache. AttributeError: it asks for a
        # part that the cache lacks. RuntimeError: states of another shape.
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise _sampling_failure(f"{type(error).__name__}: {error}") from error
        gap = 0.0
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                gap = max(gap, self._largest_gap(prompt, completion))
        if not gap <= SAME_LOGPROBS[self.dtype]:  # NaN too
            raise _sampling_failure(f"log-probabilities differ by {gap:.1e}")

    def _largest_gap(self, prompt: Sequence[int], completion: Completion) -> float:
        """The largest difference, over the tokens of a completion, between its sampled
        log-probabilities and those that the base alone gives without a cache."""
        logits = self.logits([*prompt, *completion.ids], adapter=None)
        # The logits at a token predict the next one, so the completion's logits begin at the last
        # token of the prompt.
        logits = logits[len(prompt) - 1 : -1, : self.vocab]
        ids = torch.tensor(completion.ids, device=logits.device)
        uncached = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].cpu()
        cached = torch.tensor(completion.logprobs)
        return float((uncached - cached).abs().max())

    @contextmanager
    def with_adapter(self, adapter: Adapter | None) -> Iterator[None]:
        """Make `adapter` the only active adapter of the model inside the context; with None no
        adapter is active there. An `adapter` stays active after the context."""
        if self._peft is None:  # there is no adapter to activate
            yield
        elif adapter is None:
            with self._peft.disable_adapter():
                yield
        else:
            self._peft.set_adapter(_require_hub(adapter).name)
            yield


def _without_waiting(_trains: bool) -> None:
    """Do nothing: the default of `HubNetwork.take_turn`, which is called before each pass. This
    process holds the whole model, so it need not wait for other ranks (processes of the run)."""


def _sampling_failure(evidence: str) -> WorkerFailure:
    """Make the failure of a run whose model gives other log-probabilities in sampling than in
    training. `evidence` says how they differ."""
    return WorkerFailure(
        "config",
        "This model does not sample with a cache what it computes without one.",
        evidence=evidence[:300],
        hint="Use a model of another family; docs/models.md lists those that were tried.",
    )


def disable_dropout(model: torch.nn.Module) -> None:
    """Switch off the model's own dropout, because a frozen base must compute the same in training
    as in sampling.

    Some models have dropout as a module, others as a probability (a float) in an attribute whose
    name contains "drop".
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _compute_in_dtype(dtype: torch.dtype, model: torch.nn.Module) -> None:
    """Make the layers with adapters compute in `dtype`, a 16-bit format. The factors stay float32,
    and copies of them are used. Otherwise PEFT would copy every layer's input to float32, keep that
    copy for the backward pass, and multiply in float32."""
    for module in model.modules():
        # The flag is still True only in layers that an earlier call has not seen.
        if isinstance(module, BaseTunerLayer) and getattr(module, CASTS_INPUTS, True):
            setattr(module, CASTS_INPUTS, False)
            module.forward = partial(_forward_in_dtype, dtype, module.forward)


def _forward_in_dtype(
    dtype: torch.dtype, forward: Any, x: torch.Tensor, *arguments: Any, **options: Any
) -> Any:
    """Call a layer's `forward` on its input x and whatever else it takes, so that its matrix
    products are computed in `dtype`."""
    with torch.autocast(x.device.type, dtype=dtype):
        return forward(x, *arguments, **options)


def _require_hub(adapter: Adapter) -> HubAdapter:
    """Return `adapter` itself if a HubNetwork made it. Raises TypeError for one that was made for
    our own forward."""
    if not isinstance(adapter, HubAdapter):
        raise TypeError(f"this adapter belongs to another forward: {type(adapter).__name__}")
    return adapter

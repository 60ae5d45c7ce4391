"""A LoRA adapter apart from the base it belongs to: its shape, its files, its weights.

`FlatAdapter` keeps every factor as a view of one float32 buffer, so that the optimizer moves one
tensor and the gradient norm is the norm of one tensor. On disk an adapter is a folder in PEFT's
format.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from engine.core.files import read_json, write_json
from engine.records.settings import CommonSettings
from engine.worker.core.failures import WorkerFailure

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
# Options of PEFT with which a LoRA is another function than scale * B A on whole projections.
NOT_PLAIN = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "fan_in_fan_out",
)
PREFIX = "base_model.model."  # of the names of tensors in the file


@dataclass(frozen=True)
class LoraSpec:
    """The shape of an adapter.

    Attributes:
        rank: of the factors.
        alpha: the adapter's output is scaled by alpha / rank.
        dropout: of the adapter's input, while training.
        targets: names of the projections that get an adapter, or ("all-linear",) for all.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def from_settings(cls, settings: CommonSettings) -> "LoraSpec":
        """The shape of the adapter that a training run makes, from its `lora_` settings."""
        return cls(
            settings.lora_rank,
            settings.lora_alpha,
            settings.lora_dropout,
            tuple(settings.lora_targets),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "LoraSpec":
        """The shape of the adapter in a PEFT folder, from its adapter_config.json. For an rslora
        adapter `alpha` is raised so that alpha / rank is its scale.

        Raises:
            WorkerFailure: kind config, when the configuration cannot be read, or is not that of a
                plain LoRA (see NOT_PLAIN).
        """
        try:
            config = read_json(folder / CONFIG)
            rank = int(config["r"])
            alpha = float(config["lora_alpha"])
            target_modules = config["target_modules"] or []
            dropout = float(config.get("lora_dropout") or 0.0)
        # Missing, no JSON, or JSON of another shape.
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorkerFailure(
                "config", f"The adapter in {folder.name} cannot be read.", evidence=repr(error)
            ) from error
        # What makes it more than a plain LoRA.
        departures = [name for name in NOT_PLAIN if config.get(name)]
        if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
            departures.append(f"{config.get('peft_type')} with bias {config.get('bias')}")
        if departures or rank < 1:
            raise WorkerFailure(
                "config",
                f"The adapter in {folder.name} is not a plain LoRA.",
                evidence=", ".join(departures) or f"rank {rank}",
                hint="Use an adapter trained with rank, alpha and targets alone.",
            )
        scale = math.sqrt(rank) if config.get("use_rslora") else 1.0  # rslora: alpha / sqrt(rank)
        # A string is "all-linear" or a pattern, kept as the only target.
        targets = (
            (target_modules,) if isinstance(target_modules, str) else tuple(sorted(target_modules))
        )
        return cls(rank, alpha * scale, dropout, targets)

    @property
    def named_targets(self) -> str | list[str]:
        """The targets as PEFT writes them: a list of names, or the text all-linear."""
        return self.targets[0] if self.targets == ("all-linear",) else list(self.targets)

    def as_peft(self, base_ref: str) -> dict[str, Any]:
        """The content of adapter_config.json for this shape; `base_ref` is the base model's name in
        it. Options that are not used are written with PEFT's defaults."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_ref,
            "inference_mode": True,
            "r": self.rank,
            # PEFT expects a whole number, and accepts others.
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": self.named_targets,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": None,
            "layers_to_transform": None,
            "rank_pattern": {},
            "alpha_pattern": {},
            "use_rslora": False,
            "use_dora": False,
        }


class Adapter(Protocol):
    """LoRA weights for one base model."""

    @property
    def spec(self) -> LoraSpec: ...

    @property
    def version(self) -> int:
        """A number that changes whenever the weights do."""
        ...

    def parameters(self) -> list[torch.nn.Parameter]:
        """The tensors that the optimizer moves; float32, in a fixed order."""
        ...

    def clear_gradients(self) -> None: ...

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients gathered by backward passes, under the names of `state`; not copies."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """The weights under PEFT's names, float32 copies on CPU."""
        ...

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the weights by `state`. Raises WorkerFailure (config) where they do not fit."""
        ...


@dataclass(frozen=True)
class Part:
    """One adapted projection of a fused layer.

    Attributes:
        module: its name in the model.
        a, b: where its factors stand within those of the fused layer.
    """

    module: str
    a: slice
    b: slice


@dataclass
class Factors:
    """The adapter of one fused linear layer.

    Attributes:
        a: [parts * rank, in] float32 leaf; b: [adapted outputs, rank] float32 leaf.
        spans: (start, stop) of each adapted part within the layer's outputs.
        parts: the projections in the same order.
    """

    a: torch.Tensor
    b: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Slot:
    """Where a fused layer can take an adapter.

    Attributes:
        projections: (module, start, stop) of each: its name, and its span of the layer's outputs.
        features: how many inputs the layer has.
    """

    projections: tuple[tuple[str, int, int], ...]
    features: int


class FlatAdapter:
    """An adapter in one buffer; see the module. Initial weights are PEFT's for the same seed: A
    uniform, B zero.

    Args:
        slots: one per fused layer of the model, in order.
        spec: rank, alpha, dropout and targets.
        seed: decides A.
        device: where the buffer lives.

    Attributes:
        factors: of each slot; None for a layer that gets no adapter.
        flat: the buffer with all weights; its gradient is one buffer too.

    Raises:
        WorkerFailure: kind config, when no layer is among the targets.
    """

    def __init__(
        self, slots: Sequence[Slot], spec: LoraSpec, seed: int, device: torch.device
    ) -> None:
        """Allocate one buffer for the adapters of all fused layers (`slots`), take each layer's
        factors A and B as views of it, and draw A by the seed; B is zero.

        Raises:
            WorkerFailure: kind config, when no layer is among the targets.
        """
        self.spec = spec
        self.applied: Any = None  # the decoder's layers with this adapter on them, once made
        self.factors: list[Factors | None] = []
        projections_of_slot = [_targeted_projections(slot, spec) for slot in slots]
        # A has rank x inputs numbers for each projection, B outputs x rank.
        size = sum(
            spec.rank
            * (len(chosen) * slot.features + sum(stop - start for _, start, stop in chosen))
            for slot, chosen in zip(slots, projections_of_slot, strict=True)
        )
        if not size:
            raise WorkerFailure(
                "config", f"None of the model's layers is named {', '.join(spec.targets)}."
            )
        self.flat = torch.nn.Parameter(torch.zeros(size, device=device))
        self.flat.grad = torch.zeros_like(self.flat)
        offset = 0
        for slot, chosen in zip(slots, projections_of_slot, strict=True):
            if not chosen:
                self.factors.append(None)
                continue
            adapted = sum(stop - start for _, start, stop in chosen)
            a, offset = self._leaf(offset, len(chosen) * spec.rank, slot.features)
            b, offset = self._leaf(offset, adapted, spec.rank)
            self.factors.append(Factors(a, b, *_spans_and_parts(chosen, spec.rank)))
        self._initialise(seed)

    def _leaf(self, offset: int, rows: int, columns: int) -> tuple[torch.Tensor, int]:
        """Take the next rows * columns numbers of the buffer, from `offset` on. Returns (a view of
        them, [rows, columns]; the offset after them).

        The view is a leaf for autograd, and its gradient is a view of the buffer's gradient.
        """
        end = offset + rows * columns
        leaf = self.flat.detach()[offset:end].view(rows, columns).requires_grad_()
        assert self.flat.grad is not None
        leaf.grad = self.flat.grad[offset:end].view(rows, columns)
        return leaf, end

    def _initialise(self, seed: int) -> None:
        """Draw the A factors that PEFT would draw with this seed; the B factors stay zero."""
        # PEFT draws three times per module: two constructors, then A again. Only the last draw of A
        # is kept; the others make the generator yield the same adapter for the same seed.
        generator = torch.Generator().manual_seed(seed)
        slope = math.sqrt(5)  # PEFT's argument to kaiming_uniform_
        with torch.no_grad():
            for factors in self.factors:
                for part in factors.parts if factors else ():
                    assert factors is not None
                    a, b = factors.a[part.a], factors.b[part.b]
                    for shape in (a.shape, b.shape, a.shape):
                        drawn = torch.empty(shape)
                        torch.nn.init.kaiming_uniform_(drawn, a=slope, generator=generator)
                        if shape == a.shape:
                            a.copy_(drawn)  # the last draw of A remains

    @property
    def version(self) -> int:
        return self.flat._version

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self.flat]

    def clear_gradients(self) -> None:
        assert self.flat.grad is not None
        self.flat.grad.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: view.detach().cpu().clone() for name, view in self._named()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients gathered by backward passes, under the names of `state`; views, not
        copies."""
        tensors = {}
        for factors in self.factors:
            for part in factors.parts if factors else ():
                assert factors is not None and factors.a.grad is not None
                assert factors.b.grad is not None
                tensors[f"{PREFIX}{part.module}.lora_A.weight"] = factors.a.grad[part.a]
                tensors[f"{PREFIX}{part.module}.lora_B.weight"] = factors.b.grad[part.b]
        return tensors

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the weights by the tensors in `state`, named as `state` names them.

        Raises:
            WorkerFailure: kind config, when a tensor is missing, left over or of another shape.
        """
        named = dict(self._named())
        require_same(named, state)
        with torch.no_grad():
            for name, view in named.items():
                view.copy_(state[name])

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (PEFT's name, view of the buffer) for the factors A and B of every projection that
        has an adapter."""
        for factors in self.factors:
            for part in factors.parts if factors else ():
                assert factors is not None
                yield f"{PREFIX}{part.module}.lora_A.weight", factors.a.detach()[part.a]
                yield f"{PREFIX}{part.module}.lora_B.weight", factors.b.detach()[part.b]


def _targeted_projections(slot: Slot, spec: LoraSpec) -> list[tuple[str, int, int]]:
    """The projections of a slot that get an adapter: all of them for the target "all-linear",
    otherwise those whose name ends in a target, such as "...self_attn.q_proj" in "q_proj"."""
    all_linear = "all-linear" in spec.targets
    return [
        projection
        for projection in slot.projections
        if all_linear or projection[0].rsplit(".", 1)[-1] in spec.targets
    ]


def _spans_and_parts(
    chosen: list[tuple[str, int, int]], rank: int
) -> tuple[tuple[tuple[int, int], ...], tuple[Part, ...]]:
    """Where each of the chosen projections lies. Returns (their spans of the layer's outputs, their
    parts of the factors).

    In A the projections follow each other with `rank` rows each; in B each has as many rows as it
    has outputs.

    Args:
        chosen: (module, start, stop) of each projection, as in `Slot.projections`.
    """
    parts = []
    offset = 0  # in the rows of B
    for number, (module, start, stop) in enumerate(chosen):
        width = stop - start
        parts.append(
            Part(module, slice(number * rank, (number + 1) * rank), slice(offset, offset + width))
        )
        offset += width
    return tuple((start, stop) for _, start, stop in chosen), tuple(parts)


def require_same(wanted: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    """Check that weights fit the adapter exactly. To load what fits and ignore the rest would
    silently train or serve something else.

    Args:
        wanted: the adapter's own tensors.
        state: those to be loaded.

    Raises:
        WorkerFailure: kind config, when a tensor is missing, left over or of another shape.
    """
    missing = sorted(wanted.keys() - state.keys())
    extra = sorted(state.keys() - wanted.keys())
    wrong = [k for k in wanted.keys() & state.keys() if wanted[k].shape != state[k].shape]
    if missing or extra or wrong:
        raise WorkerFailure(
            "config",
            "The adapter does not belong to this model and these LoRA settings.",
            evidence=f"{len(missing)} missing, {len(extra)} left over, {len(wrong)} of other shape:"
            f" {(missing + extra + wrong)[0]}",
            hint="Start from the base the adapter was trained on, with its rank and targets.",
        )


def save_adapter(adapter: Adapter, folder: Path, base_ref: str) -> None:
    """Write a PEFT folder: adapter_config.json and adapter_model.safetensors."""
    write_json(folder / CONFIG, adapter.spec.as_peft(base_ref))
    save_file(adapter.state(), folder / WEIGHTS, metadata={"format": "pt"})


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a PEFT folder, by name; safetensors only.

    Raises:
        WorkerFailure: kind config, when the file is missing or cannot be read, or a tensor holds
            NaN or infinity.
    """
    try:
        state = load_file(folder / WEIGHTS)
    except (OSError, ValueError) as error:
        raise WorkerFailure(
            "config", f"The adapter in {folder.name} cannot be read.", evidence=str(error)
        ) from error
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise WorkerFailure("config", f"The adapter holds NaN or infinity in {name}.")
    return state

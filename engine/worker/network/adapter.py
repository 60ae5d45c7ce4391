"""A LoRA adapter apart from the base it belongs to: its shape, its files, its weights.

`FlatAdapter` keeps every factor as a view of one float32 buffer, so that the optimizer moves one
tensor and the gradient norm is the norm of one tensor. On disk an adapter is a folder in PEFT's
format.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors.torch import load_file, save_file

from engine.core.files import read_json, write_json
from engine.models.adapters import NOT_PLAIN
from engine.records.settings import CommonSettings
from engine.worker.core.failures import WorkerFailure

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."  # of the names of tensors in the file


@dataclass(frozen=True)
class LoraSpec:
    """The shape of an adapter.

    Attributes:
        rank: of the factors A and B.
        alpha: the adapter's output is scaled by alpha / rank.
        dropout: probability of dropout on the adapter's input, while training.
        targets: names of the projections that get an adapter, or ("all-linear",) for all.
        excluded: a pattern; a module whose whole name matches it gets no adapter. "" excludes
            nothing.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    excluded: str = ""

    @property
    def scale(self) -> float:
        """The factor of the adapter's output, alpha / rank: a layer adds scale * B A x to its own
        output."""
        return self.alpha / self.rank

    @classmethod
    def from_settings(cls, settings: CommonSettings) -> "LoraSpec":
        """Read the shape of a training run's adapter from the run's settings `lora_rank`,
        `lora_alpha`, `lora_dropout` and `lora_targets`."""
        return cls(
            rank=settings.lora_rank,
            alpha=settings.lora_alpha,
            dropout=settings.lora_dropout,
            targets=tuple(settings.lora_targets),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "LoraSpec":
        """Read the shape of the adapter in a PEFT folder from its adapter_config.json.

        Raises:
            WorkerFailure: kind config, if the configuration cannot be read, or is not that of a
                plain LoRA (see NOT_PLAIN).
        """
        try:
            config = read_json(folder / CONFIG)
            rank = int(config["r"])
            alpha = float(config["lora_alpha"])
            target_modules = config["target_modules"] or []
            dropout = float(config.get("lora_dropout") or 0.0)
        # OSError: no file; ValueError: not JSON, or text in place of a number; KeyError: a missing
        # key; TypeError: not a JSON object, or a list or null in place of a number.
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WorkerFailure(
                "config", f"The adapter in {folder.name} cannot be read.", evidence=repr(error)
            ) from error
        _require_plain(config, rank, folder)
        if config.get("use_rslora"):
            # Its scale is alpha / sqrt(rank); `scale` divides by the rank.
            alpha *= math.sqrt(rank)
        return cls(rank=rank, alpha=alpha, dropout=dropout, targets=_targets(target_modules))

    @property
    def named_targets(self) -> str | list[str]:
        """The names of the projections that get an adapter, as PEFT writes them: a list, or the
        string "all-linear"."""
        return self.targets[0] if self.targets == ("all-linear",) else list(self.targets)

    def as_peft(self, base_ref: str) -> dict[str, Any]:
        """The content of adapter_config.json for this shape, with `base_ref` as the base model's
        name. Options that are not used are written with PEFT's defaults."""
        exclusion = {"exclude_modules": self.excluded} if self.excluded else {}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_ref,
            "inference_mode": True,
            "r": self.rank,
            # PEFT documents an integer, and accepts fractions.
            "lora_alpha": int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": self.named_targets,
            **exclusion,
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


def _targets(target_modules: str | list[str]) -> tuple[str, ...]:
    """Convert `target_modules` of an adapter_config.json, the names of the projections with an
    adapter, to a sorted tuple. It is a list of names, or one string: "all-linear" or a pattern."""
    if isinstance(target_modules, str):
        return (target_modules,)
    return tuple(sorted(target_modules))


def _require_plain(config: dict[str, Any], rank: int, folder: Path) -> None:
    """Refuse the adapter in `folder` if `config`, its adapter_config.json, is not that of a plain
    LoRA (rank, alpha and targets alone, see NOT_PLAIN) with at least rank 1.

    Raises:
        WorkerFailure: kind config, naming the options that a plain LoRA does not have.
    """
    extras = [name for name in NOT_PLAIN if config.get(name)]
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        # Both are named, whichever of the two is not plain.
        extras.append(f"{config.get('peft_type')} with bias {config.get('bias')}")
    if extras or rank < 1:
        raise WorkerFailure(
            "config",
            f"The adapter in {folder.name} is not a plain LoRA.",
            evidence=", ".join(extras) or f"rank {rank}",
            hint="Use an adapter trained with rank, alpha and targets alone.",
        )


class Adapter(Protocol):
    """LoRA weights for one base model."""

    @property
    def spec(self) -> LoraSpec:
        """The adapter's shape: rank, alpha, dropout and targets."""
        ...

    @property
    def version(self) -> int:
        """A number that changes whenever the weights do."""
        ...

    def parameters(self) -> list[torch.nn.Parameter]:
        """The tensors that the optimizer moves; float32, in a fixed order."""
        ...

    def clear_gradients(self) -> None:
        """Drop the gradients that backward passes have added up."""
        ...

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that backward passes have added up, under the names of `state`; not
        copies."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the weights under PEFT's names, float32 on the CPU."""
        ...

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the weights by `state`. Raises WorkerFailure (config) if names or shapes differ
        from the adapter's."""
        ...


def fingerprint(parameters: Sequence[torch.nn.Parameter]) -> bytes:
    """Compute the SHA-256 of the weights of these parameters, in their order. Another result means
    other weights: they have changed, or those of another process differ."""
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.digest()


@dataclass(frozen=True)
class Part:
    """The factors of one adapted projection, as rows of the fused layer's factors.

    Attributes:
        module: the projection's name in the model.
        a, b: its rows of `Factors.a` and `Factors.b`.
    """

    module: str
    a: slice
    b: slice


@dataclass
class Factors:
    """The adapter of one fused linear layer.

    Attributes:
        a: [parts * rank, in] float32 leaf; b: [adapted outputs, rank] float32 leaf.
        spans: (start, stop) of each adapted projection within the layer's outputs.
        parts: for each span, the name of its projection and its rows of a and b.
    """

    a: torch.Tensor
    b: torch.Tensor
    spans: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]


class Projection(NamedTuple):
    """A projection in a fused layer: its name in the model, and its span of the layer's outputs."""

    module: str
    start: int
    stop: int


@dataclass(frozen=True)
class Slot:
    """Where a fused layer can take an adapter.

    Attributes:
        projections: in the order of the layer's outputs.
        features: how many inputs the layer has.
    """

    projections: tuple[Projection, ...]
    features: int


class FlatAdapter:
    """An adapter in one buffer; see the module. Its first weights are PEFT's for the same seed: A
    uniform, B zero.

    Args:
        slots: one per fused layer of the model, in order.
        spec: rank, alpha, dropout and targets.
        seed: decides A.
        device: where the buffer lives.

    Attributes:
        factors: for each slot its factors, or None if the layer gets no adapter.
        flat: the buffer with all weights; its gradient is one buffer too.

    Raises:
        WorkerFailure: kind config, if the model has no layer of a name in `spec.targets`.
    """

    def __init__(
        self, slots: Sequence[Slot], spec: LoraSpec, seed: int, device: torch.device
    ) -> None:
        """Allocate one buffer for the adapters of all fused layers (`slots`), make each layer's
        factors A and B views of the buffer, and draw A by the seed; B is zero.

        Raises:
            WorkerFailure: kind config, if the model has no layer of a name in `spec.targets`.
        """
        self.spec = spec
        self.applied: Any = None  # the decoder's layers with this adapter on them, once made
        targets_by_slot = [(slot, _targeted_projections(slot, spec)) for slot in slots]
        size = sum(_factor_size(slot, targets, spec.rank) for slot, targets in targets_by_slot)
        if not size:
            raise WorkerFailure(
                "config", f"None of the model's layers is named {', '.join(spec.targets)}."
            )
        self.flat = torch.nn.Parameter(torch.zeros(size, device=device))
        # Allocated now, so that the factors' gradients can be views of this buffer.
        self.flat.grad = torch.zeros_like(self.flat)
        self._allocated = 0  # the buffer is given to factors up to this index
        self.factors: list[Factors | None] = [
            self._allocate_factors(slot, projections) if projections else None
            for slot, projections in targets_by_slot
        ]
        self._initialise(seed)

    def _allocate_factors(self, slot: Slot, projections: Sequence[Projection]) -> Factors:
        """Make the factors of a layer, of which these projections get an adapter, as views of the
        next free part of the buffer. The factor A is [projections * rank, inputs of the layer], B
        is [outputs of these projections, rank]."""
        rank = self.spec.rank
        a = self._allocate_leaf(len(projections) * rank, slot.features)
        b = self._allocate_leaf(_output_count(projections), rank)
        spans = tuple((start, stop) for _, start, stop in projections)
        return Factors(a, b, spans, _parts(projections, rank))

    def _allocate_leaf(self, rows: int, columns: int) -> torch.Tensor:
        """Take the next rows * columns numbers of the buffer, as a view [rows, columns]. Autograd
        treats the view as a parameter of its own, whose gradient is a view of the buffer's
        gradient."""
        span = slice(self._allocated, self._allocated + rows * columns)
        self._allocated = span.stop
        leaf = self.flat.detach()[span].view(rows, columns).requires_grad_()
        assert self.flat.grad is not None
        leaf.grad = self.flat.grad[span].view(rows, columns)
        return leaf

    def _initialise(self, seed: int) -> None:
        """Fill in the A factors that PEFT would draw with this seed; the B factors stay zero, so
        that the adapter changes nothing yet."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for factors, part in self._adapted_parts():
                a, b = factors.a[part.a], factors.b[part.b]
                # PEFT draws A and B when it constructs their layers, and then A once more. The
                # first two draws are thrown away: they only move the generator on.
                for shape in (a.shape, b.shape):
                    _draw_as_peft(shape, generator)
                a.copy_(_draw_as_peft(a.shape, generator))

    def _adapted_parts(self) -> Iterator[tuple[Factors, Part]]:
        """Yield (factors of the layer, the projection's part of them) for every projection that has
        an adapter, in the order of the buffer."""
        for factors in self.factors:
            if factors is not None:
                for part in factors.parts:
                    yield factors, part

    @property
    def version(self) -> int:
        """A number that changes whenever the weights do: torch counts the changes of a tensor."""
        return self.flat._version

    def parameters(self) -> list[torch.nn.Parameter]:
        """The buffer with all weights, the one tensor that the optimizer moves."""
        return [self.flat]

    def clear_gradients(self) -> None:
        """Set the gradients to zero in place, because the factors' gradients are views of them."""
        assert self.flat.grad is not None
        self.flat.grad.zero_()

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of all factors A and B on the CPU, float32, under PEFT's names."""
        return {name: view.detach().cpu().clone() for name, view in self._named_views()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that backward passes have added up, under the names of `state`. They
        are views, not copies."""
        tensors = {}
        for factors, part in self._adapted_parts():
            # Made in `_allocate_leaf`.
            assert factors.a.grad is not None and factors.b.grad is not None
            tensors[f"{PREFIX}{part.module}.lora_A.weight"] = factors.a.grad[part.a]
            tensors[f"{PREFIX}{part.module}.lora_B.weight"] = factors.b.grad[part.b]
        return tensors

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the weights by the tensors in `state`, which have PEFT's names.

        Raises:
            WorkerFailure: kind config, if a tensor is missing, left over or of another shape.
        """
        views = dict(self._named_views())
        require_same_shapes(views, state)
        with torch.no_grad():
            for name, view in views.items():
                view.copy_(state[name])

    def _named_views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (PEFT's name, view of the buffer) for each adapted projection's factors A and B."""
        for factors, part in self._adapted_parts():
            yield f"{PREFIX}{part.module}.lora_A.weight", factors.a.detach()[part.a]
            yield f"{PREFIX}{part.module}.lora_B.weight", factors.b.detach()[part.b]


def _draw_as_peft(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw a float32 tensor of this shape on the CPU from the distribution that PEFT and torch's
    linear layers begin with (Kaiming's uniform one)."""
    values = torch.empty(shape)
    torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values


def _targeted_projections(slot: Slot, spec: LoraSpec) -> list[Projection]:
    """Select the projections of a fused layer that get an adapter by `spec.targets`: all of them
    for the target "all-linear". Otherwise those whose name ends with a target: the target "q_proj"
    selects "model.layers.0.self_attn.q_proj"."""
    if "all-linear" in spec.targets:
        return list(slot.projections)
    return [
        projection
        for projection in slot.projections
        if projection.module.rsplit(".", 1)[-1] in spec.targets
    ]


def _factor_size(slot: Slot, projections: Sequence[Projection], rank: int) -> int:
    """Count the numbers in the factors of these projections of a layer: for each projection, A is
    [rank, inputs] and B is [outputs, rank]."""
    return rank * (len(projections) * slot.features + _output_count(projections))


def _output_count(projections: Sequence[Projection]) -> int:
    """Count the outputs that these projections of a fused layer have together."""
    return sum(stop - start for _, start, stop in projections)


def _parts(projections: Sequence[Projection], rank: int) -> tuple[Part, ...]:
    """For each adapted projection, find the rows of the layer's factors A and B that belong to it:
    `rank` rows of A, and one row of B for each of its outputs. The rows of the projections follow
    each other without gaps."""
    parts = []
    offset = 0  # in B, whose rows are only the outputs of adapted projections
    # start and stop count all outputs of the layer, adapted or not: only their distance is used.
    for number, (module, start, stop) in enumerate(projections):
        width = stop - start
        parts.append(
            Part(module, slice(number * rank, (number + 1) * rank), slice(offset, offset + width))
        )
        offset += width
    return tuple(parts)


def require_same_shapes(
    adapter_tensors: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
) -> None:
    """Check that the tensors of `state` have the names and shapes of the adapter's tensors. Loading
    only those that fit would train or serve another adapter than the one meant, unnoticed.

    Raises:
        WorkerFailure: kind config, if a tensor is missing, left over or of another shape.
    """
    missing = sorted(adapter_tensors.keys() - state.keys())
    extra = sorted(state.keys() - adapter_tensors.keys())
    common = adapter_tensors.keys() & state.keys()
    misshapen = [name for name in common if adapter_tensors[name].shape != state[name].shape]
    wrong = missing + extra + misshapen
    if wrong:
        raise WorkerFailure(
            "config",
            "The adapter does not belong to this model and these LoRA settings.",
            evidence=f"{len(missing)} missing, {len(extra)} left over,"
            f" {len(misshapen)} of other shape: {wrong[0]}",
            hint="Start from the base the adapter was trained on, with its rank and targets.",
        )


def save_adapter(adapter: Adapter, folder: Path, base_ref: str) -> None:
    """Write an adapter to a PEFT folder: adapter_config.json, which names the base `base_ref`, and
    adapter_model.safetensors."""
    write_json(folder / CONFIG, adapter.spec.as_peft(base_ref))
    save_file(adapter.state(), folder / WEIGHTS, metadata={"format": "pt"})


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a PEFT folder, by name. Only files in the safetensors format are read.

    Raises:
        WorkerFailure: kind config, if the file is missing or cannot be read, or a tensor holds NaN
            or infinity.
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

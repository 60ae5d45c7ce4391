"""A LoRA adapter apart from the base it belongs to: its shape, its files, its weights.

`FlatAdapter` keeps every factor as a view of one float32 buffer, so that the optimizer takes one
step over one tensor and the norm is one norm. On disk an adapter is a folder in PEFT's format.
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
# What makes a LoRA another function than scale * B A on whole projections.
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
PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraSpec:
    """The shape of an adapter; its output is scaled by alpha / rank."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def from_settings(cls, settings: CommonSettings) -> "LoraSpec":
        return cls(
            settings.lora_rank,
            settings.lora_alpha,
            settings.lora_dropout,
            tuple(settings.lora_targets),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "LoraSpec":
        """What a PEFT folder says of itself.

        Raises:
            WorkerFailure: kind config, when it is no plain LoRA.
        """
        try:
            config = read_json(folder / CONFIG)
            rank, alpha = int(config["r"]), float(config["lora_alpha"])
            named = config["target_modules"] or []
            dropout = float(config.get("lora_dropout") or 0.0)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorkerFailure(
                "config", f"The adapter in {folder.name} cannot be read.", evidence=repr(error)
            ) from error
        special = [name for name in NOT_PLAIN if config.get(name)]
        if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
            special.append(f"{config.get('peft_type')} with bias {config.get('bias')}")
        if special or rank < 1:
            raise WorkerFailure(
                "config",
                f"The adapter in {folder.name} is not a plain LoRA.",
                evidence=", ".join(special) or f"rank {rank}",
                hint="Use an adapter trained with rank, alpha and targets alone.",
            )
        scale = math.sqrt(rank) if config.get("use_rslora") else 1.0  # alpha / sqrt(r)
        targets = (named,) if isinstance(named, str) else tuple(sorted(named))
        return cls(rank, alpha * scale, dropout, targets)

    @property
    def named_targets(self) -> str | list[str]:
        """The targets as PEFT writes them."""
        return self.targets[0] if self.targets == ("all-linear",) else list(self.targets)

    def as_peft(self, base_ref: str) -> dict[str, Any]:
        """The content of adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_ref,
            "inference_mode": True,
            "r": self.rank,
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
        """Changes whenever the weights do."""
        ...

    def parameters(self) -> list[torch.nn.Parameter]:
        """What the optimizer moves; float32, in a fixed order."""
        ...

    def clear_gradients(self) -> None: ...

    def gradients(self) -> dict[str, torch.Tensor]:
        """What backward passes have gathered, under the names of `state`; views."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """The weights under PEFT's names, float32 copies on CPU."""
        ...

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Put weights in place. Raises WorkerFailure (config) where they do not fit."""
        ...


@dataclass(frozen=True)
class Part:
    """One adapted projection: `module` is its name in the model, `a` and `b` where its factors
    stand within those of its fused layer."""

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
    """Where one fused layer could take an adapter: (module, start, stop) of every projection in
    it, and how many features it reads."""

    projections: tuple[tuple[str, int, int], ...]
    features: int


class FlatAdapter:
    """See the module. Initial weights are PEFT's for the same seed: A uniform, B zero.

    Args:
        slots: one per fused layer of the model, in order.
        spec: rank, alpha, dropout and targets.
        seed: decides A.
        device: where the buffer lives.
    """

    def __init__(
        self, slots: Sequence[Slot], spec: LoraSpec, seed: int, device: torch.device
    ) -> None:
        self.spec = spec
        self.applied: Any = None  # the decoder's layers with this adapter on them, once made
        self.factors: list[Factors | None] = []
        wanted = [_adapted(slot, spec) for slot in slots]
        size = sum(
            spec.rank
            * (len(chosen) * slot.features + sum(stop - start for _, start, stop in chosen))
            for slot, chosen in zip(slots, wanted, strict=True)
        )
        if not size:
            raise WorkerFailure(
                "config", f"None of the model's layers is named {', '.join(spec.targets)}."
            )
        self.flat = torch.nn.Parameter(torch.zeros(size, device=device))
        self.flat.grad = torch.zeros_like(self.flat)
        offset = 0
        for slot, chosen in zip(slots, wanted, strict=True):
            if not chosen:
                self.factors.append(None)
                continue
            adapted = sum(stop - start for _, start, stop in chosen)
            a, offset = self._leaf(offset, len(chosen) * spec.rank, slot.features)
            b, offset = self._leaf(offset, adapted, spec.rank)
            self.factors.append(Factors(a, b, *_places(chosen, spec.rank)))
        self._initialise(seed)

    def _leaf(self, offset: int, rows: int, columns: int) -> tuple[torch.Tensor, int]:
        """A view of the buffer that gathers gradients into the buffer's own."""
        end = offset + rows * columns
        leaf = self.flat.detach()[offset:end].view(rows, columns).requires_grad_()
        assert self.flat.grad is not None
        leaf.grad = self.flat.grad[offset:end].view(rows, columns)
        return leaf, end

    def _initialise(self, seed: int) -> None:
        """Draw the A factors as PEFT would with this seed; the B factors start at zero."""
        # PEFT draws three times per module: two constructors, then A again; doing the same gives
        # the same adapter for the same seed.
        chance = torch.Generator().manual_seed(seed)
        root = math.sqrt(5)
        with torch.no_grad():
            for factors in self.factors:
                for part in factors.parts if factors else ():
                    assert factors is not None
                    a, b = factors.a[part.a], factors.b[part.b]
                    for shape in (a.shape, b.shape, a.shape):
                        drawn = torch.empty(shape)
                        torch.nn.init.kaiming_uniform_(drawn, a=root, generator=chance)
                        if shape == a.shape:
                            a.copy_(drawn)

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
        """The gathered gradients under the names of `state`, views."""
        tensors = {}
        for factors in self.factors:
            for part in factors.parts if factors else ():
                assert factors is not None and factors.a.grad is not None
                assert factors.b.grad is not None
                tensors[f"{PREFIX}{part.module}.lora_A.weight"] = factors.a.grad[part.a]
                tensors[f"{PREFIX}{part.module}.lora_B.weight"] = factors.b.grad[part.b]
        return tensors

    def load(self, state: dict[str, torch.Tensor]) -> None:
        named = dict(self._named())
        require_same(named, state)
        with torch.no_grad():
            for name, view in named.items():
                view.copy_(state[name])

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for factors in self.factors:
            for part in factors.parts if factors else ():
                assert factors is not None
                yield f"{PREFIX}{part.module}.lora_A.weight", factors.a.detach()[part.a]
                yield f"{PREFIX}{part.module}.lora_B.weight", factors.b.detach()[part.b]


def _adapted(slot: Slot, spec: LoraSpec) -> list[tuple[str, int, int]]:
    every = "all-linear" in spec.targets
    return [p for p in slot.projections if every or p[0].rsplit(".", 1)[-1] in spec.targets]


def _places(
    chosen: list[tuple[str, int, int]], rank: int
) -> tuple[tuple[tuple[int, int], ...], tuple[Part, ...]]:
    parts, offset = [], 0
    for number, (module, start, stop) in enumerate(chosen):
        width = stop - start
        parts.append(
            Part(module, slice(number * rank, (number + 1) * rank), slice(offset, offset + width))
        )
        offset += width
    return tuple((start, stop) for _, start, stop in chosen), tuple(parts)


def require_same(wanted: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    """Loading what fits and ignoring the rest would train or serve the base in silence.

    Raises:
        WorkerFailure: kind config, when a tensor is missing, left over or of another shape.
    """
    missing, extra = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
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
    """The tensors of a PEFT folder; safetensors only.

    Raises:
        WorkerFailure: kind config, when there are none or they hold NaN or infinity.
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

"""Which settings to lower: so that a run fits into memory, or so that it takes less time."""

import json
import math
from dataclasses import replace
from typing import Literal

from engine.cost import memory as footprint
from engine.cost.flops import Plan, works
from engine.cost.throughput import Speed
from engine.records.settings import SFTSettings

Fit = Literal["fits", "tight", "too_big"]
_Lowered = tuple[str, object, object]  # a setting's name, its value and a smaller one

_MOST_LOWERED = 24  # halvings, of all settings together, until a run fits
_LESS = 0.9  # of a value: what is lowered is worth its trouble
_LEAST_GROUP = 4  # completions of a task: with fewer the baseline is noise
_FITS, _TIGHT = 0.92, 0.8  # shares of a device's memory


def phases_of(plan: Plan, rate: Speed, level: str) -> dict[str, float]:
    """Seconds of each phase of the run before finished runs correct them.

    Args:
        level: low, likely or high.
    """
    model, first = plan.model, not plan.seen.runs
    return rate.phases(works(plan, level), model.layers, model.weight_bytes, first=first)


def fit_of(total: int, available: int) -> Fit:
    """How `total` bytes fit into a device that has `available`."""
    if total > _FITS * available:
        return "too_big"
    return "tight" if total > _TIGHT * available else "fits"


def lowered(plan: Plan, rate: Speed, over: int | None) -> str:
    """What to lower, as "max_length from 512 to 256"; "" where nothing helps.

    Args:
        over: peak bytes where memory is short, None where time is to be saved.
    """
    name, before, value = _lower(plan, rate, over)
    return f"{name} from {json.dumps(before)} to {json.dumps(value)}" if name else ""


def lower_until_it_fits(plan: Plan, rate: Speed, correction: float) -> dict[str, object]:
    """Settings with which a run that does not fit into memory does; {} where it fits, or none do.

    Args:
        correction: what runs that ended taught of the estimate of memory, as a factor.
    """
    changed: dict[str, object] = {}
    for _ in range(_MOST_LOWERED):
        total = footprint.memory(plan).total
        if fit_of(int(total * correction), plan.device.memory_total) != "too_big":
            return changed
        name, _, value = _lower(plan, rate, total)
        if not name:
            break
        changed[name] = value
        plan = replace(plan, settings=plan.settings.model_copy(update={name: value}))
    return {}


def _lower(plan: Plan, rate: Speed, over: int | None) -> _Lowered:
    """The one setting whose lowering, to half or what rows need, saves most: memory where that is
    short (`over` bytes), else time. Its name, old and new value; "" where nothing helps."""
    best: _Lowered = ("", None, None)
    saved = 0.0
    base = over if over is not None else sum(phases_of(plan, rate, "likely").values())
    for name, before, value in candidates(plan):
        smaller = replace(plan, settings=plan.settings.model_copy(update={name: value}))
        after = (
            footprint.memory(smaller).total
            if over is not None
            else sum(phases_of(smaller, rate, "likely").values())
        )
        if base - after > saved:
            best, saved = (name, before, value), base - after
    return best


def candidates(plan: Plan) -> list[tuple[str, int, int]]:
    """(name, value, smaller value) of the settings whose lowering could help."""
    settings, needed = plan.settings, _needed(plan)
    if isinstance(settings, SFTSettings):
        values = {
            "steps": settings.steps,
            "max_length": settings.max_length,
            "batch_size": settings.batch_size,
        }
    else:
        values = {
            "steps": settings.steps,
            "max_tokens": settings.max_tokens,
            "group_size": settings.group_size,
            "prompts_per_step": settings.prompts_per_step,
            "max_length": settings.max_length,
        }
    values |= {"lora_rank": settings.lora_rank, "eval_rows": settings.eval_rows}
    candidates: list[tuple[str, int, int]] = []
    for name, value in values.items():
        smaller = max(value // 2, needed.get(name, 1))
        least = _LEAST_GROUP if name == "group_size" else 1
        if least <= smaller <= _LESS * value:
            candidates.append((name, value, smaller))
    if not settings.gradient_checkpointing:
        candidates.append(("gradient_checkpointing", False, True))
    return candidates


def _needed(plan: Plan) -> dict[str, int]:
    """Lengths below which rows would be cut, or left out: what 19 in 20 of them need."""
    rows, settings = plan.env.lengths, plan.settings
    if isinstance(settings, SFTSettings):
        return {"max_length": _most([row.total for row in rows if row.turns])}
    prompt = _most([row.prompt for row in rows])
    return {
        "max_length": max(1, prompt) + settings.max_tokens,
        "max_tokens": max(8, _most([row.longest_turn for row in rows])),
    }


def _most(lengths: list[int]) -> int:
    """What 19 in 20 stay within, 0 where there are none."""
    return sorted(lengths)[math.ceil(0.95 * len(lengths)) - 1] if lengths else 0

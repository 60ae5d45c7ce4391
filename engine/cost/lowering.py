"""Finds settings to lower so that a run fits into memory, or takes less time."""

import json
import math
from dataclasses import replace
from typing import Literal

from engine.cost import memory as footprint
from engine.cost.flops import Plan
from engine.cost.run_work import works
from engine.cost.throughput import Speed
from engine.models.sizing.layers import FITS
from engine.records.settings import DPOSettings, RowSettings, TrainSettings

Fit = Literal["fits", "tight", "too_big"]
_Lowering = tuple[str, object, object]  # name of a setting, its value, the value to lower it to

_MOST_LOWERINGS = 24  # the most times that a setting is lowered to make a run fit
_WORTHWHILE = 0.9  # a smaller value must be at most this share of the old value
_LEAST_GROUP = 4  # least group_size: the mean of fewer completions is too noisy as a baseline
_TIGHT = 0.8  # a run that takes more than this share of a device's memory is tight
_LEAST_TURN = 8  # least max_tokens that is suggested
_ROWS_TO_KEEP = 0.95  # share of the rows that a lower limit must not cut
# Settings of what is asked to judge the model. Lowering one of them leaves the training as it is,
# so it is named even if another setting saves more time, up to this many times as much.
_OF_EVALUATIONS = ("eval_rows", "skill_rows")
_PREFERRED_OVER = 2.0


def phases_of(plan: Plan, speed: Speed, level: str) -> dict[str, float]:
    """Return phase -> seconds of the run, before finished runs correct them.

    Args:
        plan: the run.
        speed: the speed of the machine.
        level: how long sampled answers are assumed to be: "low", "likely" or "high".
    """
    model = plan.model
    is_first_run = not plan.measured.runs
    return speed.phases(
        works(plan, level), model.layers, model.weight_bytes, is_first_run=is_first_run
    )


def fit_of(total: int, available: int) -> Fit:
    """Say how well `total` bytes fit into a device that has `available` bytes.

    Returns "too_big" above the share `FITS` of the device, "tight" above 80 %, otherwise "fits".
    """
    if total > FITS * available:
        return "too_big"
    return "tight" if total > _TIGHT * available else "fits"


def lowering_in_words(plan: Plan, speed: Speed, peak_bytes: int | None) -> str:
    """Name the setting to lower, such as "max_length from 512 to 256"; "" if none helps.

    Args:
        plan: the run.
        speed: the speed of the machine.
        peak_bytes: the memory that the run takes now, to save memory; None to save time.
    """
    lowering = _best_lowering(plan, speed, peak_bytes)
    if lowering is None:
        return ""
    name, old_value, new_value = lowering
    return f"{name} from {json.dumps(old_value)} to {json.dumps(new_value)}"


def lower_until_it_fits(plan: Plan, speed: Speed, correction: float) -> dict[str, object]:
    """Lower one setting after another, until the run fits into memory.

    Returns setting -> new value. Returns {} if the run fits as it is, or if no values make it fit.

    Args:
        plan: the run.
        speed: the speed of the machine.
        correction: the factor by which finished runs correct the predicted memory.
    """
    changed: dict[str, object] = {}
    for _ in range(_MOST_LOWERINGS):
        total = footprint.least_memory(plan).total
        if fit_of(int(total * correction), plan.device.memory_total) != "too_big":
            return changed
        # `total` stays uncorrected: `_best_lowering` compares it with bytes that are uncorrected.
        lowering = _best_lowering(plan, speed, peak_bytes=total)
        if lowering is None:
            break
        name, _, new_value = lowering
        changed[name] = new_value
        plan = _with_setting(plan, name, new_value)
    return {}


def _best_lowering(plan: Plan, speed: Speed, peak_bytes: int | None) -> _Lowering | None:
    """Find the setting whose lowering saves most; None if no lowering helps. To save time, a
    setting of the evaluations is preferred to one that changes the training.

    Args:
        plan: the run.
        speed: the speed of the machine.
        peak_bytes: the memory that the run takes now, to save memory; None to save time.
    """
    best: _Lowering | None = None
    highest_rank = 0.0
    likely_s = _likely_seconds(plan, speed) if peak_bytes is None else 0.0
    for name, old_value, new_value in candidates(plan):
        smaller_plan = _with_setting(plan, name, new_value)
        if peak_bytes is not None:
            saved = peak_bytes - footprint.least_memory(smaller_plan).total
        else:
            saved = likely_s - _likely_seconds(smaller_plan, speed)
        is_preferred = peak_bytes is None and name in _OF_EVALUATIONS
        rank = saved * _PREFERRED_OVER if is_preferred else saved
        if rank > highest_rank:
            best = (name, old_value, new_value)
            highest_rank = rank
    return best


def _with_setting(plan: Plan, name: str, value: object) -> Plan:
    """Return a copy of the plan with one setting changed, and the batteries of skills cut to what
    its `skill_rows` allow."""
    settings = plan.settings.model_copy(update={name: value})
    batteries = tuple(
        replace(battery, tasks=min(battery.tasks, settings.skill_rows))
        for battery in plan.batteries
    )
    return replace(plan, settings=settings, batteries=batteries)


def _likely_seconds(plan: Plan, speed: Speed) -> float:
    """Return the likely seconds of the whole run."""
    return sum(phases_of(plan, speed, "likely").values())


def candidates(plan: Plan) -> list[tuple[str, int, int]]:
    """Return the settings whose lowering could help, as (name, value, smaller value).

    The smaller value is half the value, or what most rows need if that is more; of skill_rows it is
    half the questions that the largest battery has. A setting is left out if its smaller value is
    over 90 % of the value, or if a group (the completions of one task) would get too small. If
    gradient checkpointing is off, ("gradient_checkpointing", False, True) is one of the candidates.
    """
    needed = _needed_lengths(plan)
    largest_battery = max((battery.tasks for battery in plan.batteries), default=0)
    lowerings: list[tuple[str, int, int]] = []
    for name, value in _lowerable_settings(plan.settings).items():
        effective_value = min(value, largest_battery) if name == "skill_rows" else value
        smaller_value = max(effective_value // 2, needed.get(name, 1))
        least_value = _LEAST_GROUP if name == "group_size" else 1
        if least_value <= smaller_value <= _WORTHWHILE * value:
            lowerings.append((name, value, smaller_value))
    if not plan.settings.gradient_checkpointing:
        lowerings.append(("gradient_checkpointing", False, True))
    return lowerings


def _lowerable_settings(settings: TrainSettings) -> dict[str, int]:
    """Return the numeric settings that cost memory or time, by name.

    The order matters: of two settings whose lowering saves equally much, the earlier is lowered.
    """
    if isinstance(settings, RowSettings):
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
    return values | {
        "lora_rank": settings.lora_rank,
        "eval_rows": settings.eval_rows,
        "skill_rows": settings.skill_rows,
    }


def _needed_lengths(plan: Plan) -> dict[str, int]:
    """Return the values of max_length and max_tokens that suffice for 19 in 20 rows, by setting.

    With lower values more rows would be cut or left out. SFT and DPO have no max_tokens.
    """
    rows = plan.env.lengths
    settings = plan.settings
    if isinstance(settings, DPOSettings):
        return {"max_length": _length_of_most([max(row.pair) for row in rows if row.pair])}
    if isinstance(settings, RowSettings):  # SFT, which trains on rows with an answer
        return {"max_length": _length_of_most([row.total for row in rows if row.turns])}
    prompt = _length_of_most([row.prompt for row in rows])
    return {
        # Room for the prompt and one turn of full length.
        "max_length": max(1, prompt) + settings.max_tokens,
        "max_tokens": max(_LEAST_TURN, plan.env.usual_turn),
    }


def _length_of_most(lengths: list[int]) -> int:
    """Return the 95th percentile of the lengths: 19 in 20 are not longer. Returns 0 for none."""
    if not lengths:
        return 0
    kept_count = math.ceil(_ROWS_TO_KEEP * len(lengths))
    return sorted(lengths)[kept_count - 1]

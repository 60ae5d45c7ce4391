"""Detectors of the learning itself (overfitting, no update, instability), of an exam that is too
small, and of a machine that failed."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.evidence.detect.findings import Finding, Lever, edit_lever, setting_lever
from engine.evidence.detect.groups import rounded_half, rounded_part
from engine.evidence.detect.views import Facts, mean
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.inference import MARGIN, tasks_needed
from engine.evidence.stats.power import more_rows
from engine.evidence.stats.results import rounded
from engine.records.lines.curves import number

# Kinds of failure that lie in the machine, and what a finding says of them.
_MACHINE = {
    "oom": "Memory ran out.",
    "infra": "The machine failed: disk, interpreter or device.",
    "killed": "The trainer was killed from outside.",
    "interrupted": "The run was interrupted more often than it is continued.",
    "timeout": "The run outlived its wall-clock limit.",
}

_ERROR_CHARS = 300  # of an error's text, shown as evidence


def overfitting(facts: Facts) -> Finding | None:
    """Detect that the loss of SFT's training rows still falls while the held-out loss rises.

    None with too few exams, or where held-out success clearly rose in the meantime. The lever is to
    stop at the step of the lowest held-out loss; a lower learning rate where that is step 0.
    """
    exams = facts.curve("heldout_loss")
    if len(exams) <= limits.OVERFIT_EVALS:
        return None
    # So many rises in a row need one value more.
    last_losses = [value for _, value in exams[-limits.OVERFIT_EVALS - 1 :]]
    if any(later <= earlier for earlier, later in itertools.pairwise(last_losses)):
        return None
    best_step, lowest_loss = min(exams, key=lambda point: point[1])
    last_step, last_loss = exams[-1]
    if last_loss < lowest_loss * (1 + limits.OVERFIT_RISE):
        return None
    train_losses = facts.curve("loss")
    train_loss_then = _values_up_to(train_losses, best_step)
    train_loss_now = _values_up_to(train_losses, last_step)
    if not train_loss_then or not train_loss_now or mean(train_loss_now) >= mean(train_loss_then):
        return None
    success_by_step = dict(facts.curve("heldout_success"))
    # Where success was not measured it did not rise: 0 both times.
    success_then = success_by_step.get(best_step, 0.0)
    noise = 0.0  # while the number of tasks is not known
    if facts.exam_tasks:  # two standard errors of the difference between two shares
        noise = 2 * math.sqrt(2 * success_then * (1 - success_then) / facts.exam_tasks)
    if success_by_step.get(last_step, 0.0) - success_then > max(limits.OVERFIT_SUCCESS, noise):
        return None
    evidence = {
        "heldout_loss_lowest": lowest_loss,
        "lowest_at_step": best_step,
        "heldout_loss": last_loss,
        "loss_then": mean(train_loss_then),
        "loss": mean(train_loss_now),
        "heldout_success_then": success_by_step.get(best_step),
        "heldout_success": success_by_step.get(last_step),
    }
    what = (
        f"The held-out loss was lowest at step {best_step} ({lowest_loss:.3g}) and has risen to "
        f"{last_loss:.3g} since, while the loss of the rows fell from "
        f"{mean(train_loss_then):.3g} to {mean(train_loss_now):.3g}."
    )
    lever = setting_lever(
        "steps", facts.settings.steps, best_step, "fewer passes; more rows if there are any"
    )
    if best_step == 0:  # every step did harm, so fewer of them would not help
        learning_rate = facts.settings.learning_rate
        reason = "and see whether the rows are like the held-out ones: no step made those likelier"
        lever = setting_lever(
            "learning_rate", learning_rate, rounded_part(learning_rate, 3), reason
        )
    return Finding("overfitting", what, evidence, lever, playbook="sft", pick="changed")


def too_short(facts: Facts) -> Finding | None:
    """Detect an SFT run that ended too early: its held-out loss still fell and little was solved.

    None for a run that is not finished, or whose last loss is not its lowest.
    """
    losses = facts.curve("heldout_loss")
    success_values = [value for _, value in facts.curve("heldout_success")]
    if (
        len(losses) < limits.OVERFIT_EVALS
        or not success_values
        or max(success_values) > limits.SOLVED_NEVER
    ):
        return None
    _, halfway_loss = losses[(len(losses) - 1) // 2]
    last_step, last_loss = losses[-1]
    # Only a finished run has a comparison.
    if facts.comparison is None or last_loss > min(value for _, value in losses):
        return None
    if last_loss > (1 - limits.STILL_FALLING) * halfway_loss:
        return None
    evidence = {
        "heldout_loss_start": losses[0][1],
        "heldout_loss_halfway": halfway_loss,
        "heldout_loss": last_loss,
        "heldout_success": success_values[-1],
        "steps": last_step,
    }
    what = (
        f"{success_values[-1]:.0%} of the held-out tasks are solved after {last_step} steps, "
        f"but the loss still falls: {losses[0][1]:.3g}, {halfway_loss:.3g} halfway, "
        f"{last_loss:.3g} at the end."
    )
    lever = setting_lever("steps", facts.settings.steps, 2 * last_step, "nothing says it is done")
    return Finding("too_short", what, evidence, lever, playbook="sft", pick="best")


def no_update(facts: Facts) -> Finding | None:
    """Detect an adapter that does not change: no gradient, or steps too small to matter.

    None where it changes, or where there are too few steps to tell.
    """
    # Steps in which no group differs have no gradient either; that is a finding of its own.
    steps_with_signal = [
        line for line in facts.lines if (number(line.get("zero_advantage_share")) or 0.0) < 1.0
    ]
    rates, norms = (
        [value for line in steps_with_signal if (value := number(line.get(name))) is not None]
        for name in ("lr", "grad_norm")
    )
    if facts.failed != "no_update":  # else the trainer itself has found it already
        steps_too_small = len(rates) >= limits.WINDOW and sum(rates) < limits.FARTHEST_MOVE
        no_gradient = len(norms) >= limits.LEAST and statistics.median(norms) < limits.NO_GRADIENT
        if not (steps_too_small or no_gradient):
            return None
    evidence = {
        "learning_rate": facts.settings.learning_rate,
        "sum_of_lr": sum(rates),
        "grad_norm": statistics.median(norms) if norms else None,
        "steps": len(rates),
    }
    what = (
        f"In {len(rates)} steps no weight of the adapter can have moved by more than "
        f"{sum(rates):.1g} (gradient norm {evidence['grad_norm'] or 0.0:.2g})."
    )
    learning_rate = facts.settings.learning_rate
    new_rate = (
        float(f"{10 * learning_rate:.2g}") if isinstance(learning_rate, int | float) else None
    )
    lever = setting_lever(
        "learning_rate",
        learning_rate,
        new_rate,
        "or leave it out for the value that suits the model",
    )
    return Finding("no_update", what, evidence, lever, playbook="failures")


def unstable(facts: Facts) -> Finding | None:
    """Detect unstable training.

    The signs, in the order in which they are looked for:
        the run ended on NaN or infinity;
        the divergence from the start (KL) jumped;
        the gradient norm spiked several times, or once and training got worse after it.

    None without any of these.
    """
    if facts.failed == "nonfinite":
        evidence = {"error": (facts.failure.evidence if facts.failure else "")[:_ERROR_CHARS]}
        what = f"The run ended on a number that is none: {evidence['error'] or 'NaN'}."
        return _unstable_finding(facts, what, evidence, 3.0)
    clip_limit = facts.settings.max_grad_norm or 1.0
    gradient_spikes = _spikes(facts.curve("grad_norm"), float(clip_limit))
    divergence_jumps = _spikes(facts.curve("kl"), limits.KL_FLOOR)
    if divergence_jumps:
        step, value, usual_value = divergence_jumps[-1]
        what = (
            f"The divergence from the start jumped to {value:.2g} at step {step}, from "
            f"{usual_value:.2g}."
        )
        return _unstable_finding(
            facts,
            what,
            {"kl": value, "kl_usual": usual_value, "step": step, "jumps": len(divergence_jumps)},
            2.0,
        )
    if not gradient_spikes:
        return None
    step, value, usual_value = max(
        gradient_spikes, key=lambda spike: spike.value / spike.usual_value
    )
    harmful_spikes = [spike for spike in gradient_spikes if _worse_after(facts, spike.step)]
    if len(gradient_spikes) < limits.SPIKES and not harmful_spikes:
        return None
    evidence = {
        "grad_norm": value,
        "grad_norm_usual": usual_value,
        "step": step,
        "spikes": len(gradient_spikes),
        "followed_by_a_fall": len(harmful_spikes),
    }
    what = (
        f"The gradient norm jumped {len(gradient_spikes)} times, to {value:.2g} at step {step} "
        f"where {usual_value:.2g} is usual"
        + (", and training got worse after it." if harmful_spikes else ".")
    )
    return _unstable_finding(facts, what, evidence, 2.0)


def underpowered(facts: Facts) -> Finding | None:
    """Detect an inconclusive verdict whose exam has too few tasks to show a change that matters.

    None where the exam has enough tasks, and for SFT runs that were merely too short.
    """
    comparison = facts.comparison
    if comparison is None or comparison.outcome.verdict != "inconclusive":
        return None
    smallest_gap = rounded(comparison.outcome.detectable)
    n = comparison.outcome.n
    if smallest_gap is None or not n:
        return None
    is_share = comparison.measure == "success"
    if (is_share and smallest_gap <= MARGIN) or (facts.algorithm == "sft" and too_short(facts)):
        return None
    evidence: dict[str, object] = {
        "difference": comparison.difference,
        "interval": comparison.interval,
        "n": n,
        "smallest_detectable_gap": smallest_gap,
    }
    tasks_wanted = None
    if is_share:
        flips = len(comparison.outcome.gained) + len(comparison.outcome.lost)
        # One more flip than was seen, so that a sample without any does not promise too much.
        tasks_wanted = evidence["tasks_needed"] = tasks_needed(MARGIN, (flips + 1) / (n + 1))
    gap_text = f"{100 * smallest_gap:.1f} points" if is_share else f"{smallest_gap:.3g}"
    what = (
        f"{n} reported tasks show a change of {gap_text} or more; a smaller one stays in the noise."
    )
    if facts.heldout_rows is not None:
        evidence["heldout_rows"] = facts.heldout_rows
    lever = _more_tasks(facts, n, tasks_wanted)
    return Finding("underpowered", what, evidence, lever, playbook="evidence", pick="changed")


def _more_tasks(facts: Facts, n: int, needed: int | None) -> Lever:
    """The lever to get more tasks into the exam.

    It raises the number of rows asked, or asks for new rows where the environment has no more.

    Args:
        n: the number of tasks in the verdict.
        needed: how many tasks it would take; None where that is not known.
    """
    rows_available = facts.heldout_rows
    training = facts.algorithm != "evaluate"
    # A training run reports only half of its held-out tasks.
    rows_wanted = 2 * needed if needed and training else needed
    setting = "eval_rows" if training else "rows"
    current = getattr(facts.settings, setting)
    if isinstance(current, int):
        rows_used = current
    else:  # the setting is unset; a training run reports `n` tasks, half of its rows
        rows_used = 2 * n if training else n
    if rows_available is not None and rows_used >= rows_available:
        half_note = "; a run reports on half of them" if training else ""
        return edit_lever(more_rows(rows_wanted, rows_available) + half_note)
    # Where it is not known how many tasks are needed: four times as many halve the gap.
    new_rows = rows_wanted or 4 * rows_used
    remark = "half of them are reported" if training else ""
    if rows_available is None and training:
        remark += "; the environment needs as many held-out tasks"
    elif rows_available is not None and new_rows > rows_available:
        new_rows = rows_available
    return setting_lever(setting, current, new_rows, remark)


def infra(facts: Facts) -> Finding | None:
    """Detect a run that failed because of the machine, not because of the model; None for others.

    Where memory ran out, the lever is gradient checkpointing, or a smaller batch if checkpointing
    is on already. For other failures it is to repair the machine.
    """
    if facts.failed not in _MACHINE:
        return None
    failure = facts.failure
    error = (failure.evidence or failure.message)[:_ERROR_CHARS] if failure else ""
    evidence = {"kind": facts.failed, "error": error}
    if facts.failed == "oom":  # out of memory
        size_setting = "batch_size" if facts.algorithm == "sft" else "prompts_per_step"
        if not facts.settings.gradient_checkpointing:
            lever = setting_lever(
                "gradient_checkpointing", False, True, "the same mathematics in less memory"
            )
        else:
            current_size = getattr(facts.settings, size_setting)
            lever = setting_lever(
                size_setting,
                current_size,
                max(1, current_size // 2) if isinstance(current_size, int) else None,
            )
    else:
        lever = edit_lever("mend the machine (honesmith doctor), then resume the run")
    return Finding("infra", _MACHINE[facts.failed], evidence, lever, playbook="crashes", root=True)


def _unstable_finding(
    facts: Facts, what: str, evidence: Mapping[str, object], divisor: float
) -> Finding:
    """The finding `unstable`; its lever is the learning rate divided by `divisor`.

    `what` is its sentence. The lever names no value where the learning rate is not known.
    """
    learning_rate = facts.settings.learning_rate
    new_rate = None
    if isinstance(learning_rate, int | float):
        new_rate = rounded_half(learning_rate * 2 / divisor)  # which divides by two
    return Finding(
        "unstable",
        what,
        {**evidence, "learning_rate": learning_rate},
        setting_lever("learning_rate", learning_rate, new_rate),
        playbook="failures",
    )


class _Spike(NamedTuple):
    """A point of a curve that is far above the usual value, the median of the steps before it."""

    step: int
    value: float
    usual_value: float


def _spikes(points: Sequence[tuple[int, float]], floor: float) -> list[_Spike]:
    """The points of a curve that are far above the median of the steps before them.

    Points up to `floor` never count. Step 0 and values of 0 or less are ignored altogether. A point
    with too few steps before it is no spike.
    """
    spikes: list[_Spike] = []
    earlier_values: list[float] = []
    for step, value in points:
        if value <= 0.0 or step <= 0:
            continue
        recent_values = earlier_values[-limits.SPIKE_MEMORY :]
        usual_value = (
            statistics.median(recent_values) if len(recent_values) >= limits.LEAST else None
        )
        if usual_value is not None and value > limits.SPIKE * usual_value and value > floor:
            spikes.append(_Spike(step, value, usual_value))
        earlier_values.append(value)
    return spikes


def _worse_after(facts: Facts, step: int) -> bool:
    """Whether training got worse after a step, by more than its noise.

    Compares the means of the five steps before and after: the loss for SFT, the reward for GRPO.
    False where either side has fewer steps.
    """
    # A loss gets worse by rising, a reward by falling.
    name, direction = ("loss", -1.0) if facts.algorithm == "sft" else ("reward_mean", 1.0)
    curve = facts.curve(name)
    before = [value for at_step, value in curve if 0 < at_step < step][-limits.LEAST :]
    after = [value for at_step, value in curve if at_step > step][: limits.LEAST]
    if len(before) < limits.LEAST or len(after) < limits.LEAST:
        return False
    noise = max(statistics.stdev(before), statistics.stdev(after), 1e-9)
    # Two standard errors of the difference of two means over so many steps.
    return direction * (mean(before) - mean(after)) > 2 * noise * (2 / limits.LEAST) ** 0.5


def _values_up_to(points: Sequence[tuple[int, float]], step: int) -> list[float]:
    """The last values of a curve up to a step, at most five.

    Where there are none, the first five values of the curve.
    """
    values_until = [value for at_step, value in points if at_step <= step][-limits.LEAST :]
    return values_until or [value for _, value in points[: limits.LEAST]]

"""Detectors of the learning itself, of the exam and of the machine."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from engine.evidence.detect.findings import Finding, Lever, edit_lever, setting_lever
from engine.evidence.detect.groups import rounded_half, rounded_part
from engine.evidence.detect.views import Facts, mean
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.inference import MARGIN, tasks_needed
from engine.evidence.stats.power import more_rows
from engine.evidence.stats.results import rounded
from engine.records.lines.curves import number

_MACHINE = {
    "oom": "Memory ran out.",
    "infra": "The machine failed: disk, interpreter or device.",
    "killed": "The trainer was killed from outside.",
    "interrupted": "The run was interrupted more often than it is continued.",
    "timeout": "The run outlived its wall-clock limit.",
}


def overfitting(facts: Facts) -> Finding | None:
    """SFT: the loss of the rows falls on, that of held-out rows rises."""
    exams = facts.curve("heldout_loss")
    if len(exams) <= limits.OVERFIT_EVALS:
        return None
    tail = [value for _, value in exams[-limits.OVERFIT_EVALS - 1 :]]
    if any(later <= earlier for earlier, later in itertools.pairwise(tail)):
        return None
    best_step, lowest = min(exams, key=lambda point: point[1])
    last_step, last = exams[-1]
    if last < lowest * (1 + limits.OVERFIT_RISE):
        return None
    losses = facts.curve("loss")
    around = _near(losses, best_step)
    ending = _near(losses, last_step)
    if not around or not ending or mean(ending) >= mean(around):
        return None
    solved = dict(facts.curve("heldout_success"))
    then = solved.get(best_step, 0.0)
    noise = 2 * math.sqrt(2 * then * (1 - then) / facts.exam_tasks) if facts.exam_tasks else 0.0
    if solved.get(last_step, 0.0) - then > max(limits.OVERFIT_SUCCESS, noise):
        return None
    evidence = {
        "heldout_loss_lowest": lowest,
        "lowest_at_step": best_step,
        "heldout_loss": last,
        "loss_then": mean(around),
        "loss": mean(ending),
        "heldout_success_then": solved.get(best_step),
        "heldout_success": solved.get(last_step),
    }
    what = (
        f"The held-out loss was lowest at step {best_step} ({lowest:.3g}) and has risen to "
        f"{last:.3g} since, while the loss of the rows fell from {mean(around):.3g} to "
        f"{mean(ending):.3g}."
    )
    lever = setting_lever(
        "steps", facts.settings.get("steps"), best_step, "fewer passes; more rows if there are any"
    )
    if best_step == 0:  # no number of steps helps where every one of them did harm
        rate = facts.settings.get("learning_rate")
        why = "and see whether the rows are like the held-out ones: no step made those likelier"
        lever = setting_lever("learning_rate", rate, rounded_part(rate, 3), why)
    return Finding("overfitting", what, evidence, lever, "sft", "changed")


def too_short(facts: Facts) -> Finding | None:
    """SFT: nothing is solved yet, and the held-out loss still falls."""
    losses, solved = (
        facts.curve("heldout_loss"),
        [value for _, value in facts.curve("heldout_success")],
    )
    if len(losses) < limits.OVERFIT_EVALS or not solved or max(solved) > limits.SOLVED_NEVER:
        return None
    (_, middle), (last_step, last) = losses[(len(losses) - 1) // 2], losses[-1]
    if facts.comparison is None or last > min(value for _, value in losses):
        return None
    if last > (1 - limits.STILL_FALLING) * middle:
        return None
    evidence = {
        "heldout_loss_start": losses[0][1],
        "heldout_loss_halfway": middle,
        "heldout_loss": last,
        "heldout_success": solved[-1],
        "steps": last_step,
    }
    what = (
        f"{solved[-1]:.0%} of the held-out tasks are solved after {last_step} steps, but the loss "
        f"still falls: {losses[0][1]:.3g}, {middle:.3g} halfway, {last:.3g} at the end."
    )
    lever = setting_lever(
        "steps", facts.settings.get("steps"), 2 * last_step, "nothing says it is done"
    )
    return Finding("too_short", what, evidence, lever, "sft", "best")


def no_update(facts: Facts) -> Finding | None:
    """An adapter that stands still: no gradient, or steps too small to matter."""
    # Steps in which no group differs have no gradient for another reason.
    taught = [
        line for line in facts.lines if (number(line.get("zero_advantage_share")) or 0.0) < 1.0
    ]
    rates, norms = (
        [value for line in taught if (value := number(line.get(name))) is not None]
        for name in ("lr", "grad_norm")
    )
    if facts.failed != "no_update":
        tiny = len(rates) >= limits.WINDOW and sum(rates) < limits.FARTHEST_MOVE
        still = len(norms) >= limits.LEAST and statistics.median(norms) < limits.NO_GRADIENT
        if not (tiny or still):
            return None
    evidence = {
        "learning_rate": facts.settings.get("learning_rate"),
        "sum_of_lr": sum(rates),
        "grad_norm": statistics.median(norms) if norms else None,
        "steps": len(rates),
    }
    what = (
        f"In {len(rates)} steps no weight of the adapter can have moved by more than "
        f"{sum(rates):.1g} (gradient norm {evidence['grad_norm'] or 0.0:.2g})."
    )
    rate = facts.settings.get("learning_rate")
    to = float(f"{10 * rate:.2g}") if isinstance(rate, int | float) else None
    lever = setting_lever(
        "learning_rate", rate, to, "or leave it out for the value that suits the model"
    )
    return Finding("no_update", what, evidence, lever, "failures")


def unstable(facts: Facts) -> Finding | None:
    """NaN, spikes of the gradient that hurt, or a divergence that jumps."""
    if facts.failed == "nonfinite":
        evidence = {"error": (facts.failure.evidence if facts.failure else "")[:300]}
        what = f"The run ended on a number that is none: {evidence['error'] or 'NaN'}."
        return _slower(facts, what, evidence, 3.0)
    limit = facts.settings.get("max_grad_norm") or 1.0
    grads = _spikes(facts.curve("grad_norm"), float(limit))
    jumps = _spikes(facts.curve("kl"), limits.KL_FLOOR)
    if jumps:
        step, value, usual = jumps[-1]
        what = (
            f"The divergence from the start jumped to {value:.2g} at step {step}, from {usual:.2g}."
        )
        return _slower(
            facts, what, {"kl": value, "kl_usual": usual, "step": step, "jumps": len(jumps)}, 2.0
        )
    if not grads:
        return None
    step, value, usual = max(grads, key=lambda spike: spike[1] / spike[2])
    hurt = [spike for spike in grads if _fell_after(facts, spike[0])]
    if len(grads) < limits.SPIKES and not hurt:
        return None
    evidence = {
        "grad_norm": value,
        "grad_norm_usual": usual,
        "step": step,
        "spikes": len(grads),
        "followed_by_a_fall": len(hurt),
    }
    what = (
        f"The gradient norm jumped {len(grads)} times, to {value:.2g} at step {step} where "
        f"{usual:.2g} is usual" + (", and training got worse after it." if hurt else ".")
    )
    return _slower(facts, what, evidence, 2.0)


def underpowered(facts: Facts) -> Finding | None:
    """The exam is too small for the change hoped for."""
    comparison = facts.comparison
    if comparison is None or comparison.outcome.verdict != "inconclusive":
        return None
    gap, n = rounded(comparison.outcome.detectable), comparison.outcome.n
    if gap is None or not n:
        return None
    rate = comparison.measure == "success"
    if (rate and gap <= MARGIN) or (facts.algorithm == "sft" and too_short(facts)):
        return None
    evidence: dict[str, object] = {
        "difference": comparison.difference,
        "interval": comparison.interval,
        "n": n,
        "smallest_detectable_gap": gap,
    }
    needed = None
    if rate:
        flips = len(comparison.outcome.gained) + len(comparison.outcome.lost)
        needed = evidence["tasks_needed"] = tasks_needed(MARGIN, (flips + 1) / (n + 1))
    shown = f"{100 * gap:.1f} points" if rate else f"{gap:.3g}"
    what = f"{n} reported tasks show a change of {shown} or more; a smaller one stays in the noise."
    if facts.heldout_rows is not None:
        evidence["heldout_rows"] = facts.heldout_rows
    lever = _more_tasks(facts, n, needed)
    return Finding("underpowered", what, evidence, lever, "evidence", "changed")


def _more_tasks(facts: Facts, n: int, needed: int | None) -> Lever:
    """More rows in the exam, or in the environment where every row is used."""
    have, training = facts.heldout_rows, facts.algorithm != "evaluate"
    wanted = 2 * needed if needed and training else needed  # half of a run's tasks are reported
    name = "eval_rows" if training else "rows"
    now = facts.settings.get(name)
    used = now if isinstance(now, int) else 2 * n if training else n
    if have is not None and used >= have:
        half = "; a run reports on half of them" if training else ""
        return edit_lever(more_rows(wanted, have) + half)
    # The gap halves with four times the tasks, where nobody can say how many it takes.
    to, also = wanted or 4 * used, "half of them are reported" if training else ""
    if have is None and training:
        also += "; the environment needs as many held-out tasks"
    elif have is not None and to > have:
        to = have
    return setting_lever(name, now, to, also)


def infra(facts: Facts) -> Finding | None:
    """The machine, not the model."""
    if facts.failed not in _MACHINE:
        return None
    failure = facts.failure
    error = (failure.evidence or failure.message)[:300] if failure else ""
    evidence = {"kind": facts.failed, "error": error}
    if facts.failed == "oom":
        name = "batch_size" if facts.algorithm == "sft" else "prompts_per_step"
        if not facts.settings.get("gradient_checkpointing"):
            lever = setting_lever(
                "gradient_checkpointing", False, True, "the same mathematics in less memory"
            )
        else:
            now = facts.settings.get(name)
            lever = setting_lever(name, now, max(1, now // 2) if isinstance(now, int) else None)
    else:
        lever = edit_lever("mend the machine (honesmith doctor), then resume the run")
    return Finding("infra", _MACHINE[facts.failed], evidence, lever, "crashes", root=True)


def _slower(facts: Facts, what: str, evidence: Mapping[str, object], by: float) -> Finding:
    rate = facts.settings.get("learning_rate")
    to = rounded_half(rate * 2 / by) if isinstance(rate, int | float) else None
    return Finding(
        "unstable",
        what,
        {**evidence, "learning_rate": rate},
        setting_lever("learning_rate", rate, to),
        "failures",
    )


def _spikes(points: Sequence[tuple[int, float]], floor: float) -> list[tuple[int, float, float]]:
    """(step, value, what was usual) where a curve jumps above the median of the steps before."""
    spikes: list[tuple[int, float, float]] = []
    earlier: list[float] = []
    for step, value in points:
        if value <= 0.0 or step <= 0:
            continue
        before = earlier[-limits.SPIKE_MEMORY :]
        usual = statistics.median(before) if len(before) >= limits.LEAST else None
        if usual is not None and value > limits.SPIKE * usual and value > floor:
            spikes.append((step, value, usual))
        earlier.append(value)
    return spikes


def _fell_after(facts: Facts, step: int) -> bool:
    """Whether the five steps after are worse than the five before, beyond their noise."""
    name, sign = ("loss", -1.0) if facts.algorithm == "sft" else ("reward_mean", 1.0)
    curve = facts.curve(name)
    before = [value for at_step, value in curve if 0 < at_step < step][-limits.LEAST :]
    after = [value for at_step, value in curve if at_step > step][: limits.LEAST]
    if len(before) < limits.LEAST or len(after) < limits.LEAST:
        return False
    noise = max(statistics.stdev(before), statistics.stdev(after), 1e-9)
    return sign * (mean(before) - mean(after)) > 2 * noise * (2 / limits.LEAST) ** 0.5


def _near(points: Sequence[tuple[int, float]], step: int) -> list[float]:
    """The last five values up to a step (from the first steps on where there are fewer)."""
    before = [value for at_step, value in points if at_step <= step][-limits.LEAST :]
    return before or [value for _, value in points[: limits.LEAST]]

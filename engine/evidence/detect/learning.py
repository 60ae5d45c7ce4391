"""Detectors of the learning itself (overfitting, no update, instability), of an evaluation with too
few tasks, and of a machine that failed."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.core.format import whole_percent
from engine.evidence.detect.findings import (
    Finding,
    Lever,
    edit_lever,
    lower_rate_lever,
    setting_lever,
)
from engine.evidence.detect.views import Facts
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.inference import MARGIN
from engine.evidence.stats.power import more_rows, tasks_for_share
from engine.evidence.stats.results import rounded
from engine.evidence.stats.trends import Spike, mean, spikes_of
from engine.evidence.verdict.comparison import Comparison
from engine.records.lines.curves import number
from engine.records.settings import ROW_ALGORITHMS

# Kinds of failure that are faults of the machine, and what a finding says of them.
_SENTENCE_OF_MACHINE_FAULT = {
    "oom": "Memory ran out.",
    "infra": "The machine failed: disk, interpreter or device.",
    "endpoint": "A model that the run asks over HTTP did not answer.",
    "killed": "The trainer was killed from outside.",
    "interrupted": "The run was interrupted more often than it is continued.",
    "timeout": "The run outlived its wall-clock limit.",
}

_ERROR_CHARS = 300  # of an error's text that are shown as evidence


def overfitting(facts: Facts) -> Finding | None:
    """Detect that the training loss (SFT, DPO) still falls while the held-out loss rises.

    Returns None with too few held-out evaluations, if the held-out loss rose too little to matter,
    or if held-out success clearly rose in the meantime.
    """
    losses = _losses_since_lowest(facts)
    if losses is None:
        return None
    least_risen_loss = losses.lowest_heldout * (1 + limits.OVERFIT_RISE_PART)
    rose_enough = losses.last_heldout >= least_risen_loss
    training_loss_fell = losses.training_now < losses.training_then
    if not rose_enough or not training_loss_fell:
        return None
    if success_rose(facts, losses.lowest_step, losses.last_step):
        return None
    return _overfitting_finding(facts, losses)


@dataclass(frozen=True)
class _Losses:
    """The held-out loss and the training loss of a run at two steps."""

    lowest_step: int  # the step with the lowest held-out loss
    last_step: int  # the step of the last held-out evaluation
    lowest_heldout: float
    last_heldout: float
    training_then: float  # mean training loss of the last steps up to `lowest_step`
    training_now: float  # mean training loss of the last steps up to `last_step`


def _losses_since_lowest(facts: Facts) -> _Losses | None:
    """The losses of a run whose held-out loss rises at its end; None for other runs.

    Also None if the training loss is not known.
    """
    heldout_losses = facts.curve("heldout_loss")  # pairs (step, loss)
    if not _rises_at_end(facts.curve_values("heldout_loss")):
        return None
    training_losses = facts.curve("loss")
    if not training_losses:
        return None
    lowest_loss = min(loss for _, loss in heldout_losses)
    lowest_step = next(step for step, loss in heldout_losses if loss == lowest_loss)
    last_step, last_loss = heldout_losses[-1]
    return _Losses(
        lowest_step=lowest_step,
        last_step=last_step,
        lowest_heldout=lowest_loss,
        last_heldout=last_loss,
        training_then=mean(_last_values_up_to(training_losses, lowest_step)),
        training_now=mean(_last_values_up_to(training_losses, last_step)),
    )


def _overfitting_finding(facts: Facts, losses: _Losses) -> Finding:
    """The finding that a run fits its training rows ever better and held-out rows ever worse."""
    success_by_step = dict(facts.curve("heldout_success"))
    evidence = {
        "heldout_loss_lowest": losses.lowest_heldout,
        "lowest_at_step": losses.lowest_step,
        "heldout_loss": losses.last_heldout,
        "loss_then": losses.training_then,
        "loss": losses.training_now,
        "heldout_success_then": success_by_step.get(losses.lowest_step),
        "heldout_success": success_by_step.get(losses.last_step),
    }
    sentence = (
        f"The held-out loss was lowest at step {losses.lowest_step} "
        f"({losses.lowest_heldout:.3g}) and has risen to "
        f"{losses.last_heldout:.3g} since, while the loss of the rows fell from "
        f"{losses.training_then:.3g} to {losses.training_now:.3g}."
    )
    lever = _overfitting_lever(facts, losses.lowest_step)
    return Finding("overfitting", sentence, evidence, lever, playbook="sft", examples="changed")


def _rises_at_end(losses: Sequence[float]) -> bool:
    """Whether each of the last three losses (`FEWEST_EVALUATIONS`) is above the one before it."""
    if len(losses) <= limits.FEWEST_EVALUATIONS:  # n rises need n + 1 values
        return False
    last_losses = losses[-limits.FEWEST_EVALUATIONS - 1 :]
    return not any(later <= earlier for earlier, later in itertools.pairwise(last_losses))


def _overfitting_lever(facts: Facts, best_step: int) -> Lever:
    """The advice (a lever) to train only until `best_step`, the one with the lowest held-out loss.

    If that is step 0, the start, the advice is a lower learning rate, or more rows if the run saw
    its rows very often.
    """
    if best_step == 0 and facts.passes_over_rows >= limits.MANY_PASSES:
        return edit_lever(
            "more different rows, or fewer passes: no step made held-out rows likelier"
        )
    if best_step == 0:  # every step did harm, so fewer of them would not help
        reason = "and see whether the rows are like the held-out ones: no step made those likelier"
        return lower_rate_lever(facts.settings.learning_rate, divisor=3, why=reason)
    reason = "fewer passes; more rows if there are any"
    return setting_lever("steps", now=facts.settings.steps, to=best_step, why=reason)


def success_rose(facts: Facts, from_step: int, to_step: int) -> bool:
    """Whether held-out success clearly rose from one step to another.

    A step without a measured success counts as 0.
    """
    success_by_step = dict(facts.curve("heldout_success"))
    before, after = success_by_step.get(from_step, 0.0), success_by_step.get(to_step, 0.0)
    noise = 0.0  # while the number of tasks is not known
    task_count = facts.exam_tasks  # held-out tasks behind each of the two shares; 0: not known
    if task_count:  # two standard errors of the difference between two shares
        noise = 2 * math.sqrt(2 * before * (1 - before) / task_count)
    return after - before > max(limits.OVERFIT_SUCCESS_GAIN, noise)


def too_short(facts: Facts) -> Finding | None:
    """Detect an SFT run that ended too early: its held-out loss still fell and little was solved.

    Returns None for a run that is not finished, that solved more than hardly any task, or whose
    last loss is not clearly its lowest.
    """
    if facts.comparison is None:  # the run is not finished
        return None
    solved_shares = facts.curve_values("heldout_success")
    if not solved_shares or max(solved_shares) > limits.HARDLY_SOLVED_SHARE:
        return None
    loss_curve = facts.curve("heldout_loss")
    losses = [loss for _, loss in loss_curve]
    if _falls_slowly(losses):
        return _slow_finding(facts, losses, solved_share=solved_shares[-1])
    if not _still_falls(losses):
        return None
    return _too_short_finding(facts, loss_curve, solved_share=solved_shares[-1])


def _too_short_finding(
    facts: Facts, loss_curve: Sequence[tuple[int, float]], *, solved_share: float
) -> Finding:
    """The finding that a run ended while its held-out loss fell, with the advice to train longer.

    `loss_curve` are pairs (step, held-out loss); `solved_share` is the last held-out success.
    """
    losses = [loss for _, loss in loss_curve]
    first_loss, halfway_loss, last_loss = losses[0], _halfway(losses), losses[-1]
    last_step, _ = loss_curve[-1]
    evidence = {
        "heldout_loss_start": first_loss,
        "heldout_loss_halfway": halfway_loss,
        "heldout_loss": last_loss,
        "heldout_success": solved_share,
        "steps": last_step,
    }
    sentence = (
        f"{whole_percent(solved_share)} of the held-out tasks are solved after {last_step} steps, "
        f"but the loss still falls: {first_loss:.3g}, {halfway_loss:.3g} halfway, "
        f"{last_loss:.3g} at the end."
    )
    reason = "nothing says it is done"
    lever = setting_lever("steps", now=facts.settings.steps, to=2 * last_step, why=reason)
    return Finding("too_short", sentence, evidence, lever, playbook="sft", examples="best")


def _falls_slowly(losses: Sequence[float]) -> bool:
    """Whether each loss is below the one before it, but all together fell by a small part only.

    Returns False if there are too few losses to tell.
    """
    if len(losses) < limits.FEWEST_EVALUATIONS:
        return False
    always_falls = all(later < earlier for earlier, later in itertools.pairwise(losses))
    return always_falls and losses[-1] >= (1 - limits.SLOW_FALL_PART) * losses[0]


def _slow_finding(facts: Facts, losses: Sequence[float], *, solved_share: float) -> Finding:
    """The finding that a loss falls by steps too small, with the advice to raise the learning
    rate."""
    evidence = {
        "heldout_loss_start": losses[0],
        "heldout_loss": losses[-1],
        "heldout_success": solved_share,
        "learning_rate": facts.settings.learning_rate,
    }
    sentence = (
        f"{whole_percent(solved_share)} of the held-out tasks are solved, and the held-out "
        f"loss falls slowly from {losses[0]:.3g} to {losses[-1]:.3g}: the steps are too small."
    )
    lever = _higher_rate(facts.settings.learning_rate)
    return Finding("too_short", sentence, evidence, lever, playbook="sft")


def _still_falls(losses: Sequence[float]) -> bool:
    """Whether the last loss is the lowest, and clearly below the one halfway. Returns False if
    there are too few losses to tell."""
    if len(losses) < limits.FEWEST_EVALUATIONS:
        return False
    last_loss = losses[-1]
    is_lowest = last_loss <= min(losses)
    return is_lowest and last_loss <= (1 - limits.STILL_FALLING_PART) * _halfway(losses)


def _halfway(values: Sequence[float]) -> float:
    """The value in the middle of a series; the earlier one if there are two."""
    return values[(len(values) - 1) // 2]


def no_update(facts: Facts) -> Finding | None:
    """Detect an adapter that does not change: no gradient, or steps too small to matter.

    Returns None if it changes, or if there are too few steps to tell.
    """
    rates, norms = _rates_and_norms(facts)
    # AdamW moves a weight by at most about the learning rate per step.
    farthest_move = sum(rates)
    ended_by_trainer = facts.failure_kind == "no_update"  # the trainer came to the same conclusion
    steps_too_small = len(rates) >= limits.RECENT_STEPS and farthest_move < limits.LEAST_WEIGHT_MOVE
    if not (ended_by_trainer or steps_too_small or _has_no_gradient(norms)):
        return None
    median_norm = statistics.median(norms) if norms else None
    return _no_update_finding(facts, len(rates), farthest_move, median_norm)


def _no_update_finding(
    facts: Facts, step_count: int, farthest_move: float, median_norm: float | None
) -> Finding:
    """The finding that an adapter does not change.

    `farthest_move` is the most that a weight can have moved in all steps. `median_norm` is the
    usual gradient norm; None if none was measured.
    """
    evidence = {
        "learning_rate": facts.settings.learning_rate,
        "sum_of_lr": farthest_move,
        "grad_norm": median_norm,
        "steps": step_count,
    }
    sentence = (
        f"In {step_count} steps no weight of the adapter can have moved by more than "
        f"{farthest_move:.1g} (gradient norm {median_norm or 0.0:.2g})."
    )
    # With ten times this factor a weight could move ten times as far as an adapter needs to change.
    factor = max(1.0, limits.LEAST_WEIGHT_MOVE / farthest_move) if farthest_move else 1.0
    lever = _higher_rate(facts.settings.learning_rate, 10 * factor)
    # A root cause: nothing was learnt or lost, so training caused nothing else that the run shows.
    return Finding("no_update", sentence, evidence, lever, playbook="failures", is_cause=True)


def _higher_rate(learning_rate: object, factor: float = 10.0) -> Lever:
    """The advice (a lever) to multiply the learning rate by `factor`, with two digits; it names no
    new value if `learning_rate` is not a number."""
    new_rate = None
    if isinstance(learning_rate, int | float):
        new_rate = float(f"{factor * learning_rate:.2g}")
    reason = "better: leave it out for the value that suits the model"
    return setting_lever("learning_rate", now=learning_rate, to=new_rate, why=reason)


def _has_no_gradient(norms: Sequence[float]) -> bool:
    """Whether the median gradient norm is practically 0. False if there are too few to tell."""
    return (
        len(norms) >= limits.FEWEST_STEPS and statistics.median(norms) < limits.ZERO_GRADIENT_NORM
    )


def _rates_and_norms(facts: Facts) -> tuple[list[float], list[float]]:
    """(learning rates, gradient norms) of the steps that can have a gradient.

    A GRPO step in which no completion has an advantage has no gradient and is left out; the
    detector `uniform_groups` reports such steps.
    """
    rates: list[float] = []
    norms: list[float] = []
    for line in facts.lines:
        zero_advantage_share = number(line.get("zero_advantage_share")) or 0.0
        if zero_advantage_share >= 1.0:
            continue
        rate, norm = number(line.get("lr")), number(line.get("grad_norm"))
        if rate is not None:
            rates.append(rate)
        if norm is not None:
            norms.append(norm)
    return rates, norms


def unstable(facts: Facts) -> Finding | None:
    """Detect unstable training. Returns None without a sign of it.

    The signs are, in this order: the run ended on NaN or infinity; the loss of SFT soared; the KL
    divergence from the start jumped; the gradient norm spiked several times, or once and training
    got worse after it.
    """
    if facts.failure_kind == "nonfinite":
        error = facts.failure.evidence[:_ERROR_CHARS] if facts.failure else ""
        sentence = f"The run ended on a number that is none: {error or 'NaN'}."
        # A larger cut than for spikes (2), because this sign ended the run.
        return _unstable_finding(facts, sentence, {"error": error}, rate_divisor=3)
    explosion = _explosion(facts) if facts.algorithm in ROW_ALGORITHMS else None
    if explosion is not None:
        return explosion
    divergence_jumps = spikes_of(facts.curve("kl"), limits.KL_FLOOR)
    if divergence_jumps:
        return _divergence_finding(facts, divergence_jumps)
    return _gradient_finding(facts)


def _explosion(facts: Facts) -> Finding | None:
    """The finding that the training loss rose far above its first value and stayed above it.

    Returns None if it did not, and for a run under way whose highest loss is so recent (less than
    `EXPLODED_STEPS` steps ago) that it may still recover.
    """
    steps, losses = [step for step, _ in facts.curve("loss")], facts.curve_values("loss")
    if len(losses) < limits.FEWEST_STEPS:
        return None
    first_loss, highest = losses[0], max(losses)
    peak_step = steps[losses.index(highest)]
    least_high = max(limits.EXPLODED_FACTOR * first_loss, first_loss + limits.EXPLODED_RISE)
    if highest < least_high:
        return None
    is_over = facts.comparison is not None or facts.failure is not None
    may_recover = not is_over and steps[-1] < peak_step + limits.EXPLODED_STEPS
    came_down = statistics.fmean(losses[-3:]) < first_loss
    if may_recover or came_down:
        return None
    evidence = {"loss_start": first_loss, "loss_highest": highest, "step": peak_step}
    rise = f"rose from {first_loss:.3g} at the first step to {highest:.3g} at step {peak_step}"
    sentence = f"The loss of the rows {rise}: the steps throw the model away."
    return _unstable_finding(facts, sentence, evidence, rate_divisor=10)


def _divergence_finding(facts: Facts, jumps: Sequence[Spike]) -> Finding:
    """The finding that the KL divergence of the policy from its start jumped; it describes the last
    of the `jumps`."""
    last_jump = jumps[-1]
    evidence = {
        "kl": last_jump.value,
        "kl_usual": last_jump.usual_value,
        "step": last_jump.step,
        "jumps": len(jumps),
    }
    sentence = (
        f"The divergence from the start jumped to {last_jump.value:.2g} at step {last_jump.step}, "
        f"from {last_jump.usual_value:.2g}."
    )
    return _unstable_finding(facts, sentence, evidence, rate_divisor=2)


def _gradient_finding(facts: Facts) -> Finding | None:
    """The finding that the gradient norm spiked; it describes the largest spike relative to usual.

    Returns None if there were only a few spikes, and training got worse after none of them.
    """
    # A norm up to the clipping limit is no spike: such a gradient was applied unchanged. 1 is used
    # if gradients were not clipped, or if the limit is not known.
    clip_limit = float(facts.settings.max_grad_norm or 1.0)
    spikes = spikes_of(facts.curve("grad_norm"), clip_limit)
    harmful_count = sum(_worse_after(facts, spike.step) for spike in spikes)
    if not harmful_count and len(spikes) < limits.FEWEST_SPIKES:
        return None
    largest = max(spikes, key=_times_usual)
    evidence = {
        "grad_norm": largest.value,
        "grad_norm_usual": largest.usual_value,
        "step": largest.step,
        "spikes": len(spikes),
        "followed_by_a_fall": harmful_count,
    }
    sentence = _gradient_text(largest, len(spikes), harmful=harmful_count > 0)
    return _unstable_finding(facts, sentence, evidence, rate_divisor=2)


def _times_usual(spike: Spike) -> float:
    """How many times as high as usual a spike is: a sort key."""
    return spike.value / spike.usual_value


def _gradient_text(largest: Spike, spike_count: int, *, harmful: bool) -> str:
    """The sentence on `spike_count` spikes of the gradient norm, of which it names the largest;
    `harmful` says that training got worse after one of them."""
    consequence = ", and training got worse after it" if harmful else ""
    return (
        f"The gradient norm jumped {spike_count} times, to {largest.value:.2g} at step "
        f"{largest.step} where {largest.usual_value:.2g} is usual{consequence}."
    )


def underpowered(facts: Facts) -> Finding | None:
    """Detect an inconclusive verdict that rests on too few tasks to show a change that matters.

    Returns None if there are enough tasks, and for SFT runs that were merely too short.
    """
    comparison = facts.comparison
    if comparison is None or comparison.outcome.verdict != "inconclusive":
        return None
    smallest_gap = rounded(comparison.outcome.detectable)  # the smallest change that would show
    if smallest_gap is None or not comparison.outcome.n:
        return None
    shows_enough = comparison.measure == "success" and smallest_gap <= MARGIN
    merely_too_short = facts.algorithm == "sft" and too_short(facts) is not None
    if shows_enough or merely_too_short:
        return None
    return _underpowered_finding(facts, comparison, smallest_gap)


def _underpowered_finding(facts: Facts, comparison: Comparison, smallest_gap: float) -> Finding:
    """The finding that a comparison has too few tasks to show a change below `smallest_gap`."""
    task_count = comparison.outcome.n
    is_share = comparison.measure == "success"
    evidence: dict[str, object] = {
        "difference": comparison.difference,
        "interval": comparison.interval,
        "n": task_count,
        "smallest_detectable_gap": smallest_gap,
    }
    needed_tasks = tasks_for_share(comparison.outcome) if is_share else None
    if is_share:
        evidence["tasks_needed"] = needed_tasks
    if facts.heldout_rows is not None:
        evidence["heldout_rows"] = facts.heldout_rows
    gap_text = f"{100 * smallest_gap:.1f} points" if is_share else f"{smallest_gap:.3g}"
    lever = _more_tasks(facts, task_count, needed_tasks)
    sentence = (
        f"{task_count} reported tasks show a change of {gap_text} or more; a smaller one stays in "
        "the noise."
    )
    return Finding(
        "underpowered", sentence, evidence, lever, playbook="evidence", examples="changed"
    )


def _more_tasks(facts: Facts, reported_tasks: int, needed_tasks: int | None) -> Lever:
    """The advice (a lever) to get more tasks into the evaluation that the verdict rests on.

    It is to raise the setting for the number of rows, or, if all held-out rows are used already, to
    add rows to the environment. `reported_tasks` is the number of tasks in the verdict,
    `needed_tasks` how many it would take; None if that is not known.
    """
    is_training = facts.algorithm != "evaluate"
    setting = "eval_rows" if is_training else "rows"
    rows_set = getattr(facts.settings, setting)  # None if it was not set
    # A training run reports only half of its held-out tasks, unless dev tasks choose.
    reports_half = is_training and not facts.dev_tasks
    rows_per_task = 2 if reports_half else 1
    # Without a setting, the number of rows follows from the tasks that were reported.
    rows_used = rows_set if isinstance(rows_set, int) else rows_per_task * reported_tasks
    rows_needed = None if needed_tasks is None else rows_per_task * needed_tasks
    rows_available = facts.heldout_rows
    if rows_available is not None and rows_used >= rows_available:
        half_note = "; a run reports on half of them" if reports_half else ""
        return edit_lever(more_rows(rows_needed, rows_available) + half_note)
    new_rows = _rows_to_ask(rows_used, rows_needed, rows_available)
    remark = _remark_on_halves(rows_available) if reports_half else ""
    return setting_lever(setting, now=rows_set, to=new_rows, why=remark)


def _remark_on_halves(rows_available: int | None) -> str:
    """The remark beside the advice to evaluate a training run on more held-out rows.
    `rows_available` is how many the environment has; None if that is not known."""
    remark = "half of them are reported"
    if rows_available is None:
        remark += "; the environment needs as many held-out tasks"
    return remark


def _rows_to_ask(rows_used: int, rows_needed: int | None, rows_available: int | None) -> int:
    """How many rows the next evaluation should ask, at most those available.

    `rows_used` were asked this time; `rows_needed` would be enough; None: not known.
    """
    # If it is not known how many are needed: four times as many tasks halve the smallest change
    # that shows.
    rows = rows_needed or 4 * rows_used
    return rows if rows_available is None else min(rows, rows_available)


def infra(facts: Facts) -> Finding | None:
    """Detect a run that failed because of the machine, not because of the model; else None."""
    failure = facts.failure
    if failure is None or failure.kind not in _SENTENCE_OF_MACHINE_FAULT:
        return None
    error = (failure.evidence or failure.message)[:_ERROR_CHARS]
    evidence = {"kind": failure.kind, "error": error}
    if failure.kind == "oom":
        lever = _less_memory(facts)
    else:
        mend = "start that model" if failure.kind == "endpoint" else "mend the machine"
        lever = edit_lever(f"{mend} (honesmith doctor), then resume the run")
    sentence = _SENTENCE_OF_MACHINE_FAULT[failure.kind]
    return Finding("infra", sentence, evidence, lever, playbook="crashes", is_cause=True)


def _less_memory(facts: Facts) -> Lever:
    """The advice (a lever) for a run that ran out of memory: switch gradient checkpointing on; if
    it is on already, halve the batch size."""
    if not facts.settings.gradient_checkpointing:
        return setting_lever(
            "gradient_checkpointing", now=False, to=True, why="the same mathematics in less memory"
        )
    setting = "batch_size" if facts.algorithm in ROW_ALGORITHMS else "prompts_per_step"
    batch_size = getattr(facts.settings, setting)
    half_size = max(1, batch_size // 2) if isinstance(batch_size, int) else None
    return setting_lever(setting, now=batch_size, to=half_size)


def _unstable_finding(
    facts: Facts, sentence: str, evidence: Mapping[str, object], *, rate_divisor: int
) -> Finding:
    """The finding `unstable`, with the advice to divide the learning rate by `rate_divisor`.

    The advice names no value if the learning rate is not known.
    """
    learning_rate = facts.settings.learning_rate
    evidence = {**evidence, "learning_rate": learning_rate}
    lever = lower_rate_lever(learning_rate, divisor=rate_divisor)
    return Finding("unstable", sentence, evidence, lever, playbook="failures")


def _worse_after(facts: Facts, step: int) -> bool:
    """Whether training got worse after a step, by more than its noise.

    Compares the means of the five steps before and after it. False if either side has fewer steps.
    """
    count = limits.FEWEST_STEPS
    judged_by_loss = facts.algorithm in ROW_ALGORITHMS  # SFT and DPO, which have no reward
    curve = facts.curve("loss" if judged_by_loss else "reward_mean")
    before = [value for at_step, value in curve if 0 < at_step < step][-count:]
    after = [value for at_step, value in curve if at_step > step][:count]
    if len(before) < count or len(after) < count:
        return False
    rise = mean(after) - mean(before)
    worsening = rise if judged_by_loss else -rise  # a loss gets worse by rising
    return worsening > _noise_of_difference(before, after)


def _noise_of_difference(before: Sequence[float], after: Sequence[float]) -> float:
    """Two standard errors of the difference of two means, over `FEWEST_STEPS` values each."""
    # The larger standard deviation is used for both sides; 1e-9 keeps the noise above 0.
    deviation = max(statistics.stdev(before), statistics.stdev(after), 1e-9)
    return 2 * deviation * (2 / limits.FEWEST_STEPS) ** 0.5


def _last_values_up_to(points: Sequence[tuple[int, float]], step: int) -> list[float]:
    """The last five values of a curve up to `step`, or fewer if there are fewer.

    `points` are pairs (step, value). If the curve begins after `step`, its first five values.
    """
    until_step = [value for at_step, value in points if at_step <= step]
    if until_step:
        return until_step[-limits.FEWEST_STEPS :]
    return [value for _, value in points[: limits.FEWEST_STEPS]]

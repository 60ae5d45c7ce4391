"""Detectors of faults in the reward: scoring fails, is slow, changes, or rewards wrong answers; or
the reward falls."""

import math
import statistics
from collections.abc import Mapping, Sequence

from engine.core.format import whole_percent
from engine.evidence.detect.findings import Finding, edit_lever, lower_rate_lever
from engine.evidence.detect.views import START_STEPS, Facts
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.trends import (
    Trend,
    level_if_lasting,
    mean,
    mean_or_none,
    recent_mean,
    recent_values,
    trend,
)
from engine.evidence.verdict.fresh_scores import rewards_depend_on_past
from engine.records.settings import SAMPLING_ALGORITHMS
from envs.audit import rescore

# Name of a signal that the reward is exploited -> how a finding describes it, in this order.
_SIGNAL_TEXTS = {
    "success_flat": "success did not follow",
    "wrong_paid": "most of that was paid to wrong answers too",
    "longer": "answers grew longer",
    "shorter": "answers grew shorter",
    "alike": "different tasks get the same answer",
    "repeated": "answers repeat themselves",
    "form_only": "only the form is learnt",
    "judge": "the judge is pleased by wrong answers",
    "audit": "the reward audit had failed",
}

_ERROR_CHARS = 300  # of an error's text that are shown as evidence
_TASK_CHARS = 80  # of a task's id that are shown as evidence


def reward_errors(facts: Facts) -> Finding | None:
    """Detect that scoring raised, hung or crashed on too many answers, or ended the run.

    For a run that samples, the last steps are judged (all steps while they are few); for other
    runs, the last held-out answers. Returns None if scoring works.
    """
    error_shares = _scoring_error_shares(facts)
    error_share = mean(error_shares) if error_shares else 0.0
    scoring_ended_run = facts.failure_kind == "reward"
    if not scoring_ended_run and error_share <= limits.HIGH_ERROR_SHARE:
        return None
    evidence: dict[str, object] = {"reward_errors": error_share}
    if scoring_ended_run and facts.failure is not None:
        evidence["error"] = facts.failure.evidence[:_ERROR_CHARS]
    if error_shares:
        sentence = (
            f"Scoring failed on {whole_percent(error_share)} of the answers of the last steps."
        )
    else:  # no step was done: the failed scorings ended the run
        sentence = "Scoring failed on too many answers before a step was done."
    lever = edit_lever("score(): mend it for the answers shown, push again")
    return Finding(
        "reward_errors",
        sentence,
        evidence,
        lever,
        playbook="rewards",
        examples="error",
        is_cause=True,
    )


def _scoring_error_shares(facts: Facts) -> list[float]:
    """The shares of answers whose scoring failed, by step, for the steps that are judged.

    For a run that samples these are the last steps, or all of them while they are few. Other runs
    have one share, that of their last held-out answers; [] if nothing was answered.
    """
    if facts.algorithm in SAMPLING_ALGORITHMS:
        return facts.recent("reward_errors") or facts.series("reward_errors")
    view = facts.last_answers
    return [view.error_share] if view is not None else []


def scorer_moves(facts: Facts) -> Finding | None:
    """Detect that answers get another reward from an env process that has scored nothing before, or
    another reward each time.

    Returns None if no answers were scored again, or if too few rewards differ.
    """
    rescoring = facts.rescoring  # what came of scoring answers again; {} if none were
    if not rewards_depend_on_past(rescoring):
        return _reward_by_chance(facts)
    # If rewards depend on the past there is at least one example.
    example = rescoring["examples"][0]
    evidence = {
        "scored": rescoring["scored"],
        "differing": rescoring["differing"],
        "wavering": rescoring["wavering"],  # got another reward each time
        "task": str(example["task"])[:_TASK_CHARS],
        "reward": example["first"],
        "fresh": example["second"],
    }
    sentence = rescore.sentence(rescoring)
    lever = edit_lever("score(): keep nothing between calls, patch nothing; push, evaluate again")
    return Finding(
        "scorer_moves", f"{sentence}.", evidence, lever, playbook="rewards", is_cause=True
    )


def _reward_by_chance(facts: Facts) -> Finding | None:
    """Detect that the same answer earns another reward each time, in a run that ended no better.

    Returns None if few answers do: a judge may waver, and a run may learn all the same.
    """
    scored, wavering = facts.rescoring.get("scored") or 0, facts.rescoring.get("wavering") or 0
    if not scored or wavering / scored <= limits.TOLERATED_SHARE_WITH_NETWORK:
        return None
    if facts.comparison is None or facts.comparison.outcome.verdict == "better":
        return None
    evidence = {"scored": scored, "wavering": wavering}
    sentence = (
        f"{wavering} of {scored} answers earned another reward when they were scored again, and "
        "another one the next time."
    )
    lever = edit_lever("score(): no chance and no state: the same answer, the same reward; push")
    return Finding("scorer_moves", sentence, evidence, lever, playbook="rewards", is_cause=True)


def slow_reward(facts: Facts) -> Finding | None:
    """Detect that scoring takes more than half of the time of a step.

    Returns None if times were not measured, if scoring takes less, or if it takes less than a
    second.
    """
    score_s = recent_mean(facts.series("reward_s"))
    sample_s = recent_mean(facts.series("sample_s"))
    train_s = recent_mean(facts.series("train_s"))
    if score_s is None or sample_s is None or train_s is None:
        return None
    step_s = score_s + (sample_s + train_s)
    share = score_s / max(1e-9, step_s)  # `step_s` may be 0
    if share <= limits.SLOW_PART_OF_STEP or score_s < limits.SLOW_SECONDS:
        return None
    evidence = {
        "reward_s": score_s,
        "sample_s": sample_s,
        "train_s": train_s,
        "share_of_step": share,
    }
    sentence = f"Scoring takes {score_s:.1f} s of each step, {whole_percent(share)} of its time."
    lever = edit_lever("score(): cache, batch, no network, no new process per answer")
    return Finding("slow_reward", sentence, evidence, lever, playbook="failures")


def judge_pleasing(facts: Facts) -> Finding | None:
    """Detect that a judge (a model that scores) rates many answers highly that fail the hard check.

    Returns None if few answers are of this kind, if training reduces their share, or if answers
    have no judge or no hard check.
    """
    shares = facts.view_values("judge_gap")
    if facts.algorithm == "grpo":  # no finding while training reduces the share
        pleased_share = level_if_lasting(shares, limits.HIGH_JUDGE_GAP)
    else:
        pleased_share = mean_or_none(shares)
    if pleased_share is None or pleased_share <= limits.HIGH_JUDGE_GAP:
        return None
    evidence = {
        "pleased_and_wrong": pleased_share,
        "pleased_and_wrong_start": mean(shares[:START_STEPS]),
        "alike_share": mean_or_none(facts.recent_view_values("alike_share")),
        "solved": mean_or_none(facts.recent_view_values("solved_share")),
    }
    sentence = (
        f"In {whole_percent(pleased_share)} of the answers the judge is pleased and the hard "
        "check fails."
    )
    lever = edit_lever("score(): multiply the judge's part by the hard check instead of adding it")
    return Finding(
        "judge_pleasing",
        sentence,
        evidence,
        lever,
        playbook="rewards",
        examples="best",
        where="success == False",
    )


def plateau(facts: Facts) -> Finding | None:
    """Detect that most answers earn one partial reward, or all answers of most groups do, and none
    is right.

    Such a reward is a plateau: it pays for unfinished answers, and groups are uniform, so that
    nothing leads further. Returns None while the answers of a group differ, if some answers are
    right, or if success is not reported.
    """
    effective_share = recent_mean(facts.series("groups_effective"))
    solved_share = recent_mean(facts.view_values("solved_share"))
    plateau_share = recent_mean(facts.view_values("usual_share"))
    if effective_share is None or solved_share is None or plateau_share is None:
        return None
    if effective_share >= limits.LOW_EFFECTIVE_SHARE or solved_share > limits.HARDLY_SOLVED_SHARE:
        return None
    # The median, but a reward that answers do earn: of two in the middle, the lower one.
    level = statistics.median_low(recent_values(facts.view_values("usual_reward")))
    if plateau_share >= limits.HIGH_PLATEAU_SHARE and level > 0:
        return _plateau_finding(facts, level, plateau_share, solved_share)
    flat_share = recent_mean(facts.series("groups_flat_partial"))
    if flat_share is not None and flat_share >= limits.HIGH_PLATEAU_SHARE:
        return _plateau_finding(facts, None, flat_share, solved_share)
    return None


def _plateau_finding(
    facts: Facts, level: float | None, plateau_share: float, solved_share: float
) -> Finding:
    """The finding that answers earn a partial reward and stay there.

    `level` is that reward, which the share `plateau_share` of the answers earn. If `level` is None,
    each group has its own partial reward, and `plateau_share` is the share of such groups.
    """
    evidence = {
        "plateau_reward": level,
        "share_on_it": plateau_share,
        "groups_flat_partial": recent_mean(facts.series("groups_flat_partial")),
        "solved": solved_share,
        "reward_start": mean_or_none(facts.series("reward_mean")[:START_STEPS]),
        "reward_mean": recent_mean(facts.series("reward_mean")),
        "groups_effective": recent_mean(facts.series("groups_effective")),
    }
    share_text = whole_percent(plateau_share)
    if level is None:
        observation = f"In {share_text} of the groups of the last steps all earn the same part"
        lower_pay, row_filter = "less", "success == False and reward > 0"
    else:
        observation = f"{share_text} of the answers of the last steps earn exactly {level:.3g}"
        lower_pay = f"less than {level:.3g}"
        row_filter = f"success == False and reward == {level!r}"
    sentence = (
        f"{observation} and {whole_percent(solved_share)} are right: the reward is a plateau that "
        "pays for not finishing."
    )
    lever = edit_lever(
        f"score(): pay {lower_pay} for what the answers shown do, and a step more for each thing "
        'that is still missing; or show whole answers by SFT first (algorithm="sft")'
    )
    return Finding(
        "plateau",
        sentence,
        evidence,
        lever,
        playbook="rewards",
        examples="best",
        where=row_filter,
    )


def reward_hacking(facts: Facts) -> Finding | None:
    """Detect a reward that rises without the success it stands for, while the answers change oddly.

    There are two kinds of signals. Returns None if together they are not enough evidence.
        reward signals: success does not follow the reward, or wrong answers earn more and more.
        other signals: oddities of the answers, such as the same answer to different tasks.
    """
    reward_trend = trend(facts.series("reward_mean"))
    if reward_trend is None or not reward_trend.rose:
        return None
    success_follows = _success_follows(facts, reward_trend)
    reward_signals = _reward_signals(facts, reward_trend, success_follows=success_follows)
    other_signals = _other_signals(facts, success_known=success_follows is not None)
    if reward_signals and success_follows:
        other_signals.pop("form_only", None)  # the form was learnt together with the answers
    if not _is_enough_evidence(reward_signals, other_signals):
        return None
    where = "success == False" if reward_signals else ""  # without these, success may be unknown
    return _hacking_finding(facts, reward_trend, other_signals | reward_signals, where)


def _hacking_finding(
    facts: Facts, reward_trend: Trend, signals: Mapping[str, float], where: str
) -> Finding:
    """The finding that a reward is exploited.

    `signals` maps the name of a signal to the number that shows it; `where` filters the example
    rollouts.
    """
    changes = ", ".join(text for name, text in _SIGNAL_TEXTS.items() if name in signals)
    sentence = (
        f"The reward rose from {reward_trend.first:.2g} to {reward_trend.last:.2g}, but {changes}."
    )
    lever = edit_lever(
        "score(): stop paying what the best answers share; push, train from the start"
    )
    return Finding(
        "reward_hacking",
        sentence,
        _hacking_evidence(facts, reward_trend, signals),
        lever,
        playbook="rewards",
        examples="best",
        where=where,
    )


def _hacking_evidence(
    facts: Facts, reward_trend: Trend, signals: Mapping[str, float]
) -> dict[str, object]:
    """The numbers, by name, that show an exploited reward.

    `reward_trend` has the mean reward at the start and at the end; `signals` maps the name of a
    signal to the number that shows it.
    """
    solved_shares = facts.view_values("solved_share")
    return {
        "reward_start": reward_trend.first,
        "reward": reward_trend.last,
        "solved_start": mean_or_none(solved_shares[: limits.RECENT_STEPS]),
        "solved": mean_or_none(solved_shares[-limits.RECENT_STEPS :]),
        "signals": sorted(signals),
        # "success_flat" is left out: its number stands under `solved` already.
        **{f"signal_{name}": value for name, value in signals.items() if name != "success_flat"},
    }


def _is_enough_evidence(
    reward_signals: Mapping[str, float], other_signals: Mapping[str, float]
) -> bool:
    """Whether these signals are enough evidence that a reward is exploited."""
    if reward_signals:
        # All reward signals together count as one; there must be another kind of signal too.
        return 1 + len(other_signals) >= limits.FEWEST_HACKING_SIGNALS
    # Success is not reported, or rises with the reward, which may come from the same exploit. Only
    # one pattern is proof then: answers that grow longer and are the same for different tasks.
    # More of them must be alike here than for the signal "alike" itself.
    same_for_all_tasks = other_signals.get("alike", 0.0) >= limits.HIGHER_ALIKE_SHARE
    return "longer" in other_signals and same_for_all_tasks


def _reward_signals(
    facts: Facts, reward_trend: Trend, *, success_follows: bool | None
) -> dict[str, float]:
    """The signals of an exploit in the reward: name of the signal -> the number that shows it.

    `success_follows` says whether success rose with the reward. If it is None (not known), there
    are no signals.
    """
    if success_follows is None:
        return {}
    signals: dict[str, float] = {}
    wrong_pay = _pay_of_wrong_answers(facts, reward_trend)
    if wrong_pay is not None:
        signals["wrong_paid"] = wrong_pay
    if not success_follows:
        signals["success_flat"] = mean(facts.view_values("solved_share")[-limits.RECENT_STEPS :])
    return signals


def _success_follows(facts: Facts, reward_trend: Trend) -> bool | None:
    """Whether the share of right answers rose together with the reward.

    Also True if nearly all answers were right from the start. Returns None if the environment
    reports no success, or if the run is too short.
    """
    success_trend = trend(facts.view_values("solved_share"))
    if success_trend is None:
        return None
    if success_trend.first >= limits.NEARLY_ALL_SOLVED_SHARE:
        return True
    largest_reward = max(1.0, *(abs(value) for value in facts.series("reward_mean")))
    # In parts of the largest reward, the reward's rise can be compared with the rise of a share.
    part_of_reward_rise = limits.PART_OF_REWARD_RISE * reward_trend.change / largest_reward
    return success_trend.change >= max(limits.SMALL_SUCCESS_CHANGE, part_of_reward_rise)


def _pay_of_wrong_answers(facts: Facts, reward_trend: Trend) -> float | None:
    """The reward that wrong answers now earn, if most of the reward's rise was not earned.

    Returns None in these cases:
        a trend is missing;
        wrong answers earn no more than before, or right ones earn nothing;
        wrong answers earn little compared with right ones;
        the unearned part of the rise is small.
    """
    wrong_trend = trend(facts.view_values("wrong_reward"))
    right_trend = trend(facts.view_values("right_reward"))
    solved_trend = trend(facts.view_values("solved_share"))
    if wrong_trend is None or right_trend is None or solved_trend is None:
        return None
    if not wrong_trend.rose or right_trend.last <= 0:
        return None
    if wrong_trend.last < limits.WRONG_REWARD_PART * right_trend.last:
        return None
    # A rise of the mean reward is earned to the extent that more answers are right. The rest comes
    # from higher pay for right and for wrong answers, weighted by their shares of the answers.
    unearned_rise = (
        solved_trend.last * right_trend.change + (1 - solved_trend.last) * wrong_trend.change
    )
    if unearned_rise < limits.UNEARNED_PART * reward_trend.change:
        return None
    return wrong_trend.last


def _other_signals(facts: Facts, *, success_known: bool) -> dict[str, float]:
    """The signals of an exploit that are not in the reward: name -> the number that shows it.

    They are oddities of the answers, and "audit" if the reward audit had failed. `success_known`
    says whether the environment reports success.
    """
    signals = {**_length_signal(facts), **_alike_signal(facts), **_repeated_signal(facts)}
    if success_known:  # else answers may have become right together with their form
        signals |= _form_signal(facts)
    signals |= _judge_signal(facts)
    if facts.settings.accept_reward_risk:  # set only if the audit failed and the user accepted that
        signals["audit"] = 1.0
    return signals


def _length_signal(facts: Facts) -> dict[str, float]:
    """A signal that the reward is exploited: answers became much longer or shorter.

    The result maps the name of the signal to the factor by which their mean length changed. Returns
    {} without the signal.
    """
    growth = _growth_factor(trend(facts.view_values("mean_tokens")))
    if growth >= limits.LONGER_FACTOR:
        return {"longer": growth}
    if growth <= limits.SHORTER_FACTOR:
        return {"shorter": growth}
    return {}


def _alike_signal(facts: Facts) -> dict[str, float]:
    """A signal that the reward is exploited: answers to different tasks became alike.

    The result maps the name of the signal to the share of answers that are like the answer to
    another task. Returns {} without the signal.
    """
    alike_trend = trend(facts.view_values("alike_share"))
    if (
        alike_trend
        and alike_trend.last >= limits.HIGH_ALIKE_SHARE
        and alike_trend.change >= limits.ALIKE_RISE
    ):
        return {"alike": alike_trend.last}
    return {}


def _repeated_signal(facts: Facts) -> dict[str, float]:
    """A signal that the reward is exploited: answers repeat far more of themselves than at first.

    The result maps the name of the signal to the share of repeated phrases now. Returns {} without
    the signal.
    """
    repeated_trend = trend(facts.view_values("repeated_share"))
    if repeated_trend is None:
        return {}
    much_repeated = max(limits.HIGH_REPEATED_SHARE, limits.REPEATED_GROWTH * repeated_trend.first)
    return {"repeated": repeated_trend.last} if repeated_trend.last >= much_repeated else {}


def _form_signal(facts: Facts) -> dict[str, float]:
    """A signal that the reward is exploited: the score for form rose to nearly full.

    The result maps the name of the signal to that score. Returns {} without the signal.
    """
    form_trend = trend(facts.view_values("form_score"))
    if (
        form_trend
        and form_trend.change >= limits.FORM_RISE
        and form_trend.last >= limits.FULL_FORM_SCORE
    ):
        return {"form_only": form_trend.last}
    return {}


def _judge_signal(facts: Facts) -> dict[str, float]:
    """A signal that the reward is exploited: a judge rates more and more wrong answers highly.

    The result maps the name of the signal to the share of such answers at the end. Returns {}
    without the signal.
    """
    gap_trend = trend(facts.view_values("judge_gap"))
    if gap_trend and gap_trend.last > limits.HIGH_JUDGE_GAP and gap_trend.rose:
        return {"judge": gap_trend.last}
    return {}


def _growth_factor(change: Trend | None) -> float:
    """The factor by which a series grew, such as 1.5. Returns 1 without a trend, or if the series
    began at 0."""
    if change is None or change.first <= 0:
        return 1.0
    return change.last / change.first


def reward_falls(facts: Facts) -> Finding | None:
    """Detect that the reward of the training answers is clearly below that of the first steps.

    Returns None if a held-out evaluation has measured the run since: `below_start` reports its
    falls, and a lower training reward alone is no loss.
    """
    rewards, spreads = facts.series("reward_mean"), facts.series("reward_std")
    first_steps, last_steps = limits.FALL_FIRST_STEPS, limits.FALL_LAST_STEPS
    if facts.against_start is not None or len(rewards) < first_steps + last_steps:
        return None
    before, after = mean(rewards[:first_steps]), mean(rewards[-last_steps:])
    lost = before - after
    if before <= 0 or lost < limits.LOST_REWARD_PART * before:
        return None
    if lost < limits.FALL_Z * _error_of_fall(facts, spreads):
        return None
    return _reward_fall_finding(facts, before, after)


def _error_of_fall(facts: Facts, spreads: Sequence[float]) -> float:
    """The standard error of the difference between the mean reward of the first steps and that of
    the last ones.

    `spreads` has the standard deviation of the reward of each step.
    """
    # Answers to one task are similar, so only two of each group count as independent.
    answers_per_step = 2 * (facts.settings.prompts_per_step or 1)
    spread_before = mean(spreads[: limits.FALL_FIRST_STEPS])
    spread_after = mean(spreads[-limits.FALL_LAST_STEPS :])
    return math.sqrt(
        spread_before**2 / (limits.FALL_FIRST_STEPS * answers_per_step)
        + spread_after**2 / (limits.FALL_LAST_STEPS * answers_per_step)
    )


def _reward_fall_finding(facts: Facts, before: float, after: float) -> Finding:
    """The finding that the mean reward fell from `before` (first steps) to `after` (last steps).

    The cost of the finding is the difference.
    """
    evidence = {
        "reward_start": before,
        "reward": after,
        "lost_part": (before - after) / before,
        "learning_rate": facts.settings.learning_rate,
    }
    sentence = (
        f"The reward fell from {before:.2g} in the first steps to {after:.2g} in the last "
        f"{limits.FALL_LAST_STEPS}."
    )
    reason = "from the start again: this run forgot it"
    lever = lower_rate_lever(facts.settings.learning_rate, divisor=3, why=reason)
    cost = before - after
    return Finding("reward_falls", sentence, evidence, lever, playbook="failures", cost=cost)

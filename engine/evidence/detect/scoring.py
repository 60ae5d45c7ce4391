"""Detectors of faults in the reward: scoring fails, is slow, changes, or rewards wrong answers."""

from engine.evidence.detect.findings import Finding, edit_lever
from engine.evidence.detect.views import AT_START, Facts, Trend, mean, mean_or_none, stuck_at, trend
from engine.evidence.stats import thresholds as limits
from engine.evidence.verdict.fresh_scores import rewards_depend_on_past
from envs.audit import rescore

# Name of a sign of an exploit -> how a finding describes it, in this order.
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


def reward_errors(facts: Facts) -> Finding | None:
    """Detect that scoring raised, hung or crashed on too many answers, or ended the run.

    For GRPO the last steps count, or all steps while they are few. For other runs the last exam or
    evaluation counts. None where scoring works.
    """
    if facts.algorithm == "grpo":
        error_shares = facts.recent("reward_errors") or facts.series("reward_errors")
    else:
        view = facts.exam or (facts.views[-1] if facts.views else None)
        error_shares = [view.errors] if view is not None else []
    error_share = mean(error_shares) if error_shares else 0.0
    if facts.failed != "reward" and error_share <= limits.REWARD_ERRORS:
        return None
    evidence: dict[str, object] = {"reward_errors": error_share}
    if facts.failed == "reward":
        evidence["error"] = (facts.failure.evidence if facts.failure else "")[:300]
    what = f"Scoring failed on {error_share:.0%} of the answers of the last steps."
    if facts.failed == "reward" and not error_shares:
        what = "Scoring failed on too many answers before a step was done."
    lever = edit_lever("score(): mend it for the answers shown, push again")
    return Finding(
        "reward_errors", what, evidence, lever, playbook="rewards", pick="error", root=True
    )


def scorer_moves(facts: Facts) -> Finding | None:
    """Detect that answers get another reward from an env process that has scored nothing before.

    None where no answers were scored again, or where too few rewards differ.
    """
    if not rewards_depend_on_past(facts.rescored):
        return None
    names = ("scored", "differing", "wavering")
    evidence: dict[str, object] = {name: facts.rescored[name] for name in names}
    # Where rewards depend on the past, there is an example.
    example = facts.rescored["examples"][0]
    evidence |= {
        "task": str(example["task"])[:80],
        "reward": example["first"],
        "fresh": example["second"],
    }
    what = rescore.sentence(facts.rescored)
    lever = edit_lever("score(): keep nothing between calls, patch nothing; push, evaluate again")
    return Finding("scorer_moves", f"{what}.", evidence, lever, playbook="rewards", root=True)


def slow_reward(facts: Facts) -> Finding | None:
    """Detect that scoring takes longer than sampling and training together.

    None where it does not, where it takes no noticeable time, or where times were not measured.
    """
    score_seconds, sample_seconds, train_seconds = (
        facts.recent(name) for name in ("reward_s", "sample_s", "train_s")
    )
    if not score_seconds or not sample_seconds or not train_seconds:
        return None
    score_time, other_time = mean(score_seconds), mean(sample_seconds) + mean(train_seconds)
    share = score_time / max(1e-9, score_time + other_time)
    if share <= limits.SLOW_SHARE or score_time < limits.SLOW_SECONDS:
        return None
    evidence = {
        "reward_s": score_time,
        "sample_s": mean(sample_seconds),
        "train_s": mean(train_seconds),
        "share_of_step": share,
    }
    what = f"Scoring takes {score_time:.1f} s of each step, {share:.0%} of its time."
    lever = edit_lever("score(): cache, batch, no network, no new process per answer")
    return Finding("slow_reward", what, evidence, lever, playbook="failures")


def judge_pleasing(facts: Facts) -> Finding | None:
    """Detect that a judge rates many answers highly that fail the hard check.

    For GRPO the share of such answers counts at which training is stuck; for an evaluation its
    mean. None where it is low or not measured.
    """
    shares = facts.of_views("judge_gap")
    if facts.algorithm == "grpo":
        pleased_share = stuck_at(shares, limits.JUDGE_GAP)
    else:
        pleased_share = mean(shares) if shares else None
    if pleased_share is None or pleased_share <= limits.JUDGE_GAP:
        return None
    evidence = {
        "pleased_and_wrong": pleased_share,
        "pleased_and_wrong_start": mean(shares[:AT_START]),
        "alike_share": mean_or_none(facts.recent_views("alike")),
        "solved": mean_or_none(facts.recent_views("solved")),
    }
    what = f"In {pleased_share:.0%} of the answers the judge is pleased and the hard check fails."
    lever = edit_lever("score(): multiply the judge's part by the hard check instead of adding it")
    return Finding(
        "judge_pleasing",
        what,
        evidence,
        lever,
        playbook="rewards",
        pick="best",
        where="success == False",
    )


def reward_hacking(facts: Facts) -> Finding | None:
    """Detect a reward that rises without the success it stands for, while the answers change oddly.

    Two kinds of evidence are needed, and None is returned without both:
        the reward: success does not follow it, or wrong answers come to be paid.
        the answers: a sign of an exploit, such as the same answer to different tasks.

    Where success is not reported, or rises too without wrong answers being paid, the only proof is
    that answers grow longer and become alike across tasks.
    """
    reward_trend = trend(facts.series("reward_mean"))
    if reward_trend is None or not reward_trend.rose:
        return None
    solved_shares = facts.of_views("solved")
    success_follows = _success_follows(facts, solved_shares, reward_trend)
    signals = _signs_of_exploit(facts, success_known=success_follows is not None)
    pay_of_wrong = (
        _pay_of_wrong_answers(facts, reward_trend) if success_follows is not None else None
    )
    if pay_of_wrong is not None:
        signals["wrong_paid"] = pay_of_wrong
    if success_follows is False:
        signals["success_flat"] = mean(solved_shares[-limits.WINDOW :])
    elif pay_of_wrong is not None:
        signals.pop("form_only", None)  # the form was learnt together with the answers
    elif "longer" not in signals or signals.get("alike", 0.0) < limits.ALIKE_THOUGH_SOLVED:
        # Success that rises with the reward may come from the same exploit. Then only one pattern
        # is proof enough: answers that grow longer and are the same for different tasks.
        return None
    # Flat success and paid wrong answers are one signal together; the answers must show another.
    answer_signals = signals.keys() - {"success_flat", "wrong_paid"}
    if 1 + len(answer_signals) < limits.HACKING_SIGNALS:
        return None
    evidence = {
        "reward_start": reward_trend.first,
        "reward": reward_trend.last,
        "solved_start": mean_or_none(solved_shares[: limits.WINDOW]),
        "solved": mean_or_none(solved_shares[-limits.WINDOW :]),
        "signals": sorted(signals),
        **{f"signal_{name}": value for name, value in signals.items() if name != "success_flat"},
    }
    changes = ", ".join(text for name, text in _SIGNAL_TEXTS.items() if name in signals)
    what = (
        f"The reward rose from {reward_trend.first:.2g} to {reward_trend.last:.2g}, but {changes}."
    )
    lever = edit_lever(
        "score(): stop paying what the best answers share; push, train from the start"
    )
    where = "success == False" if success_follows is False or pay_of_wrong is not None else ""
    return Finding(
        "reward_hacking", what, evidence, lever, playbook="rewards", pick="best", where=where
    )


def _success_follows(facts: Facts, solved_shares: list[float], reward_trend: Trend) -> bool | None:
    """Whether the share of right answers rose together with the reward.

    True where nearly all answers were right from the start. None where the environment reports no
    success, or where the series is too short.
    """
    success_trend = trend(solved_shares)
    if success_trend is None:
        return None
    if success_trend.first >= limits.SOLVED_ALWAYS:
        return True
    top_reward = max(1.0, *(abs(value) for value in facts.series("reward_mean")))
    return success_trend.change >= max(
        limits.SUCCESS_FOLLOWS, limits.FOLLOWS_PART * reward_trend.change / top_reward
    )


def _pay_of_wrong_answers(facts: Facts, reward_trend: Trend) -> float | None:
    """The reward that wrong answers now earn, if most of the reward's rise was not earned.

    A rise of the mean reward has two parts. One is earned: (rise of success) x (extra pay of a
    right answer). The other is not: the change of what right and wrong answers are paid.

    None where the unearned part is small, where wrong answers earn little or no more than before,
    or where a trend is missing.
    """
    wrong_trend = trend(facts.of_views("wrong_reward"))
    right_trend = trend(facts.of_views("right_reward"))
    if wrong_trend is None or right_trend is None or not wrong_trend.rose or right_trend.last <= 0:
        return None
    solved_trend = trend(facts.of_views("solved"))
    if solved_trend is None:
        return None
    unearned_rise = (
        solved_trend.last * right_trend.change + (1 - solved_trend.last) * wrong_trend.change
    )
    if (
        wrong_trend.last < limits.WRONG_PAYS * right_trend.last
        or unearned_rise < limits.UNEARNED * reward_trend.change
    ):
        return None
    return wrong_trend.last


def _signs_of_exploit(facts: Facts, *, success_known: bool) -> dict[str, float]:
    """The signs of an exploit in the answers: name of the sign -> the number that shows it.

    `success_known=False` means that the environment reports no success; then a rising form metric
    alone is no sign.
    """
    signals: dict[str, float] = {}
    growth = _growth(trend(facts.of_views("length")))
    if growth >= limits.LENGTH_UP:
        signals["longer"] = growth
    elif growth <= limits.LENGTH_DOWN:
        signals["shorter"] = growth
    alike_trend = trend(facts.of_views("alike"))
    if (
        alike_trend is not None
        and alike_trend.last >= limits.ALIKE
        and alike_trend.change >= limits.ALIKE_RISE
    ):
        signals["alike"] = alike_trend.last
    repeated_trend = trend(facts.of_views("repeated"))
    if repeated_trend is not None and repeated_trend.last >= max(
        limits.REPEATED, limits.REPEATED_TIMES * repeated_trend.first
    ):
        signals["repeated"] = repeated_trend.last
    form_trend = trend(facts.of_views("form"))
    if (
        success_known
        and form_trend is not None
        and form_trend.change >= limits.FORM_RISE
        and form_trend.last >= limits.FORM_FULL
    ):
        signals["form_only"] = form_trend.last
    judge_trend = trend(facts.of_views("judge_gap"))
    if judge_trend is not None and judge_trend.last > limits.JUDGE_GAP and judge_trend.rose:
        signals["judge"] = judge_trend.last
    if facts.settings.accept_reward_risk:
        signals["audit"] = 1.0
    return signals


def _growth(change: Trend | None) -> float:
    """By which factor a series grew over its trend, such as 1.5; 1 without one or from 0 on."""
    return 1.0 if change is None or change.first <= 0 else change.last / change.first

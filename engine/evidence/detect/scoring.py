"""Detectors of the reward itself: it fails, it waits, it is pleased, it is exploited."""

from engine.evidence.detect.findings import Finding, edit_lever
from engine.evidence.detect.views import Facts, Trend, mean, mean_or_none, stuck_at, trend
from engine.evidence.stats import thresholds as limits
from engine.evidence.verdict.fresh_scores import moved
from envs.audit import rescore


def reward_errors(facts: Facts) -> Finding | None:
    """Scoring that raises, hangs or crashes."""
    if facts.algorithm == "grpo":
        recent = facts.recent("reward_errors") or facts.series("reward_errors")
    else:
        view = facts.exam or (facts.views[-1] if facts.views else None)
        recent = [view.errors] if view is not None else []
    level = mean(recent) if recent else 0.0
    if facts.failed != "reward" and level <= limits.REWARD_ERRORS:
        return None
    evidence: dict[str, object] = {"reward_errors": level}
    if facts.failed == "reward":
        evidence["error"] = (facts.failure.evidence if facts.failure else "")[:300]
    what = f"Scoring failed on {level:.0%} of the answers of the last steps."
    if facts.failed == "reward" and not recent:
        what = "Scoring failed on too many answers before a step was done."
    lever = edit_lever("score(): mend it for the answers shown, push again")
    return Finding("reward_errors", what, evidence, lever, "rewards", "error", root=True)


def scorer_moves(facts: Facts) -> Finding | None:
    """The same answer earns another reward where the env process has scored nothing before."""
    if not moved(facts.rescored):
        return None
    names = ("scored", "differing", "wavering")
    evidence: dict[str, object] = {name: facts.rescored[name] for name in names}
    one = facts.rescored["examples"][0]
    evidence |= {"task": str(one["task"])[:80], "reward": one["first"], "fresh": one["second"]}
    what = rescore.sentence(facts.rescored)
    lever = edit_lever("score(): keep nothing between calls, patch nothing; push, evaluate again")
    return Finding("scorer_moves", f"{what}.", evidence, lever, "rewards", root=True)


def slow_reward(facts: Facts) -> Finding | None:
    """More time goes into scoring than into sampling and training."""
    waits, samples, trains = (facts.recent(name) for name in ("reward_s", "sample_s", "train_s"))
    if not waits or not samples or not trains:
        return None
    wait, rest = mean(waits), mean(samples) + mean(trains)
    share = wait / max(1e-9, wait + rest)
    if share <= limits.SLOW_SHARE or wait < limits.SLOW_SECONDS:
        return None
    evidence = {
        "reward_s": wait,
        "sample_s": mean(samples),
        "train_s": mean(trains),
        "share_of_step": share,
    }
    what = f"Scoring takes {wait:.1f} s of each step, {share:.0%} of its time."
    lever = edit_lever("score(): cache, batch, no network, no new process per answer")
    return Finding("slow_reward", what, evidence, lever, "failures")


def judge_pleasing(facts: Facts) -> Finding | None:
    """A judge is pleased where the hard check fails."""
    values = facts.of_views("judge_gap")
    level = mean(values) if facts.algorithm == "evaluate" and values else None
    level = stuck_at(values, limits.JUDGE_GAP) if facts.algorithm == "grpo" else level
    if level is None or level <= limits.JUDGE_GAP:
        return None
    evidence = {
        "pleased_and_wrong": level,
        "pleased_and_wrong_start": mean(values[:3]),
        "alike_share": mean_or_none(facts.recent_views("alike")),
        "solved": mean_or_none(facts.recent_views("solved")),
    }
    what = f"In {level:.0%} of the answers the judge is pleased and the hard check fails."
    lever = edit_lever("score(): multiply the judge's part by the hard check instead of adding it")
    return Finding("judge_pleasing", what, evidence, lever, "rewards", "best", "success == False")


def reward_hacking(facts: Facts) -> Finding | None:
    """The reward rises, what it stands for does not, and the answers change in telling ways."""
    paid = trend(facts.series("reward_mean"))
    if paid is None or not paid.rose:
        return None
    solved = facts.of_views("solved")
    follows = _follows(facts, solved, paid)
    signals = _signals(facts, success_known=follows is not None)
    wrong = _wrong_paid(facts, paid) if follows is not None else None
    if wrong is not None:
        signals["wrong_paid"] = wrong
    if follows is False:
        signals["success_flat"] = mean(solved[-limits.WINDOW :])
    elif wrong is not None:
        signals.pop("form_only", None)  # a form that is learnt together with the answers
    elif "longer" not in signals or signals.get("alike", 0.0) < limits.ALIKE_THOUGH_SOLVED:
        # Success that rises with the reward may come from the same hole; then only answers that
        # grow longer and say the same everywhere tell.
        return None
    # What is paid for and what does not follow are one signal: the answers must show another.
    told_by_answers = signals.keys() - {"success_flat", "wrong_paid"}
    if 1 + len(told_by_answers) < limits.HACKING_SIGNALS:
        return None
    evidence = {
        "reward_start": paid.first,
        "reward": paid.last,
        "solved_start": mean_or_none(solved[: limits.WINDOW]),
        "solved": mean_or_none(solved[-limits.WINDOW :]),
        "signals": sorted(signals),
        **{f"signal_{name}": value for name, value in signals.items() if name != "success_flat"},
    }
    told = {
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
    changes = ", ".join(told[name] for name in told if name in signals)
    what = f"The reward rose from {paid.first:.2g} to {paid.last:.2g}, but {changes}."
    lever = edit_lever(
        "score(): stop paying what the best answers share; push, train from the start"
    )
    where = "success == False" if follows is False or wrong is not None else ""
    return Finding("reward_hacking", what, evidence, lever, "rewards", "best", where)


def _follows(facts: Facts, solved: list[float], paid: Trend) -> bool | None:
    """Whether right answers became more with the reward; None where nobody says what is right."""
    change = trend(solved)
    if change is None:
        return None
    if change.first >= limits.SOLVED_ALWAYS:
        return True
    top = max(1.0, *(abs(value) for value in facts.series("reward_mean")))
    return change.change >= max(limits.SUCCESS_FOLLOWS, limits.FOLLOWS_PART * paid.change / top)


def _wrong_paid(facts: Facts, paid: Trend) -> float | None:
    """What wrong answers earn by now, where most of the reward's rise is not for becoming right.

    A rise is (the rise of success) x (what a right answer earned more) and, whatever is left, a
    rise of the pay of right and of wrong answers alike: that part is unearned. None elsewhere.
    """
    wrong, right = trend(facts.of_views("wrong_reward")), trend(facts.of_views("right_reward"))
    if wrong is None or right is None or not wrong.rose or right.last <= 0:
        return None
    solved = trend(facts.of_views("solved"))
    if solved is None:
        return None
    unearned = solved.last * right.change + (1 - solved.last) * wrong.change
    if wrong.last < limits.WRONG_PAYS * right.last or unearned < limits.UNEARNED * paid.change:
        return None
    return wrong.last


def _signals(facts: Facts, *, success_known: bool) -> dict[str, float]:
    """What changed in the answers, by name, with the number that shows it."""
    gains: dict[str, float] = {}
    length = _ratio(trend(facts.of_views("length")))
    if length >= limits.LENGTH_UP:
        gains["longer"] = length
    elif length <= limits.LENGTH_DOWN:
        gains["shorter"] = length
    alike = trend(facts.of_views("alike"))
    if alike is not None and alike.last >= limits.ALIKE and alike.change >= limits.ALIKE_RISE:
        gains["alike"] = alike.last
    again = trend(facts.of_views("repeated"))
    if again is not None and again.last >= max(
        limits.REPEATED, limits.REPEATED_TIMES * again.first
    ):
        gains["repeated"] = again.last
    form = trend(facts.of_views("form"))
    if (
        success_known
        and form is not None
        and form.change >= limits.FORM_RISE
        and form.last >= limits.FORM_FULL
    ):
        gains["form_only"] = form.last
    gap = trend(facts.of_views("judge_gap"))
    if gap is not None and gap.last > limits.JUDGE_GAP and gap.rose:
        gains["judge"] = gap.last
    if facts.settings.get("accept_reward_risk"):
        gains["audit"] = 1.0
    return gains


def _ratio(change: Trend | None) -> float:
    return 1.0 if change is None or change.first <= 0 else change.last / change.first

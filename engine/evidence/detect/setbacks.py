"""Detectors of what a run lost: what it was at its start, and what it could do before."""

from collections.abc import Sequence

from engine.evidence.detect.findings import Finding, Lever, edit_lever, setting_lever
from engine.evidence.detect.groups import rounded_part
from engine.evidence.detect.views import Facts, StartComparison, mean, mean_or_none, window
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.inference import ALPHA
from engine.evidence.verdict.regression import Battery, sentence_of


def below_start(facts: Facts) -> Finding | None:
    """The last exam is worse than step 0 on the same tasks, whatever checkpoint was best."""
    exam = facts.against_start
    if exam is None:
        return None
    outcome, p = exam.comparison.outcome, exam.comparison.p
    if outcome.verdict != "worse" or p is None or p * exam.evaluations >= ALPHA:
        return None  # a run that only wavers has a chance at every exam
    rate = exam.measure == "success"
    before, after = _level(exam.before, rate), _level(exam.after, rate)
    low, high = (_level(end, rate, sign=True) for end in exam.comparison.interval)
    reason, lever = _why(facts, exam)
    fell = "rose" if exam.measure == "loss" else "fell"
    what = (
        f"Held-out {exam.measure} {fell} from {before} at step 0 to {after} at step {exam.step}, "
        f"on the same {outcome.n} tasks (95 % interval of the change {low} to {high})"
    )
    evidence = {
        "before": exam.before,
        "after": exam.after,
        "difference": exam.comparison.difference,
        "interval": exam.comparison.interval,
        "n": outcome.n,
        "p": p,
        "step": exam.step,
        "reward_before": exam.reward_before,
        "reward_after": exam.reward_after,
        "truncated_share": mean_or_none(window(facts.of_views("cut"))),
        "reward_when_cut": mean_or_none(window(facts.of_views("cut_reward"))),
        "learning_rate": facts.settings.get("learning_rate"),
    }
    pick = "best" if facts.algorithm == "grpo" else "changed"
    section = "rewards" if not lever.setting else "failures"
    return Finding("below_start", f"{what}{reason}.", evidence, lever, section, pick)


def _why(facts: Facts, exam: StartComparison) -> tuple[str, Lever]:
    """What the fall is put down to: a reward that is content with it, else steps too large."""
    before, after = exam.reward_before, exam.reward_after
    if facts.algorithm == "grpo" and exam.measure == "success":
        if before is not None and after is not None and _reward_held(exam, before, after):
            return f", while the reward went from {before:.2g} to {after:.2g}", edit_lever(_PAY)
        if cut_is_paid(facts, at_start=before):
            paid = mean(window(facts.of_views("cut_reward")))
            return f"; answers that are cut earn {paid:.2g}, as much as the mean", edit_lever(
                _CUT_PAY
            )
    rate = facts.settings.get("learning_rate")
    to = rounded_part(rate, 3)
    return "", setting_lever("learning_rate", rate, to, "from the start again: this run forgot it")


def _reward_held(exam: StartComparison, before: float, after: float) -> bool:
    """Whether the reward fell by much less than success did: a reward that is success falls with
    it, by however little that is."""
    top, fell = max(1.0, abs(before), abs(after)), (exam.before or 0.0) - (exam.after or 0.0)
    return before - after < min(limits.SUCCESS_FOLLOWS, limits.HELD_PART * fell) * top


_PAY = "score(): it pays what is no success; see the best answers, push, train from the start"
_CUT_PAY = (
    "score(): pay nothing for length or for an answer that is cut; push, train from the start"
)


def cut_is_paid(facts: Facts, *, at_start: float | None = None) -> bool:
    """Whether an answer that is cut earns about what the others do, and not next to nothing, nor
    because it was right before it was cut: where nobody says what is right, nobody can tell."""
    solved = window(facts.of_views("cut_solved"))
    if not solved or mean(solved) > limits.SOLVED_NEVER:
        return False
    cut, pay = window(facts.of_views("cut")), window(facts.of_views("cut_reward"))
    reward = window(facts.of_views("reward"))
    if not cut or not pay or not reward or mean(cut) <= limits.TRUNCATED:
        return False
    floor = max(0.0, limits.CUT_PAYS_SOMETHING * (at_start or 0.0))
    return mean(pay) > floor and mean(pay) >= limits.CUT_PAYS * mean(reward)


def forgetting(facts: Facts) -> Finding | None:
    """Skills the model had before are gone: by this run, or by one it descends from."""
    kept = facts.kept
    if kept is None:
        return None
    mix = "mix 10 to 30 % rows of what the model could do before into the training rows"
    if kept.verdict == "forgotten":
        lost = _forgotten(kept.batteries)
        edit = f"{mix}, fewer steps, and train from the start again"
        lever = edit_lever(edit)
        return Finding("forgetting", sentence_of(lost), _numbers(lost), lever, "sft")
    since = kept.against_base
    if since is None or since.verdict != "forgotten":
        return None
    lost = _forgotten(since.batteries)
    by = ", ".join(since.lost_by) or "a run before it"
    evidence = {**_numbers(lost), "base": since.base, "lost_by": list(since.lost_by)}
    edit = f"{mix} of {by} and train that again: a child cannot win back what its parent lost"
    what = f"Inherited from {by}: " + sentence_of(lost, f" since {since.base}")
    return Finding("forgetting", what, evidence, edit_lever(edit), "sft", severity="medium")


def _forgotten(batteries: Sequence[Battery]) -> Battery:
    return next(battery for battery in batteries if battery.verdict == "forgotten")


def _numbers(battery: Battery) -> dict[str, object]:
    return {
        "battery": battery.battery,
        "before": battery.before,
        "after": battery.after,
        "interval": battery.interval,
        "n": battery.n,
        "lost": battery.lost,
        "gained": battery.gained,
    }


def _level(value: float | None, rate: bool, *, sign: bool = False) -> str:
    if value is None:
        return "?"
    if not rate:
        return f"{value:+.3g}" if sign else f"{value:.3g}"
    return f"{100 * value:+.1f} points" if sign else f"{value:.1%}"

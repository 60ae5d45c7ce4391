"""Detectors of losses: held-out results below the start, and earlier skills that are gone."""

from collections.abc import Sequence

from engine.evidence.detect.findings import Finding, Lever, edit_lever, setting_lever
from engine.evidence.detect.groups import rounded_part
from engine.evidence.detect.views import Facts, StartComparison, mean, mean_or_none, window
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.inference import ALPHA
from engine.evidence.verdict.regression import Battery, sentence_of


def below_start(facts: Facts) -> Finding | None:
    """Detect that the last exam is clearly worse than step 0 on the same tasks.

    It does not matter whether an earlier checkpoint was better. The p value is multiplied by the
    number of exams, since each one is a chance to be wrong. None where the last exam is not clearly
    worse, or where there is none after step 0.
    """
    exam = facts.against_start
    if exam is None:
        return None
    outcome = exam.comparison.outcome
    p = exam.comparison.p
    if outcome.verdict != "worse" or p is None or p * exam.evaluations >= ALPHA:
        return None  # corrected for chance: a run that only fluctuates is tested at every exam
    is_share = exam.measure == "success"
    before, after = _level_text(exam.before, is_share), _level_text(exam.after, is_share)
    low, high = (_level_text(end, is_share, sign=True) for end in exam.comparison.interval)
    reason, lever = _reason_and_lever(facts, exam)
    direction = "rose" if exam.measure == "loss" else "fell"
    what = (
        f"Held-out {exam.measure} {direction} from {before} at step 0 to {after} at step "
        f"{exam.step}, on the same {outcome.n} tasks (95 % interval of the change {low} to {high})"
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
        "learning_rate": facts.settings.learning_rate,
    }
    pick = "best" if facts.algorithm == "grpo" else "changed"
    playbook_section = "rewards" if not lever.setting else "failures"
    return Finding(
        "below_start", f"{what}{reason}.", evidence, lever, playbook=playbook_section, pick=pick
    )


def _reason_and_lever(facts: Facts, exam: StartComparison) -> tuple[str, Lever]:
    """The reason for a fall below the start, as the end of a sentence, and the lever.

    The reward is the cause if it did not fall with success, or if it pays answers that are cut.
    Otherwise the reason is "" and the lever is a lower learning rate.
    """
    reward_before, reward_after = exam.reward_before, exam.reward_after
    if facts.algorithm == "grpo" and exam.measure == "success":
        if (
            reward_before is not None
            and reward_after is not None
            and _reward_kept_up(exam, reward_before, reward_after)
        ):
            reason = f", while the reward went from {reward_before:.2g} to {reward_after:.2g}"
            return reason, edit_lever(_PAYS_WRONG)
        if cut_is_paid(facts, at_start=reward_before):
            pay_of_cut = mean(window(facts.of_views("cut_reward")))
            reason = f"; answers that are cut earn {pay_of_cut:.2g}, as much as the mean"
            return reason, edit_lever(_PAYS_CUT)
    learning_rate = facts.settings.learning_rate
    new_rate = rounded_part(learning_rate, 3)
    return "", setting_lever(
        "learning_rate", learning_rate, new_rate, "from the start again: this run forgot it"
    )


def _reward_kept_up(exam: StartComparison, reward_before: float, reward_after: float) -> bool:
    """Whether the reward fell by much less than success did.

    `reward_before` and `reward_after` are the mean rewards at step 0 and at the exam. Their change
    is taken relative to the larger of them (at least 1), so that it compares with a share.
    """
    largest_reward = max(1.0, abs(reward_before), abs(reward_after))
    success_lost = (exam.before or 0.0) - (exam.after or 0.0)
    return (
        reward_before - reward_after
        < min(limits.SUCCESS_FOLLOWS, limits.HELD_PART * success_lost) * largest_reward
    )


# Edits to propose: the reward pays wrong answers, or answers that are cut.
_PAYS_WRONG = (
    "score(): it pays what is no success; see the best answers, push, train from the start"
)
_PAYS_CUT = (
    "score(): pay nothing for length or for an answer that is cut; push, train from the start"
)


def cut_is_paid(facts: Facts, *, at_start: float | None = None) -> bool:
    """Whether answers that are cut earn about as much as the others, without being right.

    False where few answers are cut, or where the environment does not say what is right.

    `at_start` is the mean reward before training, None where it is not known. A reward for cut
    answers that is next to nothing against it does not count.
    """
    cut_solved = window(facts.of_views("cut_solved"))
    if not cut_solved or mean(cut_solved) > limits.SOLVED_NEVER:
        return False
    cut_shares, pay_of_cut = window(facts.of_views("cut")), window(facts.of_views("cut_reward"))
    reward = window(facts.of_views("reward"))
    if not cut_shares or not pay_of_cut or not reward or mean(cut_shares) <= limits.TRUNCATED:
        return False
    least_pay = max(0.0, limits.CUT_PAYS_SOMETHING * (at_start or 0.0))
    return mean(pay_of_cut) > least_pay and mean(pay_of_cut) >= limits.CUT_PAYS * mean(reward)


def forgetting(facts: Facts) -> Finding | None:
    """Detect that earlier skills are gone, lost by this run or by one that it descends from.

    A loss inherited from an ancestor is of medium severity only. None where no skills were
    measured, or where none were lost.
    """
    kept = facts.kept
    if kept is None:
        return None
    mix_rows = "mix 10 to 30 % rows of what the model could do before into the training rows"
    if kept.verdict == "forgotten":
        battery = _first_forgotten(kept.batteries)
        edit = f"{mix_rows}, fewer steps, and train from the start again"
        lever = edit_lever(edit)
        return Finding(
            "forgetting", sentence_of(battery), _battery_evidence(battery), lever, playbook="sft"
        )
    against_base = kept.against_base
    if against_base is None or against_base.verdict != "forgotten":
        return None
    battery = _first_forgotten(against_base.batteries)
    # `lost_by` is empty where no single run shows the loss.
    culprits = ", ".join(against_base.lost_by) or "a run before it"
    evidence = {
        **_battery_evidence(battery),
        "base": against_base.base,
        "lost_by": list(against_base.lost_by),
    }
    edit = (
        f"{mix_rows} of {culprits} and train that again: a child cannot win back what its "
        "parent lost"
    )
    what = f"Inherited from {culprits}: " + sentence_of(battery, f" since {against_base.base}")
    return Finding(
        "forgetting", what, evidence, edit_lever(edit), playbook="sft", severity="medium"
    )


def _first_forgotten(batteries: Sequence[Battery]) -> Battery:
    """The first battery with the verdict "forgotten"; there must be one."""
    return next(battery for battery in batteries if battery.verdict == "forgotten")


def _battery_evidence(battery: Battery) -> dict[str, object]:
    """The results of a battery as the evidence of a finding."""
    return {
        "battery": battery.battery,
        "before": battery.before,
        "after": battery.after,
        "interval": battery.interval,
        "n": battery.n,
        "lost": battery.lost,
        "gained": battery.gained,
    }


def _level_text(value: float | None, is_share: bool, *, sign: bool = False) -> str:
    """A level as text, such as "41.2%" for a share and "0.412" for others; "?" for None.

    With `sign` the value is a change: "+3.1 points" or "+0.031".
    """
    if value is None:
        return "?"
    if not is_share:
        return f"{value:+.3g}" if sign else f"{value:.3g}"
    return f"{100 * value:+.1f} points" if sign else f"{value:.1%}"

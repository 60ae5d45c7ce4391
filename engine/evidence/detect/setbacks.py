"""Detectors of losses: held-out results below the start, and earlier skills that are gone."""

from collections.abc import Sequence

from engine.evidence.detect.findings import Finding, Lever, edit_lever, setting_lever
from engine.evidence.detect.groups import rounded_part
from engine.evidence.detect.views import Facts, StartComparison, mean, recent_mean, window
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.inference import ALPHA
from engine.evidence.verdict.regression import Battery, SinceBase, sentence_of


def below_start(facts: Facts) -> Finding | None:
    """Detect that the last held-out evaluation is clearly worse than step 0 on the same tasks.

    It does not matter whether an earlier checkpoint was better. None where the fall is not
    significant: the p value is multiplied by the number of evaluations, since each one is a chance
    to be wrong.
    """
    against_start = facts.against_start
    if against_start is None or against_start.comparison.outcome.verdict != "worse":
        return None
    p = against_start.comparison.p
    if p is None or p * against_start.evaluations >= ALPHA:
        return None
    reason, lever = _reason_and_lever(facts, against_start)
    return Finding(
        "below_start",
        f"{_fall_text(against_start)}{reason}.",
        _fall_evidence(facts, against_start),
        lever,
        playbook="failures" if lever.setting else "rewards",  # without one it edits score()
        # GRPO has training rollouts that show what the reward pays; others have held-out answers.
        pick="best" if facts.algorithm == "grpo" else "changed",
    )


def _fall_evidence(facts: Facts, against_start: StartComparison) -> dict[str, object]:
    """The numbers of a fall below the start."""
    return {
        "before": against_start.before,
        "after": against_start.after,
        "difference": against_start.comparison.difference,
        "interval": against_start.comparison.interval,
        "n": against_start.comparison.outcome.n,
        "p": against_start.comparison.p,
        "step": against_start.step,
        "reward_before": against_start.reward_before,
        "reward_after": against_start.reward_after,
        "truncated_share": recent_mean(facts.view_values("cut_share")),
        "reward_when_cut": recent_mean(facts.view_values("cut_reward")),
        "learning_rate": facts.settings.learning_rate,
    }


def _fall_text(against_start: StartComparison) -> str:
    """The sentence on a fall below the start, without its full stop."""
    is_share = against_start.measure == "success"
    before = _level_text(against_start.before, is_share)
    after = _level_text(against_start.after, is_share)
    low, high = (_change_text(end, is_share) for end in against_start.comparison.interval)
    direction = "rose" if against_start.measure == "loss" else "fell"
    return (
        f"Held-out {against_start.measure} {direction} from {before} at step 0 to {after} at step "
        f"{against_start.step}, on the same {against_start.comparison.outcome.n} tasks "
        f"(95 % interval of the change {low} to {high})"
    )


def _reason_and_lever(facts: Facts, against_start: StartComparison) -> tuple[str, Lever]:
    """(the reason for a fall below the start, as the end of a sentence; the advice, a lever).

    The reward is the cause if it did not fall with success, or if it pays answers that are cut.
    Otherwise the reason is "" and the advice is a lower learning rate.
    """
    if facts.algorithm == "grpo" and against_start.measure == "success":
        if _reward_kept_up(against_start):
            before, after = against_start.reward_before, against_start.reward_after
            reason = f", while the reward went from {before:.2g} to {after:.2g}"
            return reason, edit_lever(_PAYS_WRONG)
        if cut_is_paid(facts, reward_at_start=against_start.reward_before):
            pay_of_cut = mean(window(facts.view_values("cut_reward")))
            reason = f"; answers that are cut earn {pay_of_cut:.2g}, as much as the mean"
            return reason, edit_lever(_PAYS_CUT)
    return "", _lower_rate(facts.settings.learning_rate)


def _lower_rate(learning_rate: object) -> Lever:
    """The advice (a lever) to train with a third of the learning rate."""
    new_rate = rounded_part(learning_rate, parts=3)
    reason = "from the start again: this run forgot it"
    return setting_lever("learning_rate", now=learning_rate, to=new_rate, why=reason)


def _reward_kept_up(against_start: StartComparison) -> bool:
    """Whether the reward fell by much less than success did; False where a reward is not known.

    The loss of reward is measured in parts of the larger reward, to compare it with a share. It
    must stay below `HELD_PART` of the loss of success, and in any case below `SUCCESS_FOLLOWS`.
    """
    before, after = against_start.reward_before, against_start.reward_after
    if before is None or after is None:
        return False
    reward_lost = before - after
    success_lost = (against_start.before or 0.0) - (against_start.after or 0.0)
    allowed_part = min(limits.HELD_PART * success_lost, limits.SUCCESS_FOLLOWS)
    # At least 1, the reward that a right answer usually earns.
    larger_reward = max(1.0, abs(before), abs(after))
    return reward_lost < allowed_part * larger_reward


# Edits to propose: the reward pays wrong answers, or answers that are cut.
_PAYS_WRONG = (
    "score(): it pays what is no success; see the best answers, push, train from the start"
)
_PAYS_CUT = (
    "score(): pay nothing for length or for an answer that is cut; push, train from the start"
)


def cut_is_paid(facts: Facts, *, reward_at_start: float | None = None) -> bool:
    """Whether answers that are cut earn about as much as the others, without being right.

    False where the environment does not say what is right, where many cut answers are right, where
    few answers are cut, or where cut ones earn next to nothing. `reward_at_start` is the mean
    reward before training, None where it is not known.
    """
    cut_solved_share = recent_mean(facts.view_values("cut_solved_share"))
    cut_share = recent_mean(facts.view_values("cut_share"))
    cut_reward = recent_mean(facts.view_values("cut_reward"))
    reward = recent_mean(facts.view_values("reward"))
    if cut_solved_share is None or cut_share is None or cut_reward is None or reward is None:
        return False
    if cut_solved_share > limits.SOLVED_NEVER or cut_share <= limits.TRUNCATED:
        return False
    # Where hardly any answer earns a reward, cut ones earn the mean too, but they are not paid.
    next_to_nothing = max(0.0, limits.CUT_PAYS_SOMETHING * (reward_at_start or 0.0))
    return cut_reward > next_to_nothing and cut_reward >= limits.CUT_PAYS * reward


def forgetting(facts: Facts) -> Finding | None:
    """Detect that earlier skills are gone, lost by this run or by one that it descends from.

    None where no skills were measured, or where none were lost.
    """
    skills = facts.kept_skills
    if skills is None:
        return None
    # Each skill is measured by a battery, a fixed set of tasks.
    if skills.verdict == "forgotten":
        battery = _first_forgotten(skills.batteries)
        lever = edit_lever(f"{_MIX_ROWS}, fewer steps, and train from the start again")
        return Finding(
            "forgetting", sentence_of(battery), _battery_evidence(battery), lever, playbook="sft"
        )
    if skills.against_base is not None and skills.against_base.verdict == "forgotten":
        return _inherited_forgetting(skills.against_base)
    return None


# The beginning of an edit to propose.
_MIX_ROWS = "mix 10 to 30 % rows of what the model could do before into the training rows"


def _inherited_forgetting(against_base: SinceBase) -> Finding:
    """The finding that a skill was lost before this run, by runs that it descends from.

    It is of medium severity, because this run itself lost nothing. `against_base` compares this
    run's model with the base model that the first of them began with.
    """
    battery = _first_forgotten(against_base.batteries)
    # `lost_by` is empty where no single run shows the loss.
    culprits = ", ".join(against_base.lost_by) or "a run before it"
    evidence = {
        **_battery_evidence(battery),
        "base": against_base.base,
        "lost_by": list(against_base.lost_by),
    }
    lever = edit_lever(
        f"{_MIX_ROWS} of {culprits} and train that again: a child cannot win back what its "
        "parent lost"
    )
    sentence = f"Inherited from {culprits}: " + sentence_of(battery, f" since {against_base.base}")
    return Finding("forgetting", sentence, evidence, lever, playbook="sft", severity="medium")


def _first_forgotten(batteries: Sequence[Battery]) -> Battery:
    """The first battery (set of tasks) with the verdict "forgotten"; there must be one."""
    return next(battery for battery in batteries if battery.verdict == "forgotten")


def _battery_evidence(battery: Battery) -> dict[str, object]:
    """The results of a battery (a set of tasks) as the evidence of a finding."""
    return {
        "battery": battery.battery,
        "before": battery.before,
        "after": battery.after,
        "interval": battery.interval,
        "n": battery.n,
        "lost": battery.lost,
        "gained": battery.gained,
    }


def _level_text(value: float | None, is_share: bool) -> str:
    """A level as text, such as "41.2%" for a share and "0.412" for others; "?" for None."""
    if value is None:
        return "?"
    return f"{value:.1%}" if is_share else f"{value:.3g}"


def _change_text(value: float | None, is_share: bool) -> str:
    """A change as text, such as "+3.1 points" for a share and "+0.031" for others; "?" for None."""
    if value is None:
        return "?"
    return f"{100 * value:+.1f} points" if is_share else f"{value:+.3g}"

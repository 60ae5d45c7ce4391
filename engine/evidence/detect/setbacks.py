"""Detectors of losses, and of the faults in rows that cause them: results below the start, lost
skills, leaks, contradictory rows, held-out tasks of another kind than the training rows."""

from collections.abc import Sequence

from engine.core.format import percent, significant, whole_percent
from engine.core.hints import Change, Hint
from engine.evidence.detect.findings import (
    Finding,
    Lever,
    edit_lever,
    lower_rate_lever,
    setting_lever,
)
from engine.evidence.detect.learning import success_rose
from engine.evidence.detect.views import Facts, StartComparison, is_learning
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.inference import ALPHA
from engine.evidence.stats.trends import mean, recent_mean, recent_values, trend
from engine.evidence.verdict.regression import Battery, SinceBase, keep_settings, sentence_of
from engine.records.settings import REPLAYING_ALGORITHMS, ROW_ALGORITHMS

_SHOWN_WORDS = 4  # most words of held-out prompts that a sentence names


def below_start(facts: Facts) -> Finding | None:
    """Detect that the last held-out evaluation is clearly worse than step 0 on the same tasks.

    It does not matter whether an earlier checkpoint was better. The p value is multiplied by the
    number of evaluations, because each one is a chance to be wrong. If that makes it too large, the
    verdict, which rests on other tasks, may confirm the fall.
    """
    against_start = facts.against_start
    if against_start is None:
        return None
    if not _fell_clearly(against_start) and not _verdict_is_worse(facts):
        return None
    reason, lever = _reason_and_lever(facts, against_start)
    return Finding(
        "below_start",
        f"{_fall_text(against_start)}{reason}.",
        _fall_evidence(facts, against_start),
        lever,
        playbook="failures" if lever.setting else "rewards",  # without a setting: edit score()
        # GRPO has training rollouts that show what the reward pays; others have held-out answers.
        examples="best" if facts.algorithm == "grpo" else "changed",
        cost=facts.heldout_drop,
    )


def _fell_clearly(against_start: StartComparison) -> bool:
    """Whether the last evaluation is significantly worse than step 0, after correction for the
    number of evaluations."""
    p = against_start.comparison.p
    if against_start.comparison.outcome.verdict != "worse" or p is None:
        return False
    corrected_p = p * against_start.evaluations  # Bonferroni
    return corrected_p < ALPHA


def _verdict_is_worse(facts: Facts) -> bool:
    """Whether both the last evaluation and the verdict, which rests on other tasks, are worse.

    The product of their p values must be as small as that of two significant ones. Returns False
    for GRPO, whose rollouts show the cause of a small fall without this.
    """
    if facts.algorithm == "grpo":
        return False
    against_start = facts.against_start
    if facts.comparison is None or facts.comparison.outcome.verdict != "worse":
        return False
    if against_start is None or against_start.comparison.outcome.verdict != "worse":
        return False
    p, p_of_verdict = against_start.comparison.p, facts.comparison.p
    if p is None or p_of_verdict is None:
        return False
    corrected_p = min(1.0, p * against_start.evaluations)  # Bonferroni
    return corrected_p * p_of_verdict < ALPHA**2


def _fall_evidence(facts: Facts, against_start: StartComparison) -> dict[str, object]:
    """The numbers, by name, on a held-out result that fell below that of step 0.

    `difference` and `interval` are after - before. A number that is not known is None.
    """
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
    """The sentence that the held-out result is below that of step 0, without the full stop."""
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

    The reward is blamed if it did not fall with success, or if it pays answers that are cut. DPO
    may blame its pairs, a distillation its teacher (see `_reason_in_pairs_or_teacher`). Otherwise
    the reason is "" and the advice is a lower learning rate.
    """
    if facts.algorithm == "grpo" and against_start.measure == "success":
        if _reward_kept_up(against_start):
            before, after = against_start.reward_before, against_start.reward_after
            reason = f", while the reward went from {before:.2g} to {after:.2g}"
            return reason, edit_lever(_PAYS_WRONG)
        if cut_is_paid(facts, reward_at_start=against_start.reward_before):
            pay_of_cut = mean(recent_values(facts.view_values("cut_reward")))
            reason = f"; answers that are cut earn {pay_of_cut:.2g}, as much as the mean"
            return reason, edit_lever(_PAYS_CUT)
    return _reason_in_pairs_or_teacher(facts, against_start)


def _reason_in_pairs_or_teacher(facts: Facts, against_start: StartComparison) -> tuple[str, Lever]:
    """(the reason why the policy got worse than at the start, the advice on what to change).

    If DPO did learn to prefer the better answers of its pairs, the pairs are to blame; if a
    distillation did come nearer to its teacher, the teacher is. Otherwise, and for any other
    algorithm, the reason is "" and the advice is a lower learning rate. The reason begins with a
    comma, because it continues a sentence.
    """
    # A loss is measured on reference answers; only the model's own answers can speak against pairs.
    if facts.algorithm == "dpo" and against_start.measure != "loss":
        preferred_share = recent_mean(facts.series("preference_accuracy"))
        if preferred_share is not None and preferred_share >= limits.LEARNT_PAIRS_SHARE:
            return (
                f", while {whole_percent(preferred_share)} of the pairs are preferred as written",
                _MEND_PAIRS,
            )
    if facts.algorithm == "distill" and _came_nearer(facts.series("reverse_kl")):
        return ", while it came nearer to its teacher", _OTHER_TEACHER
    return "", _start_again_with_lower_rate(facts)


def _came_nearer(distances: Sequence[float]) -> bool:
    """Whether the distance to the teacher (one for each step) is smaller in the last five steps
    than in the first five. Returns False if these would overlap."""
    count = limits.FEWEST_STEPS
    if len(distances) < 2 * count:
        return False
    return mean(distances[-count:]) < mean(distances[:count])


def _start_again_with_lower_rate(facts: Facts) -> Lever:
    """The advice (a lever) to train from the start again, with a third of the learning rate."""
    reason = "from the start again: this run forgot it"
    return lower_rate_lever(facts.settings.learning_rate, divisor=3, why=reason)


def _reward_kept_up(against_start: StartComparison) -> bool:
    """Whether the reward fell by less than half as much as success did, and by less than 5 points.
    Returns False if a reward is not known.

    The loss of reward is measured in parts of the larger reward, so that it compares with the loss
    of success, which is a share.
    """
    before, after = against_start.reward_before, against_start.reward_after
    if before is None or after is None:
        return False
    reward_lost = before - after
    success_lost = (against_start.before or 0.0) - (against_start.after or 0.0)
    most_lost_part = min(limits.PART_OF_SUCCESS_LOSS * success_lost, limits.SMALL_SUCCESS_CHANGE)
    # At least 1, because a right answer usually earns 1.
    larger_reward = max(1.0, abs(before), abs(after))
    return reward_lost < most_lost_part * larger_reward


# Edits to propose: the reward pays wrong answers, or answers that are cut.
_PAYS_WRONG = (
    "score(): it pays what is no success; see the best answers, push, train from the start"
)
_PAYS_CUT = (
    "score(): pay nothing for length or for an answer that is cut; push, train from the start"
)


_MEND_PAIRS = edit_lever(
    "the pairs: what stands as chosen is the worse answer; read ten, score both sides, exchange "
    "them, push, train from the start"
)
_OTHER_TEACHER = edit_lever(
    "another teacher: evaluate both on the held-out tasks first, this one is worse than the start"
)


def cut_is_paid(facts: Facts, *, reward_at_start: float | None = None) -> bool:
    """Whether answers that are cut earn about as much as the others, without being right.

    Returns False if the environment does not report success, if many cut answers are right, if few
    answers are cut, or if cut answers earn next to nothing. `reward_at_start` is the mean reward
    before training; None if it is not known.
    """
    cut_solved_share = recent_mean(facts.view_values("cut_solved_share"))
    cut_share = recent_mean(facts.view_values("cut_share"))
    cut_reward = recent_mean(facts.view_values("cut_reward"))
    reward = recent_mean(facts.view_values("reward"))
    if cut_solved_share is None or cut_share is None or cut_reward is None or reward is None:
        return False
    if cut_solved_share > limits.HARDLY_SOLVED_SHARE or cut_share <= limits.HIGH_CUT_SHARE:
        return False
    # If hardly any answer earns a reward, cut answers earn the mean too without being paid.
    next_to_nothing = max(0.0, limits.LEAST_PART_OF_START_REWARD * (reward_at_start or 0.0))
    earns_the_mean = cut_reward >= limits.CUT_REWARD_PART * reward
    return cut_reward > next_to_nothing and earns_the_mean


def forgetting(facts: Facts) -> Finding | None:
    """Detect that earlier skills are lost, by this run or by one that its model descends from.

    Returns None if no skills were measured, or if none were lost.
    """
    skills = facts.kept_skills
    if skills is None:
        return None
    # A battery is a fixed set of tasks that measures a skill.
    if skills.verdict == "forgotten":
        battery = _first_forgotten(skills.batteries)
        return Finding(
            "forgetting",
            sentence_of(battery),
            _battery_evidence(battery),
            _keep_lever(facts, skills.batteries),
            playbook="sft",
            cost=max(0.0, (battery.before or 0.0) - (battery.after or 0.0)),
        )
    if skills.against_base is not None and skills.against_base.verdict == "forgotten":
        return _inherited_forgetting(skills.against_base)
    return None


_FROM_START = "train from the start again: what is lost does not come back"
_FIRST_KL_COEF = 0.01  # advised kl_coef for a GRPO run that had none


def _keep_lever(facts: Facts, batteries: Sequence[Battery]) -> Lever:
    """The advice (a lever) against losing the skills that `batteries` show as lost, by algorithm:
    replayed rows for SFT and GRPO, a stronger KL pull to the start for GRPO that replays enough
    already, a larger beta for DPO, less training for any other."""
    settings = facts.settings
    can_replay = facts.algorithm in REPLAYING_ALGORITHMS
    replayed = keep_settings(settings, batteries) if can_replay else {}
    if replayed:
        reason = f"replays in each batch what the start could do; {_FROM_START}"
        return Lever(Hint(reason, change=Change(settings=replayed)), "keep", settings.keep or 0.0)
    if facts.algorithm == "grpo":
        # A factor of 3 is about half an order of magnitude.
        new_coef = 3 * settings.kl_coef if settings.kl_coef else _FIRST_KL_COEF
        reason = f"holds the policy to its start; {_FROM_START}"
        return setting_lever("kl_coef", now=settings.kl_coef, to=new_coef, why=reason)
    if facts.algorithm == "dpo":
        return edit_lever(f"a larger beta, which holds the policy to its start; {_FROM_START}")
    return edit_lever(f"fewer steps or a lower learning_rate; {_FROM_START}")


def _inherited_forgetting(against_base: SinceBase) -> Finding:
    """The finding that a skill was lost before this run, by runs that its model descends from.

    Its severity is medium, because this run itself lost nothing. `against_base` compares this run's
    model with the base model from which the first of those runs began.
    """
    battery = _first_forgotten(against_base.batteries)  # a battery is a set of tasks
    # `lost_by` is empty if no single run shows the loss.
    culprits = ", ".join(against_base.lost_by) or "a run before it"
    evidence = {
        **_battery_evidence(battery),
        "base": against_base.base,
        "lost_by": list(against_base.lost_by),
    }
    lever = edit_lever(
        f"train {culprits} again with a larger keep than it had, and this run from it: a child "
        "cannot win back what its parent lost"
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
    """A level as text: "41.2%" for a share, "0.412" for others, "?" for None."""
    if value is None:
        return "?"
    return percent(value, unit="%") if is_share else significant(value)


def _change_text(value: float | None, is_share: bool) -> str:
    """A change as text: "+3.1 points" for a share, "+0.031" for others, "?" for None."""
    if value is None:
        return "?"
    return f"{100 * value:+.1f} points" if is_share else f"{value:+.3g}"


# --- rows ------------------------------------------------------------------------------------


def worse_start(facts: Facts) -> Finding | None:
    """Detect that the run began with a checkpoint that was itself below the start of its own run.

    Returns None if this run got better, or if that checkpoint was not evaluated.
    """
    fall = facts.fall_of_the_start
    if fall is None or fall.comparison.outcome.verdict != "worse" or _is_better(facts):
        return None
    evidence = {"before": fall.before, "after": fall.after, "step": fall.step}
    is_share = fall.measure == "success"
    sentence = (
        f"The run went on from a checkpoint that had fallen: held-out {fall.measure} "
        f"{_level_text(fall.before, is_share)} at its own start, "
        f"{_level_text(fall.after, is_share)} at step {fall.step}."
    )
    lever = edit_lever("start from what that run began with, or from its @best if that was better")
    return Finding("worse_start", sentence, evidence, lever, playbook="stalls", is_cause=True)


def leak(facts: Facts) -> Finding | None:
    """Detect that the training rows hold held-out tasks, so that no score can be trusted.

    Returns None if the check at submit called the shared part clean or an overlap.
    """
    contamination = facts.rows.contamination
    if contamination.verdict != "leak":
        return None
    evidence = {
        "heldout_tasks_taught": len(contamination.leaked),
        "examples": list(contamination.leaked[:3]),
    }
    lever = edit_lever(
        "take the copies of held-out tasks out of the training rows (never change their wording), "
        "push, train from the start"
    )
    sentence = f"Leak: {contamination.headline or 'training rows hold held-out tasks'}."
    return Finding("leak", sentence, evidence, lever, playbook="evidence", is_cause=True)


def contradictory_rows(facts: Facts) -> Finding | None:
    """Detect training rows with the same prompt and different answers, in a run that gained
    nothing.

    Returns None if they are few, or if the verdict is "better": several answers may all be right.
    """
    rows = facts.rows
    share = rows.contradicted / rows.train if rows.train else 0.0
    if share <= limits.HIGH_CONTRADICTED_SHARE or _is_better(facts):
        return None
    evidence = {"rows": rows.train, "contradicted": rows.contradicted}
    sentence = (
        f"{whole_percent(share)} of the training rows have the prompt of another row and another "
        "answer: a model can learn none of them."
    )
    lever = edit_lever("the rows: one answer for each prompt; push, train from the start")
    return Finding("contradictory_rows", sentence, evidence, lever, playbook="sft", is_cause=True)


def constant_answer(facts: Facts) -> Finding | None:
    """Detect that a run which got better learnt the form of the answers and not which one is right:
    one and the same answer to every held-out task would do as well.

    Returns None if the model beats that answer, or if it is clearly worse than it: something else
    is then amiss.
    """
    constant = facts.constant
    if constant is None or facts.comparison is None or not _is_better(facts):
        return None
    success = facts.comparison.after
    if success is None or success.high is None or success.value is None:
        return None
    if success.high < constant.share:  # the whole interval is below: something else is amiss
        return None
    evidence = {"after": success.value, "constant": constant.share, "tasks": constant.tasks}
    lever = edit_lever(
        'first evaluate with split="train": if those rows fail too, their prompts do not tell the '
        "answer (labels by chance, or what decides is not in the prompt): edit the rows and push; "
        "if they succeed, more and more varied rows"
    )
    return Finding(
        "constant_answer",
        constant.sentence,
        evidence,
        lever,
        playbook="failures",
        examples="changed",
        cost=max(0.0, 1 - success.value),
    )


def duplicates(facts: Facts) -> Finding | None:
    """Detect that most training rows are copies of others, in a run that gained nothing.

    Returns None if they are not most of the rows, or if the verdict is "better".
    """
    rows = facts.rows
    copied_share = 1 - rows.different / rows.train if rows.train else 0.0
    if copied_share <= limits.HIGH_COPIED_SHARE or _is_better(facts):
        return None
    evidence = {"rows": rows.train, "different": rows.different}
    sentence = (
        f"{rows.different} of the {rows.train} training rows are different, the others are copies: "
        "they are learnt by heart."
    )
    lever = edit_lever("more different rows; push, train from the start")
    return Finding("duplicates", sentence, evidence, lever, playbook="sft", is_cause=True)


def pairs_alike(facts: Facts) -> Finding | None:
    """Detect DPO pairs whose two answers differ in blanks, case or punctuation alone.

    Returns None if they are few, or if the verdict is "better".
    """
    rows = facts.rows
    share = rows.alike_pairs / rows.pairs if rows.pairs else 0.0
    if share <= limits.HIGH_ALIKE_PAIRS_SHARE or _is_better(facts):
        return None
    evidence = {"pairs": rows.pairs, "alike": rows.alike_pairs}
    sentence = (
        f"In {whole_percent(share)} of the pairs the two answers differ in blanks, case or "
        "punctuation alone: what makes one better is not shown."
    )
    lever = edit_lever("the pairs: a right and a wrong answer each (curate with select=pairs)")
    return Finding("pairs_alike", sentence, evidence, lever, playbook="curation", is_cause=True)


def other_exam(facts: Facts) -> Finding | None:
    """Detect held-out tasks (the exam) of another wording or kind than the training rows.

    Returns None if held-out prompts have no words of their own, if training did not work, or if the
    verdict is "better" and half of the held-out tasks are solved.
    """
    heldout_words = facts.rows.exam_words[:_SHOWN_WORDS]  # words of held-out prompts alone
    if not heldout_words or _is_heldout_learnt(facts) or not _training_worked(facts):
        return None
    evidence = {"words_of_the_exam": list(heldout_words)}
    quoted_words = ", ".join(f'"{word}"' for word in heldout_words)
    sentence = (
        "The training tasks were learnt, the held-out ones were not or hardly: their prompts use "
        f"words that no training prompt has ({quoted_words})."
    )
    lever = edit_lever(
        "held-out rows of the kind and wording that is trained, or training rows in the wordings "
        "of the held-out ones"
    )
    return Finding("other_exam", sentence, evidence, lever, playbook="evidence", is_cause=True)


def rows_disagree(facts: Facts) -> Finding | None:
    """Detect training rows that the start model finds far less likely than the held-out ones.

    Rows of one kind of task are about equally likely, so these rows are wrong or of another kind.
    Returns None if the verdict is "better", or if the held-out prompts are worded differently (see
    `other_exam`).
    """
    losses, heldout_losses = facts.series("loss"), facts.curve("heldout_loss")
    if not losses or not heldout_losses or _is_better(facts) or facts.comparison is None:
        return None
    first_evaluated_step, heldout_loss = heldout_losses[0]
    if first_evaluated_step != 0 or facts.rows.exam_words:
        return None
    rows_loss = losses[0]  # of the first batch, before the first update
    least_gap = heldout_loss + limits.LOSS_GAP_OF_ROWS
    if rows_loss < least_gap or rows_loss < limits.LOSS_FACTOR_OF_ROWS * heldout_loss:
        return None
    evidence = {"loss_of_rows_at_start": rows_loss, "heldout_loss_at_start": heldout_loss}
    sentence = (
        f"Before training the answers of the rows had a loss of {rows_loss:.2g}, those of the "
        f"held-out ones {heldout_loss:.2g}: the rows teach something else than the exam asks."
    )
    lever = edit_lever(
        "the rows: read twenty of their answers, correct the wrong ones and take out those of "
        "another task; push, train from the start"
    )
    return Finding("rows_disagree", sentence, evidence, lever, playbook="sft", is_cause=True)


def memorised_rows(facts: Facts) -> Finding | None:
    """Detect an SFT run that knows its rows by heart and solves few held-out tasks.

    Its training loss is a small part of the held-out loss, which is at rest: it neither falls nor
    rises (see `overfitting`), and held-out success does not rise either. More of the same steps
    teach nothing new.

    Returns None for a run that is not finished, that solves most of the tasks, that saw its rows a
    few times only, or if one of the numbers is not known.
    """
    success_curve, loss_curve = facts.curve("heldout_success"), facts.curve("heldout_loss")
    training_loss = recent_mean(facts.series("loss"))
    if facts.comparison is None or training_loss is None or not success_curve:
        return None
    solved_share, passes = success_curve[-1][1], facts.passes_over_rows
    if solved_share > limits.MEMORISED_SOLVED_SHARE or passes < limits.SEVERAL_PASSES:
        return None
    if len(loss_curve) < limits.FEWEST_EVALUATIONS:
        return None
    halfway_step, halfway_loss = loss_curve[(len(loss_curve) - 1) // 2]
    last_step, heldout_loss = loss_curve[-1]
    lowest_loss = min(loss for _, loss in loss_curve)
    is_known_by_heart = training_loss <= limits.MEMORISED_LOSS_PART * heldout_loss
    still_falls = heldout_loss <= (1 - limits.STILL_FALLING_PART) * halfway_loss
    rises = heldout_loss >= (1 + limits.OVERFIT_RISE_PART) * lowest_loss
    if not is_known_by_heart or still_falls or rises:
        return None
    if success_rose(facts, halfway_step, last_step):
        return None
    return _memorised_finding(facts, training_loss, heldout_loss, solved_share, passes)


def _memorised_finding(
    facts: Facts, training_loss: float, heldout_loss: float, solved_share: float, passes: float
) -> Finding:
    """The finding that rows are known by heart; losses in nats per token."""
    rows = facts.training_rows.rows
    evidence = {
        "loss": training_loss,
        "heldout_loss": heldout_loss,
        "heldout_success": solved_share,
        "rows": rows,
        "passes": passes,
    }
    sentence = (
        f"The {rows:,} rows are known by heart after {passes:.2g} passes (loss "
        f"{training_loss:.2g}), the held-out loss rests at {heldout_loss:.2g}, and "
        f"{whole_percent(solved_share)} of the held-out tasks are solved."
    )
    lever = edit_lever(
        f"more different rows (say {limits.MORE_ROWS_FACTOR * rows:,}): other values of what the "
        "answer depends on; more steps over these teach nothing new"
    )
    return Finding("memorised_rows", sentence, evidence, lever, playbook="sft", examples="worst")


def _is_better(facts: Facts) -> bool:
    """Whether the verdict of a finished run is "better"."""
    return facts.comparison is not None and facts.comparison.outcome.verdict == "better"


def _is_heldout_learnt(facts: Facts) -> bool:
    """Whether the verdict is "better" and, if success is measured, half of the held-out tasks are
    solved at the end."""
    heldout_shares = facts.curve_values("heldout_success")
    is_half_solved = not heldout_shares or heldout_shares[-1] >= limits.HELDOUT_LEARNT_SHARE
    return _is_better(facts) and is_half_solved


def _training_worked(facts: Facts) -> bool:
    """Whether the run came to solve its training tasks, or to fit its training rows."""
    if facts.algorithm not in ROW_ALGORITHMS:
        reward_trend = trend(facts.series("reward_mean"))
        rose = reward_trend is not None and reward_trend.rose
        return rose or is_learning(facts) or _heldout_far_behind(facts)
    losses = facts.series("loss")
    if len(losses) < 2 * limits.FEWEST_STEPS:
        return False
    last_loss = mean(losses[-limits.FEWEST_STEPS :])
    return last_loss <= limits.LEARNT_LOSS_PART * losses[0]


def _heldout_far_behind(facts: Facts) -> bool:
    """Whether the share solved at the end is far higher on training tasks than on held-out
    tasks."""
    solved_share = recent_mean(facts.view_values("solved_share"))
    heldout_shares = facts.curve_values("heldout_success")
    if solved_share is None or not heldout_shares:
        return False
    return solved_share - heldout_shares[-1] >= limits.LARGE_HELDOUT_GAP

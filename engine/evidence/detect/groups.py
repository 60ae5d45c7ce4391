"""Detectors of GRPO's signal: do the answers of a group differ, and does anything come of it?"""

from engine.core.hints import Change
from engine.evidence.detect.findings import Finding, edit_lever, setting_lever
from engine.evidence.detect.views import Facts, mean, mean_or_none, moved, trend, window
from engine.evidence.stats import thresholds as limits


def uniform_groups(facts: Facts) -> Finding | None:
    """Groups that are alike without being solved, so that no advantage differs from zero.

    Alike in their text from the start: the temperature. Alike in their pay only: the reward. Too
    hard and too easy tasks are findings of their own.
    """
    flat, unsolved, effective = (
        facts.recent(name)
        for name in ("zero_advantage_share", "groups_too_hard", "groups_effective")
    )
    if not flat or not unsolved or not effective or learning(facts):
        return None
    if mean(effective) >= limits.EFFECTIVE_LOW:
        return None
    same_text = _alike_from_start(facts)
    if not same_text and (mean(unsolved) < limits.UNSOLVED_FLAT or never_solved(facts)):
        return None
    easy = mean(facts.recent("groups_too_easy") or [0.0])
    distinct = mean_or_none(window(facts.of_views("distinct")))
    evidence = {
        "zero_advantage_share": mean(flat),
        "groups_effective": mean(effective),
        "groups_too_hard": mean(unsolved),
        "groups_too_easy": easy,
        "distinct_in_group": distinct,
        "temperature": facts.settings.get("temperature"),
        "group_size": facts.settings.get("group_size"),
        "cause": "equal texts" if same_text else "equal rewards",
    }
    shares = f"{mean(flat):.0%} of the completions of the last steps have no advantage"
    if same_text:
        now = facts.settings.get("temperature") or 1.0
        if now < 1.0:
            lever = setting_lever("temperature", now, 1.0)
        else:
            lever = edit_lever(
                "start from a checkpoint or a model that still gives several answers"
            )
        what = f"{shares}: the answers of a group are the same text."
        return Finding("uniform_groups", what, evidence, lever, "failures", "group", root=True)
    edit = "score(): pay part of the way, each tier provably harder than the one before"
    if easy >= limits.EFFECTIVE_NONE:
        edit = "tasks between the two ends: leave out those solved always and those solved never"
    what = f"{shares}: the answers of a group differ, but not what they are paid."
    section = "rewards" if easy < limits.EFFECTIVE_NONE else "curriculum"
    return Finding("uniform_groups", what, evidence, edit_lever(edit), section, "group")


def too_hard(facts: Facts) -> Finding | None:
    """Hardly a task is ever solved, and nothing on the way is paid differently.

    Tasks that an exam of this run, the one at step 0 included, saw solved are not too hard.
    """
    effective = facts.recent("groups_effective")
    if any(value >= limits.SOLVED_ONCE for _, value in facts.curve("heldout_success")):
        return None
    if not effective or mean(effective) >= limits.EFFECTIVE_NONE or learning(facts):
        return None
    if not never_solved(facts) or _alike_from_start(facts):
        return None
    solved = window(facts.of_views("solved"))
    evidence = {
        "groups_effective": mean(effective),
        "groups_too_hard": mean(facts.recent("groups_too_hard") or [0.0]),
        "solved": mean_or_none(solved),
        "reward_mean": mean_or_none(facts.recent("reward_mean")),
        "group_size": facts.settings.get("group_size"),
    }
    what = (
        f"{mean(effective):.0%} of the groups of the last steps carry a gradient and "
        f"{_percent(evidence['solved'])} of the answers are right: the tasks are too hard for now."
    )
    lever = edit_lever(
        'train by SFT on reference answers first (algorithm="sft"), then GRPO on it',
        Change(arguments={"algorithm": "sft"}),
    )
    where = "success == False" if solved else ""
    return Finding("too_hard", what, evidence, lever, "curriculum", "best", where)


def too_easy(facts: Facts) -> Finding | None:
    """Solved nearly always before anything was learnt. A run that got there is no finding."""
    start = facts.series("groups_effective")[: limits.WINDOW]
    solved = facts.of_views("solved")[: limits.LEAST]
    if len(start) < limits.LEAST or mean(start) >= limits.EFFECTIVE_NONE or not solved:
        return None
    if mean(solved) < limits.SOLVED_ALWAYS:
        return None
    before = next((value for step, value in facts.curve("heldout_success") if step == 0), None)
    evidence = {
        "groups_effective": mean(start),
        "groups_too_easy": mean(facts.series("groups_too_easy")[: limits.WINDOW] or [0.0]),
        "solved": mean(solved),
        "heldout_success": before,
    }
    what = (
        f"{mean(solved):.0%} of the answers were right from the first steps on: there is nothing "
        "to select."
    )
    return Finding("too_easy", what, evidence, edit_lever("harder tasks"), "curriculum", "worst")


def entropy_collapse(facts: Facts) -> Finding | None:
    """Exploration is gone while most tasks are still unsolved, or from the first steps on."""
    return _ran_out(facts) or _gone_at_once(facts)


def _ran_out(facts: Facts) -> Finding | None:
    """Entropy that fell and stayed low while tasks are unsolved and nothing rises any more."""
    values = facts.series("entropy")
    if len(values) < limits.WINDOW + limits.ENTROPY_FLAT_STEPS:
        return None
    start, now = mean(values[:3]), mean(values[-limits.LEAST :])
    if start < limits.ENTROPY_FROM or now >= limits.ENTROPY_LEFT * start:
        return None
    low = [mean(values[i - 2 : i + 1]) < limits.ENTROPY_LEFT * start for i in range(2, len(values))]
    fell = 2 + low.index(True) if any(low) else len(values)
    flat_for = len(values) - fell
    if flat_for < limits.ENTROPY_FLAT_STEPS:
        return None
    solved = facts.of_views("solved") or facts.series("heldout_success")
    if len(solved) < 2:
        return None
    began, ended = mean(solved[:3]), mean(solved[-limits.LEAST :])
    if ended >= began + limits.WAY_GONE * (1.0 - began) or ended >= 1 - limits.UNPARSED:
        return None
    if _still_rising(facts, flat_for):
        return None
    distinct = mean_or_none(window(facts.of_views("distinct")))
    evidence = {
        "entropy_start": start,
        "entropy": now,
        "entropy_left": now / start,
        "flat_steps": flat_for,
        "solved_start": began,
        "solved": ended,
        "distinct_in_group": distinct,
    }
    what = (
        f"Entropy fell to {now / start:.0%} of its start, and in the {flat_for} steps since "
        f"the share of right answers stays at {ended:.0%}."
    )
    rate = facts.settings.get("learning_rate")
    lever = setting_lever(
        "learning_rate", rate, rounded_half(rate), "and go on from a step before the fall"
    )
    return Finding("entropy_collapse", what, evidence, lever, "stalls", "group")


def _gone_at_once(facts: Facts) -> Finding | None:
    """Exploration gone within the first steps, and an exam that is not above the start for it."""
    values = facts.series("entropy")
    early = values[limits.ENTROPY_EARLY // 2 : limits.ENTROPY_EARLY]
    start = values[0] if values else 0.0
    if len(values) < 2 * limits.LEAST or start < limits.ENTROPY_FROM or facts.comparison is None:
        return None
    now = mean(values[-limits.LEAST :])
    if max(mean(early), now) >= limits.ENTROPY_LEFT * start:
        return None
    exam = facts.against_start
    if exam is None or exam.measure not in ("success", "reward"):
        return None
    before, after, difference = exam.before, exam.after, exam.comparison.difference
    if difference is None or before is None or after is None or difference > 0:
        return None
    if facts.comparison.outcome.verdict == "better":
        return None
    if exam.measure == "success" and after >= 1 - limits.UNPARSED:
        return None  # nothing was left to explore for
    groups = facts.series("groups_effective")
    n = exam.comparison.outcome.n
    evidence = {
        "entropy_start": start,
        "entropy_first_steps": mean(early),
        "entropy": now,
        "heldout_start": before,
        "heldout": after,
        "n": n,
        "p": exam.comparison.p,
        "groups_effective_start": mean_or_none(groups[:1]),
        "groups_effective": mean_or_none(groups[-limits.LEAST :]),
    }
    what = (
        f"Entropy fell from {start:.2g} to {mean(early):.2g} within {limits.ENTROPY_EARLY} steps, "
        f"and held-out {exam.measure} is not above its start ({before:.2g} to {after:.2g} on "
        f"{n} tasks, which may be chance)."
    )
    rate = facts.settings.get("learning_rate")
    to = rounded_part(rate, 3)
    lever = setting_lever("learning_rate", rate, to, "from the start again")
    return Finding("entropy_collapse", what, evidence, lever, "stalls", "group", severity="low")


def learning(facts: Facts) -> bool:
    """Whether the share of right answers, in training or held out, clearly rises."""
    solved = trend(facts.of_views("solved"))
    if solved is not None and solved.rose and solved.change >= limits.LEARNING_GAIN:
        return True
    exams = [value for _, value in facts.curve("heldout_success")]
    if len(exams) < 2 or not facts.exam_tasks:
        return False
    noise = limits.TREND_Z * (2 * exams[0] * (1 - exams[0]) / facts.exam_tasks) ** 0.5
    return exams[-1] - exams[0] >= max(limits.LEARNING_GAIN, noise)


def never_solved(facts: Facts) -> bool:
    """Whether hardly an answer is right; by the groups where the environment does not say."""
    solved = window(facts.of_views("solved"))
    if solved:
        return mean(solved) <= limits.SOLVED_NEVER
    hard = facts.recent("groups_too_hard")
    return bool(hard) and mean(hard) >= 1 - limits.EFFECTIVE_NONE


def rounded_half(value: object) -> float | None:
    """Half of a setting, in two digits."""
    return rounded_part(value, 2)


def rounded_part(value: object, parts: int) -> float | None:
    """One of `parts` equal parts of a setting, in two digits; None where it is no number."""
    return float(f"{value / parts:.2g}") if isinstance(value, int | float) else None


def _alike_from_start(facts: Facts) -> bool:
    start = facts.of_views("distinct")[: limits.LEAST]
    return (
        len(start) >= limits.LEAST
        and mean(start) <= limits.ALIKE_IN_GROUP
        and _not_all_solved(facts)
    )


def _not_all_solved(facts: Facts) -> bool:
    """Equal texts that are right are a policy that knows the answer."""
    solved = facts.of_views("solved")[: limits.LEAST]
    return not solved or mean(solved) < limits.SOLVED_ALWAYS


def _still_rising(facts: Facts, steps: int) -> bool:
    """Whether anything came since the entropy fell: the first half of these steps against the
    second, by right answers, else by reward."""
    values = (facts.of_views("solved") or facts.series("reward_mean"))[-steps:]
    half = len(values) // 2
    if half < 2:
        return False
    change = moved(values[:half], values[-half:])
    return change.change > limits.SUCCESS_FOLLOWS and change.z >= limits.RISING_Z


def _percent(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, float) else "hardly any"

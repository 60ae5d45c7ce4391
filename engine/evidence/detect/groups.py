"""Detectors of GRPO's signal: do the answers of a group differ, and does anything come of it?"""

from engine.evidence.detect.findings import Finding, Lever
from engine.evidence.detect.views import Facts, mean, mean_or_none, moved, trend, window
from engine.evidence.stats import thresholds as at


def uniform_groups(f: Facts) -> Finding | None:
    """Groups that are alike without being solved, so that no advantage differs from zero.

    Alike in their text from the start: the temperature. Alike in their pay only: the reward. Too
    hard and too easy tasks are findings of their own.
    """
    flat, unsolved, effective = (f.recent(name) for name in (
        "zero_advantage_share", "groups_too_hard", "groups_effective"))  # fmt: skip
    if not flat or not unsolved or not effective or learning(f):
        return None
    if mean(effective) >= at.EFFECTIVE_LOW:
        return None
    same_text = _alike_from_start(f)
    if not same_text and (mean(unsolved) < at.UNSOLVED_FLAT or never_solved(f)):
        return None
    easy = mean(f.recent("groups_too_easy") or [0.0])
    distinct = mean_or_none(window(f.of_views("distinct")))
    evidence = {
        "zero_advantage_share": mean(flat),
        "groups_effective": mean(effective),
        "groups_too_hard": mean(unsolved),
        "groups_too_easy": easy,
        "distinct_in_group": distinct,
        "temperature": f.settings.get("temperature"),
        "group_size": f.settings.get("group_size"),
        "cause": "equal texts" if same_text else "equal rewards",
    }
    shares = f"{mean(flat):.0%} of the completions of the last steps have no advantage"
    if same_text:
        now = f.settings.get("temperature") or 1.0
        if now < 1.0:
            lever = Lever("temperature", now, 1.0)
        else:
            lever = Lever(
                edit="start from a checkpoint or a model that still gives several answers"
            )
        what = f"{shares}: the answers of a group are the same text."
        return Finding("uniform_groups", what, evidence, lever, "failures", "group", root=True)
    edit = "score(): pay part of the way, each tier provably harder than the one before"
    if easy >= at.EFFECTIVE_NONE:
        edit = "tasks between the two ends: leave out those solved always and those solved never"
    what = f"{shares}: the answers of a group differ, but not what they are paid."
    section = "rewards" if easy < at.EFFECTIVE_NONE else "curriculum"
    return Finding("uniform_groups", what, evidence, Lever(edit=edit), section, "group")


def too_hard(f: Facts) -> Finding | None:
    """Hardly a task is ever solved, and nothing on the way is paid differently.

    Tasks that an exam of this run, the one at step 0 included, saw solved are not too hard.
    """
    effective = f.recent("groups_effective")
    if any(value >= at.SOLVED_ONCE for _, value in f.curve("heldout_success")):
        return None
    if not effective or mean(effective) >= at.EFFECTIVE_NONE or learning(f):
        return None
    if not never_solved(f) or _alike_from_start(f):
        return None
    solved = window(f.of_views("solved"))
    evidence = {
        "groups_effective": mean(effective),
        "groups_too_hard": mean(f.recent("groups_too_hard") or [0.0]),
        "solved": mean_or_none(solved),
        "reward_mean": mean_or_none(f.recent("reward_mean")),
        "group_size": f.settings.get("group_size"),
    }
    what = (
        f"{mean(effective):.0%} of the groups of the last steps carry a gradient and "
        f"{_percent(evidence['solved'])} of the answers are right: the tasks are too hard for now."
    )
    lever = Lever(edit='train by SFT on reference answers first (algorithm="sft"), then GRPO on it')
    where = "success == False" if solved else ""
    return Finding("too_hard", what, evidence, lever, "curriculum", "best", where)


def too_easy(f: Facts) -> Finding | None:
    """Solved nearly always before anything was learnt. A run that got there is no finding."""
    start = f.series("groups_effective")[: at.WINDOW]
    solved = f.of_views("solved")[: at.LEAST]
    if len(start) < at.LEAST or mean(start) >= at.EFFECTIVE_NONE or not solved:
        return None
    if mean(solved) < at.SOLVED_ALWAYS:
        return None
    before = next((value for step, value in f.curve("heldout_success") if step == 0), None)
    evidence = {
        "groups_effective": mean(start),
        "groups_too_easy": mean(f.series("groups_too_easy")[: at.WINDOW] or [0.0]),
        "solved": mean(solved),
        "heldout_success": before,
    }
    what = (
        f"{mean(solved):.0%} of the answers were right from the first steps on: there is nothing "
        "to select."
    )
    return Finding("too_easy", what, evidence, Lever(edit="harder tasks"), "curriculum", "worst")


def entropy_collapse(f: Facts) -> Finding | None:
    """Exploration is gone while most tasks are still unsolved, or from the first steps on."""
    return _ran_out(f) or _cooled_at_once(f)


def _ran_out(f: Facts) -> Finding | None:
    values = f.series("entropy")
    if len(values) < at.WINDOW + at.ENTROPY_FLAT_STEPS:
        return None
    start, now = mean(values[:3]), mean(values[-at.LEAST :])
    if start < at.ENTROPY_FROM or now >= at.ENTROPY_LEFT * start:
        return None
    low = [mean(values[i - 2 : i + 1]) < at.ENTROPY_LEFT * start for i in range(2, len(values))]
    fell = 2 + low.index(True) if any(low) else len(values)
    flat_for = len(values) - fell
    if flat_for < at.ENTROPY_FLAT_STEPS:
        return None
    solved = f.of_views("solved") or f.series("heldout_success")
    if len(solved) < 2:
        return None
    began, ended = mean(solved[:3]), mean(solved[-at.LEAST :])
    if ended >= began + at.WAY_GONE * (1.0 - began) or ended >= 1 - at.UNPARSED:
        return None
    if _still_rising(f, flat_for):
        return None
    distinct = mean_or_none(window(f.of_views("distinct")))
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
    rate = f.settings.get("learning_rate")
    lever = Lever(
        "learning_rate", rate, rounded_half(rate), "and go on from a step before the fall"
    )
    return Finding("entropy_collapse", what, evidence, lever, "stalls", "group")


def _cooled_at_once(f: Facts) -> Finding | None:
    """Exploration gone within the first steps, and an exam that is not above the start for it."""
    values = f.series("entropy")
    early = values[at.ENTROPY_EARLY // 2 : at.ENTROPY_EARLY]
    found, start = f.against_start, values[0] if values else 0.0
    if len(values) < 2 * at.LEAST or start < at.ENTROPY_FROM or not f.verdict:
        return None
    now = mean(values[-at.LEAST :])
    if max(mean(early), now) >= at.ENTROPY_LEFT * start:
        return None
    if found.get("metric") not in ("success", "reward") or found["difference"] is None:
        return None
    if found["difference"] > 0 or f.verdict.get("verdict") == "better":
        return None
    if found["metric"] == "success" and found["after"] >= 1 - at.UNPARSED:
        return None  # nothing was left to explore for
    groups = f.series("groups_effective")
    evidence = {
        "entropy_start": start,
        "entropy_first_steps": mean(early),
        "entropy": now,
        "heldout_start": found["before"],
        "heldout": found["after"],
        "n": found["n"],
        "p": found["p"],
        "groups_effective_start": mean_or_none(groups[:1]),
        "groups_effective": mean_or_none(groups[-at.LEAST :]),
    }
    what = (
        f"Entropy fell from {start:.2g} to {mean(early):.2g} within {at.ENTROPY_EARLY} steps, and "
        f"held-out {found['metric']} is not above its start ({found['before']:.2g} to "
        f"{found['after']:.2g} on {found['n']} tasks, which may be chance)."
    )
    rate = f.settings.get("learning_rate")
    to = rounded_part(rate, 3)
    lever = Lever("learning_rate", rate, to, "from the start again")
    return Finding("entropy_collapse", what, evidence, lever, "stalls", "group", severity="low")


def learning(f: Facts) -> bool:
    """Whether the share of right answers, in training or held out, clearly rises."""
    found = trend(f.of_views("solved"))
    if found is not None and found.rose and found.change >= at.LEARNING_GAIN:
        return True
    exams = [value for _, value in f.curve("heldout_success")]
    if len(exams) < 2 or not f.exam_tasks:
        return False
    noise = at.TREND_Z * (2 * exams[0] * (1 - exams[0]) / f.exam_tasks) ** 0.5
    return exams[-1] - exams[0] >= max(at.LEARNING_GAIN, noise)


def never_solved(f: Facts) -> bool:
    """Whether hardly an answer is right; by the groups where the environment does not say."""
    solved = window(f.of_views("solved"))
    if solved:
        return mean(solved) <= at.SOLVED_NEVER
    hard = f.recent("groups_too_hard")
    return bool(hard) and mean(hard) >= 1 - at.EFFECTIVE_NONE


def rounded_half(value: object) -> float | None:
    """Half of a setting, in two digits."""
    return rounded_part(value, 2)


def rounded_part(value: object, parts: int) -> float | None:
    """One of `parts` equal parts of a setting, in two digits; None where it is no number."""
    return float(f"{value / parts:.2g}") if isinstance(value, int | float) else None


def _alike_from_start(f: Facts) -> bool:
    start = f.of_views("distinct")[: at.LEAST]
    return len(start) >= at.LEAST and mean(start) <= at.ALIKE_IN_GROUP and _not_all_solved(f)


def _not_all_solved(f: Facts) -> bool:
    """Equal texts that are right are a policy that knows the answer."""
    solved = f.of_views("solved")[: at.LEAST]
    return not solved or mean(solved) < at.SOLVED_ALWAYS


def _still_rising(f: Facts, steps: int) -> bool:
    """Whether anything came since the entropy fell: the first half of these steps against the
    second, by right answers, else by reward."""
    values = (f.of_views("solved") or f.series("reward_mean"))[-steps:]
    half = len(values) // 2
    if half < 2:
        return False
    found = moved(values[:half], values[-half:])
    return found.change > at.SUCCESS_FOLLOWS and found.z >= at.RISING_Z


def _percent(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, float) else "hardly any"

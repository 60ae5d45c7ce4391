"""Detectors of GRPO's signal: do the answers of a group (all to one task) differ?"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.format import whole_percent
from engine.core.hints import Change
from engine.evidence.detect.findings import (
    Finding,
    Lever,
    edit_lever,
    lower_rate_lever,
    setting_lever,
)
from engine.evidence.detect.scoring import plateau
from engine.evidence.detect.views import (
    START_STEPS,
    Facts,
    StartComparison,
    is_learning,
    never_solved,
)
from engine.evidence.signal.kinds import unsolved_shares
from engine.evidence.stats import thresholds as limits
from engine.evidence.stats.trends import (
    change_between,
    mean,
    mean_or_none,
    recent_mean,
)


def uniform_groups(facts: Facts) -> Finding | None:
    """Detect groups (all answers to one task) that give no gradient, because their texts or their
    rewards are equal without being right.

    Returns None in these cases:
        too few steps are done, enough groups give a gradient, or the run learns;
        the texts differ, and most answers earn one partial reward: see the detector `plateau`;
        the texts differ, and few groups earn equal rewards without being solved;
        the texts differ, and hardly any answer is right: see the detector `too_hard`.
    """
    shares = _recent_group_shares(facts)
    if shares is None or shares.effective >= limits.LOW_EFFECTIVE_SHARE or is_learning(facts):
        return None
    if _same_text_from_start(facts):
        return _same_text_finding(facts, shares)
    if plateau(facts) is not None:
        return None
    # Groups with equal rewards are no fault if all their answers are right.
    few_faulty_groups = shares.unsolved < limits.HIGH_UNSOLVED_SHARE
    if few_faulty_groups or never_solved(facts):
        return None
    return _equal_rewards_finding(facts, shares)


@dataclass(frozen=True)
class _GroupShares:
    """The share of the groups of the last steps that is of each kind."""

    effective: float  # groups whose answers earn different rewards
    unsolved: float  # groups in which all answers earn the same and not all are right
    solved: float  # groups in which every answer is right
    zero_advantage: float  # share of completions (not of groups) that give no gradient


def _recent_group_shares(facts: Facts) -> _GroupShares | None:
    """The share of each kind of group (answers to one task) over the last steps; None if there are
    too few steps."""
    zero_advantage = recent_mean(facts.series("zero_advantage_share"))
    effective = recent_mean(facts.series("groups_effective"))
    unsolved = recent_mean(unsolved_shares(facts.lines))
    if zero_advantage is None or effective is None or unsolved is None:
        return None
    solved = mean(facts.recent("groups_too_easy") or [0.0])  # 0 if it was not logged
    return _GroupShares(effective, unsolved, solved, zero_advantage)


def _same_text_finding(facts: Facts, shares: _GroupShares) -> Finding:
    """The finding that the answers of each group (all to one task) were the same text from the
    start on."""
    return Finding(
        "uniform_groups",
        _no_advantage_text(shares, "the answers of a group are the same text"),
        _group_evidence(facts, shares, cause="equal texts"),
        # A temperature that is not known or 0 is taken as 1: raising it is not the advice then.
        _lever_for_same_text(facts.settings.temperature or 1.0),
        playbook="failures",
        examples="group",
        is_cause=True,
    )


def _equal_rewards_finding(facts: Facts, shares: _GroupShares) -> Finding:
    """The finding that the answers of a group (all to one task) differ, but earn the same.

    The advice is to change the reward, the choice of tasks, or the group size.
    """
    if facts.recent_view_values("solved_share") and _right_is_not_paid(facts):
        edit = "score(): a right answer earns what a wrong one does: pay what success means"
        playbook_section = "rewards"
    elif _larger_groups_differ(facts, shares):
        return _small_groups_finding(facts, shares)
    elif shares.solved < limits.TINY_EFFECTIVE_SHARE:
        edit = "score(): pay part of the way, each tier provably harder than the one before"
        playbook_section = "rewards"
    else:
        edit = "tasks between the two ends: leave out those solved always and those solved never"
        playbook_section = "curriculum"
    return Finding(
        "uniform_groups",
        _no_advantage_text(shares, "the answers of a group differ, but not what they are paid"),
        _group_evidence(facts, shares, cause="equal rewards"),
        edit_lever(edit),
        playbook=playbook_section,
        examples="group",
    )


def _right_is_not_paid(facts: Facts) -> bool:
    """Whether some answers are right and some wrong, and all earn the same reward."""
    solved_share = recent_mean(facts.view_values("solved_share"))
    usual_share = recent_mean(facts.view_values("usual_share"))
    if solved_share is None or usual_share is None:
        return False
    is_mixed = limits.HARDLY_SOLVED_SHARE < solved_share < limits.NEARLY_ALL_SOLVED_SHARE
    # A few may differ, as many as may fail to be scored.
    nearly_all_earn_the_same = usual_share >= 1 - limits.HIGH_ERROR_SHARE
    return is_mixed and nearly_all_earn_the_same


def _larger_groups_differ(facts: Facts, shares: _GroupShares) -> bool:
    """Whether groups are small, and groups of the usual size would hold different rewards."""
    group_size = facts.settings.group_size or limits.USUAL_GROUP_SIZE
    solved_share = recent_mean(facts.view_values("solved_share"))
    if group_size > limits.SMALL_GROUP_SIZE or solved_share is None:
        return False
    # The chance that a group has right and wrong answers, if all tasks were equally hard.
    all_right_chance = solved_share**limits.USUAL_GROUP_SIZE
    all_wrong_chance = (1 - solved_share) ** limits.USUAL_GROUP_SIZE
    differing_share = 1 - all_right_chance - all_wrong_chance
    return differing_share >= max(limits.LOW_EFFECTIVE_SHARE, 2 * shares.effective)


def _small_groups_finding(facts: Facts, shares: _GroupShares) -> Finding:
    """The finding that groups are too small to hold a right answer and a wrong one."""
    group_size = facts.settings.group_size
    text = _no_advantage_text(shares, f"groups of {group_size} seldom hold two different rewards")
    lever = setting_lever(
        "group_size",
        now=group_size,
        to=limits.USUAL_GROUP_SIZE,
        why="fewer prompts_per_step cost as much",
    )
    evidence = _group_evidence(facts, shares, cause="small groups")
    return Finding("uniform_groups", text, evidence, lever, playbook="failures", examples="group")


def solved(facts: Facts) -> Finding | None:
    """Detect that a run came to solve all its tasks, and continued without a gradient. Returns None
    for a run that solved them from the start (see `too_easy`)."""
    solved_group_shares = facts.series("groups_too_easy")  # of groups with right answers only
    heldout_shares = facts.curve_values("heldout_success")
    heldout_share = heldout_shares[-1] if heldout_shares else None
    # If the held-out tasks are solved too, an occasional wrong sample teaches little.
    heldout_solved = heldout_share is not None and heldout_share >= limits.NEARLY_ALL_SOLVED_SHARE
    solved_level = limits.MOSTLY_SOLVED_SHARE if heldout_solved else limits.ALL_SOLVED_SHARE
    solved_steps = _last_steps_above(solved_group_shares, solved_level)
    if solved_steps < limits.FEWEST_SOLVED_STEPS or too_easy(facts) is not None:
        return None
    last_step, _ = facts.curve("groups_too_easy")[-1]
    return _solved_finding(facts, last_step - solved_steps, solved_steps, heldout_share)


def _last_steps_above(shares: Sequence[float], least_mean: float) -> int:
    """How many steps in a row, up to the last, have a moving mean of at least `least_mean`.

    `shares` has one value for each step; the moving mean is that of a step and the four before it.
    """
    count = 0
    for end in range(len(shares), limits.FEWEST_STEPS - 1, -1):  # backwards from the last step
        if mean(shares[end - limits.FEWEST_STEPS : end]) < least_mean:
            break
        count += 1
    return count


def _solved_finding(
    facts: Facts, solved_at: int, solved_steps: int, heldout_share: float | None
) -> Finding:
    """The finding that nearly all groups are solved since step `solved_at`, for `solved_steps`
    steps. `heldout_share` of the held-out tasks were solved last; None if not measured."""
    evidence = {
        "solved_since": solved_at,
        "steps_without_gradient": solved_steps,
        "groups_too_easy": mean(facts.series("groups_too_easy")[-limits.RECENT_STEPS :]),
        "heldout_success": heldout_share,
    }
    sentence = (
        f"Solved: since step {solved_at} nearly every group is right in every answer, so that "
        f"{solved_steps} steps taught next to nothing."
    )
    if heldout_share is not None and heldout_share < limits.ALL_SOLVED_SHARE - limits.HELDOUT_GAP:
        sentence += f" Of the held-out tasks {whole_percent(heldout_share)} are."
        lever = edit_lever("more training tasks, as various as the held-out ones")
    else:
        reason = "or harder tasks; stop_early=alert ends a run here"
        lever = setting_lever("steps", now=facts.settings.steps, to=solved_at, why=reason)
    return Finding("solved", sentence, evidence, lever, playbook="curriculum")


def _no_advantage_text(shares: _GroupShares, fault: str) -> str:
    """The sentence that completions have no advantage (no gradient); `fault` says why, as a main
    clause such as "the answers of a group are the same text"."""
    return (
        f"{whole_percent(shares.zero_advantage)} of the completions of the last steps have no "
        f"advantage: {fault}."
    )


def _group_evidence(facts: Facts, shares: _GroupShares, cause: str) -> dict[str, object]:
    """The numbers, by name, on groups (answers to one task) without a gradient; `cause` says what
    is equal in them."""
    return {
        "zero_advantage_share": shares.zero_advantage,
        "groups_effective": shares.effective,
        "groups_unsolved": shares.unsolved,
        "groups_too_easy": shares.solved,
        "distinct_in_group": recent_mean(facts.view_values("distinct_share")),
        "temperature": facts.settings.temperature,
        "group_size": facts.settings.group_size,
        "cause": cause,
    }


def _lever_for_same_text(temperature: float) -> Lever:
    """The advice (a lever) if the answers are one text: temperature 1, or another start model."""
    if temperature < 1.0:
        return setting_lever("temperature", now=temperature, to=1.0)
    return edit_lever("start from a checkpoint or a model that still gives several answers")


def too_hard(facts: Facts) -> Finding | None:
    """Detect that hardly any task is ever solved, and that partial progress is not rewarded either.

    Returns None in these cases:
        in a held-out evaluation (also step 0) a fair share of the tasks was solved;
        enough groups give a gradient, or too few steps are done to tell;
        the run learns, or solves more than hardly any task;
        the answers of a group are the same text (see `uniform_groups`).
    """
    heldout_shares = facts.curve_values("heldout_success")
    if any(share >= limits.FAIRLY_SOLVED_SHARE for share in heldout_shares):
        return None
    effective_share = recent_mean(facts.series("groups_effective"))
    if effective_share is None or effective_share >= limits.TINY_EFFECTIVE_SHARE:
        return None
    if is_learning(facts) or not never_solved(facts) or _same_text_from_start(facts):
        return None
    if plateau(facts) is not None:
        return None  # the detector `plateau` reports them
    return _too_hard_finding(facts, effective_share)


def _too_hard_finding(facts: Facts, effective_share: float) -> Finding:
    """The finding that the tasks are too hard, with the advice to train by SFT first.

    `effective_share` is the share of groups that still give a gradient.
    """
    solved_share = recent_mean(facts.view_values("solved_share"))
    evidence = {
        "groups_effective": effective_share,
        "groups_too_hard": mean(facts.recent("groups_too_hard") or [0.0]),
        "solved": solved_share,
        "reward_mean": recent_mean(facts.series("reward_mean")),
        "group_size": facts.settings.group_size,
    }
    solved_text = whole_percent(solved_share) if solved_share is not None else "hardly any"
    sentence = (
        f"{whole_percent(effective_share)} of the groups of the last steps carry a gradient and "
        f"{solved_text} of the answers are right: the tasks are too hard for now."
    )
    lever = edit_lever(
        'train by SFT on reference answers first (algorithm="sft"), then GRPO on it',
        Change(arguments={"algorithm": "sft"}),
    )
    # The examples are the best of the failed answers; without a share, success is not reported.
    where = "success == False" if solved_share is not None else ""
    return Finding(
        "too_hard", sentence, evidence, lever, playbook="curriculum", examples="best", where=where
    )


def too_easy(facts: Facts) -> Finding | None:
    """Detect that nearly all answers were right from the first steps on.

    Returns None in these cases:
        the run has too few steps, or learnt to solve its tasks;
        the environment does not report success;
        enough groups give a gradient all the same.
    """
    effective_shares = facts.series("groups_effective")[: limits.RECENT_STEPS]
    if len(effective_shares) < limits.FEWEST_STEPS:
        return None
    effective_share = mean(effective_shares)
    solved_share = mean_or_none(facts.view_values("solved_share")[: limits.FEWEST_STEPS])
    if solved_share is None or solved_share < limits.NEARLY_ALL_SOLVED_SHARE:
        return None
    solved_at_start = dict(facts.curve("heldout_success")).get(0, 0.0)
    # Sampled answers are sometimes wrong even if all greedy answers to held-out tasks are right.
    heldout_solved = solved_at_start >= limits.NEARLY_ALL_SOLVED_SHARE
    enough_share = limits.LOW_EFFECTIVE_SHARE if heldout_solved else limits.TINY_EFFECTIVE_SHARE
    if effective_share >= enough_share:  # enough groups still give a gradient
        return None
    return _too_easy_finding(facts, effective_share, solved_share)


def _too_easy_finding(facts: Facts, effective_share: float, solved_share: float) -> Finding:
    """The finding that the tasks are too easy.

    In the first steps `effective_share` of the groups gave a gradient, and `solved_share` of the
    answers were right.
    """
    evidence = {
        "groups_effective": effective_share,
        "groups_too_easy": mean(facts.series("groups_too_easy")[: limits.RECENT_STEPS] or [0.0]),
        "solved": solved_share,
        "heldout_success": dict(facts.curve("heldout_success")).get(0),
    }
    sentence = (
        f"{whole_percent(solved_share)} of the answers were right from the first steps on: there "
        "is nothing to select."
    )
    lever = edit_lever("harder tasks")
    return Finding("too_easy", sentence, evidence, lever, playbook="curriculum", examples="worst")


def entropy_collapse(facts: Facts) -> Finding | None:
    """Detect that the answers lost their variety (entropy) before the tasks were solved.

    They may lose it slowly or within the first steps. Returns None if they did not.
    """
    if plateau(facts) is not None:
        return None  # a plateau makes answers alike: the entropy is its effect
    return _entropy_lost_slowly(facts) or _entropy_lost_at_once(facts)


def _entropy_lost_slowly(facts: Facts) -> Finding | None:
    """Detect entropy that fell and stayed low, while tasks are unsolved and progress has stopped.

    Returns None in these cases:
        it is not known how many answers are right;
        the run has learnt to solve a good part of its tasks, which costs entropy too;
        the run still improved after the fall.
    """
    fall = _lasting_entropy_fall(facts.series("entropy"))
    if fall is None:
        return None
    solved_shares = facts.view_values("solved_share") or facts.series("heldout_success")
    if len(solved_shares) < 2:
        return None
    solved_start = mean(solved_shares[:START_STEPS])
    solved_end = mean(solved_shares[-limits.FEWEST_STEPS :])
    if _gained_much(solved_start, solved_end) or _nearly_all_solved(solved_end):
        return None
    if _still_rising(facts, fall.steps_since):
        return None
    return _lasting_fall_finding(facts, fall, solved_start, solved_end)


@dataclass(frozen=True)
class _EntropyFall:
    """The mean entropy (nats per token) at the start and at the end of a run, and how many steps
    ago it fell."""

    start: float
    end: float
    steps_since: int


def _lasting_fall_finding(
    facts: Facts, fall: _EntropyFall, solved_start: float, solved_end: float
) -> Finding:
    """The finding that entropy fell for good.

    `solved_start` and `solved_end` are the shares of right answers in the first and last steps.
    """
    entropy_left = fall.end / fall.start
    evidence = {
        "entropy_start": fall.start,
        "entropy": fall.end,
        "entropy_left": entropy_left,
        "flat_steps": fall.steps_since,
        "solved_start": solved_start,
        "solved": solved_end,
        "distinct_in_group": recent_mean(facts.view_values("distinct_share")),
    }
    sentence = (
        f"Entropy fell to {whole_percent(entropy_left)} of its start, and in the "
        f"{fall.steps_since} steps since right answers stay at {whole_percent(solved_end)}."
    )
    lever = lower_rate_lever(
        facts.settings.learning_rate, divisor=2, why="and go on from a step before the fall"
    )
    return Finding(
        "entropy_collapse", sentence, evidence, lever, playbook="stalls", examples="group"
    )


def _lasting_entropy_fall(entropies: Sequence[float]) -> _EntropyFall | None:
    """The fall of an entropy that was high at the start, fell and is low since long; else None.

    `entropies` has one value for each step, in nats per token.
    """
    if len(entropies) < limits.RECENT_STEPS + limits.ENTROPY_FLAT_STEPS:
        return None
    start, end = mean(entropies[:START_STEPS]), mean(entropies[-limits.FEWEST_STEPS :])
    low_entropy = limits.ENTROPY_LEFT_PART * start
    if start < limits.LEAST_START_ENTROPY or end >= low_entropy:
        return None
    steps_since = _steps_since_below(entropies, low_entropy)
    if steps_since < limits.ENTROPY_FLAT_STEPS:
        return None
    return _EntropyFall(start, end, steps_since)


def _gained_much(solved_start: float, solved_end: float) -> bool:
    """Whether the share of right answers went at least half of the way (`PART_OF_WAY`) from its
    start to 1."""
    way_to_all_solved = 1.0 - solved_start
    return solved_end >= solved_start + limits.PART_OF_WAY * way_to_all_solved


def _steps_since_below(values: Sequence[float], limit: float) -> int:
    """How many steps ago a series was below a limit for the first time; 0 if it never was.

    The mean of each step and the two before it is compared, so that a single low step does not
    count.
    """
    for index in range(2, len(values)):
        if mean(values[index - 2 : index + 1]) < limit:
            return len(values) - index
    return 0


def _entropy_lost_at_once(facts: Facts) -> Finding | None:
    """Detect entropy that fell within the first steps, in a run without a held-out gain.

    Returns None for a run without a verdict, or with the verdict "better".
    """
    if facts.comparison is None or facts.comparison.outcome.verdict == "better":
        return None
    entropy = _early_entropy_fall(facts.series("entropy"))
    against_start = _comparison_without_gain(facts)
    if entropy is None or against_start is None:
        return None
    return Finding(
        "entropy_collapse",
        _early_fall_text(entropy, against_start),
        _early_fall_evidence(facts, entropy, against_start),
        lower_rate_lever(facts.settings.learning_rate, divisor=3, why="from the start again"),
        playbook="stalls",
        examples="group",
        severity="low",  # the missing gain may be chance
    )


@dataclass(frozen=True)
class _Entropies:
    """The entropy in the first step, at the end of the first steps, and in the last steps."""

    start: float
    early: float
    end: float


def _early_fall_text(entropy: _Entropies, against_start: StartComparison) -> str:
    """The sentence on an entropy that fell within the first steps, while held-out results did not
    get better (`against_start` compares them with step 0)."""
    n = against_start.comparison.outcome.n
    steps = limits.ENTROPY_EARLY_STEPS
    return (
        f"Entropy fell from {entropy.start:.2g} to {entropy.early:.2g} within {steps} steps, and "
        f"held-out {against_start.measure} is not above its start ({against_start.before:.2g} to "
        f"{against_start.after:.2g} on {n} tasks, which may be chance)."
    )


def _early_fall_evidence(
    facts: Facts, entropy: _Entropies, against_start: StartComparison
) -> dict[str, object]:
    """The numbers, by name, on an entropy that fell at once without a gain over step 0."""
    effective_shares = facts.series("groups_effective")
    return {
        "entropy_start": entropy.start,
        "entropy_first_steps": entropy.early,
        "entropy": entropy.end,
        "heldout_start": against_start.before,
        "heldout": against_start.after,
        "n": against_start.comparison.outcome.n,
        "p": against_start.comparison.p,
        "groups_effective_start": mean_or_none(effective_shares[:1]),
        "groups_effective": mean_or_none(effective_shares[-limits.FEWEST_STEPS :]),
    }


def _early_entropy_fall(entropies: Sequence[float]) -> _Entropies | None:
    """The entropy of a run that lost it within the first steps and did not regain it; else None.

    Also None with too few steps, or with low entropy from the start. `entropies` has one value for
    each step.
    """
    if len(entropies) < 2 * limits.FEWEST_STEPS or entropies[0] < limits.LEAST_START_ENTROPY:
        return None
    entropy = _Entropies(
        start=entropies[0],
        # The second half of the first steps: the fall itself is over by then.
        early=mean(entropies[limits.ENTROPY_EARLY_STEPS // 2 : limits.ENTROPY_EARLY_STEPS]),
        end=mean(entropies[-limits.FEWEST_STEPS :]),
    )
    low_entropy = limits.ENTROPY_LEFT_PART * entropy.start
    if entropy.early >= low_entropy or entropy.end >= low_entropy:
        return None
    return entropy


def _comparison_without_gain(facts: Facts) -> StartComparison | None:
    """The last held-out evaluation compared with step 0, if its result is not above that of step 0.

    Returns None in these cases:
        neither success nor reward was measured both times;
        the result is above that of step 0;
        nearly all tasks are solved, so that the result could hardly rise.
    """
    against_start = facts.against_start
    if against_start is None or against_start.measure not in ("success", "reward"):
        return None
    before, after = against_start.before, against_start.after
    difference = against_start.comparison.difference
    if before is None or after is None or difference is None:
        return None
    has_gained = difference > 0
    can_hardly_gain = against_start.measure == "success" and _nearly_all_solved(after)
    if has_gained or can_hardly_gain:
        return None
    return against_start


def _same_text_from_start(facts: Facts) -> bool:
    """Whether the answers of a group (all to one task) were the same text in the first steps,
    without being right."""
    distinct_at_start = facts.view_values("distinct_share")[: limits.FEWEST_STEPS]
    if (
        len(distinct_at_start) < limits.FEWEST_STEPS
        or mean(distinct_at_start) > limits.LOW_DISTINCT_SHARE
    ):
        return False
    return _not_all_solved(facts)


def _nearly_all_solved(solved_share: float) -> bool:
    """Whether nearly all tasks are solved, so that exploration can hardly gain anything."""
    # The rest may be answers that the scorer cannot parse: up to UNPARSED is no finding.
    return solved_share >= 1 - limits.HIGH_UNPARSED_SHARE


def _not_all_solved(facts: Facts) -> bool:
    """Whether the first steps left tasks unsolved; True if success is not reported. Groups of equal
    answers are a fault only then: a model that knows its tasks answers equally."""
    solved_at_start = facts.view_values("solved_share")[: limits.FEWEST_STEPS]
    return not solved_at_start or mean(solved_at_start) < limits.NEARLY_ALL_SOLVED_SHARE


def _still_rising(facts: Facts, steps: int) -> bool:
    """Whether the run still improved clearly in its last `steps` steps.

    The second half of these steps is compared with the first: by the share of right answers, or by
    the reward if success is not reported. Returns False if the halves are too short to compare.
    """
    values = (facts.view_values("solved_share") or facts.series("reward_mean"))[-steps:]
    half_length = len(values) // 2
    if half_length < 2:
        return False
    rise = change_between(values[:half_length], values[-half_length:])
    is_beyond_noise = rise.z >= limits.RISING_Z
    return rise.change > limits.SMALL_SUCCESS_CHANGE and is_beyond_noise

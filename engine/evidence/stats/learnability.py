"""Can GRPO learn from these tasks? Statistics of answers that a base model sampled before a run.

Each task was sampled `n` times. A group (the answers to one task) teaches only if its members earn
different rewards, so the share of such groups at a given group size is what a step can work with.
Up to `n` that share is estimated without bias from the samples; beyond it, by a beta-binomial over
the tasks.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.format import whole_percent
from engine.evidence.stats.basics.distributions import pass_at_k
from engine.evidence.stats.inference import Interval, wilson
from engine.records.run_result import Advice, AnswerLengths, FailedScores, ProbeResult

GROUP_SIZES = (2, 4, 6, 8, 12, 16)
_PASS_AT = (1, 2, 4, 8, 16)  # each k for which pass@k is reported
CUT = 0.1  # above this share of answers cut at max_tokens, advise to raise it
LITTLE = 0.2  # below this share of groups with different rewards GRPO learns little
MANY = 0.4  # from this share of too hard (or too easy) tasks on, advise to leave them out at first
ALIKE = 0.35  # below this share of distinct answers a group repeats itself
ENOUGH = 0.85  # a group size is enough if it reaches this part of the best size's share
BROKEN = 0.2  # above this share of failed scores the other scores say nothing about the tasks

_SHARE_TO_START = 0.25  # share of groups that must hold a right answer for GRPO to be worthwhile


@dataclass(frozen=True)
class Sample:
    """One sampled answer.

    Attributes:
        reward: what the answer earned.
        success: whether the answer solves the task; None if the environment does not say.
        error: whether scoring failed.
        tokens: how many tokens the model wrote.
        cut: whether a limit ended the answer.
        text: the answer itself.
    """

    reward: float
    success: bool | None = None
    error: bool = False
    tokens: int = 0
    cut: bool = False
    text: str = ""

    @property
    def solved(self) -> bool:
        """Whether the answer is right: `success` if the environment reports it, else whether the
        reward is positive."""
        return self.reward > 0 if self.success is None else self.success


Samples = Sequence[Sample]


def learnability(groups: Sequence[Samples], group_size: int, max_tokens: int) -> ProbeResult:
    """Statistics of sampled answers to tasks that a run would train on, with advice and a summary.

    Args:
        groups: one sequence of samples per task.
        group_size: how many samples were drawn per task.
        max_tokens: how many tokens an answer was allowed.
    """
    result = _measurements(groups, group_size, max_tokens)
    return result.model_copy(update={"advice": advice(result), "summary": _summary(result)})


def _measurements(groups: Sequence[Samples], group_size: int, max_tokens: int) -> ProbeResult:
    """The statistics of the sampled answers, without advice and summary.

    `groups` has one sequence of samples per task; `group_size` samples were drawn for each, with at
    most `max_tokens` tokens.
    """
    samples = [sample for group in groups for sample in group]
    scored_groups = [[sample for sample in group if not sample.error] for group in groups]
    shares = _shares_by_difficulty(groups)  # of the tasks, by "effective", "too_easy", "too_hard"
    solve_counts = _solve_counts(groups)  # (samples, solved ones) of each task
    failed_scores = FailedScores(failed=sum(sample.error for sample in samples), of=len(samples))
    return ProbeResult(
        tasks=len(groups),
        samples_per_task=group_size,
        effective=shares["effective"].share,
        too_easy=shares["too_easy"].share,
        too_hard=shares["too_hard"].share,
        intervals={name: share.interval for name, share in shares.items()},
        pass_at_k=_mean_pass_at_k(solve_counts, group_size),
        gradient_share=_teaching_share_by_size(scored_groups),
        solved_counts=[solved for _, solved in solve_counts],
        reward_mean=_mean([sample.reward for sample in samples]),
        truncated_share=_mean([float(sample.cut) for sample in samples]),
        error_share=failed_scores.failed / max(1, len(samples)),
        failed_scores=failed_scores,
        distinct_share=_mean_distinct_share(scored_groups),
        length=_answer_lengths(samples, max_tokens),
    )


@dataclass(frozen=True)
class _TaskShare:
    """A share of the tasks, with the ends of its 95 % interval."""

    share: float
    interval: list[float]


def _shares_by_difficulty(groups: Sequence[Samples]) -> dict[str, _TaskShare]:
    """The shares of the tasks that are "effective", "too_easy" and "too_hard", with intervals. The
    shares are 0 without tasks."""
    task_count = len(groups)
    shares = {}
    for difficulty, count in _counts_by_difficulty(groups).items():
        interval = wilson(count, task_count)
        shares[difficulty] = _TaskShare(count / max(1, task_count), _interval_ends(interval))
    return shares


def _teaching_share_by_size(scored_groups: Sequence[Samples]) -> dict[str, float]:
    """The expected share of groups whose members earn different rewards, by group size (as text).

    `scored_groups` holds for each task the samples whose scoring did not fail.
    """
    return {str(size): round(teaching_share(scored_groups, size), 4) for size in GROUP_SIZES}


def _solve_counts(groups: Sequence[Samples]) -> list[tuple[int, int]]:
    """(number of samples, number solved) of each task that has samples; a failed score is not
    solved."""
    solve_counts = []
    for group in groups:
        if group:
            solved = sum(sample.solved and not sample.error for sample in group)
            solve_counts.append((len(group), solved))
    return solve_counts


def _mean_pass_at_k(solve_counts: Sequence[tuple[int, int]], group_size: int) -> dict[str, float]:
    """pass@k for each k of `_PASS_AT`, as a mean over the tasks with at least k samples.

    `solve_counts` holds (samples, solved samples) of each task. The result maps k as text to a
    share, such as {"4": 0.31}; a k above `group_size` is left out.
    """
    means = {}
    for k in _PASS_AT:
        if k <= group_size:
            chances = [pass_at_k(n, solved, k) for n, solved in solve_counts if n >= k]
            means[str(k)] = _mean(chances)
    return means


def _mean_distinct_share(groups: Sequence[Samples]) -> float:
    """The number of different texts in a group divided by its size, averaged over the groups."""
    shares = []
    for group in groups:
        if group:
            different_texts = {sample.text for sample in group}
            shares.append(len(different_texts) / len(group))
    return _mean(shares)


def _answer_lengths(samples: Samples, max_tokens: int) -> AnswerLengths:
    """The median and the 95th percentile of the answers' tokens, and how many tokens were
    allowed."""
    lengths = sorted(sample.tokens for sample in samples)
    return AnswerLengths(
        p50=_quantile(lengths, 0.5), p95=_quantile(lengths, 0.95), max_tokens=max_tokens
    )


def _counts_by_difficulty(groups: Sequence[Samples]) -> dict[str, int]:
    """How many tasks are "effective", "too_easy" and "too_hard"; some tasks are none of these.

    A task is effective if those of its samples that could be scored earned different rewards. If
    all earned the same, it is too easy if all of them were solved, else too hard.
    """
    counts = {"effective": 0, "too_easy": 0, "too_hard": 0}
    for group in groups:
        scored_samples = [sample for sample in group if not sample.error]
        if _rewards_differ(scored_samples):
            counts["effective"] += 1
        # A task with a failed score is neither: that sample might have earned another reward.
        elif scored_samples and len(scored_samples) == len(group):
            all_solved = all(sample.solved for sample in scored_samples)
            counts["too_easy" if all_solved else "too_hard"] += 1
    return counts


def _summary(result: ProbeResult) -> str:
    """One sentence: the share of tasks whose samples earned different rewards, with its interval.

    For example "40% of 50 tasks (28% to 54%) have rewards that differ within 8 samples". If scores
    failed, the sentence begins with their share.
    """
    low, high = result.intervals["effective"]
    interval = f"{whole_percent(low)} to {whole_percent(high)}"
    return _failed_scores_opening(result) + (
        f"{whole_percent(result.effective)} of {result.tasks} tasks ({interval}) have rewards that "
        f"differ within {result.samples_per_task} samples"
    )


def _failed_scores_opening(result: ProbeResult) -> str:
    """The share of failed scores as the opening of a sentence, such as "3% of the scores failed; ".

    It begins with "Not ready: " if so many failed that the other scores say nothing. Returns "" if
    none failed.
    """
    share = result.error_share
    if not share:
        return ""
    ready = "Not ready: " if share > BROKEN else ""
    return f"{ready}{whole_percent(share)} of the scores failed; "


def teaching_share(scored_groups: Sequence[Samples], size: int) -> float:
    """The expected share of groups of `size` answers whose members earn different rewards.

    `scored_groups` holds for each task the samples whose scoring did not fail. Returns 0 if there
    are no such samples.
    """
    usable_groups = [group for group in scored_groups if group]
    solve_counts = [(len(group), sum(sample.solved for sample in group)) for group in usable_groups]
    a, b = _solve_rate_prior(solve_counts)  # Beta(a, b): the solve rates over the tasks
    return _mean([_chance_of_different(group, size, a, b) for group in usable_groups])


def share_that_differs(success: float, size: int) -> float:
    """The share of groups of `size` answers that hold right and wrong answers, if every task is
    solved with probability `success`: 1 - p^n - (1 - p)^n. GRPO learns from these groups alone."""
    return 1.0 - success**size - (1.0 - success) ** size


def success_to_start(size: int) -> float:
    """The success rate at which a quarter of the groups of `size` answers hold a right one, so that
    GRPO has something to reinforce: 3.5 % for groups of 8."""
    return 1.0 - (1.0 - _SHARE_TO_START) ** (1.0 / size)


def _chance_of_different(group: Samples, size: int, a: float, b: float) -> float:
    """The chance that `size` answers to this task earn at least two different rewards.

    `group` are the samples of the task. Beta(a, b) is the distribution of solve rates over all
    tasks; it is used only if `size` exceeds the number of samples and all samples earned the same.
    """
    sample_count = len(group)
    # Rounded, so that a rounding error does not make two rewards out of one.
    count_of_reward = Counter(round(sample.reward, 9) for sample in group)
    if size <= sample_count:  # unbiased: count the subsets of this size that have one reward
        same_reward = sum(math.comb(count, size) for count in count_of_reward.values())
        return 1.0 - same_reward / math.comb(sample_count, size)
    if len(count_of_reward) > 1:  # take the shares among the samples as the true probabilities
        return 1.0 - sum((count / sample_count) ** size for count in count_of_reward.values())
    return _chance_of_mixed_results(group, size, a, b)


def _chance_of_mixed_results(group: Samples, size: int, a: float, b: float) -> float:
    """The chance that `size` answers to a task are neither all solved nor all unsolved.

    `group` are samples of the task, all solved or all unsolved. They update Beta(a, b), the
    distribution of solve rates over all tasks. Returns 0 if `a` or `b` is 0, which means that all
    answers to all tasks had the same result.
    """
    if not a or not b:
        return 0.0
    solved_count = len(group) if group[0].solved else 0
    a, b = a + solved_count, b + len(group) - solved_count
    return 1.0 - _chance_all_succeed(a, b, size) - _chance_all_succeed(b, a, size)


def _chance_all_succeed(a: float, b: float, size: int) -> float:
    """The chance that `size` draws all succeed if their common success rate is distributed as
    Beta(a, b), as a beta-binomial has it."""
    # After i successes the chance of another one is (a + i) / (a + b + i). By logarithms, so that
    # the product of many small factors does not become 0.
    return math.exp(sum(math.log((a + i) / (a + b + i)) for i in range(size)))


def _solve_rate_prior(solve_counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The parameters (a, b) of the beta distribution of the tasks' solve rates, by the method of
    moments.

    `solve_counts` holds (samples, solved samples) of each task. Returns (0, 0) if all samples were
    solved, or none was.
    """
    sample_count = sum(n for n, _ in solve_counts)
    solved_count = sum(solved for _, solved in solve_counts)
    mean = solved_count / sample_count if sample_count else 0.0
    if not 0.0 < mean < 1.0:
        return 0.0, 0.0
    correlation = _correlation_within_tasks(solve_counts, mean)
    # Keep it away from 0 and 1, at which the sum of a and b would be infinite or 0.
    correlation = min(max(correlation, 1e-3), 0.999)
    a_plus_b = 1.0 / correlation - 1.0
    return mean * a_plus_b, (1.0 - mean) * a_plus_b


def _correlation_within_tasks(solve_counts: Sequence[tuple[int, int]], mean: float) -> float:
    """The correlation of two samples of one task: 1 if they always agree, 0 if only by chance.

    `solve_counts` holds (samples, solved samples) of each task; `mean` is the share of solved
    samples, above 0 and below 1.
    """
    samples_per_task = sum(n for n, _ in solve_counts) / len(solve_counts)
    if samples_per_task <= 1:  # one sample per task shows no correlation: assume a middle value
        return 0.5
    variance_of_rates = _mean([(solved / n - mean) ** 2 for n, solved in solve_counts])
    variance_of_sample = mean * (1.0 - mean)
    # Even between equal tasks the rates of n samples vary by 1 / n of a sample's variance.
    part_by_chance = 1.0 / samples_per_task
    part_beyond_chance = variance_of_rates / variance_of_sample - part_by_chance
    return part_beyond_chance / (1.0 - part_by_chance)


def advice(result: ProbeResult) -> list[Advice]:
    """What to change before a run, the most important first. Returns [] if there is nothing to
    change.

    If too many scores failed, that is the only advice, because the other numbers mean nothing.
    """
    if result.error_share > BROKEN:
        return _score_advice(result)
    return [
        *_score_advice(result),
        *_length_advice(result),
        *_difficulty_advice(result),
        *_variety_advice(result),
        *_group_size_advice(result),
    ]


def _score_advice(result: ProbeResult) -> list[Advice]:
    """The advice to mend the scorer if any scoring failed, else []."""
    if not result.error_share:
        return []
    text = f"{whole_percent(result.error_share)} of the scores failed: mend score() and push again"
    return [Advice(lever="score", say=text)]


def _length_advice(result: ProbeResult) -> list[Advice]:
    """The advice to allow longer answers if many were cut at `max_tokens`, else []."""
    if result.length is None or result.truncated_share <= CUT:
        return []
    allowed_tokens = result.length.max_tokens
    text = (
        f"{whole_percent(result.truncated_share)} of the answers are cut at {allowed_tokens} "
        f"tokens: raise max_tokens to {2 * allowed_tokens}, or ask for shorter answers"
    )
    return [Advice(lever="max_tokens", say=text)]


def _variety_advice(result: ProbeResult) -> list[Advice]:
    """The advice to raise the temperature if the answers to a task are nearly equal, else []."""
    if result.distinct_share is None:  # it was not measured
        return []
    # If the answers to half of the tasks earn different rewards, there is enough variety, however
    # similar the texts are.
    if result.distinct_share >= ALIKE or result.effective >= 0.5:
        return []
    text = "the answers of a group are nearly the same: raise temperature"
    return [Advice(lever="temperature", say=text)]


def _difficulty_advice(result: ProbeResult) -> list[Advice]:
    """The advice if the tasks are too hard or too easy, else [].

    If hardly any task teaches (its answers earn different rewards), the advice is to change the
    start or the data. If many tasks are too hard or too easy, it is to leave those out at first.
    """
    hardly_any_teaches = result.effective < LITTLE
    if hardly_any_teaches and result.too_hard > 0 and result.too_hard >= result.too_easy:
        text = "hardly any answer is right: train by SFT first, or give partial credit"
        return [Advice(lever="sft", say=text)]
    if hardly_any_teaches and result.too_easy > 0:
        return [Advice(lever="data", say="the tasks are solved already: take harder ones")]
    part_to_leave_out = _part_to_leave_out(result)
    return [Advice(lever="curriculum", say=part_to_leave_out)] if part_to_leave_out else []


def _part_to_leave_out(result: ProbeResult) -> str:
    """A sentence on the tasks to leave out at first, because they are too hard or too easy. "" if
    few tasks are."""
    if result.too_hard >= MANY:
        return (
            f"{whole_percent(result.too_hard)} of the tasks are never solved: start on the others, "
            "in a version of the environment without them"
        )
    if result.too_easy >= MANY:
        return (
            f"{whole_percent(result.too_easy)} of the tasks are always solved: leave them out, "
            "they cost samples and teach nothing"
        )
    return ""


def _group_size_advice(result: ProbeResult) -> list[Advice]:
    """The advice to use another group size.

    Returns [] if the size used is about right, or if hardly any group would teach at any size.
    """
    highest_share = max(result.gradient_share.values())
    # If hardly any task gets answers of different rewards, no group size would help.
    if result.effective < LITTLE / 2 or highest_share <= 0:
        return []
    text = _better_group_size(result, ENOUGH * highest_share)
    return [Advice(lever="group_size", say=text)] if text else []


def _better_group_size(result: ProbeResult, share_wanted: float) -> str:
    """A sentence that recommends the smallest group size at which enough groups teach.

    A group teaches if its answers earn different rewards; enough is the share `share_wanted`, which
    at least one size must reach. Returns "" if the smallest such size is close to the one used.
    """
    size_used = result.samples_per_task
    # Group size (as text, a JSON key) -> share of groups that teach, in ascending order of sizes.
    share_by_size = result.gradient_share
    sufficient_sizes = [int(size) for size, share in share_by_size.items() if share >= share_wanted]
    better_size = sufficient_sizes[0]
    share_text = whole_percent(share_by_size[str(better_size)])
    if better_size > size_used:
        return (
            f"group_size {better_size} would give {share_text} of the groups "
            f"something to tell apart, {size_used} gives {whole_percent(result.effective)}"
        )
    if better_size <= size_used / 2:
        return (
            f"group_size {better_size} carries nearly as much ({share_text} of the "
            f"groups) as {size_used}: use it with more prompts_per_step"
        )
    return ""


def _rewards_differ(group: Samples) -> bool:
    """Whether the samples of a group earned at least two different rewards.

    Rewards are rounded first, so that a rounding error is no difference.
    """
    return len({round(sample.reward, 9) for sample in group}) > 1


def _interval_ends(interval: Interval) -> list[float]:
    """The low and the high end of an interval, rounded for a result."""
    return [round(interval.low, 4), round(interval.high, 4)]


def _mean(values: Sequence[float]) -> float:
    """The mean of the values; 0 if there are none."""
    return math.fsum(values) / len(values) if values else 0.0


def _quantile(sorted_values: Sequence[int], share: float) -> int:
    """The value at `share` (0 to 1) of a sorted sequence; 0 if it is empty."""
    if not sorted_values:
        return 0
    index = round(share * (len(sorted_values) - 1))
    return sorted_values[index]

"""Is there anything for GRPO to select? What sampled answers of a base model say before a run.

Each task was sampled `n` times. A group teaches only where its members earn different rewards, so
the share of such groups at a group size is what a step has to work with. Up to `n` that share is
estimated without bias from the samples; beyond it, by a beta-binomial over the tasks.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.evidence.stats.inference import Interval, pass_at_k, wilson
from engine.records.probe_result import Advice, AnswerLengths, FailedScores, ProbeResult

GROUP_SIZES = (2, 4, 6, 8, 12, 16)
CUT = 0.1  # above this share of answers cut at max_tokens there is an advice about it
LITTLE = 0.2  # below this share of groups with different rewards GRPO learns little
MANY = 0.4  # from this share of too hard (or too easy) tasks on, leave them out at first
ALIKE = 0.35  # below this share of distinct answers a group repeats itself
ENOUGH = 0.85  # a group size is enough if it reaches this part of the best size's share
BROKEN = 0.2  # above this share of failed scores the other scores say nothing about the tasks


@dataclass(frozen=True)
class Sample:
    """One sampled answer.

    Attributes:
        reward: what it earned.
        success: whether it solves the task; None where the environment does not say.
        error: whether scoring failed.
        tokens: how many tokens the model wrote.
        cut: whether a limit ended the answer.
        said: the text of the answer.
    """

    reward: float
    success: bool | None = None
    error: bool = False
    tokens: int = 0
    cut: bool = False
    said: str = ""

    @property
    def solved(self) -> bool:
        """Success where the environment says so, else a positive reward."""
        return self.reward > 0 if self.success is None else self.success


Samples = Sequence[Sample]


def learnability(groups: Sequence[Samples], group_size: int, max_tokens: int) -> ProbeResult:
    """What sampled answers say about training on these tasks, with advice.

    The result holds the shares of tasks that teach, are too easy or too hard, pass@k, the expected
    share of groups that teach for each group size, answer lengths, advice and a summary.

    Args:
        groups: one sequence of samples per task.
        group_size: how many samples were drawn per task.
        max_tokens: how many tokens an answer was allowed.
    """
    scored = [[s for s in group if not s.error] for group in groups]
    mixed = [group for group in scored if _rewards_differ(group)]
    # A task is called too easy or too hard only if none of its scores failed: the answers whose
    # scores fail are seldom those that are right.
    uniform = [g for g in groups if g and not _rewards_differ(g) and not any(s.error for s in g)]
    easy = sum(all(s.solved for s in g) for g in uniform)
    counts = {"effective": len(mixed), "too_easy": easy, "too_hard": len(uniform) - easy}
    samples = [sample for group in groups for sample in group]
    solved = [(len(g), sum(s.solved and not s.error for s in g)) for g in groups if g]
    failed = sum(sample.error for sample in samples)
    lengths = sorted(sample.tokens for sample in samples)
    result = ProbeResult(
        tasks=len(groups),
        samples_per_task=group_size,
        effective=counts["effective"] / max(1, len(groups)),
        too_easy=counts["too_easy"] / max(1, len(groups)),
        too_hard=counts["too_hard"] / max(1, len(groups)),
        intervals={name: _ends(wilson(count, len(groups))) for name, count in counts.items()},
        pass_at_k={
            str(k): _mean([pass_at_k(n, c, k) for n, c in solved if n >= k])
            for k in (1, 2, 4, 8, 16)
            if k <= group_size
        },
        gradient_share={str(size): round(teaches(scored, size), 4) for size in GROUP_SIZES},
        solved_counts=[c for _, c in solved],
        reward_mean=_mean([sample.reward for sample in samples]),
        truncated_share=_mean([float(sample.cut) for sample in samples]),
        error_share=failed / max(1, len(samples)),
        failed_scores=FailedScores(failed=failed, of=len(samples)),
        distinct_share=_mean([len({s.said for s in g}) / len(g) for g in scored if g]),
        length=AnswerLengths(
            p50=_quantile(lengths, 0.5), p95=_quantile(lengths, 0.95), max_tokens=max_tokens
        ),
    )
    return result.model_copy(update={"advice": advice(result), "summary": _summary(result)})


def _summary(result: ProbeResult) -> str:
    """One sentence: the share of tasks whose samples earned different rewards, with interval."""
    low, high = result.intervals["effective"]
    return _failed_scores_opening(result) + (
        f"{result.effective:.0%} of {result.tasks} tasks ({low:.0%} to {high:.0%}) have rewards "
        f"that differ within {result.samples_per_task} samples"
    )


def _failed_scores_opening(result: ProbeResult) -> str:
    """The share of failed scores as the opening of a sentence; "" where none failed."""
    share = result.error_share
    if not share:
        return ""
    ready = "Not ready: " if share > BROKEN else ""
    return f"{ready}{share:.0%} of the scores failed; "


def teaches(scored: Sequence[Samples], size: int) -> float:
    """The expected share of groups of `size` whose members earn different rewards.

    `scored` holds for each task its samples whose scoring did not fail; 0 without any.
    """
    usable = [group for group in scored if group]
    a, b = _solve_rate_prior([(len(g), sum(s.solved for s in g)) for g in usable])
    return _mean([_chance_of_different(group, size, a, b) for group in usable])


def _chance_of_different(group: Samples, size: int, a: float, b: float) -> float:
    """The chance that `size` answers to this task earn at least two different rewards.

    Up to the number of samples it is estimated from them without bias. Beyond it, the samples'
    shares of rewards are taken as the true ones; where all samples earned the same, the solve rate
    is Beta(a, b), the distribution over all tasks, updated by these samples.
    """
    n = len(group)
    rewards = Counter(round(sample.reward, 9) for sample in group)
    if size <= n:
        same_reward = sum(math.comb(count, size) for count in rewards.values())
        return 1.0 - same_reward / math.comb(n, size)
    if len(rewards) > 1:
        return 1.0 - sum((count / n) ** size for count in rewards.values())
    if not a or not b:  # all answers to all tasks were solved, or none was
        return 0.0
    solved = n if group[0].solved else 0
    a, b = a + solved, b + n - solved
    return 1.0 - _chance_all_succeed(a, b, size) - _chance_all_succeed(b, a, size)


def _chance_all_succeed(a: float, b: float, size: int) -> float:
    """The chance that `size` draws all succeed when their rate is Beta(a, b)."""
    return math.exp(sum(math.log((a + i) / (a + b + i)) for i in range(size)))


def _solve_rate_prior(solved: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The parameters (a, b) of a beta distribution of the tasks' solve rates, by moments.

    `solved` holds (samples, solved samples) of each task. (0, 0) where all samples were solved, or
    none was.
    """
    total = sum(n for n, _ in solved)
    mean = sum(c for _, c in solved) / total if total else 0.0
    if not 0.0 < mean < 1.0:
        return 0.0, 0.0
    per_task = total / len(solved)
    spread = _mean([(c / n - mean) ** 2 for n, c in solved])
    binomial = mean * (1.0 - mean)  # variance of one sample
    # The correlation of two samples of one task; one sample each cannot tell it: half is assumed.
    correlation = (
        (spread / binomial - 1.0 / per_task) / (1.0 - 1.0 / per_task) if per_task > 1 else 0.5
    )
    weight = 1.0 / min(max(correlation, 1e-3), 0.999) - 1.0
    return mean * weight, (1.0 - mean) * weight


def advice(result: ProbeResult) -> list[Advice]:
    """What to change before a run, the most important first; [] where nothing stands out.

    Where too many scores failed that is the only advice: the other numbers mean nothing then.
    """
    items: list[Advice] = []

    def add(lever: str, text: str) -> None:
        """Adds an advice; `lever` names the setting or part to change."""
        items.append(Advice(lever=lever, say=text))

    if result.error_share:
        add("score", f"{result.error_share:.0%} of the scores failed: mend score() and push again")
    if result.error_share > BROKEN:
        return items
    if result.length is not None and result.truncated_share > CUT:
        allowed = result.length.max_tokens
        add(
            "max_tokens",
            f"{result.truncated_share:.0%} of the answers are cut at {allowed} "
            f"tokens: raise max_tokens to {2 * allowed}, or ask for shorter answers",
        )
    if text := _difficulty(result):
        add(*text)
    distinct = 1.0 if result.distinct_share is None else result.distinct_share
    if distinct < ALIKE and result.effective < 0.5:
        add("temperature", "the answers of a group are nearly the same: raise temperature")
    if text := _better_group_size(result):
        add("group_size", text)
    return items


def _difficulty(result: ProbeResult) -> tuple[str, str] | None:
    """The advice (lever, sentence) where the tasks are too hard or too easy; else None."""
    if result.effective < LITTLE and result.too_hard >= max(result.too_easy, 1e-9):
        text = "hardly any answer is right: train by SFT first, or give partial credit"
        return "sft", text
    if result.effective < LITTLE and result.too_easy:
        return "data", "the tasks are solved already: take harder ones"
    if result.too_hard >= MANY:
        return "curriculum", (
            f"{result.too_hard:.0%} of the tasks are never solved: start on the others, in a "
            "version of the environment without them"
        )
    if result.too_easy >= MANY:
        return "curriculum", (
            f"{result.too_easy:.0%} of the tasks are always solved: leave them out, they cost "
            "samples and teach nothing"
        )
    return None


def _better_group_size(result: ProbeResult) -> str:
    """A sentence about the group size that would do better.

    That is the smallest size that is nearly as good as the best. "" where the size used is about
    right, or where hardly any group would teach at any size.
    """
    shares, used = result.gradient_share, result.samples_per_task
    highest = max(shares.values())
    if result.effective < LITTLE / 2 or highest <= 0:
        return ""
    enough = next(int(size) for size, share in shares.items() if share >= ENOUGH * highest)
    share = f"{shares[str(enough)]:.0%}"
    if enough > used:
        return (
            f"group_size {enough} would give {share} of the groups "
            f"something to tell apart, {used} gives {result.effective:.0%}"
        )
    if enough <= used / 2:
        return (
            f"group_size {enough} carries nearly as much ({share} of the "
            f"groups) as {used}: use it with more prompts_per_step"
        )
    return ""


def _rewards_differ(group: Samples) -> bool:
    """Whether the samples of a group earned at least two different rewards."""
    return len({round(sample.reward, 9) for sample in group}) > 1


def _ends(interval: Interval) -> list[float]:
    """The low and the high end of an interval, rounded for a result."""
    return [round(interval.low, 4), round(interval.high, 4)]


def _mean(values: Sequence[float]) -> float:
    """The mean; 0 without values."""
    return math.fsum(values) / len(values) if values else 0.0


def _quantile(ordered: Sequence[int], share: float) -> int:
    """The value at `share` (0 to 1) of a sorted sequence; 0 where it is empty."""
    return ordered[round(share * (len(ordered) - 1))] if ordered else 0

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
CUT = 0.1  # share of answers cut at max_tokens that is worth an advice
LITTLE = 0.2  # share of groups with variance below which GRPO learns little
MANY = 0.4  # share of tasks out of reach, or solved, from which the rest is better taken first
ALIKE = 0.35  # share of distinct answers in a group below which it says the same again and again
ENOUGH = 0.85  # of what the largest group would carry
BROKEN = 0.2  # share of scores that failed above which the others say nothing of the tasks


@dataclass(frozen=True)
class Sample:
    """One sampled answer. `tokens` are those the model said; `cut` when a limit ended it."""

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
    """Shares, pass@k, expected share of groups that teach by group size, lengths and advice.

    Args:
        groups: one sequence of samples per task.
        max_tokens: what an answer was allowed.
    """
    scored = [[s for s in group if not s.error] for group in groups]
    mixed = [group for group in scored if _mixed(group)]
    # What is left of a group is no judgement of its task where a score of it failed: the answers
    # whose scores fail are seldom those that are right.
    whole = [g for g in groups if g and not _mixed(g) and not any(s.error for s in g)]
    easy = sum(all(s.solved for s in g) for g in whole)
    counts = {"effective": len(mixed), "too_easy": easy, "too_hard": len(whole) - easy}
    everything = [sample for group in groups for sample in group]
    solved = [(len(g), sum(s.solved and not s.error for s in g)) for g in groups if g]
    failed = sum(sample.error for sample in everything)
    lengths = sorted(sample.tokens for sample in everything)
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
        reward_mean=_mean([sample.reward for sample in everything]),
        truncated_share=_mean([float(sample.cut) for sample in everything]),
        error_share=failed / max(1, len(everything)),
        failed_scores=FailedScores(failed=failed, of=len(everything)),
        distinct_share=_mean([len({s.said for s in g}) / len(g) for g in scored if g]),
        length=AnswerLengths(
            p50=_quantile(lengths, 0.5), p95=_quantile(lengths, 0.95), max_tokens=max_tokens
        ),
    )
    return result.model_copy(update={"advice": advice(result), "summary": _summary(result)})


def _summary(result: ProbeResult) -> str:
    low, high = result.intervals["effective"]
    return _scores_failed(result) + (
        f"{result.effective:.0%} of {result.tasks} tasks ({low:.0%} to {high:.0%}) have rewards "
        f"that differ within {result.samples_per_task} samples"
    )


def _scores_failed(result: ProbeResult) -> str:
    """The failed scores of a probe as the opening of a sentence, "" without any."""
    share = result.error_share
    if not share:
        return ""
    ready = "Not ready: " if share > BROKEN else ""
    return f"{ready}{share:.0%} of the scores failed; "


def teaches(scored: Sequence[Samples], size: int) -> float:
    """The expected share of groups of `size` whose members earn different rewards."""
    usable = [group for group in scored if group]
    a, b = _population([(len(g), sum(s.solved for s in g)) for g in usable])
    return _mean([_differs(group, size, a, b) for group in usable])


def _differs(group: Samples, size: int, a: float, b: float) -> float:
    """The chance that `size` answers to this task earn at least two different rewards."""
    n = len(group)
    rewards = Counter(round(sample.reward, 9) for sample in group)
    if size <= n:
        alike = sum(math.comb(count, size) for count in rewards.values())
        return 1.0 - alike / math.comb(n, size)
    if len(rewards) > 1:
        return 1.0 - sum((count / n) ** size for count in rewards.values())
    if not a or not b:  # every answer to every task went the same way
        return 0.0
    solved = n if group[0].solved else 0
    a, b = a + solved, b + n - solved
    return 1.0 - _all_of(a, b, size) - _all_of(b, a, size)


def _all_of(a: float, b: float, size: int) -> float:
    """The chance that `size` draws all succeed when their rate is Beta(a, b)."""
    return math.exp(sum(math.log((a + i) / (a + b + i)) for i in range(size)))


def _population(solved: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Beta(a, b) of the tasks' solve rates by moments; (0, 0) where nothing ever differs."""
    total = sum(n for n, _ in solved)
    mean = sum(c for _, c in solved) / total if total else 0.0
    if not 0.0 < mean < 1.0:
        return 0.0, 0.0
    each = total / len(solved)
    spread = _mean([(c / n - mean) ** 2 for n, c in solved])
    chance = mean * (1.0 - mean)
    alike = (spread / chance - 1.0 / each) / (1.0 - 1.0 / each) if each > 1 else 0.5
    weight = 1.0 / min(max(alike, 1e-3), 0.999) - 1.0
    return mean * weight, (1.0 - mean) * weight


def advice(result: ProbeResult) -> list[Advice]:
    """What to change before a run, most important first."""
    items: list[Advice] = []

    def add(lever: str, text: str) -> None:
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
    if text := _group_size(result):
        add("group_size", text)
    return items


def _difficulty(result: ProbeResult) -> tuple[str, str] | None:
    """(lever, sentence) where the tasks are too hard or too easy for this model."""
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


def _group_size(result: ProbeResult) -> str:
    """Which group size would do better, "" where this one is right or nothing would teach."""
    shares, now = result.gradient_share, result.samples_per_task
    most = max(shares.values())
    if result.effective < LITTLE / 2 or most <= 0:
        return ""
    enough = next(int(size) for size, share in shares.items() if share >= ENOUGH * most)
    share = f"{shares[str(enough)]:.0%}"
    if enough > now:
        return (
            f"group_size {enough} would give {share} of the groups "
            f"something to tell apart, {now} gives {result.effective:.0%}"
        )
    if enough <= now / 2:
        return (
            f"group_size {enough} carries nearly as much ({share} of the "
            f"groups) as {now}: use it with more prompts_per_step"
        )
    return ""


def _mixed(group: Samples) -> bool:
    return len({round(sample.reward, 9) for sample in group}) > 1


def _ends(interval: Interval) -> list[float]:
    return [round(interval.low, 4), round(interval.high, 4)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _quantile(ordered: Sequence[int], share: float) -> int:
    return ordered[round(share * (len(ordered) - 1))] if ordered else 0

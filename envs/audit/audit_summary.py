"""The result of a reward audit in one line: what is paid, and the cause if something is wrong.

Gold is the reference answer; a probe is a kind of wrong or degenerate answer that was tried.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from envs.audit.probes import GOLD, LENGTHS, NEAR, OVERLONG

PAYS_FOR_LENGTH = "pays for length"
# If longer junk earns this much more than short junk, as a share of what gold earns, the scorer
# pays for length, which is a weakness.
LENGTH_PAYS = 0.1

Line = Mapping[str, Any]


def headline(
    risks: Sequence[str],
    weaknesses: Sequence[str],
    table: Sequence[Line],
    failing: tuple[int, int],
    covered: str,
) -> str:
    """Return one line about an audit: ok, warn or risk, what gold earns, and what is wrong.

    For example "risk: gold earns 1.00, but look at: filler 0.80 (40 of 200 rows scored)".

    Args:
        risks, weaknesses: names of probes or of other findings. Weaknesses are named only if there
            are no risks.
        table: one line per probe, with its `probe`, `mean` and `verdict`.
        failing: how many reference answers fail, and how many there are.
        covered: how many rows were scored, in words, e.g. "40 of 200 rows scored".
    """
    means = {line["probe"]: line["mean"] for line in table}
    gold = f"gold earns {means[GOLD]:.2f}" if GOLD in means else "there is no reference answer"
    names = risks or weaknesses
    if not names:
        return f"ok: {gold}{_best_degenerate_text(table)} ({covered})"
    verdict = "risk" if risks else "warn"
    return f"{verdict}: {gold}, but {_causes(names, means, failing)} ({covered})"


def _best_degenerate_text(table: Sequence[Line]) -> str:
    """Return the end of a sentence about the degenerate answer that earns most, e.g. ", the best
    degenerate answer (filler) 0.20"; "" if there is none. `table` has one line per probe."""
    best = best_degenerate(table)
    if best is None:
        return ""
    return f", the best degenerate answer ({best['probe']}) {best['mean']:.2f}"


def _causes(names: Sequence[str], means: Mapping[str, float], failing: tuple[int, int]) -> str:
    """Return in words what is wrong with a scorer.

    Args:
        names: the risks (probes and other findings); or the weaknesses, if there are no risks.
        means: each probe's mean reward.
        failing: how many reference answers fail, and how many there are.
    """
    causes = []
    if GOLD in names:  # how many fail says more than their mean reward
        failing_count, gold_count = failing
        causes.append(f"{failing_count} of {gold_count} reference answers fail")
    other_causes = [_with_means(name, means) for name in names if name != GOLD]
    if other_causes:
        causes.append(f"look at: {', '.join(other_causes)}")
    return "; ".join(causes)


def _with_means(name: str, means: Mapping[str, float]) -> str:
    """Return the name of a risk or weakness, followed by the mean rewards that show it.

    For example "filler 0.80", "pays for length (gold 0.50, with junk behind it 0.90)" or "pays for
    length (junk of one word 0.10, endless 0.40)". `means` maps each probe (a kind of planted
    answer, such as the reference answer, GOLD, or meaningless words of some length) to its mean
    reward. A name that is neither PAYS_FOR_LENGTH nor a probe is returned alone.
    """
    if name == PAYS_FOR_LENGTH:
        if _pays_for_junk(means):
            return f"{name} (gold {means[GOLD]:.2f}, with junk behind it {means[OVERLONG]:.2f})"
        shortest, longest = means[LENGTHS[0]], means[LENGTHS[-1]]
        return f"{name} (junk of one word {shortest:.2f}, endless {longest:.2f})"
    return f"{name} {means[name]:.2f}" if name in means else name


def best_degenerate(table: Sequence[Line]) -> Line | None:
    """Return the line of `table` about the degenerate probe with the highest mean reward; None if
    there is none.

    Degenerate are all probes except those shown for information only and near misses (NEAR).
    `table` has one line per probe.
    """
    degenerate = [line for line in table if line["verdict"] != "info" and line["probe"] not in NEAR]
    return max(degenerate, key=lambda line: line["mean"], default=None)


def pays_for_length(table: Sequence[Line]) -> bool:
    """Whether junk earns more the longer it is, or the right answer earns more with junk behind it.

    An increase counts from a tenth of what the right answer earns on. `table` has one line per
    probe.
    """
    means = {line["probe"]: line["mean"] for line in table}
    if _pays_for_junk(means):
        return True
    least_increase = _least_increase(means)
    # least_increase is 0 if gold earns nothing and all means are equal.
    if least_increase <= 0 or not all(name in means for name in LENGTHS):
        return False
    means_by_length = [means[name] for name in LENGTHS]  # of junk, the shortest first
    never_falls = means_by_length == sorted(means_by_length)
    return never_falls and means_by_length[-1] - means_by_length[0] >= least_increase


def _pays_for_junk(means: Mapping[str, float]) -> bool:
    """Whether the right answer earns clearly more with junk behind it; False if one of the two was
    not scored.

    `means` maps each probe to its mean reward.
    """
    least_increase = _least_increase(means)
    # least_increase is 0 if gold earns nothing and all means are equal.
    if least_increase <= 0 or OVERLONG not in means or GOLD not in means:
        return False
    return means[OVERLONG] - means[GOLD] >= least_increase


def _least_increase(means: Mapping[str, float]) -> float:
    """Return the smallest increase of a mean reward that counts as paying for length.

    It is the share LENGTH_PAYS (a tenth) of what gold (the reference answer) earns. If there is no
    gold, or gold earns 0 or less, it is that share of the distance between the highest and the
    lowest mean in `means` (probe -> mean).
    """
    gold_mean = means.get(GOLD, 0.0)
    if gold_mean > 0:
        return LENGTH_PAYS * gold_mean
    return LENGTH_PAYS * (max(means.values()) - min(means.values()))

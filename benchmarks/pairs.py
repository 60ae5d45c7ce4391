"""Rounds of measurements: the file they are kept in, their statistics, the table. No torch.

A round is one line of JSON: every side that took part, measured one after the other. Ratios are
taken inside a round and their median over the rounds is reported, which a busy moment moves least.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import LOSS_TOLERANCE, MATMUL_SHARE, Job

OURS = "ours"
Round = dict[str, Any]


def read(path: Path) -> list[Round]:
    """The whole rounds of a results file; a line that was cut short does not count."""
    rounds = []
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            parsed = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            continue
        if isinstance(parsed, dict) and "job" in parsed:
            rounds.append(parsed)
    return rounds


def append(path: Path, line: Round) -> None:
    """Add one round; a rest that an interrupted writer left behind is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")


def of(rounds: Iterable[Round], job: Job, key: str) -> list[Round]:
    """The rounds of one job that were measured with the same software and settings."""
    return [line for line in rounds if line["job"] == job.name and line.get("key") == key]


def due(job: Job, number: int) -> list[str]:
    """Who is measured in round `number` (from 0), in turns from either end."""
    sides = [OURS, *(v for v, most in job.case.variants.items() if not most or number < most)]
    return sides if number % 2 == 0 else sides[::-1]


@dataclass(frozen=True)
class Side:
    """Medians of one side over its rounds."""

    rate: float  # tokens/s for SFT, steps/s for GRPO
    rate_cpu: float  # the same per processor second
    rss_mb: float
    rounds: int


@dataclass(frozen=True)
class Verdict:
    """One line of the table: ours against one variant."""

    job: str
    variant: str
    rounds: int
    ours: float
    theirs: float
    ratio: float
    ratio_cpu: float
    target: float
    passed: bool | None  # None where nothing is asked for
    share: float  # of the faster library's matrix rate, ours
    torch_share: float  # of that of torch.matmul
    share_target: float  # of that of torch.matmul; 0 where none is asked for
    memory: float  # our peak over theirs
    memory_target: float  # 0 where none is asked for
    loss_gap: float | None


def side(rounds: Sequence[Round], name: str) -> Side | None:
    lines = [line[name] for line in rounds if name in line]
    if not lines:
        return None
    return Side(
        rate=statistics.median(entry["rate"] for entry in lines),
        rate_cpu=statistics.median(entry["rate_cpu"] for entry in lines),
        rss_mb=statistics.median(entry["rss_mb"] for entry in lines),
        rounds=len(lines),
    )


def ratio(rounds: Sequence[Round], variant: str, what: str = "rate") -> float:
    """Median over the rounds of ours by theirs. Raises ValueError when they never met."""
    ratios = [
        line[OURS][what] / line[variant][what]
        for line in rounds
        if OURS in line and variant in line and line[variant][what] > 0
    ]
    if not ratios:
        raise ValueError(f"no round holds both ours and {variant}")
    return statistics.median(ratios)


def best_variant(job: Job, rounds: Sequence[Round]) -> str | None:
    """The peer's fastest way, by its median rate."""
    rates = {v: found.rate for v in job.case.variants if (found := side(rounds, v))}
    return max(rates, key=lambda v: rates[v]) if rates else None


def loss_gap(rounds: Sequence[Round], variant: str) -> float | None:
    """The largest relative difference of any step's loss, over all rounds; None where losses of
    the two mean different things (other batches, or completions of their own)."""
    gaps = [
        abs(a - b) / abs(b)
        for line in rounds
        if OURS in line and variant in line and line[variant].get("same_batches")
        for a, b in zip(line[OURS]["losses"], line[variant]["losses"], strict=True)
        if b
    ]
    return max(gaps) if gaps else None


def share(rounds: Sequence[Round], rate: str = "matmul") -> float:
    """Our arithmetic per second by the matrix rate measured in the same round: "matmul" is that of
    the fastest library, "torch_matmul" that of `torch.matmul`.

    By the wall and, where it is known, per processor second; the smaller of the two counts, since
    other work on the machine may slow one side of a quotient alone.
    """
    ratios = [
        min(line[OURS][name] / gflops for name, gflops in line[rate].items())
        for line in rounds
        if OURS in line and line.get(rate)
    ]
    return statistics.median(ratios) if ratios else 0.0


def verdicts(job: Job, rounds: Sequence[Round]) -> list[Verdict]:
    """The lines of one job: one for each variant that was measured, one for the best of them."""
    ours, best = side(rounds, OURS), best_variant(job, rounds)
    if ours is None or best is None:
        return []
    lines = []
    shown = [v for v in job.case.variants if side(rounds, v)]
    for label, variant in [*((v, v) for v in shown), ("best", best)]:
        if label == "best" and not job.target("best"):
            continue
        theirs = side(rounds, variant)
        if theirs is None:
            continue
        asked, reached = job.target(label), ratio(rounds, variant)
        lines.append(
            Verdict(
                job=job.name,
                variant=f"best ({variant})" if label == "best" else variant,
                rounds=theirs.rounds,
                ours=ours.rate,
                theirs=theirs.rate,
                ratio=reached,
                ratio_cpu=ratio(rounds, variant, "rate_cpu"),
                target=asked,
                passed=(reached >= asked or share(rounds) >= MATMUL_SHARE) if asked else None,
                share=share(rounds),
                torch_share=share(rounds, "torch_matmul"),
                share_target=job.case.matmul if label == job.case.padded else 0.0,
                memory=ours.rss_mb / theirs.rss_mb,
                memory_target=job.case.memory if label == job.case.padded else 0.0,
                loss_gap=loss_gap(rounds, variant),
            )
        )
    return lines


def table(lines: Sequence[Verdict]) -> str:
    """The verdicts as a Markdown table, a job's memory and loss judged beside its ratios."""
    head = (
        "| job | TRL | rounds | ours | TRL's | ratio | per CPU-s | target "
        "| matmul share (of torch.matmul) | peak memory | loss gap | verdict |"
    )
    rows = [head, "|" + "---|" * 12]
    for line in lines:
        rows.append(
            f"| {line.job} | {line.variant} | {line.rounds} | {line.ours:,.4g} "
            f"| {line.theirs:,.4g} | **{line.ratio:.2f}** | {line.ratio_cpu:.2f} "
            f"| {line.target or '':} | {line.share:.0%} ({line.torch_share:.0%}) "
            f"| {line.memory:.2f} "
            f"| {'' if line.loss_gap is None else f'{line.loss_gap:.1e}'} | {judged(line)} |"
        )
    return "\n".join(rows)


def judged(line: Verdict) -> str:
    """pass, or everything that was missed."""
    missed = []
    if line.passed is False:
        missed.append("ratio")
    if line.torch_share < line.share_target:
        missed.append("matmul share")
    if line.memory_target and line.memory > line.memory_target:
        missed.append("memory")
    if line.loss_gap is not None and line.loss_gap > LOSS_TOLERANCE:
        missed.append("loss")
    if missed:
        return "MISS " + ", ".join(missed)
    if line.passed is None:
        return ""
    return "pass" if line.ratio >= line.target else f"pass ({MATMUL_SHARE:.0%} of matmul)"

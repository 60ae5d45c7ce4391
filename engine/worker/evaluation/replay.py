"""Rows that are replayed beside the run's own (setting `keep`), so that earlier skills are not
lost.

Training on a new task alone overwrites what a model could do. A share of earlier rows in every
batch prevents this (rehearsal: Robins, "Catastrophic forgetting, rehearsal and pseudorehearsal",
1995; with reinforcement learning: PPO-ptx, arXiv 2203.02155). Where the rows come from:
replay_rows.py.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from engine.core.files import write_text
from engine.records.lines.replayed_row import ReplayedRow
from engine.records.manifest import ReplayUsed
from engine.records.run_config import GRPOConfig, SFTConfig
from engine.records.settings import GRPOSettings, SFTSettings
from engine.worker.core.batch import Row
from engine.worker.core.job import Job, require
from engine.worker.evaluation.replay_rows import ReplaySource, Start

_HINT = (
    "Leave keep out, or name another environment whose rows are replayed (keep_env), or other "
    "answers to its tasks (keep_answers)."
)


@dataclass(frozen=True)
class Replay:
    """The rows to replay.

    Attributes:
        rows: all rows, of which each step takes some. If they come from two sources, the rows of
            the smaller one are repeated, so that both are replayed about as often.
        share: the share of a batch's rows that are replayed, above 0.
        seed: decides the order of the rows.
        used: what the manifest says of the rows.
        batch_rows: the most rows that a batch has in addition to the replayed ones.
    """

    rows: Sequence[Row]
    share: float
    seed: int
    used: ReplayUsed
    batch_rows: int

    def replayed_count(self, row_count: int) -> int:
        """Return how many replayed rows to add to `row_count` others so that the replayed ones make
        up `self.share` of the total; at least 1."""
        return replayed_count(row_count, self.share)

    def of_step(self, step: int, row_count: int, batch_size: int) -> list[Row]:
        """Return the replayed rows (earlier skills, kept alive) that join the batch of `step`,
        counted from 1.

        The batch has `row_count` rows of its own, which are at most `batch_size`. The replayed rows
        depend on the seed and the step only, so a resumed run trains on the same rows. Each
        row is used once before any is used again, except that a step with fewer than `batch_size`
        own rows skips some.
        """
        # Draws are numbered over the whole run, as if every earlier batch had been full.
        first_draw = (step - 1) * self.replayed_count(batch_size)
        draws = range(first_draw, first_draw + self.replayed_count(row_count))
        return [self.rows[self._index_of_draw(draw)] for draw in draws]

    def of_full_step(self, step: int) -> list[Row]:
        """Return the replayed rows of `step` if every batch has `self.batch_rows` rows of its
        own."""
        return self.of_step(step, self.batch_rows, self.batch_rows)

    def _index_of_draw(self, number: int) -> int:
        """Return the index in `rows` of draw `number`, counted from 0 over the whole run. Each
        round draws all rows once, in an order of its own."""
        round_number, position = divmod(number, len(self.rows))
        return _order_of_round(round_number, len(self.rows), self.seed)[position]


def replayed_count(row_count: int, share: float) -> int:
    """Return how many rows to add to `row_count` others so that the added ones make up `share`
    (above 0, below 1) of the total; at least 1."""
    return max(1, round(row_count * share / (1 - share)))


@lru_cache(maxsize=2)  # a step's rows may belong to two rounds
def _order_of_round(round_number: int, count: int, seed: int) -> list[int]:
    """Return the indices of `count` rows in the order in which this round draws them."""
    return random.Random(f"{seed}-keep-{round_number}").sample(range(count), count)


def replay_of(job: Job[SFTConfig] | Job[GRPOConfig], start: Start) -> Replay | None:
    """Collect the rows that the settings `keep`, `keep_env` and `keep_answers` ask for. `start` is
    the run before its first step, whose model may have to answer questions for that.

    The rows are written to `replayed.jsonl` and announced by the event `replayed`. Returns None if
    `keep` is 0. Also returns None, with the event `nothing_replayed`, if there is nothing to replay
    and `keep` is only a default.

    Raises:
        WorkerFailure: kind data, if there is nothing to replay although the user set `keep` or
            `keep_env`.
    """
    settings = job.config.settings
    if not settings.keep:
        return None
    needed = settings.steps * replayed_count(rows_of_batch(settings), settings.keep)
    rows, used = ReplaySource(job, start, needed).rows()
    # "user" is the source of a setting that was asked for; other values are only defaults.
    if "user" in (job.config.sources.get("keep"), job.config.sources.get("keep_env")):
        require(rows, f"rows to replay: {used.nothing}", _HINT)
    elif not rows:
        job.event("nothing_replayed", f"keep = {settings.keep:g} replays nothing: {used.nothing}")
        return None
    # Written whole, so that a new attempt after a kill replaces the file.
    write_text(job.run.replayed, "".join(json.dumps(row.to_line()) + "\n" for row in rows))
    job.event(
        "replayed",
        used.sentence,
        rows=used.rows,
        source=used.source,
        questions=used.questions,
    )
    return Replay(balanced(rows), settings.keep, settings.seed, used, rows_of_batch(settings))


def rows_of_batch(settings: SFTSettings | GRPOSettings) -> int:
    """Return the most rows that a step trains on in addition to the replayed ones; for GRPO these
    are its completions."""
    if isinstance(settings, GRPOSettings):
        return settings.prompts_per_step * settings.group_size
    return settings.batch_size


def balanced(rows: Sequence[ReplayedRow]) -> list[Row]:
    """Return the rows as they are trained. The rows of a smaller source are repeated as a whole, so
    that every source has about as many rows as the largest one."""
    rows_of_source: dict[str, list[Row]] = {}
    for row in rows:
        rows_of_source.setdefault(row.source, []).append(Row(row.ids, row.loss_mask))
    largest_count = max(len(source_rows) for source_rows in rows_of_source.values())
    repeated: list[Row] = []
    for source_rows in rows_of_source.values():
        repeated += source_rows * (largest_count // len(source_rows))
    return repeated

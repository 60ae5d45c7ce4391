"""What an environment's rows come to in tokens of a given model: the base of every default.

Lengths are counted once per environment version and tokenizer and kept in the home's cache, so
that a submit answers at once. At most `SAMPLE` rows are counted, a seeded sample beyond that.
"""

import contextlib
import hashlib
import json
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.core.files import write_json
from engine.environments import registry
from engine.environments.datasets import spread
from engine.home.run_dir import Home
from engine.models import tokens
from engine.models.chat_format import TemplateError
from engine.records.record import DamagedRecord, Record
from engine.records.settings import SFTSettings, TrainSettings
from envs.json_types import TaskRow, ToolSchema

SAMPLE = 2000
_VERSION = 1  # of the cache file; raise it when what is counted changes


@dataclass(frozen=True)
class RowLengths:
    """Tokens of one row.

    Attributes:
        prompt: the prompt, up to where the assistant goes on.
        total: the reference conversation up to the end of its last assistant turn; equal to
            `prompt` where a row has no answer.
        turns: (start, end) of each assistant turn of the reference conversation.
    """

    prompt: int
    total: int
    turns: tuple[tuple[int, int], ...] = ()

    def supervised(self, loss_on: str, max_length: int | None = None) -> int:
        """Tokens that carry loss when the row is cut at `max_length`."""
        end = self.total if max_length is None else min(self.total, max_length)
        if loss_on == "all":
            return max(0, end - 1) if self.turns else 0
        turns = self.turns[-1:] if loss_on == "last" else self.turns
        return sum(max(0, min(stop, end) - start) for start, stop in turns)

    @property
    def longest_turn(self) -> int:
        return max((stop - start for start, stop in self.turns), default=0)

    @property
    def answer(self) -> int:
        """Tokens of the turns that come after the prompt: what a policy would have to produce."""
        return sum(stop - start for start, stop in self.turns if stop > self.prompt)

    @property
    def answer_turns(self) -> int:
        return sum(1 for _, stop in self.turns if stop > self.prompt)


@dataclass(frozen=True)
class EnvFacts:
    """An environment version as settings and estimates need it.

    Attributes:
        env_id: `name@hash12`.
        kind: "single", "multi" or "sft" (no scorer).
        scored: whether it can score a completion.
        train_rows, heldout_rows: rows of each side.
        answered_rows: train rows with a reference answer, the ones SFT can learn from.
        lengths: of the train rows counted.
        duplicate_share: share of train rows whose prompt an earlier train row has.
        score_s: seconds one score takes (95th percentile of the audit); 0 where not known.
        refused: rows counted that the chat template refuses; `refusal`: its words for the first.
    """

    env_id: str
    kind: str
    scored: bool
    train_rows: int
    heldout_rows: int
    answered_rows: int
    lengths: tuple[RowLengths, ...] = ()
    duplicate_share: float = 0.0
    refused: int = 0
    refusal: str = ""
    score_s: float = 0.0

    @property
    def multi_turn(self) -> bool:
        return self.kind == "multi"

    @cached_property
    def longest_prompt(self) -> int:
        return max((row.prompt for row in self.lengths), default=0)

    @cached_property
    def longest_total(self) -> int:
        return max((row.total for row in self.lengths), default=0)

    @cached_property
    def longest_turn(self) -> int:
        """Longest single assistant turn of a reference answer; 0 where none is known."""
        return max((row.longest_turn for row in self.lengths), default=0)

    @cached_property
    def answers(self) -> tuple[int, ...]:
        """Tokens a policy produces to give each reference answer, rows without one left out."""
        return tuple(row.answer for row in self.lengths if row.answer)


def env_facts(
    home: Home, record: "registry.EnvRecord", model_folder: Path, *, thinking: bool = False
) -> EnvFacts:
    """Facts of a pushed environment in tokens of the model in `model_folder`.

    Raises UserError MODEL_UNSUPPORTED when the tokenizer or chat template cannot be read.
    """
    tokenizer = tokens.load(model_folder)
    key = f"{_VERSION} {record.env_id} {tokenizer.fingerprint} {thinking}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32] + ".json"
    cached = home.cache / "tokens" / name
    counted = _read(cached)
    if counted is None:
        counted = _count(registry.read_tasks(record), record.tools, tokenizer, thinking)
        with contextlib.suppress(OSError):  # a full disk: counted again by the next call
            cached.parent.mkdir(exist_ok=True)
            write_json(cached, counted.to_json(), fsync=False)
    lengths = tuple(
        RowLengths(prompt, total, tuple(turns)) for prompt, total, turns in counted.lengths
    )
    return EnvFacts(
        env_id=record.env_id,
        kind=record.kind,
        scored=record.scored,
        train_rows=counted.train_rows,
        heldout_rows=counted.heldout_rows,
        answered_rows=counted.answered_rows,
        lengths=lengths,
        duplicate_share=counted.duplicate_share,
        refused=counted.refused,
        refusal=counted.refusal,
        score_s=record.audit.score_seconds_p95,
    )


class _CountedRows(Record):
    """What is counted of a version's rows, as the home's cache keeps it.

    Attributes:
        lengths: (prompt, total, turns) of each counted row, as in RowLengths; the rest is as in
            EnvFacts.
    """

    train_rows: int
    heldout_rows: int
    answered_rows: int
    lengths: list[tuple[int, int, list[tuple[int, int]]]]
    duplicate_share: float
    refused: int
    refusal: str


def _read(path: Path) -> _CountedRows | None:
    """What the cache holds; None where it holds nothing, or nothing of this form."""
    try:
        return _CountedRows.read(path)
    except (OSError, DamagedRecord):
        return None


def _count(
    rows: list[TaskRow],
    tools: list[ToolSchema],
    tokenizer: tokens.ChatTokenizer,
    thinking: bool,
) -> _CountedRows:
    """Counts at most `SAMPLE` train rows; rows that the chat template refuses are counted apart."""
    train = [row for row in rows if row["split"] == "train"]
    chosen = train
    if len(train) > SAMPLE:
        chosen = random.Random(0).sample(train, SAMPLE)
    lengths, refused, refusal = [], 0, ""
    for row in chosen:
        try:
            lengths.append(_lengths(row, tools, tokenizer, thinking))
        except TemplateError as error:
            refused += 1
            refusal = refusal or f"row {row['id']}: {error}"
    prompts = {json.dumps(row["prompt"], sort_keys=True) for row in train}
    return _CountedRows(
        train_rows=len(train),
        heldout_rows=len(rows) - len(train),
        answered_rows=sum(1 for row in train if row.get("gold")),
        lengths=lengths,
        duplicate_share=1 - len(prompts) / len(train) if train else 0.0,
        refused=refused,
        refusal=refusal[:300],
    )


def _lengths(
    row: TaskRow,
    tools: list[ToolSchema],
    tokenizer: tokens.ChatTokenizer,
    thinking: bool,
) -> tuple[int, int, list[tuple[int, int]]]:
    """(prompt, total, turns) of one stored row, as in RowLengths."""
    chat = tokenizer.format(thinking)
    prompt = len(chat.prompt(row["prompt"], tools))
    if not row.get("gold"):
        return prompt, prompt, []
    whole = chat.conversation(row["gold"], tools)
    return prompt, len(whole.ids), list(whole.turns)


def statistics(facts: EnvFacts, settings: TrainSettings) -> dict[str, Any]:
    """Token statistics of the train rows under the resolved `settings`.

    Percentiles of `prompt`, `target` (supervised tokens for sft, the reference answer otherwise)
    and `total`; `truncated_share` of rows cut at max_length; `dropped` rows, which nothing can be
    learned from; `duplicate_share`; `zero_supervision` rows, which have no token to learn.
    """
    rows, limit = facts.lengths, settings.max_length
    if isinstance(settings, SFTSettings):
        loss_on = settings.loss_on
        rows = tuple(row for row in rows if row.turns)
        target = [row.supervised(loss_on) for row in rows]
        dropped = [row for row in rows if row.supervised(loss_on, limit) == 0]
        truncated = [row for row in rows if row.total > limit]
    else:
        target = list(facts.answers)
        dropped = [row for row in rows if row.prompt + settings.max_tokens > limit]
        truncated = [row for row in rows if row.answer and row.longest_turn > settings.max_tokens]
    return {
        "rows": facts.train_rows,
        "counted": len(rows),
        "prompt": spread([row.prompt for row in rows]),
        "target": spread(target),
        "total": spread([row.total for row in rows]),
        "truncated_share": _share(len(truncated), len(rows)),
        "dropped": len(dropped),
        "duplicate_share": round(facts.duplicate_share, 4),
        "zero_supervision": sum(1 for count in target if count == 0),
        "without_answer": facts.train_rows - facts.answered_rows,
        "refused_by_template": facts.refused,
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0

"""Token counts of an environment's rows for a given model; the defaults are computed from them.

Lengths are counted once per environment version and tokenizer and kept in the home's cache, so
that a submit answers at once. Of more than `SAMPLE` rows a seeded sample is counted.
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
from engine.environments.pairs import rejected_of
from engine.home.run_dir import Home
from engine.models import tokens
from engine.models.chat_format import TemplateError
from engine.records.record import DamagedRecord, Record
from engine.records.settings import DPOSettings, SFTSettings, TrainSettings
from envs.json_types import TaskRow, ToolSchema

SAMPLE = 2000
_VERSION = 2  # of the cache file; raise it when the counting changes
_REFUSAL_CHARS = 300  # of the template's message that are kept
_Lengths = tuple[int, int, list[tuple[int, int]], int]  # of a row, in the order of RowLengths


@dataclass(frozen=True)
class RowLengths:
    """Tokens of one row.

    Attributes:
        prompt: the prompt, with the opening of the assistant's turn.
        total: the reference conversation up to the end of its last assistant turn; equal to
            `prompt` where a row has no answer.
        rejected: the same of the conversation with the worse answer; 0 where a row has no pair.
        turns: (start, end) of each assistant turn of the reference conversation.
    """

    prompt: int
    total: int
    turns: tuple[tuple[int, int], ...] = ()
    rejected: int = 0

    def supervised(self, loss_on: str, max_length: int | None = None) -> int:
        """Number of tokens that carry loss; 0 for a row without an answer.

        Args:
            loss_on: which tokens carry loss. "all": every token but the first, which nothing
                predicts; "last": the last assistant turn; any other value: all assistant turns.
            max_length: the length at which the row is cut; None if it is not cut.
        """
        # A turn that begins after the cut contributes 0.
        row_end = self.total if max_length is None else min(self.total, max_length)
        if not self.turns:
            return 0
        if loss_on == "all":
            return max(0, row_end - 1)
        turns = self.turns[-1:] if loss_on == "last" else self.turns
        return sum(max(0, min(turn_end, row_end) - turn_start) for turn_start, turn_end in turns)

    @property
    def longest_turn(self) -> int:
        return max((stop - start for start, stop in self.turns), default=0)

    @property
    def answer(self) -> int:
        """Tokens of the assistant turns after the prompt, which a policy would have to produce.

        A prompt may hold assistant turns of its own; those end before the prompt does.
        """
        return sum(stop - start for start, stop in self.turns if stop > self.prompt)

    @property
    def answer_turns(self) -> int:
        return sum(1 for _, stop in self.turns if stop > self.prompt)


@dataclass(frozen=True)
class EnvFacts:
    """Facts about an environment version that settings and estimates are computed from.

    Attributes:
        env_id: `name@hash12`.
        kind: "single", "multi" or "sft" (no scorer).
        scored: whether it can score a completion.
        train_rows, heldout_rows: rows of each side.
        answered_rows: train rows with a reference answer, the ones SFT can learn from.
        paired_rows: train rows with a worse answer beside it, the ones DPO can learn from.
        lengths: token counts of the train rows that were counted.
        duplicate_share: share of train rows whose prompt an earlier train row has.
        score_s: seconds one score takes (95th percentile of the audit); 0 if unknown.
        refused: number of counted rows that the chat template refuses.
        refusal: the template's message for the first refused row; "" if there are none.
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
    paired_rows: int = 0

    @property
    def multi_turn(self) -> bool:
        return self.kind == "multi"

    @cached_property
    def longest_prompt(self) -> int:
        return max((row.prompt for row in self.lengths), default=0)

    @cached_property
    def longest_total(self) -> int:
        return max((max(row.total, row.rejected) for row in self.lengths), default=0)

    @cached_property
    def longest_turn(self) -> int:
        """Tokens of the longest single assistant turn of a reference answer; 0 if there is none."""
        return max((row.longest_turn for row in self.lengths), default=0)

    @cached_property
    def answers(self) -> tuple[int, ...]:
        """Tokens of each reference answer; rows without an answer are left out."""
        return tuple(row.answer for row in self.lengths if row.answer)


def env_facts(
    home: Home, record: "registry.EnvRecord", model_folder: Path, *, thinking: bool = False
) -> EnvFacts:
    """Collect the facts of a pushed environment, counted in tokens of the model in `model_folder`.

    Counts come from the home's cache if it has them; otherwise they are made and cached there.

    Args:
        thinking: whether prompts are counted with the think block switched on.

    Raises UserError MODEL_UNSUPPORTED if the tokenizer or chat template cannot be read.
    """
    tokenizer = tokens.load(model_folder)
    # The cache file is named after everything that the counts depend on.
    key = f"{_VERSION} {record.env_id} {tokenizer.fingerprint} {thinking}"
    file_name = hashlib.sha256(key.encode()).hexdigest()[:32] + ".json"
    cache_file = home.cache / "tokens" / file_name
    counts = _read_cache(cache_file)
    if counts is None:
        counts = _count_rows(registry.read_tasks(record), record.tools, tokenizer, thinking)
        with contextlib.suppress(OSError):  # a full disk: the next call counts again
            cache_file.parent.mkdir(exist_ok=True)
            write_json(cache_file, counts.to_json(), fsync=False)
    lengths = tuple(
        RowLengths(prompt, total, tuple(turns), rejected)
        for prompt, total, turns, rejected in counts.lengths
    )
    return EnvFacts(
        env_id=record.env_id,
        kind=record.kind,
        scored=record.scored,
        train_rows=counts.train_rows,
        heldout_rows=counts.heldout_rows,
        answered_rows=counts.answered_rows,
        lengths=lengths,
        duplicate_share=counts.duplicate_share,
        refused=counts.refused,
        refusal=counts.refusal,
        score_s=record.audit.score_seconds_p95,
        paired_rows=counts.paired_rows,
    )


class _CachedCounts(Record):
    """The counts of a version's rows, as the home's cache keeps them.

    Attributes:
        lengths: (prompt, total, turns, rejected) of each counted row, as in RowLengths.

    All other fields mean the same as in EnvFacts.
    """

    train_rows: int
    heldout_rows: int
    answered_rows: int
    paired_rows: int
    lengths: list[_Lengths]
    duplicate_share: float
    refused: int
    refusal: str


def _read_cache(path: Path) -> _CachedCounts | None:
    """The counts in a cache file; None if it is missing, damaged or in an older format."""
    try:
        return _CachedCounts.read(path)
    except (OSError, DamagedRecord):
        return None


def _count_rows(
    rows: list[TaskRow],
    tools: list[ToolSchema],
    tokenizer: tokens.ChatTokenizer,
    thinking: bool,
) -> _CachedCounts:
    """Count the tokens of at most `SAMPLE` train rows, a seeded sample if there are more.

    Rows that the chat template refuses get no lengths; `refused` is their number, and `refusal` has
    the template's message for the first one.
    """
    train = [row for row in rows if row["split"] == "train"]
    sample = train
    if len(train) > SAMPLE:
        sample = random.Random(0).sample(train, SAMPLE)
    lengths: list[_Lengths] = []
    refused = 0
    refusal = ""
    for row in sample:
        try:
            lengths.append(_row_lengths(row, tools, tokenizer, thinking))
        except TemplateError as error:
            refused += 1
            if not refusal:
                refusal = f"row {row['id']}: {error}"
    prompts = {json.dumps(row["prompt"], sort_keys=True) for row in train}
    return _CachedCounts(
        train_rows=len(train),
        heldout_rows=len(rows) - len(train),
        answered_rows=sum(1 for row in train if row.get("gold")),
        paired_rows=sum(1 for row in train if rejected_of(row)),
        lengths=lengths,
        duplicate_share=1 - len(prompts) / len(train) if train else 0.0,
        refused=refused,
        refusal=refusal[:_REFUSAL_CHARS],
    )


def _row_lengths(
    row: TaskRow,
    tools: list[ToolSchema],
    tokenizer: tokens.ChatTokenizer,
    thinking: bool,
) -> _Lengths:
    """Count the tokens of one task row: (prompt, total, turns, rejected), as in RowLengths.

    For a row without a reference conversation ("gold") total equals prompt and turns is []. Raises
    TemplateError if the chat template refuses the messages.
    """
    chat = tokenizer.format(thinking)
    prompt = len(chat.prompt(row["prompt"], tools))
    if not row.get("gold"):
        return prompt, prompt, [], 0
    conversation = chat.conversation(row["gold"], tools)
    worse = rejected_of(row)
    rejected = len(chat.conversation(worse, tools).ids) if worse else 0
    return prompt, len(conversation.ids), list(conversation.turns), rejected


def statistics(facts: EnvFacts, settings: TrainSettings) -> dict[str, Any]:
    """Token statistics of the train rows under the resolved `settings`, as a JSON object.

    - rows: number of all train rows.
    - counted: number of the rows that the figures below are about; in SFT only rows with an answer,
      in DPO only those with a pair.
    - prompt, target, total: percentiles of tokens. `target` is what is learnt: tokens with loss in
      SFT, the reference answer in GRPO and DPO.
    - truncated_share: share of rows that max_length (in GRPO max_tokens) would cut.
    - dropped: number of rows that are too long to learn from.
    - duplicate_share: share of train rows whose prompt an earlier one has.
    - zero_supervision: number of rows without a token to learn.
    - without_answer: number of train rows without a reference answer, in DPO without a pair.
    - refused_by_template: number of rows that the chat template refuses.
    """
    rows = facts.lengths
    usable_rows = facts.answered_rows
    max_length = settings.max_length
    if isinstance(settings, SFTSettings):
        loss_on = settings.loss_on
        rows = tuple(row for row in rows if row.turns)  # SFT learns from rows with an answer only
        target_tokens = [row.supervised(loss_on) for row in rows]
        dropped = [row for row in rows if row.supervised(loss_on, max_length) == 0]
        truncated = [row for row in rows if row.total > max_length]
    elif isinstance(settings, DPOSettings):
        rows = tuple(row for row in rows if row.rejected)
        usable_rows = facts.paired_rows
        target_tokens = [row.answer for row in rows]
        dropped = [row for row in rows if row.prompt >= max_length]
        truncated = [row for row in rows if max(row.total, row.rejected) > max_length]
    else:
        target_tokens = list(facts.answers)
        # An answer of full length would not fit after the prompt.
        dropped = [row for row in rows if row.prompt + settings.max_tokens > max_length]
        truncated = [row for row in rows if row.answer and row.longest_turn > settings.max_tokens]
    return {
        "rows": facts.train_rows,
        "counted": len(rows),
        "prompt": spread([row.prompt for row in rows]),
        "target": spread(target_tokens),
        "total": spread([row.total for row in rows]),
        "truncated_share": _share(len(truncated), len(rows)),
        "dropped": len(dropped),
        "duplicate_share": round(facts.duplicate_share, 4),
        "zero_supervision": target_tokens.count(0),
        "without_answer": facts.train_rows - usable_rows,
        "refused_by_template": facts.refused,
    }


def _share(part: int, total: int) -> float:
    """`part` / `total`, rounded to four digits; 0 if `total` is 0."""
    return round(part / total, 4) if total else 0.0

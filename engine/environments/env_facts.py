"""Token counts of an environment's rows for a given model; default settings are computed from them.
If there are more than `SAMPLE` rows, a seeded sample of them is counted."""

import contextlib
import hashlib
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from engine.core.files import write_json
from engine.environments import registry
from engine.environments.datasets import spread
from engine.environments.pairs import pair_of
from engine.home.owner_marks import seal_in
from engine.home.run_dir import Home
from engine.models import tokens
from engine.models.chat_format import ChatFormat, NoReasoning, RowShape, TemplateError
from engine.models.template_messages import has_reasoning
from engine.records.record import DamagedRecord, Record
from engine.records.settings import (
    DPOSettings,
    Reasoning,
    RolloutSettings,
    SFTSettings,
    TrainSettings,
)
from envs.json_types import JsonObject, TaskRow, ToolSchema
from envs.metering.judge_calls import NOTHING, JudgeUse
from envs.tool_schemas import tools_of

SAMPLE = 2000
# If max_tokens is too short for a larger share of the reference answers, success says little.
TOO_MANY_CUT = 0.1
_VERSION = 5  # of the cache file; raise it when the counting changes
# (length, known, turns) of a training row, as in RowShape.
_StoredRow = tuple[int, int, list[tuple[int, int]]]
# (prompt, training rows, pair) of a task's row, the first and the last as in RowLengths.
_StoredLengths = tuple[int, list[_StoredRow], tuple[int, int] | None]
_REFUSAL_CHARS = 300  # characters of the template's message that are kept


@dataclass(frozen=True)
class RowLengths:
    """Token counts of one task's row.

    Attributes:
        prompt: tokens of the prompt, with the opening of the assistant's turn.
        total: tokens of the first training row: the reference conversation up to the end of the
            row's last assistant turn. Equal to `prompt` if there is no answer.
        turns: (start, end) of each assistant turn in those tokens.
        later: the further training rows, if the chat template splits the conversation.
        pair: tokens of the conversations with the better and with the worse answer, as DPO trains
            them; None if there is no such pair.
    """

    prompt: int
    total: int
    turns: tuple[tuple[int, int], ...] = ()
    later: tuple[RowShape, ...] = ()
    pair: tuple[int, int] | None = None

    @property
    def rows(self) -> list[RowShape]:
        """The training rows of the conversation; [] if there is no answer."""
        first = RowShape(self.total, self.turns, is_last=not self.later)
        return [first, *self.later] if self.turns else []

    @property
    def longest(self) -> int:
        """Tokens of the longest of the training rows."""
        return max(self.total, *(row.length for row in self.later), 0)

    @property
    def _all_turns(self) -> list[tuple[int, int]]:
        """(start, end) of every assistant turn in all training rows."""
        return [turn for row in self.rows for turn in row.turns]

    def supervised(self, loss_on: str, max_length: int | None = None) -> int:
        """Count the tokens that carry loss in all rows of the conversation; 0 without an answer.
        `loss_on` and `max_length` are those of the function `supervised`."""
        return sum(supervised(row, loss_on, max_length) for row in self.rows)

    @property
    def longest_turn(self) -> int:
        """Tokens of the longest assistant turn; 0 without an answer."""
        return max((stop - start for start, stop in self._all_turns), default=0)

    @property
    def answer(self) -> int:
        """Tokens of the assistant turns after the prompt. Turns within the prompt do not count."""
        return sum(stop - start for start, stop in self._all_turns if stop > self.prompt)

    @property
    def answer_turns(self) -> int:
        """Number of assistant turns after the prompt."""
        return sum(1 for _, stop in self._all_turns if stop > self.prompt)


def supervised(row: RowShape, loss_on: str, max_length: int | None = None) -> int:
    """Count the tokens of a training row that carry loss.

    Args:
        loss_on: the tokens of "assistant" turns, of the "last" one, or "all" (`RowShape.trained`).
        max_length: the length at which the row is cut; None if it is not cut.
    """
    # A turn that begins after the cut contributes 0.
    end = row.length if max_length is None else min(row.length, max_length)
    return sum(max(0, min(stop, end) - start) for start, stop in row.trained(loss_on))


@dataclass(frozen=True)
class EnvFacts:
    """Facts about an environment version that settings and estimates are computed from.

    Attributes:
        env_id: `name@hash12`.
        kind: "single", "multi", "command", or without a scorer (not `scored`) "sft", "preference".
        train_rows, heldout_rows, dev_rows: rows of each side.
        answered_rows: train rows with a reference answer, the ones SFT can learn from.
        paired_rows, heldout_pairs: train and held-out rows with a better and a worse answer, for
            DPO; of the held-out ones None where not counted.
        lengths: token counts of the train rows that were counted; of held-out rows in an exam.
        duplicate_share: share of train rows whose prompt an earlier train row has.
        score_s: seconds one score takes (95th percentile of the audit); 0 if unknown.
        waits, judge: whether scoring may wait for the network; the mean use of judges per score.
        refused, refusal: how many counted rows the chat template refuses; its first message, or "".
        without_reasoning: counted answers that lack the reasoning which `thinking` requires.
        reasoned: number of counted answers whose every turn has reasoning.
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
    waits: bool = False
    judge: JudgeUse = NOTHING
    paired_rows: int = 0
    without_reasoning: int = 0
    reasoned: int = 0
    heldout_pairs: int | None = None
    dev_rows: int = 0

    def measured_rows(self, *, by_pairs: bool) -> int:
        """Count the held-out rows (or dev rows, if more) that a run can be measured on. If there
        is no scorer and `by_pairs`, as in DPO, it is measured by its loss on pairs alone."""
        if by_pairs and not self.scored and self.heldout_pairs is not None:
            return self.heldout_pairs
        return max(self.heldout_rows, self.dev_rows)

    @property
    def sft_rows(self) -> int:
        """Estimated training rows of SFT: number of answers, times the rows per counted answer."""
        if not self.answered_lengths:
            return self.answered_rows
        counted_rows = sum(len(row.rows) for row in self.lengths)  # a template may split an answer
        return round(self.answered_rows * counted_rows / self.answered_lengths)

    @property
    def answered_lengths(self) -> int:
        """Number of answers that were counted, those that lack required reasoning included."""
        return sum(1 for row in self.lengths if row.turns) + self.without_reasoning

    @property
    def split_rows(self) -> int:
        """Number of counted answers that are trained as several rows."""
        return sum(1 for row in self.lengths if row.later)

    @property
    def multi_turn(self) -> bool:
        """Whether a rollout may have several assistant turns."""
        return self.kind in ("multi", "command")

    @cached_property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max((row.prompt for row in self.lengths), default=0)

    @cached_property
    def longest_total(self) -> int:
        """Tokens of the longest training row of SFT; 0 if none was counted."""
        return max((row.longest for row in self.lengths), default=0)

    @cached_property
    def longest_in_pairs(self) -> int:
        """Tokens of the longest conversation in a pair; 0 if no pair was counted."""
        return max((max(row.pair) for row in self.lengths if row.pair), default=0)

    def longest_row(self, algorithm: str) -> int:
        """Tokens of the longest row that "sft" or "dpo" trains on; 0 if none was counted."""
        return self.longest_in_pairs if algorithm == "dpo" else self.longest_total

    @cached_property
    def longest_turn(self) -> int:
        """Tokens of the longest single assistant turn of a reference answer; 0 if there is none."""
        return max((row.longest_turn for row in self.lengths), default=0)

    @cached_property
    def usual_turn(self) -> int:
        """The 95th percentile of the longest assistant turns of the reference answers, in tokens;
        0 if there are none."""
        longest_turns = sorted(row.longest_turn for row in self.lengths if row.turns)
        return longest_turns[math.ceil(0.95 * len(longest_turns)) - 1] if longest_turns else 0

    def cut_share(self, max_tokens: int) -> float:
        """Return the share of the reference answers that the model could never sample, because one
        of their turns has more than `max_tokens` tokens; 0 if there are no reference answers."""
        longest_turns = [row.longest_turn for row in self.lengths if row.answer]
        cut_count = sum(1 for length in longest_turns if length > max_tokens)
        return _rounded_share(cut_count, len(longest_turns))

    @cached_property
    def answers(self) -> tuple[int, ...]:
        """Tokens of each reference answer; rows without an answer are left out."""
        return tuple(row.answer for row in self.lengths if row.answer)


def env_facts(
    home: Home,
    record: "registry.EnvRecord",
    model_folder: Path,
    *,
    thinking: bool | Reasoning = False,
) -> EnvFacts:
    """Return the facts of a pushed environment in tokens of the model in `model_folder`, from the
    cache if it has them. `thinking`: True and "require" count prompts with the think block on;
    False and "drop" count answers without reasoning; "keep" counts both unchanged. Raises UserError
    MODEL_UNSUPPORTED if the tokenizer or the chat template cannot be read."""
    tokenizer = tokens.load(model_folder)
    # The cache file is named after everything that the counts depend on.
    key = f"{_VERSION} {record.env_id} {tokenizer.fingerprint} {thinking}"
    file_name = hashlib.sha256(key.encode()).hexdigest()[:32] + ".json"
    cache_file = home.cache / "tokens" / file_name
    counts = _read_cache(cache_file)
    if counts is None:
        counts = _count_rows(record, tokenizer, thinking)
        with contextlib.suppress(OSError):  # a full disk: the next call counts again
            cache_file.parent.mkdir(exist_ok=True)
            write_json(cache_file, counts.to_json(), fsync=False)
    return _make_facts(record, counts)


def _make_facts(record: "registry.EnvRecord", counts: "_CachedCounts") -> EnvFacts:
    """Combine a record and the counts of its rows. Lengths of a sealed exam would tell of it."""
    is_hidden = not counts.train_rows and seal_in(record.dir) is not None
    return EnvFacts(
        env_id=record.env_id,
        kind=record.kind,
        scored=record.scored,
        train_rows=counts.train_rows,
        heldout_rows=counts.heldout_rows,
        answered_rows=counts.answered_rows,
        lengths=tuple(_make_row_lengths(*each) for each in counts.lengths if not is_hidden),
        duplicate_share=counts.duplicate_share,
        refused=counts.refused,
        refusal=counts.refusal,
        score_s=record.audit.score_seconds_p95,
        waits=record.limits.network,
        judge=JudgeUse.from_json(record.audit.judge),
        paired_rows=counts.paired_rows,
        without_reasoning=counts.without_reasoning,
        reasoned=counts.reasoned,
        heldout_pairs=counts.heldout_pairs,
        dev_rows=record.rows.get("dev", 0),
    )


def _make_row_lengths(
    prompt: int, rows: Sequence[_StoredRow], pair: tuple[int, int] | None
) -> RowLengths:
    """Convert the three parts of a `_StoredLengths` (tokens of one task's row) to RowLengths. If
    the task has no training rows (`rows`), its `total` is the prompt."""
    # `shared_tokens`: how many tokens at the beginning of a row also stand in the row before.
    shapes = [
        RowShape(length, tuple(turns), shared_tokens, is_last=number == len(rows))
        for number, (length, shared_tokens, turns) in enumerate(rows, start=1)
    ]
    if not shapes:
        return RowLengths(prompt, total=prompt, pair=pair)
    first = shapes[0]
    return RowLengths(prompt, first.length, tuple(first.turns), later=tuple(shapes[1:]), pair=pair)


class _CachedCounts(Record):
    """The counts of a version's rows, as the home's cache stores them.

    Attributes:
        lengths: tokens of the prompt, the training rows and the pair of each counted row.

    All other fields mean the same as in EnvFacts.
    """

    train_rows: int
    heldout_rows: int
    answered_rows: int
    paired_rows: int
    heldout_pairs: int
    lengths: list[_StoredLengths]
    duplicate_share: float
    refused: int
    refusal: str
    without_reasoning: int
    reasoned: int


def _read_cache(path: Path) -> _CachedCounts | None:
    """Return the counts in a cache file; None if it is missing, damaged or in an older format."""
    try:
        return _CachedCounts.read(path)
    except (OSError, DamagedRecord):
        return None


def _count_rows(
    record: "registry.EnvRecord", tokenizer: tokens.ChatTokenizer, thinking: bool | Reasoning
) -> _CachedCounts:
    """Count an environment's rows, and the tokens of its train rows, of an exam's held-out rows, or
    of a sample of them.

    `thinking`: True and "require" switch on the think block of prompts; False and "drop" leave the
    reasoning of answers out. Rows that the chat template refuses are not measured, but counted.
    """
    train, heldout = _rows_by_split(record)
    sample = _sample(train or heldout)
    sample_lengths = _SampleLengths()
    for row in sample:
        sample_lengths.count(row, record.tools, tokenizer, thinking)
    kind_counts = _count_kinds(record, train, sample)
    return _CachedCounts(
        train_rows=len(train),
        heldout_rows=len(heldout),
        answered_rows=kind_counts.answered,
        paired_rows=kind_counts.paired,
        heldout_pairs=_count_pairs(heldout),
        lengths=sample_lengths.lengths,
        duplicate_share=(1 - kind_counts.distinct_prompts / len(train)) if train else 0.0,
        refused=sample_lengths.refused,
        refusal=sample_lengths.first_refusal[:_REFUSAL_CHARS],
        without_reasoning=sample_lengths.without_reasoning,
        reasoned=_count_reasoned(sample),
    )


def _sample(rows: Sequence[TaskRow]) -> Sequence[TaskRow]:
    """Return at most `SAMPLE` of the rows, the same ones in every call."""
    return random.Random(0).sample(rows, SAMPLE) if len(rows) > SAMPLE else rows


def _count_reasoned(rows: Iterable[TaskRow]) -> int:
    """Count the rows that have a reference answer with reasoning in each assistant turn."""
    return sum(1 for row in rows if row.get("gold") and has_reasoning(row["gold"]))


def _count_pairs(rows: Iterable[TaskRow]) -> int:
    """Count the rows that have a better and a worse answer."""
    return sum(1 for row in rows if pair_of(row))


def _rows_by_split(record: "registry.EnvRecord") -> tuple[Sequence[TaskRow], Sequence[TaskRow]]:
    """Return the train rows and the held-out rows of a version."""
    if record.version.data:  # large data: a train row is read only when it is accessed
        return registry.read_tasks(record, "train"), registry.read_tasks(record, "heldout")
    rows = registry.read_tasks(record)
    train = [row for row in rows if row["split"] == "train"]
    heldout = [row for row in rows if row["split"] == "heldout"]
    return train, heldout


@dataclass
class _SampleLengths:
    """The token counts of a sample of rows, and how many of the rows could not be counted.

    Attributes:
        refused: number of rows that the chat template refuses.
        first_refusal: the template's message for the first of them; "" if there are none.
        without_reasoning: number of rows that lack the reasoning that is required.
    """

    lengths: list[_StoredLengths] = field(default_factory=list)
    refused: int = 0
    first_refusal: str = ""
    without_reasoning: int = 0

    def count(
        self,
        row: TaskRow,
        tools: list[ToolSchema],
        tokenizer: tokens.ChatTokenizer,
        thinking: bool | Reasoning,
    ) -> None:
        """Add the token counts of one row, or count the row as one that cannot be measured."""
        try:
            self.lengths.append(_count_task_tokens(row, tools, tokenizer, thinking))
        except NoReasoning:
            self.without_reasoning += 1
        except TemplateError as error:
            self.refused += 1
            if not self.first_refusal:
                self.first_refusal = f"row {row['id']}: {error}"


@dataclass(frozen=True)
class _RowKinds:
    """Numbers of train rows with an answer, of those with a pair, and of different prompts."""

    answered: int
    paired: int
    distinct_prompts: int


def _count_kinds(
    record: "registry.EnvRecord", train: Sequence[TaskRow], sample: Sequence[TaskRow]
) -> _RowKinds:
    """Count the kinds of a version's train rows. `sample` are the rows whose tokens are counted."""
    if record.version.data:  # large data: reading all rows here would take too long
        return _estimate_kinds(record, len(train), sample)
    return _RowKinds(
        distinct_prompts=len({json.dumps(row["prompt"], sort_keys=True) for row in train}),
        answered=sum(1 for row in train if row.get("gold")),
        paired=_count_pairs(train),
    )


def _estimate_kinds(
    record: "registry.EnvRecord", train_count: int, sample: Sequence[TaskRow]
) -> _RowKinds:
    """Count the kinds of `train_count` rows of large data; estimate the pairs from a sample."""
    paired_in_sample = _count_pairs(sample)
    return _RowKinds(
        # Counted at the push, which refuses rows that have no answer and are no preferences.
        distinct_prompts=record.version.distinct_prompts,
        answered=train_count if record.kind == "sft" else 0,
        paired=round(train_count * paired_in_sample / max(1, len(sample))),
    )


def row_lengths(
    row: TaskRow,
    tools: list[ToolSchema],
    tokenizer: tokens.ChatTokenizer,
    thinking: bool | Reasoning = False,
) -> RowLengths:
    """Count the tokens of one stored task row.

    Raises TemplateError if the chat template refuses the messages, and NoReasoning if reasoning is
    required and a turn of the answer has none.
    """
    return _make_row_lengths(*_count_task_tokens(row, tools, tokenizer, thinking))


def _count_task_tokens(
    row: TaskRow,
    tools: list[ToolSchema],
    tokenizer: tokens.ChatTokenizer,
    thinking: bool | Reasoning,
) -> _StoredLengths:
    """Count the tokens of one task row in the form of the cache; raises what `row_lengths` raises.
    `tools` are those of the environment; a row may have its own."""
    tools = tools_of(row, tools)
    chat = tokenizer.format(thinking=thinking in (True, "require"))
    prompt = len(chat.prompt(row["prompt"], tools))
    pair = _pair_lengths(row, tools, chat)
    if not row.get("gold"):
        return prompt, [], pair
    tokenized_rows = chat.rows(row["gold"], tools, _treatment_of_reasoning(thinking))
    return prompt, [_stored_row(tokenized.shape) for tokenized in tokenized_rows], pair


def _stored_row(shape: RowShape) -> _StoredRow:
    """Return the shape of a training row in the form of the cache."""
    return shape.length, shape.known, list(shape.turns)


def _treatment_of_reasoning(thinking: bool | Reasoning) -> Reasoning:
    """Return what is done with reasoning in answers; True means "keep", False means "drop"."""
    if thinking is True:
        return "keep"
    if thinking is False:
        return "drop"
    return thinking


def _pair_lengths(
    row: TaskRow, tools: list[ToolSchema], chat: ChatFormat
) -> tuple[int, int] | None:
    """Count the tokens of a task row's conversations with the better and with the worse answer;
    None if the row has no pair. Raises TemplateError if the chat template refuses one of them."""
    pair = pair_of(row)
    if pair is None:
        return None
    # A chat template may split a conversation into several rows; DPO trains on the last one.
    chosen, rejected = (chat.rows(chat_messages, tools)[-1].shape for chat_messages in pair)
    return chosen.length, rejected.length


def statistics(facts: EnvFacts, settings: TrainSettings) -> JsonObject:
    """Return token statistics of the train rows under the `settings` of a run, as JSON."""
    row_tokens = _count_row_tokens(facts, settings)
    is_dpo = isinstance(settings, DPOSettings)
    usable_rows = facts.paired_rows if is_dpo else facts.answered_rows
    counted_rows = len(row_tokens.totals)
    return {
        "rows": facts.train_rows,  # all train rows; perhaps only a sample of them is counted
        # Number of rows behind the figures on tokens: in SFT training rows, in DPO pairs.
        "counted": counted_rows,
        "split": facts.split_rows,  # answers that the chat template splits into several rows
        "without_reasoning": facts.without_reasoning,  # answers that thinking = require leaves out
        "prompt": spread(row_tokens.prompts),  # percentiles of tokens, like the next two
        "target": spread(row_tokens.targets),  # tokens with loss; in GRPO the reference answer
        "total": spread(row_tokens.totals),
        "truncated_share": _rounded_share(row_tokens.truncated, counted_rows),
        "dropped": row_tokens.dropped,
        "duplicate_share": round(facts.duplicate_share, 4),  # rows that repeat an earlier prompt
        "zero_supervision": row_tokens.targets.count(0),  # rows without a token to learn
        "without_answer": facts.train_rows - usable_rows,  # in DPO: rows without a pair
        "refused_by_template": facts.refused,
    }


def _count_row_tokens(facts: EnvFacts, settings: TrainSettings) -> "_RowTokens":
    """Count the tokens of the rows that the algorithm of these settings trains on."""
    if isinstance(settings, SFTSettings):
        return _sft_tokens(facts, settings)
    if isinstance(settings, DPOSettings):
        return _dpo_tokens(facts, settings)
    return _rollout_tokens(facts, settings)


@dataclass(frozen=True)
class _RowTokens:
    """Token counts of the rows that an algorithm trains on.

    Attributes:
        prompts, totals, targets: tokens of the prompts, of the whole rows, of what is learnt.
        dropped: number of rows that are too long to learn from.
        truncated: number of rows that a limit on lengths would cut.
    """

    prompts: list[int]
    totals: list[int]
    targets: list[int]
    dropped: int
    truncated: int


def _sft_tokens(facts: EnvFacts, settings: SFTSettings) -> _RowTokens:
    """Count the tokens of the rows that SFT trains on: one row for each task with an answer, or
    several if the chat template splits it. Rows with no loss within max_length are dropped."""
    loss_on, max_length = settings.loss_on, settings.max_length
    answered = [task for task in facts.lengths if task.turns]
    rows = [row for task in answered for row in task.rows if row.trained(loss_on)]
    return _RowTokens(
        prompts=[task.prompt for task in answered],
        totals=[row.length for row in rows],
        targets=[supervised(row, loss_on) for row in rows],
        dropped=sum(1 for row in rows if supervised(row, loss_on, max_length) == 0),
        truncated=sum(1 for row in rows if row.length > max_length),
    )


def _dpo_tokens(facts: EnvFacts, settings: DPOSettings) -> _RowTokens:
    """Count the tokens of the rows with a pair; totals and targets are of the better answer."""
    # Tokens of (prompt, conversation with the better answer, conversation with the worse one).
    rows = [(row.prompt, *row.pair) for row in facts.lengths if row.pair]
    max_length = settings.max_length
    return _RowTokens(
        prompts=[prompt for prompt, _, _ in rows],
        totals=[chosen for _, chosen, _ in rows],
        targets=[max(0, chosen - prompt) for prompt, chosen, _ in rows],
        dropped=sum(1 for prompt, _, _ in rows if prompt >= max_length),  # no room for an answer
        truncated=sum(1 for _, *answers in rows if max(answers) > max_length),
    )


def _rollout_tokens(facts: EnvFacts, settings: RolloutSettings) -> _RowTokens:
    """Count the tokens of the rows of a run that samples, as if it sampled reference answers."""
    rows, max_tokens = facts.lengths, settings.max_tokens
    return _RowTokens(
        prompts=[row.prompt for row in rows],
        totals=[row.longest for row in rows],
        targets=list(facts.answers),
        # Dropped: an answer of max_tokens would not fit after the prompt.
        dropped=sum(1 for row in rows if row.prompt + max_tokens > settings.max_length),
        truncated=sum(1 for row in rows if row.answer and row.longest_turn > max_tokens),
    )


def _rounded_share(part: int, total: int) -> float:
    """Return `part` / `total`, rounded to four digits; 0 if `total` is 0."""
    return round(part / total, 4) if total else 0.0

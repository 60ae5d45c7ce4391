"""Prepares rollouts for a reader: clean texts within a limited number of characters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from engine.core.errors import UserError
from engine.core.reply import as_json
from engine.evidence.stats.results import content_of
from engine.home.sanitize import Redactor, clip, json_chars
from engine.models import tokens as tokenizers
from engine.records.lines.answer import Answer
from engine.records.lines.curves import short
from engine.records.lines.evaluation_row import EvaluationRow
from engine.records.lines.trajectory_record import TrajectoryRecord
from engine.records.run_config import RunConfig, TrainConfig
from envs.json_types import ChatMessage

Decode = Callable[[list[int]], str]  # turns token ids into text
T = TypeVar("T")

# Characters that each turn gets at least. If that is not possible, the middle turns are left out.
_LEAST_PER_TURN = 60
_LEAST_CHARS = 40  # characters that the prompt and the answer get at least
_LEAST_CUT = 20  # characters that a cut turn keeps
_MOST_TOKENS = 1500  # token ids that are shown of an answer
_MOST_PROMPT_TOKENS = 375  # token ids that are shown of its prompt
_MOST_METRICS = 20
_MOST_FAULTS, _FAULT_CHARS = 4, 200  # invalid tool calls, and characters of each reason
_TASK_CHARS, _ERROR_CHARS, _METRIC_NAME_CHARS = 120, 400, 60
_SHORTER_TEXTS = (600, 300, 150, 80)  # characters of a text, tried one after the other


@dataclass(frozen=True)
class Turn:
    """One message of a conversation. The role `note` stands for messages that are left out."""

    role: str
    content: str


@dataclass(frozen=True)
class Piece:
    """A stretch of text, with whether it is trained on and its number of tokens."""

    text: str
    trained: bool
    tokens: int


@dataclass(frozen=True)
class ShownTokens:
    """The token ids of a rollout.

    Attributes:
        prompt_ids: ids of the end of the prompt.
        ids: ids of the text after the prompt.
        loss_mask: for each of `ids` 1 if the model wrote it, else 0.
        pieces: the same as text; None if the tokenizer is gone.
        tokens_cut: number of ids that are not shown; None if all are.
    """

    prompt_ids: list[int]
    ids: list[int]
    loss_mask: list[int]
    pieces: list[Piece] | None = None
    tokens_cut: int | None = None


@dataclass(frozen=True)
class NoTokens:
    """The reason why a rollout has no token ids to show. In JSON, `kept` says that none were
    stored."""

    why: str
    kept: bool = False


@dataclass(frozen=True)
class RolloutItem:
    """One rollout or held-out answer as a page shows it. Fields that it lacks are None.

    Attributes:
        step, group, member: its place in training.
        attempt, model, half: its place in an evaluation.
        length: number of tokens that the model wrote.
        invalid_calls: the reasons why tool calls in it are invalid.
        reason: why it earned its reward, in the environment's words.
        parts: the parts of the reward, name -> [weight, value].
        completion: the answer if it is a single message.
        turns: the messages of a longer answer.
    """

    task: str | None
    step: int | None = None
    group: int | None = None
    member: int | None = None
    attempt: int | None = None
    model: str | None = None
    half: str | None = None
    reward: float | None = None
    success: bool | None = None
    advantage: float | None = None
    loss: float | None = None
    stop_reason: str | None = None
    invalid_calls: list[str] | None = None
    length: int | None = None
    metrics: dict[str, float] | None = None
    error: str | None = None
    reason: str | None = None
    parts: dict[str, list[float]] | None = None
    prompt: list[Turn] | None = None
    completion: str | None = None
    turns: list[Turn] | None = None
    tokens: ShownTokens | NoTokens | None = None


@dataclass(frozen=True)
class Texts:
    """How much text of a row is shown.

    Attributes:
        chars: characters of prompt and answer together; the answer gets at least two thirds.
        with_prompt: whether the prompt is shown.
        with_tokens: whether token ids and their loss mask are shown.
        decode: turns token ids into text; None if ids are shown as numbers only.
    """

    chars: int
    with_prompt: bool = True
    with_tokens: bool = False
    decode: Decode | None = None


def rollout_item(redact: Redactor, row: Answer, texts: Texts) -> RolloutItem:
    """Make the item that a page shows for a rollout or held-out answer. Texts are cleaned and cut,
    secrets are hidden, and numbers have few digits. `texts` says how much of the row is shown."""
    conversation = _divide_characters(redact, row, texts)
    item = RolloutItem(
        task=clip(redact.text(row.task), _TASK_CHARS),
        reward=_few_digits(row.reward),
        success=row.success,
        stop_reason=row.stop_reason,
        invalid_calls=_shown_faults(redact, row.invalid_calls),
        length=length_in_tokens(row),
        metrics=_shown_metrics(redact, row.metrics),
        error=clip(redact.text(row.error), _ERROR_CHARS) if row.error else None,
        reason=clip(redact.text(row.reason), _ERROR_CHARS) if row.reason else None,
        parts=_shown_parts(redact, row.parts),
        prompt=conversation.prompt,
        completion=conversation.completion,
        turns=conversation.turns,
        tokens=_shown_tokens(redact, row, texts.decode) if texts.with_tokens else None,
    )
    if isinstance(row, TrajectoryRecord):
        return _with_training_fields(item, row)
    if isinstance(row, EvaluationRow):
        return _with_evaluation_fields(redact, item, row)
    return item


def _with_training_fields(item: RolloutItem, row: TrajectoryRecord) -> RolloutItem:
    """Return a copy of `item` with the fields that only a rollout of training has: its place and
    its advantage."""
    return replace(
        item,
        step=row.step,
        group=row.group,
        member=row.member,
        advantage=_few_digits(row.advantage),
    )


def _with_evaluation_fields(redact: Redactor, item: RolloutItem, row: EvaluationRow) -> RolloutItem:
    """Return a copy of `item` with the fields that only an answer of an evaluation has: its place
    and its loss."""
    return replace(
        item,
        attempt=row.attempt,
        model=redact.text(row.model),
        half=None if row.half is None else redact.text(row.half),
        loss=_few_digits(row.loss),
    )


@dataclass(frozen=True)
class _Conversation:
    """The two parts of a row's text.

    Attributes:
        prompt: cut to the length at which it is shown; None if it is not shown.
        answer: not cut yet.
        answer_chars: the number of characters that the answer may have.
    """

    prompt: list[Turn] | None
    answer: list[Turn]
    answer_chars: int

    @property
    def completion(self) -> str | None:
        """The answer, cut, if it is a single message; else None."""
        if len(self.answer) != 1:
            return None
        return clip(self.answer[0].content, self.answer_chars)

    @property
    def turns(self) -> list[Turn] | None:
        """The messages of the answer, cut, if there are several; else None."""
        return shorten_turns(self.answer, self.answer_chars) if len(self.answer) > 1 else None


def _divide_characters(redact: Redactor, row: Answer, texts: Texts) -> _Conversation:
    """Divide `texts.chars` characters between the prompt and the answer of a row.

    The prompt gets what the answer does not need, but at least a third; the answer gets the rest.
    Neither gets fewer than `_LEAST_CHARS`.
    """
    prompt, answer = turns_of(redact, row.prompt), _answer_turns(redact, row)
    if not texts.with_prompt or not prompt:
        return _Conversation(prompt=None, answer=answer, answer_chars=texts.chars)
    reserved_for_answer = min(length_of(answer), texts.chars * 2 // 3)
    prompt_chars = max(texts.chars - reserved_for_answer, _LEAST_CHARS)
    shown_prompt = shorten_turns(prompt, prompt_chars)
    answer_chars = max(texts.chars - length_of(shown_prompt), _LEAST_CHARS)
    return _Conversation(shown_prompt, answer, answer_chars)


def _answer_turns(redact: Redactor, row: Answer) -> list[Turn]:
    """List the messages of a row's answer, with secrets hidden. Further conversations of the same
    rollout (`branches`) follow, each after a note."""
    answer = turns_of(redact, row.messages)
    if not answer and row.completion is not None:  # the row stores its answer as plain text
        return [Turn("assistant", redact.text(row.completion))]
    for branch in row.branches or ():
        answer.append(Turn("note", "another conversation of the same rollout"))
        answer += [*turns_of(redact, branch.prompt), *turns_of(redact, branch.messages)]
    return answer


def _shown_metrics(
    redact: Redactor, metrics: Mapping[str, float] | None
) -> dict[str, float] | None:
    """Return the first 20 metrics of an answer, rounded to few digits, with secrets hidden in their
    names; None if there are none."""
    if not metrics:
        return None
    return {
        clip(redact.text(name), _METRIC_NAME_CHARS): short(value)
        for name, value in list(metrics.items())[:_MOST_METRICS]
    }


def _shown_parts(
    redact: Redactor, parts: Mapping[str, Sequence[float]] | None
) -> dict[str, list[float]] | None:
    """Return the first 20 parts of a reward, name -> [weight, value], rounded to few digits; None
    if there are none. Names are cut like those of metrics, and secrets in them hidden."""
    if not parts:
        return None
    shown_parts: dict[str, list[float]] = {}
    for name, weight_and_value in list(parts.items())[:_MOST_METRICS]:
        shown_name = clip(redact.text(name), _METRIC_NAME_CHARS)
        shown_parts[shown_name] = [short(number) for number in weight_and_value]
    return shown_parts


def _shown_faults(redact: Redactor, faults: Sequence[str] | None) -> list[str] | None:
    """Return the reasons (`faults`) why the first four invalid tool calls are invalid, each cut to
    200 characters; None if there are no invalid calls."""
    if not faults:
        return None
    return [clip(redact.text(fault), _FAULT_CHARS) for fault in faults[:_MOST_FAULTS]]


def length_in_tokens(row: Answer) -> int | None:
    """Return the number of tokens that the model wrote in an answer; None if the row does not
    record it."""
    # If the field was not in the file, `row.tokens` is the default 0, which is no length.
    return row.tokens if "tokens" in row.model_fields_set else None


def chars_of(item: object) -> int:
    """Count the characters of `item` as compact JSON."""
    return json_chars(as_json(item))


def with_shorter_texts(item: T, chars: int) -> T:
    """Cut the texts of `item` shorter and shorter until its JSON has at most `chars` characters.
    They are cut to 600, 300, 150 and finally 80 characters each. The result may still be longer
    than `chars`."""
    for text_chars in _SHORTER_TEXTS:
        if chars_of(item) <= chars:
            return item
        item = _with_short_texts(item, text_chars)
    return item


def shorten_rollout(item: RolloutItem, chars: int) -> RolloutItem:
    """Shorten `item` to about `chars` characters of JSON: cut its texts, then drop its metrics."""
    item = with_shorter_texts(item, chars)
    return item if chars_of(item) <= chars else replace(item, metrics=None)


def _with_short_texts(value: Any, limit: int) -> Any:
    """Copy `value` with each text cut to at most `limit` characters. Lists of token ids are cut to
    `limit` ids. Other lists keep all their items, each shortened."""
    if isinstance(value, str):
        return clip(value, limit)
    if isinstance(value, list):
        if value and isinstance(value[0], int):  # token ids
            return value[:limit]
        return [_with_short_texts(item, limit) for item in value]
    if isinstance(value, dict):
        return {name: _with_short_texts(item, limit) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):  # an instance, not the class
        shortened_fields = {
            field.name: _with_short_texts(getattr(value, field.name), limit)
            for field in fields(value)
        }
        return replace(value, **shortened_fields)
    return value


def decoder_of(config: RunConfig | None) -> Decode | None:
    """Return a function that turns token ids into text, by the tokenizer of a run's base model.

    Returns None if there is no config, if the run did not train, or if the tokenizer's files are
    gone or damaged.
    """
    if not isinstance(config, TrainConfig):
        return None
    try:
        backend = tokenizers.load(Path(config.base.path)).backend
    except (UserError, OSError, ValueError):  # the ids are then shown as numbers
        return None
    return lambda ids: str(backend.decode(ids, skip_special_tokens=False))


def turns_of(redact: Redactor, messages: str | Sequence[ChatMessage] | None) -> list[Turn]:
    """Convert messages to turns, with secrets hidden and tool calls written out as text. A plain
    text becomes one message of the user; None gives []."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return [
        Turn(str(message.get("role", "")), redact.text(content_of(message)))
        for message in messages or ()
    ]


def length_of(turns: Sequence[Turn]) -> int:
    """Count the characters in the contents of all turns together."""
    return sum(len(turn.content) for turn in turns)


def shorten_turns(turns: Sequence[Turn], chars: int) -> list[Turn]:
    """Shorten a conversation to about `chars` characters. If there are too many turns for 60
    characters each, turns in the middle are left out. Then long turns are cut, all to the same
    length."""
    shown_turns = _without_middle(turns, max_turns=max(2, chars // _LEAST_PER_TURN))
    if length_of(shown_turns) <= chars:
        return shown_turns
    longest = _fair_share([len(turn.content) for turn in shown_turns], chars)
    return [replace(turn, content=clip(turn.content, longest)) for turn in shown_turns]


def _without_middle(turns: Sequence[Turn], max_turns: int) -> list[Turn]:
    """Return the first and the last turns, with a note such as "[7 messages left out]" between
    them. All turns are kept if there are at most `max_turns`, which is 2 or more."""
    if len(turns) <= max_turns:
        return list(turns)
    last_count = max_turns // 2
    first_count = max_turns - last_count
    note = Turn("note", f"[{len(turns) - max_turns} messages left out]")
    return [*turns[:first_count], note, *turns[-last_count:]]


def _fair_share(lengths: Sequence[int], total: int) -> int:
    """Compute the length to cut texts of these lengths to, so that together they are at most
    `total` long. For lengths 10, 50 and 90 and a total of 100 it is 45.

    A text that is cut keeps at least `_LEAST_CUT` characters, even if the texts are then too long
    together.
    """
    remaining_chars, remaining_texts = total, len(lengths)
    # Short texts come first: what they do not use is divided among the longer ones.
    for length in sorted(lengths):
        share = remaining_chars // remaining_texts
        if length > share:
            return max(share, _LEAST_CUT)
        remaining_chars -= length
        remaining_texts -= 1
    return max(lengths, default=0)  # all fit uncut


def pieces(
    redact: Redactor,
    ids: Sequence[int],
    mask: Sequence[int],
    decode: Decode,
    *,
    max_pieces: int = 24,
    max_chars: int = 300,
) -> list[Piece]:
    """Split the text of the tokens into stretches that are trained on or not, in order.

    Args:
        mask: for each id 1 if it is trained on, else 0.
        max_pieces: the most stretches; all further ones become one last piece with the text `…`.
        max_chars: the text of a stretch is cut to this length.
    """
    stretches: list[Piece] = []
    for start, end in _spans_of_equal_mask(mask, len(ids)):
        text = clip(redact.text(decode(list(ids[start:end]))), max_chars)
        stretches.append(Piece(text, trained=bool(mask[start]), tokens=end - start))
    if len(stretches) <= max_pieces:
        return stretches
    hidden_tokens = sum(piece.tokens for piece in stretches[max_pieces:])
    return [*stretches[:max_pieces], Piece("…", trained=False, tokens=hidden_tokens)]


def _spans_of_equal_mask(mask: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Divide the positions below `length` into stretches of equal mask (0, or any other value).
    Returns the (start, end) of each stretch."""
    spans = []
    start = 0
    for position in range(1, length + 1):
        if position == length or bool(mask[position]) != bool(mask[start]):
            spans.append((start, position))
            start = position
    return spans


def _shown_tokens(redact: Redactor, row: Answer, decode: Decode | None) -> ShownTokens | NoTokens:
    """Return the token ids of a row with their loss mask, or the reason why it has none.

    The first 1500 ids of the answer and the last 375 of the prompt are shown. Without `decode` the
    ids come without their text.
    """
    rollout = row if isinstance(row, TrajectoryRecord) else None
    if rollout is None or rollout.ids is None or rollout.loss_mask is None:
        return NoTokens('only the first groups of a training step keep theirs: where="group == 0"')
    all_prompt_ids = rollout.prompt_ids or []
    shown_tokens = ShownTokens(
        prompt_ids=all_prompt_ids[-_MOST_PROMPT_TOKENS:],
        ids=rollout.ids[:_MOST_TOKENS],
        loss_mask=[int(bool(value)) for value in rollout.loss_mask[:_MOST_TOKENS]],
        tokens_cut=_count_hidden_tokens(len(all_prompt_ids), len(rollout.ids)),
    )
    return shown_tokens if decode is None else _with_pieces(redact, shown_tokens, decode)


def _count_hidden_tokens(prompt_tokens: int, answer_tokens: int) -> int | None:
    """Count the tokens that are not shown of a prompt and an answer of these lengths; None if all
    are shown."""
    cut_of_prompt = max(0, prompt_tokens - _MOST_PROMPT_TOKENS)
    cut_of_answer = max(0, answer_tokens - _MOST_TOKENS)
    return (cut_of_prompt + cut_of_answer) or None


def _with_pieces(redact: Redactor, shown_tokens: ShownTokens, decode: Decode) -> ShownTokens:
    """Add the text of the shown tokens: the end of the prompt, and the answer. `decode` turns token
    ids into text."""
    ids = [*shown_tokens.prompt_ids, *shown_tokens.ids]
    prompt_mask = [0] * len(shown_tokens.prompt_ids)  # no token of the prompt is trained on
    return replace(
        shown_tokens, pieces=pieces(redact, ids, prompt_mask + shown_tokens.loss_mask, decode)
    )


def _few_digits(value: float | None) -> float | None:
    """Round the number to a few significant digits; None stays None."""
    return None if value is None else short(value)

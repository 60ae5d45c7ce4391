"""Rollouts as a reader can take them in: clean texts within a number of characters."""

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

Decode = Callable[[list[int]], str]  # token ids as text
T = TypeVar("T")

_LEAST_PER_TURN = 60
_MOST_TOKENS = 1500
_MOST_METRICS = 20


@dataclass(frozen=True)
class Turn:
    """One message of a conversation; role `note` stands for messages that were left out."""

    role: str
    content: str


@dataclass(frozen=True)
class Piece:
    """A stretch of text that is trained or is not, and how many tokens it has."""

    text: str
    trained: bool
    tokens: int


@dataclass(frozen=True)
class ShownTokens:
    """The token ids of a rollout.

    Attributes:
        prompt_ids: the end of the prompt.
        ids: what came after it; `loss_mask` is 1 where the model wrote it.
        pieces: the same as text, None where the tokenizer is gone.
        tokens_cut: how many ids are not shown, None where all are.
    """

    prompt_ids: list[int]
    ids: list[int]
    loss_mask: list[int]
    pieces: list[Piece] | None = None
    tokens_cut: int | None = None


@dataclass(frozen=True)
class NoTokens:
    """Why a rollout has no token ids to show."""

    why: str
    kept: bool = False


@dataclass(frozen=True)
class RolloutItem:
    """One rollout or held-out answer as a page shows it; None for what it does not have.

    Attributes:
        step, group, member: its place in training.
        attempt, model, half: its place in an evaluation.
        length: tokens the model wrote.
        completion: the answer, where it is one message; else `turns` holds the conversation.
    """

    task: str | None
    step: int | None
    group: int | None
    member: int | None
    attempt: int | None
    model: str | None
    half: str | None
    reward: float | None
    success: bool | None
    advantage: float | None
    loss: float | None
    stop_reason: str | None
    length: int | None
    metrics: dict[str, float] | None
    error: str | None
    prompt: list[Turn] | None
    completion: str | None
    turns: list[Turn] | None
    tokens: ShownTokens | NoTokens | None


@dataclass(frozen=True)
class Texts:
    """How much of a row is shown.

    Attributes:
        chars: for the prompt and the answer together; the answer keeps at least two thirds.
        prompt: whether the prompt is shown.
        tokens: also the ids and their loss mask, and as texts where `decode` can read them.
    """

    chars: int
    prompt: bool = True
    tokens: bool = False
    decode: Decode | None = None


def rollout_item(redact: Redactor, row: Answer, texts: Texts) -> RolloutItem:
    """One rollout or held-out answer, cleaned, with secrets hidden and numbers in few digits."""
    trained = row if isinstance(row, TrajectoryRecord) else None
    held_out = row if isinstance(row, EvaluationRow) else None
    conversation = _conversation(redact, row, texts)
    single = conversation.answer[0].content if len(conversation.answer) == 1 else None
    return RolloutItem(
        task=clip(redact.text(row.task), 120),
        step=trained.step if trained else None,
        group=trained.group if trained else None,
        member=trained.member if trained else None,
        attempt=held_out.attempt if held_out else None,
        model=redact.text(held_out.model) if held_out else None,
        half=redact.text(held_out.half) if held_out and held_out.half is not None else None,
        reward=_few_digits(row.reward),
        success=row.success,
        advantage=_few_digits(trained.advantage) if trained else None,
        loss=_few_digits(held_out.loss) if held_out else None,
        stop_reason=row.stop_reason,
        length=length_in_tokens(row),
        metrics=_shown_metrics(redact, row.metrics),
        error=clip(redact.text(row.error), 400) if row.error else None,
        prompt=conversation.prompt,
        completion=clip(single, conversation.chars) if single is not None else None,
        turns=within(conversation.answer, conversation.chars)
        if len(conversation.answer) > 1
        else None,
        tokens=_tokens(redact, row, texts.decode) if texts.tokens else None,
    )


@dataclass(frozen=True)
class _Conversation:
    """The prompt as it is shown, the whole answer, and the characters left for the answer."""

    prompt: list[Turn] | None
    answer: list[Turn]
    chars: int


def _conversation(redact: Redactor, row: Answer, texts: Texts) -> _Conversation:
    """The prompt gets what the answer leaves of the characters, and at least a third."""
    prompt, answer = turns_of(redact, row.prompt), turns_of(redact, row.messages)
    if not answer and row.completion is not None:
        answer = [Turn("assistant", redact.text(row.completion))]
    if not texts.prompt or not prompt:
        return _Conversation(None, answer, texts.chars)
    room = max(texts.chars - min(length_of(answer), texts.chars * 2 // 3), 40)
    shown = within(prompt, room)
    return _Conversation(shown, answer, max(texts.chars - length_of(shown), 40))


def _shown_metrics(
    redact: Redactor, metrics: Mapping[str, float] | None
) -> dict[str, float] | None:
    """The first metrics in few digits, None without any."""
    if not metrics:
        return None
    return {
        clip(redact.text(name), 60): short(value)
        for name, value in list(metrics.items())[:_MOST_METRICS]
    }


def length_in_tokens(row: Answer) -> int | None:
    """Tokens that the model wrote, None where the file does not say."""
    return row.tokens if "tokens" in row.model_fields_set else None


def chars_of(item: object) -> int:
    """Characters of `item` as compact JSON."""
    return json_chars(as_json(item))


def with_shorter_texts(item: T, chars: int) -> T:
    """`item` with its texts cut, shorter and shorter, until it takes at most `chars`, or until
    they are as short as texts get here (80 characters)."""
    for room in (600, 300, 150, 80):
        if chars_of(item) <= chars:
            return item
        item = _shortened(item, room)
    return item


def squeezed_rollout(item: RolloutItem, chars: int) -> RolloutItem:
    """`item` in about `chars`: with shorter texts, then without its metrics."""
    item = with_shorter_texts(item, chars)
    return item if chars_of(item) <= chars else replace(item, metrics=None)


def _shortened(value: Any, room: int) -> Any:
    """`value` with every text in it, and every list of ids, cut to `room`."""
    if isinstance(value, str):
        return clip(value, room)
    if isinstance(value, list):
        is_ids = bool(value) and isinstance(value[0], int)
        return [_shortened(item, room) for item in (value[:room] if is_ids else value)]
    if isinstance(value, dict):
        return {name: _shortened(item, room) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        return replace(value, **{n: _shortened(getattr(value, n), room) for n in names})
    return value


def decoder_of(config: RunConfig | None) -> Decode | None:
    """Ids as text by the base model's own tokenizer; None where its files are gone."""
    if not isinstance(config, TrainConfig):
        return None
    try:
        backend = tokenizers.load(Path(config.base.path)).backend
    except (UserError, OSError, ValueError):
        return None
    return lambda ids: str(backend.decode(ids, skip_special_tokens=False))


def turns_of(redact: Redactor, messages: str | Sequence[ChatMessage] | None) -> list[Turn]:
    """The messages cleaned, with secrets hidden and tool calls written out."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return [
        Turn(str(message.get("role", "")), redact.text(content_of(message)))
        for message in messages or ()
    ]


def length_of(turns: Sequence[Turn]) -> int:
    """Characters of all contents."""
    return sum(len(turn.content) for turn in turns)


def within(turns: Sequence[Turn], chars: int) -> list[Turn]:
    """The turns in at most about `chars`: long ones cut, and of very many the middle left out."""
    most = max(2, chars // _LEAST_PER_TURN)
    shown = list(turns)
    if len(shown) > most:
        tail = most // 2
        note = Turn("note", f"[{len(shown) - most} messages left out]")
        shown = [*shown[: most - tail], note, *shown[len(shown) - tail :]]
    if length_of(shown) <= chars:
        return shown
    cap = _fair_share([len(turn.content) for turn in shown], chars)
    return [replace(turn, content=clip(turn.content, cap)) for turn in shown]


def _fair_share(lengths: Sequence[int], total: int) -> int:
    """The cap at which these lengths, each cut at the cap, add up to `total`."""
    rest = total
    for done, length in enumerate(sorted(lengths)):
        share = rest // (len(lengths) - done)
        if length > share:
            return max(share, 20)
        rest -= length
    return max(lengths, default=0)


def pieces(
    redact: Redactor,
    ids: Sequence[int],
    mask: Sequence[int],
    decode: Decode,
    *,
    most: int = 24,
    chars: int = 300,
) -> list[Piece]:
    """Stretches of tokens with equal loss mask, in order: at most `most` of them, each text within
    `chars`. A last piece `…` counts the tokens of those that are left out."""
    stretches: list[Piece] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or bool(mask[end]) != bool(mask[start]):
            text = clip(redact.text(decode(list(ids[start:end]))), chars)
            stretches.append(Piece(text, bool(mask[start]), end - start))
            start = end
    if len(stretches) <= most:
        return stretches
    left_out = sum(piece.tokens for piece in stretches[most:])
    return [*stretches[:most], Piece("…", False, left_out)]


def _tokens(redact: Redactor, row: Answer, decode: Decode | None) -> ShownTokens | NoTokens:
    """Ids with their loss mask (1: trained). Training keeps them for the first groups only."""
    rollout = row if isinstance(row, TrajectoryRecord) else None
    if rollout is None or rollout.ids is None or rollout.loss_mask is None:
        return NoTokens('only the first groups of a training step keep theirs: where="group == 0"')
    prompt = rollout.prompt_ids or []
    prompt_ids = prompt[-_MOST_TOKENS // 4 :]
    ids = rollout.ids[:_MOST_TOKENS]
    mask = [int(bool(value)) for value in rollout.loss_mask[:_MOST_TOKENS]]
    stretches = None
    if decode is not None:
        stretches = pieces(redact, [*prompt_ids, *ids], [0] * len(prompt_ids) + mask, decode)
    cut = len(prompt) - len(prompt_ids) + len(rollout.ids) - len(ids)
    return ShownTokens(prompt_ids, ids, mask, stretches, cut or None)


def _few_digits(value: float | None) -> float | None:
    return None if value is None else short(value)

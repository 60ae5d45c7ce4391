"""Shows one SFT row as the trainer will see it: the rendered text, which parts are trained on, and
where the row is cut.

No torch is needed; the token counts equal those of the worker's renderer (see
engine/models/chat_format.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from engine.core.reply import ReplyBase
from engine.home.sanitize import Redactor, clip
from engine.models import tokens
from engine.models.chat_format import TemplateError, TokenizedChat
from engine.records.settings import SFTSettings
from engine.runs.reading.transcripts import Piece, pieces
from envs.json_types import TaskRow, ToolSchema
from envs.tool_schemas import tools_of

_MAX_ROWS = 300  # at most so many conversations are searched for a row that is cut
_MAX_PIECES, _PIECE_CHARS = 8, 160  # stretches of text that are shown, and characters of each
_LOST_CHARS = 200  # characters that are shown of the text after the cut
_TASK_CHARS = 120  # characters that are shown of a task's id


@dataclass(frozen=True)
class LostText:
    """The end of a row, after `max_length` tokens, which is cut off and not trained on."""

    tokens: int
    text: str


@dataclass(frozen=True)
class RowPreview(ReplyBase):
    """One training row, as it is trained.

    A conversation is one row, or several if the chat template writes earlier turns differently once
    more messages follow. Each turn is then trained after exactly the prompt that it has in use.

    Attributes:
        task: id of the task.
        tokens: length of the row, after the cut if it is cut.
        trained: number of tokens that carry loss.
        pieces: the text, in stretches that are trained on or not.
        cut_at: `max_length` if the row is cut there, else None.
        lost: the text after the cut, else None.
        of_rows: number of training rows that the conversation is split into; None if it is one.
        row: which of them this is, from 1; None if it is one.
    """

    task: str
    tokens: int
    trained: int
    pieces: list[Piece]
    cut_at: int | None = None
    lost: LostText | None = None
    of_rows: int | None = None
    row: int | None = None


def sft_row(
    rows: Sequence[TaskRow],
    tools: list[ToolSchema],
    model_folder: Path,
    settings: SFTSettings,
    redact: Redactor,
) -> RowPreview | None:
    """Make a preview of one training row from the first 300 conversations. Returns None if no
    conversation can be rendered.

    The first row that is cut at `max_length` is chosen, because that shows a fault of the settings.
    If no row is cut, it is the last row of the first conversation, because that shows what the
    template leaves of earlier turns.

    Args:
        tools: tool schemas of the environment, for rows that have none of their own.
        model_folder: holds the tokenizer and its chat template.
    """
    tokenizer = tokens.load(model_folder)
    preview: RowPreview | None = None
    # A generator, so that only the rows that are needed are read from a large dataset.
    # `gold` of a row is the conversation with its reference answer.
    rows_with_answer = (row for row in rows if row["split"] == "train" and row.get("gold"))
    for row in islice(rows_with_answer, _MAX_ROWS):
        chats = _tokenized_turns(row, tools, tokenizer, settings)
        shown_chat = _chat_to_show(chats, settings.max_length)
        if shown_chat is None:
            continue
        is_cut = len(shown_chat.ids) > settings.max_length
        if preview is None or is_cut:
            preview = _preview(str(row.get("id")), shown_chat, settings, tokenizer, redact)
            preview = _with_row_number(preview, chats, shown_chat)
        if is_cut:
            return preview
    return preview


def _chat_to_show(chats: Sequence[TokenizedChat], max_length: int) -> TokenizedChat | None:
    """Choose the row of a conversation to show: the first that is longer than `max_length` tokens,
    else the last. Returns None if there is no row."""
    if not chats:
        return None
    too_long = (chat for chat in chats if len(chat.ids) > max_length)
    return next(too_long, chats[-1])


def _with_row_number(
    preview: RowPreview, chats: Sequence[TokenizedChat], shown_chat: TokenizedChat
) -> RowPreview:
    """Add the place of the shown row (`shown_chat`) in its conversation to the preview, such as
    "row 2 of 3". `chats` are the rows of that conversation; if there is only one, the preview stays
    as it is."""
    if len(chats) == 1:
        return preview
    return replace(preview, of_rows=len(chats), row=chats.index(shown_chat) + 1)


def _tokenized_turns(
    row: TaskRow, tools: list[ToolSchema], tokenizer: tokens.ChatTokenizer, settings: SFTSettings
) -> list[TokenizedChat]:
    """Tokenise the training rows of one conversation. Returns [] if the chat template refuses the
    conversation. `tools` are the environment's tool schemas, for a row that has none of its own."""
    tools_of_row = tools_of(row, tools)
    try:
        return tokenizer.format().rows(row["gold"], tools_of_row, settings.thinking)
    except TemplateError:
        return []


def _preview(
    task_id: str,
    chat: TokenizedChat,
    settings: SFTSettings,
    tokenizer: tokens.ChatTokenizer,
    redact: Redactor,
) -> RowPreview:
    """Make the preview of a row of the task `task_id`. `chat` holds the row's tokens before the
    cut."""
    limit = settings.max_length
    ids = chat.ids[:limit]
    mask = chat.mask(settings.loss_on)[:limit]  # for each id 1 if it is trained on, else 0
    lost_ids = chat.ids[limit:]
    lost = None
    if lost_ids:
        lost = LostText(len(lost_ids), clip(redact.text(tokenizer.decode(lost_ids)), _LOST_CHARS))
    return RowPreview(
        task=clip(redact.text(task_id), _TASK_CHARS),
        tokens=len(ids),
        trained=sum(mask),
        pieces=pieces(
            redact, ids, mask, tokenizer.decode, max_pieces=_MAX_PIECES, max_chars=_PIECE_CHARS
        ),
        cut_at=limit if lost_ids else None,
        lost=lost,
    )

"""One SFT row as the trainer will see it: the rendered text, what of it is trained, where it ends.

Without torch; the counts agree with the worker's renderer to the token (see
engine/models/chat_format.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.reply import ReplyBase
from engine.home.sanitize import Redactor, clip
from engine.models import tokens
from engine.models.chat_format import TemplateError, TokenizedChat
from engine.reading.transcripts import Piece, pieces
from engine.records.settings import SFTSettings
from envs.json_types import TaskRow, ToolSchema

_MOST_ROWS = 300  # searched for one that is cut


@dataclass(frozen=True)
class LostText:
    """What of a row comes after `max_length` and is not trained on."""

    tokens: int
    text: str


@dataclass(frozen=True)
class RowPreview(ReplyBase):
    """One training row as it is trained.

    Attributes:
        task: its id.
        tokens: its length, where it is cut the length that is left.
        trained: tokens that carry loss.
        pieces: stretches of text that are trained or not.
        cut_at, lost: of a row that is cut `max_length`, and what comes after it.
    """

    task: str
    tokens: int
    trained: int
    pieces: list[Piece]
    cut_at: int | None = None
    lost: LostText | None = None


def sft_row(
    rows: Sequence[TaskRow],
    tools: list[ToolSchema],
    model_folder: Path,
    settings: SFTSettings,
    redact: Redactor,
) -> RowPreview | None:
    """The first train row with an answer, or the first that `max_length` cuts, where one does.

    None where there is no row that anything can be learnt from.
    """
    tokenizer = tokens.load(model_folder)
    preview: RowPreview | None = None
    answered = [row for row in rows if row["split"] == "train" and row.get("gold")]
    for row in answered[:_MOST_ROWS]:
        tools_of_row = (row.get("metadata") or {}).get("tools") or tools
        try:
            chat = tokenizer.format().conversation(row["gold"], tools_of_row)
        except TemplateError:
            continue
        is_cut = len(chat.ids) > settings.max_length
        if preview is None or is_cut:
            preview = _preview(str(row.get("id")), chat, settings, tokenizer, redact)
        if is_cut:
            break
    return preview


def _preview(
    task: str,
    chat: TokenizedChat,
    settings: SFTSettings,
    tokenizer: tokens.ChatTokenizer,
    redact: Redactor,
) -> RowPreview:
    """The row `task`, rendered to `chat`, as it is trained under the settings."""
    limit = settings.max_length
    ids, mask = chat.ids[:limit], chat.mask(settings.loss_on)[:limit]
    rest = chat.ids[limit:]
    lost = None
    if rest:
        lost = LostText(len(rest), clip(redact.text(tokenizer.decode(rest)), 200))
    return RowPreview(
        task=clip(redact.text(task), 120),
        tokens=len(ids),
        trained=sum(mask),
        pieces=pieces(redact, ids, mask, tokenizer.decode, most=8, chars=160),
        cut_at=limit if rest else None,
        lost=lost,
    )

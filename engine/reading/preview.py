"""One SFT row as the trainer will see it: the rendered text, what of it is trained, where it ends.

Without torch; the counts agree with the worker's renderer to the token (see
engine/models/chat_format.py).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.home.sanitize import Redactor, clip
from engine.models import tokens
from engine.models.chat_format import TemplateError, TokenizedChat
from engine.reading.transcripts import pieces
from engine.records.settings import SFTSettings

_LOOKED_AT = 300  # rows searched for one that is cut


def sft_row(
    rows: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]],
    model_folder: Path,
    settings: SFTSettings,
    redact: Redactor,
) -> dict[str, Any]:
    """The first train row with an answer, or the first that `max_length` cuts, where one does.

    Returns `task`, `tokens`, `trained` (tokens that carry loss), `pieces` (stretches of text with
    `trained`), and for a row that is cut `cut_at` with the `lost` tokens and text; {} for rows
    that nothing can be learnt from.
    """
    tokenizer = tokens.load(model_folder)
    limit, loss_on = settings.max_length, settings.loss_on
    shown: dict[str, Any] = {}
    answered = [row for row in rows if row["split"] == "train" and row.get("gold")]
    for row in answered[:_LOOKED_AT]:
        own = (row.get("metadata") or {}).get("tools") or tools
        try:
            whole = tokenizer.format().conversation(row["gold"], own)
        except TemplateError:
            continue
        if shown and len(whole.ids) <= limit:
            continue
        shown = _shown(row, whole, limit, loss_on, tokenizer, redact)
        if "cut_at" in shown:
            break
    return shown


def _shown(
    row: Mapping[str, Any],
    whole: TokenizedChat,
    limit: int,
    loss_on: str,
    tokenizer: tokens.ChatTokenizer,
    redact: Redactor,
) -> dict[str, Any]:
    ids, mask = whole.ids[:limit], whole.mask(loss_on)[:limit]
    found: dict[str, Any] = {
        "task": clip(redact.text(str(row.get("id"))), 120),
        "tokens": len(ids),
        "trained": sum(mask),
        "pieces": pieces(redact, ids, mask, tokenizer.decode, most=8, chars=160),
    }
    lost = whole.ids[limit:]
    if lost:
        text = clip(redact.text(tokenizer.decode(lost)), 200)
        found |= {"cut_at": limit, "lost": {"tokens": len(lost), "text": text}}
    return found

"""Conversations kept in the home, so that the next call goes on with the id of the last reply.

They are bounded: the newest `KEPT` that were used within `KEPT_DAYS` days, each of at most
`MAX_CHARS` characters: `chats/<id>.json`. Each model that took part has a branch of its own, since
models that are compared answer differently.
"""

import contextlib
import re
import secrets
import time

from pydantic import Field

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.records.record import Record
from envs.json_types import ChatMessage, ToolSchema

KEPT = 200
KEPT_DAYS = 7
MAX_CHARS = 400_000  # of one conversation as JSON
_ID = re.compile(r"c-[0-9a-f]{12}")


class Branch(Record):
    """What one model was asked and answered.

    Attributes:
        model: the name under which it was served.
        messages: in OpenAI's form, the system prompt first where there is one.
        begun: token ids of the last answer, where that was cut; it can be continued.
    """

    model: str
    messages: list[ChatMessage]
    begun: list[int] = Field(default_factory=list)


class Conversation(Record):
    """A conversation after its latest answer.

    Attributes:
        owner: name of the key that began it; nobody else can go on with it.
        turns: how often it was answered.
        tools: what the models may call, as OpenAI function schemas.
        seed: of the latest answers.
        branches: one for each model, that of the model asked first in the first place.
    """

    owner: str
    turns: int
    tools: list[ToolSchema]
    seed: int
    branches: list[Branch]


def load(home: Home, conversation_id: str, owner: str) -> Conversation:
    """The conversation with that id. Raises UserError BAD_ARGUMENT if there is none of `owner`'s,
    and HOME_UNUSABLE if its file is damaged."""
    conversation = None
    if _ID.fullmatch(conversation_id):  # any other text could lead out of the folder
        with contextlib.suppress(FileNotFoundError):
            conversation = Conversation.read(home.chats / f"{conversation_id}.json")
    if conversation is None or conversation.owner != owner:
        raise UserError(
            "BAD_ARGUMENT",
            f"there is no conversation {conversation_id!r}; the newest {KEPT} are kept, each for "
            f"{KEPT_DAYS} days after its last answer",
            hint="Begin one: leave conversation out, and give what was said as messages.",
            field="conversation",
        )
    return conversation


def save(home: Home, conversation_id: str, conversation: Conversation) -> tuple[str, str]:
    """Keep a conversation after an answer; "" as id begins a new one.

    Returns its id ("" if it has grown too long to be kept) and a warning ("" for none). If another
    call saved an answer to the same conversation meanwhile, this one gets a new id, so that neither
    answer is lost.
    """
    size = len(conversation.model_dump_json())
    if size > MAX_CHARS:
        return "", (
            f"the conversation has {size} characters and is not kept (at most {MAX_CHARS}); begin "
            "another with what matters of it"
        )
    warning = ""
    turns_before = conversation.turns - 1  # the file has more if another call has saved meanwhile
    if conversation_id and _turns(home, conversation_id) != turns_before:
        warning = f"{conversation_id} was answered by another call meanwhile; this is a new one"
        conversation_id = ""
    conversation_id = conversation_id or f"c-{secrets.token_hex(6)}"
    home.chats.mkdir(mode=0o700, exist_ok=True)
    conversation.write(home.chats / f"{conversation_id}.json")
    _forget_old(home)
    return conversation_id, warning


def _turns(home: Home, conversation_id: str) -> int:
    """How often the conversation was answered; 0 if its file was deleted."""
    try:
        return Conversation.read(home.chats / f"{conversation_id}.json").turns
    except FileNotFoundError:
        return 0


def _forget_old(home: Home) -> None:
    """Delete conversations that were not used for `KEPT_DAYS` days, and all but the `KEPT` used
    last."""
    used_at: list[tuple[float, str]] = []
    for file in home.chats.glob("c-*.json"):
        with contextlib.suppress(FileNotFoundError):  # another process forgets it too
            used_at.append((file.stat().st_mtime, file.name))
    used_at.sort(reverse=True)  # the last used one first
    oldest_time = time.time() - KEPT_DAYS * 86_400
    for number, (time_used, name) in enumerate(used_at):
        if number >= KEPT or time_used < oldest_time:
            (home.chats / name).unlink(missing_ok=True)

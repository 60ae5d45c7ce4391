"""Stores conversations in the home, so that the next call can continue one by the id in the last
reply.

Each is a file `chats/<id>.json`; the id begins with digits that stand for its owner. Of each owner
at most `KEPT` are stored, the last used ones, each for `KEPT_DAYS` days after its last use and with
at most `MAX_CHARS` characters. Each model that took part has a branch of its own, because models
that are compared answer differently.
"""

import contextlib
import hashlib
import re
import secrets
import time
from collections import Counter

from pydantic import Field

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.records.record import Record
from envs.json_types import ChatMessage, ToolSchema

KEPT = 200
KEPT_DAYS = 7
MAX_CHARS = 400_000  # of one conversation as JSON
_OWNER_DIGITS = 4  # of the 12 of an id
_ID = re.compile(r"c-[0-9a-f]{12}")


class Branch(Record):
    """What one model was asked and answered.

    Attributes:
        model: the name under which it was served.
        messages: in OpenAI's form; a system prompt comes first.
        begun: token ids of the last answer if that was cut and can be continued; else [].
    """

    model: str
    messages: list[ChatMessage]
    begun: list[int] = Field(default_factory=list)


class Conversation(Record):
    """A conversation after its latest answer.

    Attributes:
        owner: name of the key that began it; only this owner can continue it.
        turns: how often it was answered.
        tools: the tools that the models may call, as OpenAI function schemas.
        seed: of the latest answers.
        branches: one for each model; the branch of the model that was asked first comes first.
    """

    owner: str
    turns: int
    tools: list[ToolSchema]
    seed: int
    branches: list[Branch]


def load(home: Home, conversation_id: str, owner: str) -> Conversation:
    """Load the conversation with this id. Raises UserError BAD_ARGUMENT if `owner` has none with
    this id, HOME_UNUSABLE if its file is damaged."""
    conversation = None
    if _ID.fullmatch(conversation_id):  # any other text could be a path to another folder
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
    """Store a conversation after an answer; with "" as id it gets a new one. Returns (its id, a
    warning). The id is "" if the conversation has become too long to be stored; the warning is ""
    if there is none.

    If another call has stored an answer to the same conversation meanwhile, this one gets a new id,
    so that neither answer is lost.
    """
    size = len(conversation.model_dump_json())
    if size > MAX_CHARS:
        return "", (
            f"the conversation has {size} characters and is not kept (at most {MAX_CHARS}); begin "
            "another with what matters of it"
        )
    warning = ""
    turns_before = conversation.turns - 1  # the file has more if another call was faster
    if conversation_id and _turns(home, conversation_id) != turns_before:
        warning = f"{conversation_id} was answered by another call meanwhile; this is a new one"
        conversation_id = ""
    conversation_id = conversation_id or _new_id(conversation.owner)
    home.chats.mkdir(mode=0o700, exist_ok=True)
    conversation.write(home.chats / f"{conversation_id}.json")
    _delete_old(home)
    return conversation_id, warning


def _new_id(owner: str) -> str:
    """Make the id of a new conversation: "c-", digits that stand for its owner, random digits."""
    owner_digits = hashlib.sha256(owner.encode()).hexdigest()[:_OWNER_DIGITS]
    return f"c-{owner_digits}{secrets.token_hex(4)}"


def _turns(home: Home, conversation_id: str) -> int:
    """Read how often the stored conversation was answered; 0 if its file was deleted."""
    try:
        return Conversation.read(home.chats / f"{conversation_id}.json").turns
    except FileNotFoundError:
        return 0


def _delete_old(home: Home) -> None:
    """Delete conversations that were not used for `KEPT_DAYS` days, and of each owner all but
    the `KEPT` that were used last, so that no owner's conversations push out another's."""
    uses: list[tuple[float, str]] = []  # (time of the last use, name of the file)
    for file in home.chats.glob("c-*.json"):
        with contextlib.suppress(FileNotFoundError):  # another process has just deleted the file
            uses.append((file.stat().st_mtime, file.name))
    uses.sort(reverse=True)  # the last used one first
    oldest_time = time.time() - KEPT_DAYS * 86_400
    counts = Counter[str]()  # by the part of the id that stands for the owner
    for time_used, name in uses:
        owner_part = name[: len("c-") + _OWNER_DIGITS]
        counts[owner_part] += 1
        if counts[owner_part] > KEPT or time_used < oldest_time:
            (home.chats / name).unlink(missing_ok=True)

"""Conversations in the home: found by id and owner, bounded, never overwritten unseen."""

import pytest

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.serving import conversations
from engine.serving.conversations import Conversation

EMPTY = Conversation(owner="ann", turns=1, tools=[], seed=0, branches=[])


def test_a_conversation_gets_an_id_and_keeps_it(home: Home):
    name, warning = conversations.save(home, "", EMPTY)
    assert warning == "" and conversations.load(home, name, "ann") == EMPTY
    later = EMPTY.model_copy(update={"turns": 2})
    assert conversations.save(home, name, later) == (name, "")
    assert conversations.load(home, name, "ann") == later
    assert (home.chats / f"{name}.json").stat().st_mode & 0o777 == 0o600
    assert home.chats.stat().st_mode & 0o777 == 0o700


def test_what_was_answered_meanwhile_is_kept_beside_it(home: Home):
    name, _ = conversations.save(home, "", EMPTY)
    theirs = EMPTY.model_copy(update={"turns": 2, "seed": 1})
    mine = EMPTY.model_copy(update={"turns": 2, "seed": 2})
    conversations.save(home, name, theirs)
    other, warning = conversations.save(home, name, mine)
    assert other != name and "meanwhile" in warning
    assert conversations.load(home, name, "ann") == theirs
    assert conversations.load(home, other, "ann") == mine
    (home.chats / f"{name}.json").unlink()  # the oldest ones are forgotten
    assert conversations.save(home, name, mine)[0] not in (name, other)


def test_nobody_makes_the_conversations_of_others_be_forgotten(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(conversations, "KEPT", 2)
    hers, _ = conversations.save(home, "", EMPTY)
    his = EMPTY.model_copy(update={"owner": "bob"})
    for _ in range(4):
        conversations.save(home, "", his)
    assert conversations.load(home, hers, "ann") == EMPTY
    assert len(list(home.chats.iterdir())) == 3


@pytest.mark.parametrize("name", ["c-0123456789ab", "../honesmith", "", "c-0123456789ab\n"])
def test_an_id_that_is_none_names_no_file(home: Home, name: str):
    with pytest.raises(UserError) as caught:
        conversations.load(home, name, "ann")
    assert (caught.value.code, caught.value.field) == ("BAD_ARGUMENT", "conversation")

"""The record of a conversation: what it needs, and what an older or a damaged file says."""

from pathlib import Path

import pytest

from engine.records.record import DamagedRecord
from engine.serving.conversations import Branch, Conversation

BRANCH = {"model": "pebble", "messages": [{"role": "user", "content": "hi"}]}
FILE = '{"owner": "ann", "turns": 1, "tools": [], "seed": 3, "branches": [%s], "later": 1}'


def test_a_conversation_is_read_as_it_was_written(tmp_path: Path):
    whole = Conversation(
        owner="ann",
        turns=2,
        tools=[{"type": "function"}],
        seed=3,
        branches=[Branch(model="pebble", messages=BRANCH["messages"], begun=[4, 5])],
    )
    whole.write(tmp_path / "c.json")
    assert Conversation.read(tmp_path / "c.json") == whole


def test_a_branch_without_a_cut_answer_has_no_tokens_and_later_keys_are_left_alone():
    text = FILE % '{"model": "pebble", "messages": []}'
    (branch,) = Conversation.parse(text, "here").branches
    assert branch.begun == []


def test_a_damaged_conversation_is_named_with_the_key(tmp_path: Path):
    (tmp_path / "c.json").write_text(FILE % '{"messages": []}')
    with pytest.raises(DamagedRecord, match=r"c\.json is damaged: branches\.0\.model"):
        Conversation.read(tmp_path / "c.json")

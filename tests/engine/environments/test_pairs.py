"""A task's worse answer, in every form it may be given, and what is no pair."""

from typing import Any

import pytest

from engine.environments.pairs import rejected_of

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
WORSE = {"role": "assistant", "content": "It is 4."}
RIGHT = {"role": "assistant", "content": "4"}


def row(rejected: Any, gold: Any = (*PROMPT, RIGHT)) -> dict[str, Any]:
    metadata = {} if rejected is None else {"rejected": rejected}
    return {"prompt": PROMPT, "gold": gold and list(gold), "metadata": metadata}


@pytest.mark.parametrize("rejected", ["It is 4.", [WORSE], [*PROMPT, WORSE]])
def test_text_messages_and_whole_conversations_are_the_same_worse_answer(rejected: Any) -> None:
    assert rejected_of(row(rejected)) == [*PROMPT, WORSE]


@pytest.mark.parametrize(
    "rejected", [None, "", 4, {}, [], ["4"], [{"content": "4"}], PROMPT, "4", [RIGHT], [*PROMPT]]
)
def test_a_missing_a_malformed_and_an_equal_answer_make_no_pair(rejected: Any) -> None:
    assert rejected_of(row(rejected)) is None


def test_a_worse_answer_alone_is_no_pair() -> None:
    assert rejected_of(row("It is 4.", gold=None)) is None

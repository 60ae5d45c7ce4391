"""A task's better and worse answer, in every form they may be given, and what is no pair."""

from typing import Any

import pytest

from engine.environments.pairs import pair_of
from envs.row_shapes import to_task

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
WORSE = {"role": "assistant", "content": "It is 4."}
RIGHT = {"role": "assistant", "content": "4"}


def row(rejected: Any, gold: Any = (*PROMPT, RIGHT), chosen: Any = None) -> dict[str, Any]:
    given = {"rejected": rejected, "chosen": chosen}
    metadata = {key: value for key, value in given.items() if value is not None}
    return {"prompt": PROMPT, "gold": gold and list(gold), "metadata": metadata}


@pytest.mark.parametrize("rejected", ["It is 4.", [WORSE], [*PROMPT, WORSE]])
def test_text_messages_and_whole_conversations_are_the_same_worse_answer(rejected: Any) -> None:
    assert pair_of(row(rejected)) == ([*PROMPT, RIGHT], [*PROMPT, WORSE])


@pytest.mark.parametrize("chosen", ["4", [RIGHT], [*PROMPT, RIGHT]])
def test_a_row_without_a_reference_answer_names_the_better_one_as_chosen(chosen: Any) -> None:
    assert pair_of(row("It is 4.", gold=None, chosen=chosen)) == (
        [*PROMPT, RIGHT],
        [*PROMPT, WORSE],
    )


def test_a_chosen_answer_goes_before_the_reference_answer() -> None:
    reference = [*PROMPT, {"role": "assistant", "content": "Four, since two and two are four."}]
    pair = pair_of(row("It is 4.", gold=reference, chosen="4"))
    assert pair is not None and pair.chosen == [*PROMPT, RIGHT]
    # What is no answer under that name is metadata of the author's own.
    own = pair_of(row("It is 4.", gold=reference, chosen=True))
    assert own is not None and own.chosen == reference


@pytest.mark.parametrize(
    "rejected", [None, "", 4, {}, [], ["4"], [{"content": "4"}], PROMPT, "4", [RIGHT], [*PROMPT]]
)
def test_a_missing_a_malformed_and_an_equal_answer_make_no_pair(rejected: Any) -> None:
    assert pair_of(row(rejected)) is None


def test_one_answer_alone_is_no_pair() -> None:
    assert pair_of(row("It is 4.", gold=None)) is None
    assert pair_of(row(None, gold=None, chosen="4")) is None


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "It is 4."},
        {"chosen": [PROMPT[1], RIGHT], "rejected": [PROMPT[1], WORSE]},
        {
            "input": {"messages": [PROMPT[1]]},
            "preferred_output": [RIGHT],
            "non_preferred_output": [WORSE],
        },
    ],
)
def test_every_shape_of_a_preference_in_a_file_is_a_pair(line: dict[str, Any]) -> None:
    stored = {**to_task(line, "1").to_row(), "gold": None}
    assert pair_of(stored) == ([PROMPT[1], RIGHT], [PROMPT[1], WORSE])

"""Other words of a task: always others, always the same by the same seed, and never of another
question."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.wording.asked import asked_prompt, asked_tools, conversation
from engine.core.wording.kinds import KINDS, Kind, Stock
from engine.core.wording.reword import reword
from envs.json_types import TaskRow, ToolSchema

LOOKUP: ToolSchema = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Price of an item.",
        "parameters": {
            "type": "object",
            "properties": {
                "item": {"type": "string", "description": "Its name."},
                "description": {"type": "string"},
            },
            "required": ["item"],
        },
    },
}
SEARCH: ToolSchema = {"type": "function", "function": {"name": "web_search"}}
STOCKS: tuple[Stock, ...] = ("training", "probe")


def task(text: str = "What is the price of apple?", **more: Any) -> TaskRow:
    prompt = [{"role": "user", "content": text}]
    answer = [{"role": "assistant", "content": "42"}]
    row = {"id": "t", "prompt": prompt, "answer": answer, "split": "heldout", "metadata": {}}
    return {**row, "gold": [*prompt, *answer], **more}


@given(st.integers(0, 10_000), st.sampled_from(["wording", "system", "tools"]))
def test_other_words_differ_and_are_the_same_by_the_same_seed(seed: int, kind: Kind) -> None:
    for stock in STOCKS:
        worded = reword(task(), kind, [LOOKUP, SEARCH], seed, stock)
        assert worded is not None
        shown = asked_prompt(worded), asked_tools(worded, [LOOKUP, SEARCH])
        assert shown != (task()["prompt"], [LOOKUP, SEARCH])
        assert worded == reword(task(), kind, [LOOKUP, SEARCH], seed, stock)
        # What is scored is the task as it was.
        assert {key: worded[key] for key in task()} == task()


@given(st.integers(0, 10_000), st.text(min_size=1).filter(str.strip))
def test_a_question_of_any_text_stands_whole_at_the_end_of_its_frame(seed: int, text: str) -> None:
    worded = reword(task(f"Say: {text}"), "wording", [], seed, "probe")
    assert worded is not None
    (message,) = asked_prompt(worded)
    # "Say" may have become "say"; nothing behind the colon changes unless sentences moved.
    assert message["content"].endswith(text) or text.strip() in message["content"]


@given(st.integers(0, 10_000))
def test_the_calls_that_are_right_stay_right(seed: int) -> None:
    worded = reword(task(), "tools", [LOOKUP, SEARCH], seed, "training")
    assert worded is not None
    tools = {each["function"]["name"]: each["function"] for each in asked_tools(worded, [])}
    assert set(tools) == {"lookup", "web_search"}
    parameters = tools["lookup"]["parameters"]
    assert parameters["required"] == ["item"]
    assert {k: v["type"] for k, v in parameters["properties"].items()} == {
        "item": "string",
        "description": "string",
    }
    assert tools["lookup"]["description"] != "Price of an item."


def test_the_texts_that_training_draws_are_not_those_of_the_probe() -> None:
    def texts(stock: Stock) -> set[str]:
        """Every description and system message that 400 seeds show."""
        shown = set()
        for seed in range(400):
            for kind in ("system", "tools"):
                worded = reword(task(), kind, [LOOKUP], seed, stock)
                assert worded is not None
                if kind == "system":
                    shown.add(asked_prompt(worded)[0]["content"])
                else:
                    shown.add(asked_tools(worded, [])[0]["function"]["description"])
        return shown

    training, probe = texts("training"), texts("probe")
    assert len(training) > 8 and len(probe) > 8
    assert training & probe == set()


def test_frames_of_training_are_not_those_of_the_probe() -> None:
    def openings(stock: Stock) -> set[str]:
        worded = (reword(task("17 and 4?"), "wording", [], seed, stock) for seed in range(200))
        return {asked_prompt(each)[0]["content"].split("17 and")[0] for each in worded if each}

    assert openings("training") & openings("probe") == set()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_there_has_no_other_words(kind: Kind) -> None:
    silent = task() | {"prompt": [{"role": "system", "content": "Be quick."}]}
    expected = {"wording": None, "tools": None, "options": None}
    worded = reword(silent, kind, [], 0, "probe")
    assert kind == "system" or worded == expected[kind]


def test_a_system_message_that_says_how_to_answer_is_kept_whole() -> None:
    rule = "Answer with the number alone."
    prompt = [{"role": "system", "content": rule}, *task()["prompt"]]
    for seed in range(50):
        worded = reword(task(prompt=prompt), "system", [], seed, "probe")
        assert worded is not None
        first = asked_prompt(worded)[0]
        assert first["role"] == "system" and rule in first["content"].split("\n")
        assert first["content"] != rule


def test_a_system_message_that_says_nothing_is_replaced_or_left_out() -> None:
    prompt = [{"role": "system", "content": "You are a helpful assistant."}, *task()["prompt"]]
    roles = set()
    for seed in range(50):
        worded = reword(task(prompt=prompt), "system", [], seed, "probe")
        assert worded is not None
        assert "You are a helpful assistant." not in json.dumps(asked_prompt(worded))
        roles.add(asked_prompt(worded)[0]["role"])
    assert roles == {"system", "user"}


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("Add 4 and 7. End with the sum.", "End with the sum. Add 4 and 7."),
        ("Read this. Write it twice.", None),  # "it" points back
        ("Add 4 and 7. Use the rule above.", None),
        ("It rains. She smiles.", None),  # says not how to answer
    ],
)
def test_an_instruction_moves_only_where_nothing_points_back(text: str, moved: str | None) -> None:
    shown = set()
    for seed in range(200):
        worded = reword(task(text), "wording", [], seed, "probe")
        assert worded is not None
        shown.add(asked_prompt(worded)[0]["content"].lower())
    ends = {each for each in shown if not each.endswith(text.lower())}
    assert all(each.endswith(moved.lower()) for each in ends) if moved else ends == set()
    assert bool(ends) == bool(moved)


def test_several_kinds_may_meet_in_one_task() -> None:
    worded = task()
    for kind in ("wording", "system", "tools"):
        worded = reword(worded, kind, [LOOKUP], 3, "training") or worded
    system, user = asked_prompt(worded)
    assert system["role"] == "system" and "apple" in user["content"]
    assert user["content"] != "What is the price of apple?"
    assert asked_tools(worded, [LOOKUP]) != [LOOKUP]
    assert conversation(worded) == [system, user, {"role": "assistant", "content": "42"}]


def test_a_task_of_its_own_tools_keeps_them_when_its_prompt_is_reworded() -> None:
    worded = reword(task(tools=[SEARCH]), "wording", [LOOKUP], 0, "probe")
    assert worded is not None and asked_tools(worded, [LOOKUP]) == [SEARCH]

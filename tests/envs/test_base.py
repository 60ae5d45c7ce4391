"""Messages, tasks and scores."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import Message, MultiTurnEnv, Score, SingleTurnEnv, Task, ToolCall
from envs.base import is_scored, kind_of

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'},
}

texts = st.text(max_size=30)
calls = st.builds(
    ToolCall,
    name=st.text(min_size=1, max_size=8),
    arguments=st.dictionaries(texts, st.integers() | texts, max_size=3),
    id=texts,
)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts,
    tool_calls=st.lists(calls, max_size=2),
    tool_call_id=texts,
    name=texts,
)
tasks = st.builds(
    Task,
    id=st.text(min_size=1, max_size=10),
    prompt=st.text(min_size=1, max_size=30) | st.lists(messages, min_size=1, max_size=3),
    answer=st.none() | texts | st.lists(messages, max_size=3),
    split=st.none() | st.sampled_from(["train", "test"]),
    metadata=st.dictionaries(texts, st.integers() | texts | st.booleans(), max_size=3),
    group=texts,
)


@given(messages)
def test_a_message_survives_the_way_through_json(message: Message):
    assert Message.from_dict(json.loads(json.dumps(message.to_dict()))) == message


@given(tasks)
def test_a_task_survives_being_stored(task: Task):
    assert Task.from_row(json.loads(json.dumps(task.to_row()))) == task


def test_a_number_as_group_becomes_text_and_a_list_is_refused():
    assert Task("1", "x", group=7).to_row()["group"] == "7"  # pyright: ignore[reportArgumentType]
    assert "group" not in Task("1", "x").to_row()
    with pytest.raises(ValueError, match="the group of task '1' is a string"):
        Task("1", "x", group=["a"])  # pyright: ignore[reportArgumentType]


def test_tool_calls_arrive_parsed_whatever_form_their_arguments_have():
    from_text = Message("assistant", tool_calls=[CALL]).tool_calls[0]
    assert (from_text.name, from_text.arguments) == ("add", {"a": 1, "b": "x"})
    bare = ToolCall.from_dict({"name": "add", "arguments": {"a": 1}})
    assert bare == ToolCall("add", {"a": 1})
    assert ToolCall.from_dict({"function": {"name": "now"}}) == ToolCall("now")


@pytest.mark.parametrize("raw", ["{", "[1]", "3", "null x"])
def test_arguments_that_are_no_object_are_kept_as_they_are(raw: str):
    call = ToolCall.from_dict({"function": {"name": "add", "arguments": raw}})
    assert call.arguments == {} and call.invalid == raw
    assert call.to_dict()["function"]["arguments"] == raw


def test_a_list_of_text_parts_is_joined_and_none_is_empty():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Message.from_dict({"role": "user", "content": parts}).content == "ab"
    assert Message.from_dict({"role": "assistant", "content": None}).content == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "robot", "content": "x"},
        {"content": "x"},
        {"role": "user", "content": 3},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]},
        "hello",
    ],
)
def test_what_is_no_message_is_refused(wrong):
    with pytest.raises(ValueError):
        Message.from_dict(wrong)


def test_a_task_says_what_is_wrong_with_it():
    with pytest.raises(ValueError, match="prompt of task 'x' is empty"):
        Task("x", "")
    with pytest.raises(ValueError, match="id is a string"):
        Task(None, "p")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"prompt of task 'x'.*role"):
        Task("x", [{"content": "p"}])
    with pytest.raises(ValueError, match="metadata of task 'x'"):
        Task("x", "p", metadata=["m"])  # type: ignore[arg-type]


def test_half_a_surrogate_pair_is_no_text():
    for make in (
        lambda: Task("x", "a\ud800"),
        lambda: Task("x\ud800", "a"),
        lambda: Task("x", "a", "\udfff"),
        lambda: Task("x", [{"role": "user", "content": "\ud800"}]),
        lambda: Message("assistant", "\ud800"),
    ):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            make()
    assert Message("user", "\U0001f600").content == "\U0001f600"


def test_prompt_and_answer_can_be_read_as_text():
    task = Task(
        7,  # type: ignore[arg-type]
        [Message("system", "s"), {"role": "user", "content": "u"}],
        [Message("assistant", tool_calls=[CALL]), Message("tool", "3"), Message("assistant", "4")],
    )
    assert (task.id, task.prompt_text, task.answer_text) == ("7", "u", "4")
    assert Task("x", "p").answer_text == "" and Task("x", "p").answer_messages == []


def test_an_env_without_a_score_of_its_own_is_a_dataset():
    class Rows(SingleTurnEnv):
        pass

    class Single(SingleTurnEnv):
        def score(self, task: Task, completion: str) -> Score:
            return Score(1.0)

    class Child(Single):
        pass

    class Multi(MultiTurnEnv):
        def score(self, task, state) -> Score:
            return Score(1.0)

    assert [kind_of(env()) for env in (Rows, Single, Child, Multi)] == [
        "sft",
        "single",
        "single",
        "multi",
    ]
    assert not is_scored(Rows())

"""The shapes of a data row: which are read, as what, and which are refused by name."""

import pytest

from envs.base import Message
from envs.row_shapes import shape_of, to_task

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}
WORSE = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "shape", "prompt", "answer"),
    [
        ({"prompt": "q", "completion": "a"}, "prompt/completion", "q", "a"),
        ({"prompt": "q", "answer": 7}, "prompt/answer", "q", "7"),
        ({"prompt": "q", "response": "a"}, "prompt/response", "q", "a"),
        ({"prompt": "q"}, "prompt", "q", ""),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt/completion", "q", "a"),
        ({"input": "q", "output": "a"}, "input/output", "q", "a"),
        ({"question": "q", "answer": "a"}, "question/answer", "q", "a"),
        (
            {"instruction": "do", "input": "it", "output": "a"},
            "instruction/output",
            "do\n\nit",
            "a",
        ),
        ({"instruction": "do", "input": "", "output": "a"}, "instruction/output", "do", "a"),
        ({"query": "q", "response": "a"}, "query/response", "q", "a"),
        ({"messages": [USER, ASSISTANT]}, "messages", "q", "a"),
        ({"messages": [USER, {**ASSISTANT, "weight": 1}]}, "messages", "q", "a"),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            "conversations",
            "q",
            "a",
        ),
    ],
)
def test_the_known_shapes_become_tasks(row: dict, shape: str, prompt: str, answer: str):
    assert shape_of(row) == shape
    task = to_task(row, "id-1")
    assert (task.id, task.prompt_text, task.answer_text) == ("id-1", prompt, answer)


def test_a_chat_is_cut_before_its_first_assistant_message():
    system, more = {"role": "system", "content": "s"}, {"role": "user", "content": "q2"}
    task = to_task({"messages": [system, USER, ASSISTANT, more, ASSISTANT]}, "x")
    assert [m.role for m in task.messages] == ["system", "user"]
    assert [m.role for m in task.answer_messages] == ["assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("value", "group"), [("sums", "sums"), (3, "3"), ("", ""), (True, ""), (["sums"], "")]
)
def test_a_row_names_its_group_and_keeps_the_value_in_its_metadata(value: object, group: str):
    task = to_task({"prompt": "p", "completion": "c", "group": value}, "1")
    assert (task.group, task.metadata) == (group, {"group": value})


def test_further_keys_are_kept():
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"id": 3, "prompt": "q", "answer": "a", "split": "test", "system": "s", "level": 2}
    task = to_task(row | {"tools": tools, "metadata": {"m": 1}}, "x")
    assert (task.id, task.split) == ("3", "test")
    assert task.metadata == {"level": 2, "tools": tools, "m": 1}
    assert [m.role for m in task.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"body": "x"}, "no prompt found among its keys (body)"),
        ({"text": "once upon a time"}, "text is plain text to continue"),
        ({"text": "<|im_start|>user\nq<|im_end|>"}, "its template written out"),
        ({"prompt": "q", "completion": "a", "label": True}, "label true or false"),
        ({"chosen": "a"}, "rejected is missing"),
        ({"chosen": "a", "rejected": "b"}, "no common beginning"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same answer"),
        ({"prompt": "q", "chosen": [USER], "rejected": "a"}, "ends with the assistant"),
        ({"input": "q", "preferred_output": "a", "non_preferred_output": "b"}, "input is an obj"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0}]}, "has the weight 0"),
        ({"messages": [USER, {**ASSISTANT, "weight": 0.5}]}, "weight is 0 or 1, got 0.5"),
        ({"messages": [USER, {**ASSISTANT, "function_call": {"name": "f"}}]}, "write tool_calls"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "is no JSON object"),
        ({}, "no prompt found"),
        ({"input": "q"}, "no prompt found"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [ASSISTANT]}, "begins with the assistant"),
        ({"messages": [USER, ASSISTANT, USER]}, "ends with user"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role is one of"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown speaker"),
        ({"prompt": {"a": 1}, "answer": "a"}, "prompt is text or messages"),
        ({"prompt": "q", "answer": True}, "answer is text or messages"),
        ({"prompt": "q", "metadata": "m"}, "metadata is an object"),
        ({"prompt": "q", "tools": "t"}, "tools is a list"),
        ({"prompt": "q", "id": [1]}, "id is a string"),
    ],
)
def test_a_row_of_no_shape_says_why(row: dict, said: str):
    with pytest.raises(ValueError) as caught:
        to_task(row, "x")
    assert said in str(caught.value)


PAIR = {"chosen": [ASSISTANT], "rejected": [WORSE]}


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "prompt/chosen/rejected"),
        ({"question": "q", "chosen": "a", "rejected": "b"}, "prompt/chosen/rejected"),
        ({"prompt": [USER], "chosen": [ASSISTANT], "rejected": [WORSE]}, "prompt/chosen/rejected"),
        (  # as UltraFeedback has it: each answer repeats the prompt
            {"prompt": "q", "chosen": [USER, ASSISTANT], "rejected": [USER, WORSE]},
            "prompt/chosen/rejected",
        ),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, WORSE]}, "chosen/rejected"),
        (  # as LLaMA-Factory has it
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            "prompt/chosen/rejected",
        ),
        (
            {
                "input": {"messages": [USER]},
                "preferred_output": [ASSISTANT],
                "non_preferred_output": [WORSE],
            },
            "preferred_output/non_preferred_output",
        ),
    ],
)
def test_every_form_of_a_preference_becomes_the_same_task(row: dict, shape: str):
    assert shape_of(row) == shape
    task = to_task(row | {"level": 1}, "x")
    assert (task.prompt_text, task.answer, task.metadata) == ("q", None, {"level": 1, **PAIR})
    assert task.preference == ([Message("assistant", "a")], [Message("assistant", "b")])


def test_a_preference_keeps_its_system_message_and_its_tools():
    system = {"role": "system", "content": "s"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    chats = {"chosen": [system, USER, ASSISTANT], "rejected": [system, USER, WORSE]}
    assert [m.role for m in to_task(chats, "x").messages] == ["system", "user"]
    row = {"prompt": "q", "system": "s", "chosen": [USER, ASSISTANT], "rejected": "b"}
    task = to_task(row, "x")
    assert [m.role for m in task.messages] == ["system", "user"] and task.metadata == PAIR
    given = {"input": {"messages": [USER], "tools": tools, "parallel_tool_calls": True}}
    answers = {"preferred_output": [ASSISTANT], "non_preferred_output": [WORSE]}
    assert to_task(given | answers, "x").metadata == {"tools": tools, **PAIR}


def test_a_row_with_an_answer_besides_is_learnt_from_and_keeps_its_pair():
    row = {"messages": [USER, ASSISTANT], "prompt": "q", "chosen": "a", "rejected": "b"}
    task = to_task(row, "x")
    assert shape_of(row) == "messages" and task.answer_text == "a"
    assert task.preference == ([Message("assistant", "a")], [Message("assistant", "b")])
    own = {
        "prompt": "q",
        "answer": "a",
        "chosen": {"by": 1},
        "rejected": {"by": 2},
    }
    assert to_task(own, "x").metadata == {"chosen": {"by": 1}, "rejected": {"by": 2}}
    assert to_task(own, "x").preference is None


def test_a_row_of_openai_fine_tuning_keeps_its_tools_and_calls():
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "content": "a", "weight": 1},
    ]
    task = to_task({"messages": chat, "tools": tools, "parallel_tool_calls": False}, "x")
    assert task.metadata == {"tools": tools, "parallel_tool_calls": False}
    assert task.answer_messages[0].tool_calls[0].name == "f"
    assert [m.role for m in task.answer_messages] == ["assistant", "tool", "assistant"]


def test_a_row_of_sharegpt_with_calls_and_a_system_text_is_read():
    said = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "a"},
    ]
    tools = '[{"name": "f"}]'
    task = to_task({"conversations": said, "system": "s", "tools": tools}, "x")
    assert [m.role for m in task.messages] == ["system", "user"]
    assert task.answer_messages[0].tool_calls[0].arguments == {"x": 1}
    assert task.metadata["tools"] == [{"name": "f"}]

"""/v1/responses: items in, items out; nothing is remembered between requests."""

import json

import pytest

from engine.worker.gateway import openai_responses as dialect
from engine.worker.gateway.asked import Answer
from engine.worker.gateway.chat_request import Refused

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True}


def test_items_are_read_as_a_conversation():
    question = dialect.read(
        {
            "instructions": "be brief",
            "store": False,
            "tools": [TOOL],
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": []},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "let me look", "annotations": []}],
                },
                {
                    "type": "function_call",
                    "call_id": "call_1",
                    "name": "look",
                    "arguments": '{"x": 1}',
                },
                {"type": "function_call_output", "call_id": "call_1", "output": "a tree"},
            ],
        }
    )
    assert question.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "let me look", "tool_calls": [CALL]},
        {"role": "tool", "content": "a tree", "tool_call_id": "call_1"},
    ]
    assert dialect.read({"input": "hi"}).messages == [{"role": "user", "content": "hi"}]


REFUSED = {
    "a conversation elsewhere": {"input": "hi", "previous_response_id": "resp_1"},
    "a tool of the vendor": {"input": "hi", "tools": [{"type": "web_search"}]},
    "a schema": {"input": "hi", "text": {"format": {"type": "json_schema"}}},
    "a forced call": {"input": "hi", "tool_choice": "required"},
    "an item of another kind": {"input": [{"type": "computer_call"}]},
    "nothing": {},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_is_refused(what: str):
    with pytest.raises(Refused) as caught:
        dialect.read(REFUSED[what])
    assert caught.value.status == 400


def test_the_answer_is_items_whole_and_streamed():
    question = dialect.read({"input": "hi", "tools": [TOOL]})
    answer = Answer("well", "", [CALL], "tool_calls", 4, 6)
    whole = dialect.reply(question, answer)
    assert [item["type"] for item in whole["output"]] == ["message", "function_call"]
    assert whole["status"] == "completed" and whole["usage"]["total_tokens"] == 10
    data = [json.loads(e.split("data: ", 1)[1]) for e in dialect.events(question, answer)]
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    text = "".join(e["delta"] for e in data if e["type"] == "response.output_text.delta")
    assert text == "well"
    assert data[-1]["type"] == "response.completed"
    assert [item["type"] for item in data[-1]["response"]["output"]] == ["message", "function_call"]


def test_an_answer_that_was_cut_is_incomplete():
    question = dialect.read({"input": "hi"})
    cut = Answer("we", "", [], "length", 4, 1)
    assert dialect.reply(question, cut)["incomplete_details"] == {"reason": "max_output_tokens"}
    assert '"type": "response.incomplete"' in dialect.events(question, cut)[-1]

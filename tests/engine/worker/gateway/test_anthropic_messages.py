"""/v1/messages: blocks in, blocks out, tools in between."""

import json

import pytest

from engine.worker.gateway import anthropic_messages as dialect
from engine.worker.gateway.asked import Answer
from engine.worker.gateway.chat_request import Refused

TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
USER = {"role": "user", "content": "hi"}


def test_a_conversation_with_tools_is_read_as_any_other():
    question = dialect.read(
        {
            "model": "m",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "x"}}],
            "stop_sequences": ["END"],
            "thinking": {"type": "enabled"},
            "tools": [TOOL],
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "text", "text": "let me look"},
                        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "call_1", "content": "a tree"},
                        {"type": "text", "text": "go on"},
                    ],
                },
            ],
        }
    )
    assert question.messages == [
        {"role": "system", "content": "be brief"},
        USER,
        {"role": "assistant", "content": "let me look", "tool_calls": [CALL]},
        {"role": "tool", "content": "a tree", "tool_call_id": "call_1"},
        {"role": "user", "content": "go on"},
    ]
    (tool,) = question.tools
    assert (
        tool["function"]["name"] == "look"
        and question.stop == ("END",)
        and question.max_tokens == 9
    )


REFUSED = {
    "an image": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "a forced call": {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "any"}},
    "a tool of the vendor": {"messages": [USER], "tools": [{"type": "bash_20250124"}]},
    "no messages": {"system": "x"},
    "an unknown field": {"messages": [USER], "mcp_servers": []},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_done_is_refused(what: str):
    with pytest.raises(Refused) as caught:
        dialect.read(REFUSED[what])
    assert caught.value.status == 400


def test_the_answer_is_blocks_whole_and_streamed():
    question = dialect.read({"messages": [USER], "tools": [TOOL]})
    answer = Answer("well\n\nevent: x", "", [CALL], "tool_calls", 4, 6)
    whole = dialect.reply(question, answer)
    assert whole["stop_reason"] == "tool_use" and whole["usage"]["output_tokens"] == 6
    assert whole["content"][1] == {
        "type": "tool_use",
        "id": "call_1",
        "name": "look",
        "input": {"x": 1},
    }
    events = dialect.events(question, answer)
    assert all(event.count("\n") == 3 for event in events)
    data = [json.loads(event.split("data: ", 1)[1]) for event in events]
    assert [each["type"] for each in data][:1] == ["message_start"]
    deltas = [each["delta"] for each in data if each["type"] == "content_block_delta"]
    assert deltas[0]["text"] == "well\n\nevent: x"
    assert json.loads(deltas[1]["partial_json"]) == {"x": 1}
    assert data[-2]["delta"]["stop_reason"] == "tool_use" and data[-1]["type"] == "message_stop"

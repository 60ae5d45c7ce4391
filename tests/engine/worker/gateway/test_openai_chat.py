"""What programs send to /v1/chat/completions is read with patience, and nothing is promised."""

import json

import pytest

from engine.worker.gateway import openai_chat
from engine.worker.gateway.asked import Answer
from engine.worker.gateway.chat_request import Refused

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
SAID = Answer("well", "", [], "stop", 3, 2)
CALLED = Answer("", "hm", [CALL], "tool_calls", 3, 2)


def test_what_the_run_decides_is_accepted_and_does_nothing():
    plain = openai_chat.read({"messages": [USER]})
    sent = {"temperature": 0.1, "seed": 3, "user": "me", "reasoning_effort": "low", "store": False}
    assert openai_chat.read({"messages": [USER], **sent, "stop": None}) == plain


def test_messages_of_every_form_become_the_same():
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    spoken = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
    developer = {"role": "developer", "content": "be brief"}
    question = openai_chat.read({"messages": [developer, {**USER, "content": parts}, spoken]})
    assert question.messages == [
        {"role": "system", "content": "be brief"},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]


REFUSED = {
    "no object": [],
    "no messages": {"messages": []},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "two answers": {"messages": [USER], "n": 2},
    "a schema": {"messages": [USER], "response_format": {"type": "json_object"}},
    "a forced call": {"messages": [USER], "tools": [TOOL], "tool_choice": "required"},
    "log-probabilities": {"messages": [USER], "logprobs": True},
    "an unknown field": {"messages": [USER], "begun_token_ids": [1]},
    "a wrong limit": {"messages": [USER], "max_tokens": -1},
    "a wrong stop": {"messages": [USER], "stop": [""]},
    "tools that are none": {"messages": [USER], "tools": ["look"]},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_promise_another_answer_is_refused(what: str):
    with pytest.raises(Refused) as caught:
        openai_chat.read(REFUSED[what])
    assert caught.value.status == 400


def test_without_the_choice_to_call_no_tool_is_shown():
    body = {"messages": [USER], "tools": [TOOL]}
    assert openai_chat.read(body).tools == [TOOL]
    assert openai_chat.read({**body, "tool_choice": "none"}).tools == []


def data_of(events: list[str]) -> list:
    return [json.loads(e[6:]) for e in events if e.startswith("data: {")]


def test_a_whole_answer_and_its_stream_say_the_same():
    question = openai_chat.read({"messages": [USER], "stream_options": {"include_usage": True}})
    for answer in (SAID, CALLED):
        choice = openai_chat.reply(question, answer)["choices"][0]
        events = openai_chat.events(question, answer)
        assert events[-1] == "data: [DONE]\n\n"
        *pieces, usage = data_of(events)
        assert usage["usage"]["total_tokens"] == 5
        deltas = [piece["choices"][0]["delta"] for piece in pieces]
        content = "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert content == (choice["message"]["content"] or "")
        assert [{**call, "index": 0} for call in choice["message"].get("tool_calls", [])] == calls
        assert pieces[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_a29_no_text_of_the_model_ends_an_event_or_begins_another():
    smuggled = 'x\n\ndata: {"choices": []}\n\ndata: [DONE]\r\n\r\nevent: stop\u2028'
    question = openai_chat.read({"messages": [USER]})
    events = openai_chat.events(question, Answer(smuggled, "", [], "stop", 1, 1))
    assert all(event.count("\n") == 2 and event.endswith("\n\n") for event in events)
    assert all("\r" not in event and "\u2028" not in event for event in events)
    assert data_of(events)[1]["choices"][0]["delta"]["content"] == smuggled

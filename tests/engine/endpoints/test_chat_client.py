"""One request to a model behind a URL: its form, its retries, what is read of the reply."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_endpoint import Body, FakeEndpoint, Said, fake_endpoint

from engine.endpoints.chat_client import (
    ATTEMPTS,
    Cancelled,
    ChatClient,
    EndpointDown,
    Refused,
    Turn,
    to_openai,
)
from engine.records.run_config import EndpointEntry

NOW = {"retry-after": "0"}  # so that no test waits
QUESTION = [{"role": "user", "content": "hello"}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    },
}


def client_of(fake: FakeEndpoint, stop: threading.Event | None = None, **more: Any) -> ChatClient:
    entry = EndpointEntry(name="fake", url=fake.url, model="fake-1", **more)
    return ChatClient(entry, "", stop or threading.Event())


def asked(
    answer: Callable[[Body], Said], tools: tuple[Any, ...] = (), **options: Any
) -> tuple[Turn, FakeEndpoint]:
    """What one question is answered, and the server that did."""
    with fake_endpoint(answer) as fake:
        client = client_of(fake)
        try:
            return client.ask(QUESTION, tools, {"max_tokens": 7, **options}), fake
        finally:
            client.close()


def in_turn(*said: Said) -> Callable[[Body], Said]:
    """Answers that are given one after the other."""
    rest = list(said)
    return lambda _body: rest.pop(0)


def test_a_turn_says_what_it_took_and_whether_it_was_cut():
    turn, fake = asked(lambda _: Said("hi", finish="length"), temperature=0.5, stop=["x"])
    assert turn.message == {"role": "assistant", "content": "hi"} and turn.is_cut
    assert (turn.tokens_in, turn.tokens_out, turn.retries) == (10, 5, 0)
    assert fake.bodies == [
        {
            "model": "fake-1",
            "messages": QUESTION,
            "max_tokens": 7,
            "temperature": 0.5,
            "stop": ["x"],
        }
    ]


def test_a_reply_without_usage_is_no_free_one():
    turn, _ = asked(lambda _: Said("hi", usage=None))
    assert (turn.tokens_in, turn.tokens_out) == (None, None)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_fails_for_now_is_asked_again_after_as_long_as_the_server_says(status: int):
    turn, fake = asked(in_turn(Said("wait", status=status, headers=NOW), Said("hi")))
    assert (turn.message["content"], turn.retries, len(fake.bodies)) == ("hi", 1, 2)


def test_an_endpoint_that_is_down_is_given_up_after_so_many_attempts():
    with fake_endpoint(lambda _: Said("busy", status=503, headers=NOW)) as fake:
        client = client_of(fake)
        with pytest.raises(EndpointDown, match="busy"):
            client.ask(QUESTION, (), {"max_tokens": 7})
        assert len(fake.bodies) == ATTEMPTS
        client.close()


def test_a_pause_ends_when_the_run_is_stopped():
    stop = threading.Event()

    def busy(_body: Body) -> Said:
        threading.Timer(0.05, stop.set).start()
        return Said("busy", status=429, headers={"retry-after": "60"})

    with fake_endpoint(busy) as fake:
        client = client_of(fake, stop)
        with pytest.raises(Cancelled):
            client.ask(QUESTION, (), {"max_tokens": 7})
        client.close()


@pytest.mark.parametrize(
    ("said", "about_all"),
    [
        (Said("no", status=401), True),
        (Said("no", status=404), True),
        (Said("no", status=400), False),
        (Said("over there", status=307, headers={"location": "http://127.0.0.1:9/v1"}), True),
        (Said(raw={"choices": []}), False),
        (Said(raw=[1]), False),
        (Said(raw={"choices": [{"message": {"tool_calls": [{"x": 1}]}}]}), False),
    ],
)
def test_what_is_refused_is_not_asked_again_and_no_redirect_is_followed(said, about_all):
    with fake_endpoint(lambda _: said) as fake:
        client = client_of(fake)
        with pytest.raises(Refused) as caught:
            client.ask(QUESTION, (), {"max_tokens": 7})
        client.close()
    assert caught.value.is_about_all is about_all and len(fake.bodies) == 1


def test_a_parameter_that_the_server_refuses_by_name_is_left_out_and_that_is_told():
    def strict(body: Body) -> Said:
        if "max_tokens" in body:
            return Said("Unsupported parameter: 'max_tokens', use 'max_completion_tokens'", 400)
        if "temperature" in body:
            return Said("Unsupported value: 'temperature' does not support 0", 400)
        return Said("hi")

    with fake_endpoint(strict) as fake:
        client = client_of(fake)
        for _ in range(2):
            turn = client.ask(QUESTION, (), {"max_tokens": 7, "temperature": 0})
            assert turn.message["content"] == "hi"
        client.close()
    assert client.left_out == ["temperature"] and len(fake.bodies) == 4
    assert fake.bodies[-1]["max_completion_tokens"] == 7


def test_tool_calls_are_read_with_arguments_as_objects_and_faults_are_told():
    turn, _ = asked(lambda _: Said(None, calls=[("look", '{"at": 3}')]), (LOOK,))
    assert turn.message["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": 3}}
    assert turn.message["content"] == "" and turn.invalid_calls == []
    turn, _ = asked(lambda _: Said(None, calls=[("look", '{"at": "x"}')]), (LOOK,))
    assert "tool_calls" in turn.message and len(turn.invalid_calls) == 1
    turn, _ = asked(lambda _: Said("oh ", calls=[("look", "{at")]), (LOOK,))
    assert "tool_calls" not in turn.message and "{at" in turn.message["content"]
    assert "no JSON object" in turn.invalid_calls[0]


def test_reasoning_is_kept_beside_the_answer_and_never_sent_back():
    message = {"content": [{"type": "text", "text": "hi"}], "reasoning_content": "hm"}
    turn, _ = asked(lambda _: Said(raw={"choices": [{"message": message}]}))
    assert turn.message == {"role": "assistant", "content": "hi", "reasoning_content": "hm"}
    assert to_openai(turn.message) == {"role": "assistant", "content": "hi"}


def test_a_call_is_sent_back_with_its_arguments_as_text():
    call = {"id": "c1", "function": {"name": "look", "arguments": {"at": 3}}}
    sent = to_openai({"role": "assistant", "content": "", "tool_calls": [call]})
    assert sent["content"] is None and json.loads(
        sent["tool_calls"][0]["function"]["arguments"]
    ) == {"at": 3}

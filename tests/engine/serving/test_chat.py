"""Chats: one model or two, conversations that go on, tools, answers longer than a call."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stand_ins import stand_in

from engine.core.errors import UserError
from engine.core.files import read_json
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import deployments
from engine.serving import conversations, service
from engine.serving.chat import chat
from engine.serving.chat_request import ChatRequest, Heard, Patience

# Each of these takes about a second; the limit is for a machine that is busy with other things.
pytestmark = pytest.mark.timeout(60)

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def ask(home: Home, model: str, message: str = "", **more: Any) -> dict[str, Any]:
    return chat(home, ChatRequest(model, message, **more))


def process_of(home: Home, deployment_id: str) -> int:
    return read_json(home.deployment(deployment_id).process)["pid"]


def test_a_chat_starts_what_it_needs_and_compares_two_models(home, server, tuned):
    found = ask(home, f"{tuned}@best", "2+2?", system="Be brief.", compare_to="pebble")
    assert [answer["model"] for answer in found["answers"]] == [f"{tuned}@best", "pebble"]
    first = found["answers"][0]
    assert first["answer"] == f"{tuned}@best heard Be brief. 2+2?"
    assert (first["finish_reason"], first["prompt_tokens"], first["tokens"]) == ("stop", 3, 5)
    (deployment,) = service.list_deployments(home)
    (started,) = found["started"]
    assert started["deployment_id"] == deployment["deployment_id"]
    # What starting took is no part of how long the answer took.
    assert started["seconds"] > 0 and first["latency_s"] >= 0
    (said,) = found["warnings"]
    # The id of the deployment names the base, so what was asked is named beside it.
    assert started["model"] == f"{tuned}@best" and "10 idle minutes" in said
    assert said.startswith(f"{tuned}@best was started") and f"as {started['deployment_id']}" in said
    stop = {"run_id": f"{tuned}@best", "action": "stop"}
    assert found["next"] == [{"tool": "deploy", "arguments": stop}]
    again = ask(home, f"{tuned}@best", "2+2?")
    assert "started" not in again and (again["warnings"], again["next"]) == ([], [])
    service.deploy(home, ref=str(stop["run_id"]), action="stop")
    assert service.list_deployments(home) == []


def test_what_a_chat_started_holds_no_process_once_the_model_asked_for_stops(home, server, tuned):
    service.deploy(home, f"{tuned}@best")
    ask(home, f"{tuned}@best", "hello", compare_to="pebble")
    service.deploy(home, f"{tuned}@best", "stop")
    assert service.list_deployments(home) == []


def test_a_chat_says_when_an_answer_was_cut_and_what_the_server_refused(home, server):
    assert "cut at 5 tokens" in ask(home, "pebble", "x", max_tokens=1)["warnings"][0]
    with pytest.raises(UserError) as caught:
        ask(home, "pebble", "x", max_tokens=5000)
    assert caught.value.code == "BAD_ARGUMENT" and "too large" in caught.value.message
    with pytest.raises(UserError) as caught:
        ask(home, "pebble", "  ")
    assert caught.value.field == "message"
    with pytest.raises(UserError) as caught:
        ask(home, "nobody", "x")
    assert caught.value.code == "MODEL_NOT_FOUND"


def test_a_process_that_was_killed_is_started_again_by_the_next_chat(home, server):
    ask(home, "pebble", "hello")
    os.kill(process_of(home, "pebble-1"), signal.SIGKILL)
    assert ask(home, "pebble", "hello")["answers"][0]["answer"] == "pebble heard hello"
    with Store(home) as store:
        states = {row.deployment_id: row.state for row in store.list_deployments()}
    assert states == {"pebble-1": "stopped", "pebble-2": "ready"}


def test_a_process_that_dies_of_every_question_fails_in_words(home, server):
    with pytest.raises(UserError) as caught:
        ask(home, "pebble", "die")
    assert caught.value.code == "DEPLOY_FAILED" and "did not answer" in caught.value.message


def test_a_conversation_goes_on_with_the_id_of_the_last_reply(home, server):
    first = ask(home, "pebble", "one", system="Be brief.")
    second = ask(home, "pebble", "two", conversation=first["conversation"])
    assert second["conversation"] == first["conversation"]
    # The stand-in repeats all that it was sent: system prompt, question, answer, question.
    assert second["answers"][0]["answer"] == (
        "pebble heard Be brief. one pebble heard Be brief. one two"
    )
    with pytest.raises(UserError) as caught:
        ask(home, "pebble", "three", system="New.", conversation=first["conversation"])
    assert caught.value.field == "system"
    with pytest.raises(UserError) as caught:
        ask(home, "pebble", conversation=first["conversation"])
    assert "no unfinished answer" in caught.value.message


def test_each_of_two_models_goes_on_with_its_own_answers(home, server, tuned):
    best = f"{tuned}@best"
    first = ask(home, best, "one", compare_to="pebble")
    second = ask(home, best, "two", compare_to="pebble", conversation=first["conversation"])
    assert [answer["answer"] for answer in second["answers"]] == [
        f"{best} heard one {best} heard one two",
        "pebble heard one pebble heard one two",
    ]
    alone = ask(home, "pebble", "one")
    # A model that joins later reads what the first one was asked and answered.
    joined = ask(home, "pebble", "two", compare_to=best, conversation=alone["conversation"])
    assert joined["answers"][1]["answer"] == f"{best} heard one pebble heard one two"


def test_messages_stand_before_the_message_and_after_the_system_prompt(home, server):
    told = ask(
        home,
        "pebble",
        "three",
        system="zero",
        messages=[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
    )
    assert told["answers"][0]["answer"] == "pebble heard zero one two three"


def test_a_tool_call_is_answered_by_the_next_call(home, server):
    called = ask(home, "pebble", "look", tools=[LOOK])
    (answer,) = called["answers"]
    (call,) = answer["tool_calls"]
    assert answer["finish_reason"] == "tool_calls" and "index" not in call
    assert call["function"] == {"name": "look", "arguments": "{}"}
    (suggested, _stop) = called["next"]
    result = {"role": "tool", "tool_call_id": "call_0", "content": "..."}
    arguments = {"conversation": called["conversation"], "messages": [result]}
    assert suggested == {"tool": "chat", "arguments": {"model": "pebble"} | arguments}
    given = [result | {"content": "a wall"}]
    after = ask(home, "pebble", conversation=called["conversation"], messages=given)
    assert after["answers"][0]["answer"] == "pebble heard look pebble heard look a wall"
    assert after["answers"][0]["tool_calls"], "the tools are part of the conversation"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": ["x"]}, "messages"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}], "system": "y"}, "system"),
        ({"tools": ["look"]}, "tools"),
        ({"conversation": "../../config"}, "conversation"),
        ({"conversation": "c-000000000000"}, "conversation"),
    ],
)
def test_what_no_model_can_be_asked_is_refused_before_one_is_started(home, server, more, field):
    with pytest.raises(UserError) as caught:
        ask(home, "pebble", "hello", **more)
    assert (caught.value.code, caught.value.field) == ("BAD_ARGUMENT", field)
    assert service.list_deployments(home) == []


def test_a_conversation_belongs_to_the_key_that_began_it(home, server):
    mine = chat(home, ChatRequest("pebble", "one"), deployments.Asker("ann"))["conversation"]
    going_on = ChatRequest("pebble", "two", conversation=mine)
    with pytest.raises(UserError) as caught:
        chat(home, going_on, deployments.Asker("bob"))
    assert caught.value.field == "conversation"
    assert chat(home, going_on, deployments.Asker("ann"))["conversation"] == mine


def test_an_answer_of_another_call_in_between_is_not_lost(home, server):
    first = ask(home, "pebble", "one")["conversation"]
    seen: list[str] = []

    def go_on_elsewhere(_: Heard) -> None:
        if not seen:
            seen.append(ask(home, "pebble", "two", conversation=first)["conversation"])

    request = ChatRequest("pebble", "three", conversation=first)
    other = chat(home, request, listener=go_on_elsewhere)
    assert seen == [first] and other["conversation"] != first
    assert any("meanwhile" in warning for warning in other["warnings"])
    last = ask(home, "pebble", "four", conversation=other["conversation"])
    assert "two" not in last["answers"][0]["answer"]


def test_only_the_newest_conversations_are_kept(home, server, monkeypatch):
    monkeypatch.setattr(conversations, "KEPT", 2)
    kept = [ask(home, "pebble", "hello")["conversation"] for _ in range(3)]
    os.utime(home.chats / f"{kept[1]}.json", (0, 0))  # used long ago
    kept.append(ask(home, "pebble", "hello")["conversation"])
    assert {file.stem for file in home.chats.iterdir()} == {kept[2], kept[3]}
    monkeypatch.setattr(conversations, "MAX_CHARS", 300)
    long = ask(home, "pebble", "x" * 400)
    assert "conversation" not in long and "is not kept" in long["warnings"][0]


def test_a_listener_hears_the_answers_as_they_come(home, server, tuned):
    heard: list[Heard] = []
    request = ChatRequest("pebble", "hello", compare_to=f"{tuned}@best")
    reply = chat(home, request, listener=heard.append)
    for answer in reply["answers"]:
        pieces = [each for each in heard if each.model == answer["model"]]
        assert "".join(piece.text for piece in pieces) == answer["answer"]
        assert pieces[-1].tokens == answer["tokens"] == 5
        assert len([piece for piece in pieces if piece.text]) > 1


@pytest.fixture
def gate(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real deployment samples as many tokens as this file says."""
    helper = Path(__file__).parents[2] / "helpers" / "gated_server.py"
    stand_in(monkeypatch, server=helper)
    file = home.root / "tokens"
    file.write_text("100000")
    yield file
    for row in deployments.living(home):
        deployments.stop(home, row, "the test is over")


@pytest.mark.worker
def test_a_slow_answer_is_given_in_parts_that_are_token_for_token_the_whole(home: Home, gate: Path):
    question = {"model": "pebble", "message": "Repeat: the quick brown planet jumps"}
    drawn = {"temperature": 1.0, "seed": 5}
    patient = Patience(call_s=50, start_s=50, stall_s=50)
    whole = chat(home, ChatRequest(**question), patience=patient)["answers"][0]
    assert whole["tokens"] >= 4 and "partial" not in whole
    # The same seed draws the same answer.
    twice = [chat(home, ChatRequest(**question, **drawn), patience=patient) for _ in range(2)]
    assert twice[0]["answers"][0]["answer"] == twice[1]["answers"][0]["answer"]
    assert twice[0]["seed"] == 5
    sampled = whole["tokens"] + sum(reply["answers"][0]["tokens"] for reply in twice)

    # Time is up in the middle: what there is, and how to go on.
    hurried = Patience(call_s=1.5, start_s=50, stall_s=50)
    gate.write_text(str(sampled + 2))
    reply = chat(home, ChatRequest(**question), patience=hurried)
    (part,) = reply["answers"]
    assert (part["partial"], part["finish_reason"], part["tokens"]) == (True, "timeout", 2)
    assert whole["answer"].startswith(part["answer"])
    going_on = {"model": "pebble", "conversation": reply["conversation"]}
    assert reply["next"] == [{"tool": "chat", "arguments": going_on}]
    assert "2 tokens" in reply["warnings"][0] and "is not done" in reply["summary"]
    # The process is free again once the token is there that it was at.
    gate.write_text("100000")
    rest = chat(home, ChatRequest(**going_on), patience=patient)["answers"][0]
    assert part["answer"] + rest["answer"] == whole["answer"]
    assert rest["tokens"] == whole["tokens"] - 2 and rest["finish_reason"] == "stop"


@pytest.mark.worker
def test_a_model_that_gives_no_token_fails_and_one_that_is_busy_does_not(home: Home, gate: Path):
    question = ChatRequest("pebble", "Repeat: the quick brown planet jumps")
    patient = Patience(call_s=50, start_s=50, stall_s=50)
    stalling = Patience(call_s=40, start_s=50, stall_s=0.5)
    sampled = chat(home, question, patience=patient)["answers"][0]["tokens"]
    gate.write_text(str(sampled))
    with pytest.raises(UserError) as caught:
        chat(home, question, patience=stalling)
    assert "no token for 0.5 s" in caught.value.message and caught.value.retryable

    # One token more frees the model of the question that was given up; then another is in its way.
    gate.write_text(str(sampled + 2))
    begun, answers = threading.Event(), []

    def first() -> None:
        def hear(heard: Heard) -> None:
            if heard.tokens:
                begun.set()

        answers.append(chat(home, question, patience=patient, listener=hear))

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(40)
    hurried = Patience(call_s=1.5, start_s=50, stall_s=0.5)
    waited = chat(home, question, patience=hurried)
    (nothing,) = waited["answers"]
    assert nothing["partial"] and nothing["tokens"] == 0, "waiting for others is no stall"
    gate.write_text("100000")
    thread.join(40)
    (first_answer,) = answers[0]["answers"]
    again = ChatRequest("pebble", conversation=waited["conversation"])
    assert chat(home, again, patience=patient)["answers"][0]["answer"] == first_answer["answer"]

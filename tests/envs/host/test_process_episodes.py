"""Rollouts of several turns, also when another one costs them their process."""

import pytest

from envs.config.settings import Limits
from envs.host.process import EpisodeFailed

COUNTER = """
class Env(MultiTurnEnv):
    def tasks(self):
        return [Task("a", "count", [Message("assistant", "1"), Message("assistant", "2")])]

    def start(self, task):
        return {"said": [], "id": task.id}

    def step(self, state, completion):
        said = completion.content
        if said.startswith("!"):
            exec(said[1:])
        if said == "chance":
            return [Message("user", os.urandom(8).hex())]
        state["said"].append(said)
        if completion.tool_calls:
            call = completion.tool_calls[0]
            return [Message("tool", str(sum(call.arguments.values())), tool_call_id=call.id)]
        return None if said == "end" else [Message("user", f"{len(state['said'])}")]

    def score(self, task, state):
        if "boom" in state["said"]:
            raise ValueError("boom")
        return Score(len(state["said"]), metrics={"turns": len(state["said"])})
"""
TASK = {"id": "a", "prompt": [{"role": "user", "content": "count"}], "answer": None}


def say(text: str) -> dict:
    return {"role": "assistant", "content": text}


@pytest.fixture
def counter(write_env, start):
    return start(write_env(COUNTER), Limits(call_seconds=1.0))


def test_an_episode_keeps_its_state_and_ends(counter):
    episode = counter.start(TASK)
    assert episode.step(say("x")) == [{"role": "user", "content": "1"}]
    assert episode.step(say("y")) == [{"role": "user", "content": "2"}]
    assert episode.step(say("end")) is None
    score = episode.score()
    assert (score["reward"], score["metrics"], score["error"]) == (3.0, {"turns": 3.0}, None)


def test_an_unfinished_episode_is_scored_too(counter):
    episode = counter.start(TASK)
    episode.step(say("x"))
    assert episode.score()["reward"] == 1.0


def test_tool_calls_reach_the_environment_parsed(counter):
    call = {"id": "c7", "function": {"name": "add", "arguments": '{"x": 2, "y": 3}'}}
    reply = counter.start(TASK).step({"role": "assistant", "content": "", "tool_calls": [call]})
    assert reply == [{"role": "tool", "content": "5", "tool_call_id": "c7"}]


def test_many_episodes_run_side_by_side(counter):
    episodes = [counter.start(TASK) for _ in range(30)]
    for turn in range(3):
        for number, episode in enumerate(episodes):
            if number % 3 >= turn:
                episode.step(say("x"))
    assert [episode.score()["reward"] for episode in episodes] == [1.0, 2.0, 3.0] * 10


@pytest.mark.parametrize(
    "fault", ["!os._exit(1)", "!import time; time.sleep(9)", "!import ctypes; ctypes.string_at(0)"]
)
def test_a_crash_costs_one_episode_and_the_others_go_on(counter, fault: str):
    bad, good = counter.start(TASK), counter.start(TASK)
    good.step(say("x"))
    with pytest.raises(EpisodeFailed):
        bad.step(say(fault))
    assert good.step(say("y")) == [{"role": "user", "content": "2"}]
    assert good.score()["reward"] == 2.0
    failed = bad.score()
    assert failed["reward"] == 0.0 and failed["error"]
    assert counter.generation == 2


def test_an_exception_fails_the_episode_but_keeps_the_process(counter):
    episode = counter.start(TASK)
    with pytest.raises(EpisodeFailed, match="ZeroDivisionError"):
        episode.step(say("!1 / 0"))
    with pytest.raises(EpisodeFailed):
        episode.step(say("x"))
    assert counter.generation == 1


def test_an_environment_that_does_not_repeat_itself_fails_what_it_lost(counter):
    bad, good = counter.start(TASK), counter.start(TASK)
    good.step(say("chance"))
    with pytest.raises(EpisodeFailed):
        bad.step(say("!os._exit(1)"))
    with pytest.raises(EpisodeFailed, match="did not repeat itself"):
        good.step(say("x"))


def test_an_exception_in_score_is_an_error_text(counter):
    episode = counter.start(TASK)
    episode.step(say("boom"))
    assert "ValueError: boom" in episode.score()["error"]


def test_a_closed_episode_is_forgotten(counter):
    episode = counter.start(TASK)
    episode.close()
    with pytest.raises(EpisodeFailed):
        episode.step(say("x"))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("'higher'", "return a list of Message"),
        ("Message('user', 'x')", "return a list of Message"),
        ("[]", "return None"),
        ("[Message('assistant', 'x')]", "only the model"),
        ("[3]", "no list of messages"),
        ("7", "no list of messages"),
    ],
)
def test_a_reply_that_is_none_fails_the_episode(write_env, start, returned: str, said: str):
    body = COUNTER.replace("said = completion.content", f"return {returned}")
    episode = start(write_env(body)).start(TASK)
    with pytest.raises(EpisodeFailed, match=said):
        episode.step(say("x"))


def test_starting_can_fail_too(write_env, start):
    body = COUNTER.replace('return {"said": [], "id": task.id}', "raise KeyError('start')")
    with pytest.raises(EpisodeFailed, match=r"start\(\) raised KeyError"):
        start(write_env(body)).start(TASK)


def test_a_single_turn_environment_has_no_episodes(obedient, start):
    with pytest.raises(EpisodeFailed, match="single-turn"):
        start(obedient).start(TASK)

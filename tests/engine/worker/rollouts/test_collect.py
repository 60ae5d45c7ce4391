"""The environment works beside the sampler, and says what it would have said after it."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loops import PEBBLE
from transformers import AutoTokenizer

from engine.worker.core.trajectory import Completion, Group, Trajectory
from engine.worker.network.sampler import OnCompletion, SamplingParams
from engine.worker.rollouts.collect import RolloutContext, _new_group, collect
from engine.worker.rollouts.renderer import Renderer
from engine.worker.rollouts.rollout_file import answer_fields
from envs.host.process import EnvProcess, Episode
from envs.tool_schemas import tools_of

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]
DEADLINE = 30.0

SINGLE = """
from envs import Score, SingleTurnEnv, Task

class Lengths(SingleTurnEnv):
    def tasks(self):
        return [Task(str(i), f"Say {i}.", answer=str(i)) for i in range(4)]
    def score(self, task, completion):
        if completion == "9":
            raise ValueError("nine")
        return Score(len(completion) / 10 + int(task.id), metrics={"size": len(completion)})

def load_environment():
    return Lengths()
"""

MULTI = """
from envs import Message, MultiTurnEnv, Score, Task

class Counts(MultiTurnEnv):
    def tasks(self):
        return [Task(str(i), f"Count to {i + 1}.") for i in range(3)]
    def start(self, task):
        return [0, int(task.id)]
    def step(self, state, completion):
        state[0] += 1
        return None if state[0] > state[1] else [Message("user", f"go on, {state[0]}")]
    def score(self, task, state):
        return Score(float(state[0]))

def load_environment():
    return Counts()
"""


class Watched(EnvProcess):
    """A real env process that says when it has scored or answered something."""

    def __init__(self, source: Path) -> None:
        super().__init__(source)
        self.worked = threading.Semaphore(0)

    def score(self, task: Mapping[str, Any], completion: str) -> dict[str, Any]:
        found = super().score(task, completion)
        self.worked.release()
        return found

    def start(self, task: Mapping[str, Any]) -> Episode:
        return WatchedEpisode(self, task, next(self._episode_numbers))


class WatchedEpisode(Episode):
    def step(self, message: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        found = super().step(message)
        assert isinstance(self.process, Watched)
        self.process.worked.release()
        return found


class Scripted:
    """Says the texts it was given, and ends the next completion only when the environment has done
    its work on the one before: with anything but real overlap it waits for ever."""

    name = "scripted"

    def __init__(self, texts: Sequence[str], renderer: Renderer, process: Watched | None) -> None:
        self.texts = list(texts)
        self.renderer = renderer
        self.process = process
        self.seeds: list[int] = []
        self.finished = True

    def load(self, adapter: Any) -> None: ...

    def close(self) -> None: ...

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[int]:
        raise NotImplementedError

    def generate(
        self,
        prompts: Sequence[list[int]],
        n: int,
        params: SamplingParams,
        done: OnCompletion | None = None,
    ) -> list[list[Completion]]:
        self.seeds.append(params.seed)
        out: list[list[Completion]] = [[] for _ in prompts]
        for index in range(len(prompts)):
            for member in range(n):
                ids = [*self.renderer.encode(self.texts.pop(0)), min(self.renderer.stop_ids)]
                out[index].append(Completion(ids, [-0.5] * len(ids), self.finished))
                assert done is not None
                done(index, member, out[index][-1])
                if self.process is not None:
                    assert self.process.worked.acquire(timeout=DEADLINE), "nothing went on beside"
        return out


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    return Renderer(tokenizer, [tokenizer.eos_token_id])


def context(process: EnvProcess, renderer: Renderer, *, multi: bool) -> RolloutContext:
    return RolloutContext(process, renderer, multi, [], max_length=200, max_turns=2 if multi else 1)


def only(groups: Sequence[Group]) -> Trajectory:
    ((trajectory,),) = [group.members for group in groups]
    return trajectory


def environment(folder: Path, source: str) -> Watched:
    (folder / "environment.py").write_text(source)
    return Watched(folder)


def test_each_completion_is_scored_while_the_next_is_still_being_sampled(
    tmp_path: Path, renderer: Renderer
) -> None:
    texts = ["1", "22", "333", "9", "55555", "6"]
    with environment(tmp_path, SINGLE) as process:
        tasks = process.tasks()[:3]
        sampler = Scripted(texts, renderer, process)
        groups, times = collect(
            tasks, 2, context(process, renderer, multi=False), sampler, SamplingParams(8)
        )
        scored = [t for g in groups for t in g.members]
        expected = [process.score(tasks[i // 2], text) for i, text in enumerate(texts)]
    assert [t.completion for t in scored] == texts
    assert [(t.reward, t.metrics, t.error) for t in scored] == [
        (s["reward"], s["metrics"], s["error"]) for s in expected
    ]
    assert "nine" in (scored[3].error or "") and scored[3].stop_reason == "env_error"
    # Everything was scored before sampling ended, so nothing was left to wait for.
    assert times.reward_s < times.sample_s


def test_the_environment_answers_one_rollout_while_another_takes_its_turn(
    tmp_path: Path, renderer: Renderer
) -> None:
    # Task 0 is over after one turn, task 1 after two, task 2 would need three and is cut at two.
    texts = ["a", "b", "c", "d", "e"]
    with environment(tmp_path, MULTI) as process:
        sampler = Scripted(texts, renderer, process)
        groups, _ = collect(
            process.tasks(), 1, context(process, renderer, multi=True), sampler, SamplingParams(8)
        )
    played = [g.members[0] for g in groups]
    assert [t.turns for t in played] == [1, 2, 2]
    assert [t.reward for t in played] == [1.0, 2.0, 2.0]
    assert [t.stop_reason for t in played] == ["stop", "stop", "max_turns"]
    said = [[m["content"] for m in t.messages] for t in played]
    assert said == [["a"], ["b", "go on, 1", "d"], ["c", "go on, 1", "e"]]
    assert played[1].loss_mask[0] == 1 and 0 in played[1].loss_mask
    assert len(set(sampler.seeds)) == 2  # turns draw from different numbers


def test_a_fault_of_the_sampler_ends_the_scoring_too(tmp_path: Path, renderer: Renderer) -> None:
    class Broken(Scripted):
        def generate(self, *args: Any, **kwargs: Any) -> list[list[Completion]]:
            super().generate(*args, **kwargs)
            raise RuntimeError("the sampler broke")

    with environment(tmp_path, SINGLE) as process:
        sampler = Broken(["1", "2"], renderer, None)
        with pytest.raises(RuntimeError, match="the sampler broke"):
            collect(
                process.tasks()[:2],
                1,
                context(process, renderer, multi=False),
                sampler,
                SamplingParams(8),
            )
    assert not [t for t in threading.enumerate() if t.name.startswith("environment")]


LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}


def test_a_rollout_keeps_which_of_its_tool_calls_are_invalid(
    tmp_path: Path, renderer: Renderer
) -> None:
    good = '<tool_call>{"name": "lookup", "arguments": {"key": "a"}}</tool_call>'
    texts = [
        '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
        f'<tool_call>{{"name": "lookup", "arguments": {{"key": 5}}}}</tool_call>{good}',
        "<tool_call>{</tool_call>",
    ]
    with environment(tmp_path, MULTI) as process:
        play = replace(context(process, renderer, multi=True), tools=[LOOKUP], max_turns=5)
        play = replace(play, max_length=10_000)
        sampler = Scripted(texts, renderer, process)
        groups, _ = collect(process.tasks()[2:], 1, play, sampler, SamplingParams(8))
    played = only(groups)
    assert [why[:20] for why in played.invalid_calls] == [
        "turn 1: there is no ",
        "turn 2: lookup.key: ",
        "turn 3: not JSON (Ex",
    ]
    # What can be read reaches the environment as calls, what cannot as text.
    assert [len(m.get("tool_calls", [])) for m in played.messages[::2]] == [1, 2, 0]
    assert answer_fields(played)["invalid_calls"] == played.invalid_calls


def test_each_way_to_end_has_its_own_stop_reason(tmp_path: Path, renderer: Renderer) -> None:
    limits = "[limits]\ncall_seconds = 1\n"
    (tmp_path / "environment.toml").write_text(limits)
    source = MULTI.replace("state[0] += 1", "state[0] += 1\n        act(completion.content)")
    source += """
import time

def act(text):
    if text == "sleep":
        time.sleep(30)
    if text == "fail":
        raise ValueError("no")
"""
    ended: dict[str, Trajectory] = {}
    with environment(tmp_path, source) as process:
        play = context(process, renderer, multi=True)
        for text in ("sleep", "fail", "on"):
            sampler = Scripted([text] * 2, renderer, None)
            groups, _ = collect(process.tasks()[2:], 1, play, sampler, SamplingParams(8))
            ended[text] = only(groups)
        short = replace(play, max_length=len(ended["on"].prompt_ids) + 8)
        sampler = Scripted(["on"], renderer, None)
        groups, _ = collect(process.tasks()[2:], 1, short, sampler, SamplingParams(8))
        ended["short"] = only(groups)
        cutting = Scripted(["on"], renderer, None)
        cutting.finished = False
        groups, _ = collect(process.tasks()[2:], 1, play, cutting, SamplingParams(8))
        ended["cut"] = only(groups)
    assert {name: t.stop_reason for name, t in ended.items()} == {
        "sleep": "timeout",
        "fail": "env_error",
        "on": "max_turns",
        "short": "max_context",
        "cut": "max_tokens",
    }
    assert "did not answer" in (ended["sleep"].error or "")
    assert [name for name, t in ended.items() if t.cut] == ["on", "short", "cut"]
    assert ended["short"].turns == 1 and ended["short"].reward == 1.0


TWO_TOOLS = """
from envs import Score, SingleTurnEnv, Task

def tool(name):
    return {"type": "function", "function": {"name": name, "description": f"Runs {name}."}}

class Tools(SingleTurnEnv):
    tools = [tool("search")]
    def tasks(self):
        return [Task("env", "Go."), Task("own", "Go.", tools=[tool("lookup")]),
                Task("none", "Go.", tools=[])]
    def score(self, task, completion):
        return Score(0.0)

def load_environment():
    return Tools()
"""


def test_a_task_shows_its_own_tools_in_place_of_the_environments(tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text(TWO_TOOLS)
    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    with EnvProcess(tmp_path) as process:
        tools = process.describe()["tools"]
        context = RolloutContext(process, Renderer(tokenizer, [2]), False, tools, 512, 1)
        prompts = {}
        for task in process.tasks():
            (trajectory,) = _new_group(task, 1, context).members
            prompts[task["id"]] = tokenizer.decode(trajectory.prompt_ids)
            assert trajectory.tools == tools_of(task, tools)
    assert "Runs search." in prompts["env"] and "Runs lookup." in prompts["own"]
    assert "search" not in prompts["own"]
    assert "Runs" not in prompts["none"]

"""Turns, tools and thought under the official chat templates of five families, in whole runs.

The models are tiny and were taught to write as the two examples of several turns want it
(tests/helpers/taught_models.py); their templates are those that the wheel of trl carries (see
tests/oracle.txt). What is held: the runs end, tools are called, and what is trained is what was
sampled.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import taught_models
from loops import curve, go, make_run, push
from official_templates import REASON, TEMPLATES

from engine.environments.registry import find_env, read_tasks
from engine.home.run_dir import Home
from engine.records.lines.trajectory_record import read_trajectories
from engine.records.run_config import GRPOConfig
from engine.worker import grpo
from engine.worker.components import environment, prepare, tasks_of
from engine.worker.core.job import Job
from engine.worker.core.limits import EvaluationLimits
from engine.worker.core.trajectory import Completion, Trajectory
from engine.worker.network.adapter import LoraSpec
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.collect import collect

pytestmark = [
    pytest.mark.worker,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not TEMPLATES.is_dir(), reason=REASON),
]

TAUGHT = ("guess_number", "tool_call")
FAMILIES = ["qwen3", "qwen3_5_think", "llama3_1", "gemma3", "gptoss"]
SHORT = ("llama3_1", "gptoss")  # with the first family
# The first family plays all, two others the one with most turns and calls; the rest is long.
CASES = [
    pytest.param(
        name,
        env,
        marks=[]
        if name == "qwen3" or (name in SHORT and env == "three_turns")
        else pytest.mark.long,
    )
    for name in FAMILIES
    for env in ("guess_number", "tool_call", "three_turns")
]
EXAMPLES = Path(grpo.__file__).parents[2] / "envs" / "examples"
THREE_TURNS = """
from envs import Message, MultiTurnEnv, Score, Task, ToolCall

def call(item, number):
    call = ToolCall("price", {"item": item}, id=f"call0000{number}")
    return Message("assistant", "", tool_calls=[call])

class Prices(MultiTurnEnv):
    tools = [{"type": "function", "function": {"name": "price", "description": "Price of an item.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}}}}]

    def tasks(self):
        return [Task(id=str(n), prompt=f"What do a pen and ink cost in shop {n}?", answer=[
                    call("pen", 1), call("ink", 2),
                    Message("assistant", f"{n} and 7")],
                    split="heldout" if n % 4 == 0 else "train") for n in range(16)]

    def start(self, task):
        return {"turns": 0, "said": []}

    def step(self, state, completion):
        state["turns"] += 1
        state["said"].append(completion.content)
        if state["turns"] == 3:
            return None
        calls = completion.tool_calls
        if not calls:
            return [Message("user", "Please call the tool.")]
        return [Message("tool", "7", tool_call_id=call.id, name=call.name) for call in calls]

    def score(self, task, state):
        return Score(reward=float(len(state["said"][-1]) % 3))

def load_environment():
    return Prices()
"""
REASONED = """
from envs import Message, SingleTurnEnv, Score, Task

class Reasoned(SingleTurnEnv):
    def tasks(self):
        def said(n):
            thought = f"<think>add {n} and 2</think>" if HAS(n) else ""
            return Message("assistant", f"{thought}{n + 2}")

        return [Task(id=str(n), prompt=f"{n} + 2?", answer=[said(n)],
                     split="heldout" if n % 4 == 0 else "train") for n in range(16)]

    def score(self, task, completion):
        return Score(reward=0.0)

def load_environment():
    return Reasoned()
"""
SHORT = {"eval_every": 2, "eval_rows": 2, "save_every": 2, "max_examples": 6, "lora_rank": 4}
SFT = SHORT | {"steps": 2, "batch_size": 4, "max_length": 6000}
GRPO = SHORT | {
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "max_tokens": 40,
    "max_turns": 3,
}


@pytest.fixture(autouse=True)
def no_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier skills are not asked about: those questions take longer than the runs."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A home with the environments, and a folder for the models."""
    folder = tmp_path_factory.mktemp("families")
    home = Home.locate(folder / "home")
    guess = (EXAMPLES / "guess_number" / "environment.py").read_text()
    call = (EXAMPLES / "tool_call" / "environment.py").read_text()
    sources = {
        "guess_number": guess.replace("games: int = 600", "games: int = 24"),
        "tool_call": re.sub(
            r"ITEMS = \(.*?\)\.split\(\)",
            'ITEMS = "pen ink jar hat egg fan".split()',
            call,
            flags=re.DOTALL,
        ),
        "three_turns": THREE_TURNS,
        "all_reasoned": REASONED.replace("HAS(n)", "True"),
        "some_reasoned": REASONED.replace("HAS(n)", "n % 2"),
    }
    envs = {
        n: push(home, folder / n, text, name=n.replace("_", "-")) for n, text in sources.items()
    }
    return {"home": home, "envs": envs, "folder": folder}


def model_of(place: dict[str, Any], name: str) -> Path:
    """The family's model, which has been taught the two examples of several turns."""
    folder = place["folder"] / f"model-{name}"
    if not folder.is_dir():
        records = [find_env(place["home"], place["envs"][env]) for env in TAUGHT]
        conversations = [
            (row["gold"], record.tools) for record in records for row in read_tasks(record)
        ]
        taught_models.save(name, conversations, folder)
    return folder


@pytest.mark.parametrize(("name", "env"), CASES)
def test_turns_and_tools_train_under_the_official_template(
    place: dict[str, Any], name: str, env: str
) -> None:
    home, env_id, model = place["home"], place["envs"][env], str(model_of(place, name))
    for algorithm, settings in (("sft", SFT), ("grpo", GRPO)):
        run = make_run(
            home, env_id, algorithm, settings, model=model, run_id=f"{name}-{env}-{algorithm}"
        )
        go(run)
        lines = curve(run)
        assert [line["step"] for line in lines] == [0, 1, 2]
        if algorithm == "sft":
            assert all(line["supervised_tokens"] > 0 for line in lines[1:])
        else:
            played = [row for step in (1, 2) for row in read_trajectories(run.rollouts(step))]
            assert len(played) >= 16 and any(row.turns > 1 for row in played)
            assert not any(row.error for row in played)


@pytest.mark.parametrize(("name", "env"), CASES)
def test_what_is_trained_is_what_was_sampled(place: dict[str, Any], name: str, env: str) -> None:
    model = model_of(place, name)
    run = make_run(
        place["home"],
        place["envs"][env],
        "grpo",
        GRPO,
        model=str(model),
        run_id=f"{name}-{env}-sampled",
    )
    job: Job[GRPOConfig] = Job(run.path)
    components = prepare(job, model)
    asked: list[tuple[list[int], Completion]] = []
    generate = components.sampler.generate

    def recorded(
        prompts: Sequence[list[int]],
        n: int,
        params: SamplingParams,
        done: Callable[[int, int, Completion], None] | None = None,
    ) -> Any:
        groups = generate(prompts, n, params, done)
        for prompt, group in zip(prompts, groups, strict=True):
            asked.extend((list(prompt), completion) for completion in group)
        return groups

    components.sampler.generate = recorded  # pyright: ignore[reportAttributeAccessIssue]
    spec = LoraSpec.from_settings(job.config.settings)
    components.sampler.load(components.base.network.new_adapter(spec, seed=0))
    with environment(components, job) as process:
        assert process is not None
        context = components.context(process, EvaluationLimits(6, 3, 8000))
        tasks = tasks_of(components, "train")[:3]
        # Where no call must be whole, some turns end with the family's token, more at a stop
        # string, which is no such token.
        stop = ("e", "a") if env == "three_turns" else ()
        params = SamplingParams(40, 1.0, stop=stop, seed=1)
        groups, _ = collect(tasks, 4, context, components.sampler, params)
    members = [member for group in groups for member in group.members]
    assert any(member.turns > 1 for member in members)
    for member in members:
        assert member.error is None
        whole = member.prompt_ids + member.ids
        mine = [(p, c) for p, c in asked if whole[: len(p) + len(c.ids)] == p + c.ids]
        assert len(mine) >= member.turns
        trained = [i for i, mask in zip(member.ids, member.loss_mask, strict=True) if mask]
        turns = {len(p): c for p, c in mine}
        assert trained == [i for at in sorted(turns) for i in turns[at].ids]
        # Between two turns stands what the template writes there, with the environment's words.
        between = [components.renderer.completion_text(ids) for ids in untrained(member)]
        replies = [m for m in member.messages if m["role"] != "assistant"]
        assert len(between) == len(replies) == member.turns - 1
        assert all(reply["content"] in text for reply, text in zip(replies, between, strict=True))
    if env == "tool_call":
        called = [member for member in members if member.turns > 1]
        assert all(member.messages[0]["tool_calls"] for member in called)
        assert all(member.messages[1]["role"] == "tool" for member in called)
        if name == "gptoss":  # a call ends with a token of its own
            call = components.base.tokenizer.convert_tokens_to_ids("<|call|>")
            ends = [member.ids[member.loss_mask.index(0) - 1] for member in called]
            assert set(ends) == {call}


def untrained(member: Trajectory) -> list[list[int]]:
    """The ids of each stretch that the model did not write."""
    stretches = groupby(zip(member.ids, member.loss_mask, strict=True), key=lambda pair: pair[1])
    return [[i for i, _ in pairs] for mask, pairs in stretches if not mask]


@pytest.mark.parametrize("name", ["qwen3", "llama3_1"])
def test_reasoning_in_the_rows_is_kept_dropped_or_required(
    place: dict[str, Any], name: str
) -> None:
    home, model = place["home"], str(model_of(place, name))
    supervised, rows = {}, {}
    for env, thinking in (
        ("all_reasoned", None),
        ("all_reasoned", "keep"),
        ("all_reasoned", "drop"),
        ("some_reasoned", None),
        ("some_reasoned", "require"),
    ):
        given = SFT | {"max_examples": 12} | ({"thinking": thinking} if thinking else {})
        run_id = f"{name}-{env}-{thinking}".replace("_", "-").lower()
        run = make_run(home, place["envs"][env], "sft", given, model=model, run_id=run_id)
        stored = json.loads(run.config.read_text())["settings"]["thinking"]
        assert stored == (thinking or ("require" if env == "all_reasoned" else "keep"))
        go(run)
        event = next(
            line
            for line in map(json.loads, run.events.read_text().splitlines())
            if line.get("kind", line.get("event")) == "data"
        )
        rows[env, thinking] = event["rows"]
        supervised[env, thinking] = event["supervised_tokens"]
    assert rows == {
        ("all_reasoned", None): 12,
        ("all_reasoned", "keep"): 12,
        ("all_reasoned", "drop"): 12,
        ("some_reasoned", None): 12,
        ("some_reasoned", "require"): 8,  # the odd ones
    }
    assert supervised["all_reasoned", None] == supervised["all_reasoned", "keep"]
    added = supervised["all_reasoned", "keep"] - supervised["all_reasoned", "drop"]
    assert added >= 12 * len("add 1 and 2")

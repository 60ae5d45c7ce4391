"""Which tasks a step plays, with and without replacing groups that came out alike."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loops import PEBBLE
from transformers import AutoTokenizer
from typed_settings import grpo_settings

from engine.worker.core.trajectory import Completion
from engine.worker.network.sampler import OnCompletion, SamplingParams
from engine.worker.rollouts.batch_source import (
    BatchSource,
    Collector,
    RolloutBatch,
)
from engine.worker.rollouts.collect import RolloutContext
from engine.worker.rollouts.renderer import Renderer
from engine.worker.rollouts.task_order import shuffled_tasks, task_order
from envs.host.process import EnvProcess

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

SETTINGS = grpo_settings(
    {
        "seed": 3,
        "prompts_per_step": 4,
        "group_size": 2,
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop": [],
        "advantage": "group_center",
        "resample_uniform": 0,
        "thinking_length_penalty": 0.0,
        "async_sampling": False,
    }
)

# Groups of even tasks earn alike, those of odd ones differ by the length of the answer.
SOURCE = """
from envs import Score, SingleTurnEnv, Task

class Odd(SingleTurnEnv):
    def tasks(self):
        return [Task(str(i), f"Say {i}.") for i in range(24)]
    def score(self, task, completion):
        return Score(float(len(completion)) if int(task.id) % 2 else 1.0)

def load_environment():
    return Odd()
"""


class Members:
    """Member m says m + 1 letters."""

    name = "scripted"

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.seeds: list[int] = []
        self.asked: list[str] = []

    def load(self, adapter: Any) -> None:
        self.asked.append("load")

    def release_memory(self) -> None:
        self.asked.append("rest")

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
        self.asked.append("generate")
        out = []
        for index in range(len(prompts)):
            texts = ["x" * (member + 1) for member in range(n)]
            ids = [self.renderer.encode(text) for text in texts]
            out.append([Completion(i, [-1.0] * len(i), True) for i in ids])
            for member, completion in enumerate(out[-1]):
                assert done is not None
                done(index, member, completion)
        return out


@pytest.fixture
def process(tmp_path: Path) -> Iterator[EnvProcess]:
    (tmp_path / "environment.py").write_text(SOURCE)
    with EnvProcess(tmp_path) as process:
        yield process


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    return Renderer(tokenizer, [tokenizer.eos_token_id])


def player(process: EnvProcess, renderer: Renderer, rounds: int, rows: int = 24) -> Collector:
    context = RolloutContext(process, renderer, False, [], max_length=200, max_turns=1)
    settings = SETTINGS.model_copy(update={"resample_uniform": rounds})
    tasks = process.tasks()[:rows]
    return Collector(tasks, task_order(tasks, settings, {}), context, Members(renderer), settings)


def ids(played: RolloutBatch) -> tuple[list[int], list[int]]:
    return [int(g.task_id) for g in played.groups], [int(g.task_id) for g in played.dropped]


def test_without_rounds_a_step_plays_the_tasks_of_its_order(
    process: EnvProcess, renderer: Renderer
) -> None:
    groups, dropped = ids(player(process, renderer, 0).batch(1, 0))
    assert groups == shuffled_tasks(1, 24, SETTINGS.prompts_per_step, SETTINGS.seed) and not dropped


def test_uniform_groups_are_replaced_in_their_places_and_no_task_is_played_twice(
    process: EnvProcess, renderer: Renderer
) -> None:
    plain = ids(player(process, renderer, 0).batch(1, 0))[0]
    again = player(process, renderer, 8)
    groups, dropped = ids(again.batch(1, 0))
    assert all(task % 2 for task in groups)  # with 12 odd tasks eight rounds find four
    assert dropped and all(task % 2 == 0 for task in dropped)
    assert [g for g, p in zip(groups, plain, strict=True) if p % 2] == [p for p in plain if p % 2]
    assert len(set(groups + dropped)) == len(groups) + len(dropped)
    assert isinstance(again.sampler, Members)
    assert len(set(again.sampler.seeds)) == len(again.sampler.seeds)


def test_the_rounds_are_capped(process: EnvProcess, renderer: Renderer) -> None:
    plain, once = (ids(player(process, renderer, rounds).batch(2, 1)) for rounds in (0, 1))
    even = [task for task in plain[0] if task % 2 == 0]
    assert even and sorted(once[1]) == sorted(even)


def test_a_step_played_again_replaces_the_same_groups(
    process: EnvProcess, renderer: Renderer
) -> None:
    whole = player(process, renderer, 3)
    played = [ids(whole.batch(step, step - 1)) for step in (1, 2, 3)]
    assert ids(player(process, renderer, 3).batch(3, 2)) == played[2]  # as a resumed run does
    assert played[0][1] != played[1][1]


def test_where_no_fresh_task_is_left_uniform_groups_stay(
    process: EnvProcess, renderer: Renderer
) -> None:
    groups, dropped = ids(player(process, renderer, 8, rows=4).batch(1, 0))
    assert sorted(groups) == [0, 1, 2, 3] and not dropped


def test_advantages_and_the_policys_step_are_written_into_every_trajectory(
    process: EnvProcess, renderer: Renderer
) -> None:
    played = player(process, renderer, 8).batch(5, 4)
    assert [[t.advantage for t in g.members] for g in played.groups] == [[-0.5, 0.5]] * 4
    assert {t.advantage for g in played.dropped for t in g.members} == {0.0}
    every = [t for g in played.groups + played.dropped for t in g.members]
    assert {t.policy_step for t in every} == {4}


def test_the_sampler_rests_while_the_policy_is_updated(
    process: EnvProcess, renderer: Renderer
) -> None:
    played = player(process, renderer, rounds=0)
    sampler = played.sampler
    assert isinstance(sampler, Members)
    policy = SimpleNamespace(adapter=object())
    feed = BatchSource(played, policy, last_step=2)  # pyright: ignore[reportArgumentType]
    feed.batch(1)
    assert sampler.asked == ["load", "generate", "rest"]

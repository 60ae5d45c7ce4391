"""Tasks + environment + sampler -> groups of scored trajectories.

Single-turn tasks are sampled at once and scored. Multi-turn ones go in step: every rollout still
open takes one turn, then the environment answers each of them. A fault of the environment costs
the one rollout it happened in.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.worker.renderer import Renderer
from engine.worker.sampler import SamplingParams, TorchSampler
from engine.worker.trajectory import Completion, Group, Trajectory
from envs.process import EnvProcess, Episode, EpisodeFailed


@dataclass(frozen=True)
class Stage:
    """What rollouts need beside tasks and sampler.

    Attributes:
        process: the environment, in its own process.
        multi_turn: whether it answers.
        tools: shown to the model, OpenAI function schemas.
        max_length: ids of prompt and completions together.
        max_turns: assistant turns of one rollout.
    """

    process: EnvProcess
    renderer: Renderer
    multi_turn: bool
    tools: list[dict[str, Any]]
    max_length: int
    max_turns: int


@dataclass
class Times:
    """Seconds spent, for the metrics of the step."""

    sample_s: float = 0.0
    reward_s: float = 0.0


def collect(
    tasks: Sequence[dict[str, Any]],
    n: int,
    stage: Stage,
    sampler: TorchSampler,
    params: SamplingParams,
) -> tuple[list[Group], Times]:
    """Play every task `n` times. Groups come in the order of `tasks`."""
    times = Times()
    groups = [_open_group(task, n, stage) for task in tasks]
    if stage.multi_turn:
        _play_turns(tasks, groups, stage, sampler, params, times)
    else:
        _play_once(tasks, groups, n, stage, sampler, params, times)
    return groups, times


def fits(task: dict[str, Any], stage: Stage, params: SamplingParams) -> bool:
    """Whether the prompt leaves room for one completion."""
    prompt = stage.renderer.prompt(task["prompt"], stage.tools)
    return len(prompt) + params.max_tokens <= stage.max_length


def _open_group(task: dict[str, Any], n: int, stage: Stage) -> Group:
    prompt = stage.renderer.prompt(task["prompt"], stage.tools)
    return Group(task["id"], [Trajectory(task["id"], task["prompt"], prompt) for _ in range(n)])


def _play_once(
    tasks: Sequence[dict[str, Any]],
    groups: list[Group],
    n: int,
    stage: Stage,
    sampler: TorchSampler,
    params: SamplingParams,
    times: Times,
) -> None:
    began = time.monotonic()
    prompts = [group.members[0].prompt_ids for group in groups]
    for group, completions in zip(groups, sampler.generate(prompts, n, params), strict=True):
        for trajectory, completion in zip(group.members, completions, strict=True):
            _take_turn(trajectory, completion, stage, params)
    times.sample_s += time.monotonic() - began
    began = time.monotonic()
    pairs = [
        (task, trajectory.completion)
        for task, group in zip(tasks, groups, strict=True)
        for trajectory in group.members
    ]
    members = [trajectory for group in groups for trajectory in group.members]
    for trajectory, score in zip(members, stage.process.score_many(pairs), strict=True):
        _take_score(trajectory, score)
    times.reward_s += time.monotonic() - began


def _play_turns(
    tasks: Sequence[dict[str, Any]],
    groups: list[Group],
    stage: Stage,
    sampler: TorchSampler,
    params: SamplingParams,
    times: Times,
) -> None:
    played: list[tuple[Trajectory, Episode]] = []
    began = time.monotonic()
    for task, group in zip(tasks, groups, strict=True):
        for trajectory in group.members:
            try:
                played.append((trajectory, stage.process.start(task)))
            except EpisodeFailed as error:
                _fail(trajectory, str(error))
    times.reward_s += time.monotonic() - began
    going = played
    turn = 0
    while going:
        began = time.monotonic()
        prompts = [trajectory.prompt_ids + trajectory.ids for trajectory, _ in going]
        seeded = replace(params, seed=params.seed * 64 + turn)
        completions = sampler.generate(prompts, 1, seeded)
        for (trajectory, _), (completion,) in zip(going, completions, strict=True):
            _take_turn(trajectory, completion, stage, params)
        times.sample_s += time.monotonic() - began
        began = time.monotonic()
        going = [(t, e) for t, e in going if _answered(t, e, stage, params)]
        times.reward_s += time.monotonic() - began
        turn += 1
    began = time.monotonic()
    for trajectory, episode in played:
        if trajectory.error is None:
            _take_score(trajectory, episode.score())
        episode.close()
    times.reward_s += time.monotonic() - began


def _take_turn(
    trajectory: Trajectory, completion: Completion, stage: Stage, params: SamplingParams
) -> None:
    """Append what the model said, as ids and as a message."""
    text = stage.renderer.completion_text(completion.ids)
    for stop in params.stop:
        text = text.split(stop)[0]
    message = stage.renderer.assistant_message(text, tools=bool(stage.tools))
    trajectory.add_completion(completion)
    trajectory.messages.append(message)
    trajectory.completion = message["content"]
    trajectory.stop_reason = "stop" if completion.finished else "length"


def _answered(
    trajectory: Trajectory, episode: Episode, stage: Stage, params: SamplingParams
) -> bool:
    """Let the environment answer; True when the rollout goes on with another turn."""
    try:
        replies = episode.step(trajectory.messages[-1])
    except EpisodeFailed as error:
        _fail(trajectory, str(error))
        return False
    if replies is None or trajectory.stop_reason == "length":
        return False
    if trajectory.turns >= stage.max_turns:
        trajectory.stop_reason = "max_turns"
        return False
    before = [*trajectory.prompt, *trajectory.messages]
    added = stage.renderer.between_turns(before, replies, stage.tools)
    size = len(trajectory.prompt_ids) + len(trajectory.ids) + len(added)
    if size + params.max_tokens > stage.max_length:
        trajectory.stop_reason = "length"
        return False
    trajectory.add_environment(added)
    trajectory.messages += replies
    return True


def _take_score(trajectory: Trajectory, score: dict[str, Any]) -> None:
    if score["error"]:
        _fail(trajectory, score["error"])
        return
    trajectory.reward = float(score["reward"])
    trajectory.success = score["success"]
    trajectory.metrics = dict(score["metrics"])


def _fail(trajectory: Trajectory, error: str) -> None:
    trajectory.error = error
    trajectory.stop_reason = "error"
    trajectory.reward = 0.0

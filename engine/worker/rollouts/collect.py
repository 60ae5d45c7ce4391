"""Tasks + environment + sampler -> groups of scored trajectories.

Single-turn tasks are sampled at once. Multi-turn ones go in step: every rollout still open takes
one turn. Either way the environment works beside the sampler: what has ended is scored, and what
was said is answered, in a thread of its own while others are still being sampled. It meets
completions in the order in which they end, so a score must not depend on what was scored before
it; `push_env` audits that. A fault of the environment costs the one rollout it happened in.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from engine.worker.core.trajectory import Completion, Group, Trajectory
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.renderer import Renderer
from envs.host.process import EnvProcess, Episode, EpisodeFailed
from envs.json_types import ChatMessage, ScoreReply, TaskRow, ToolSchema


@dataclass(frozen=True)
class RolloutContext:
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
    tools: list[ToolSchema]
    max_length: int
    max_turns: int


@dataclass
class Times:
    """Seconds spent, for the metrics of the step; `reward_s` is what sampling did not hide."""

    sample_s: float = 0.0
    reward_s: float = 0.0

    def __add__(self, other: "Times") -> "Times":
        return Times(self.sample_s + other.sample_s, self.reward_s + other.reward_s)


def collect(
    tasks: Sequence[TaskRow],
    n: int,
    context: RolloutContext,
    sampler: Sampler,
    params: SamplingParams,
) -> tuple[list[Group], Times]:
    """Play every task `n` times. Groups come in the order of `tasks`."""
    times = Times()
    groups = [_open_group(task, n, context) for task in tasks]
    if context.multi_turn:
        _play_turns(tasks, groups, context, sampler, params, times)
    else:
        _play_once(tasks, groups, n, context, sampler, params, times)
    return groups, times


def fits(task: TaskRow, context: RolloutContext, params: SamplingParams) -> bool:
    """Whether the prompt leaves room for one completion."""
    prompt = context.renderer.prompt(task["prompt"], context.tools)
    return len(prompt) + params.max_tokens <= context.max_length


def _open_group(task: TaskRow, n: int, context: RolloutContext) -> Group:
    prompt = context.renderer.prompt(task["prompt"], context.tools)
    return Group(task["id"], [Trajectory(task["id"], task["prompt"], prompt) for _ in range(n)])


def _play_once(
    tasks: Sequence[TaskRow],
    groups: list[Group],
    n: int,
    context: RolloutContext,
    sampler: Sampler,
    params: SamplingParams,
    times: Times,
) -> None:
    """One completion each, scored in the background as soon as it ends."""
    with BackgroundWorker() as environment:

        def ended(prompt: int, member: int, completion: Completion) -> None:
            trajectory = groups[prompt].members[member]
            _take_turn(trajectory, completion, context, params)
            environment.do(_score_once, context.process, tasks[prompt], trajectory)

        began = time.monotonic()
        sampler.generate([g.members[0].prompt_ids for g in groups], n, params, ended)
        times.sample_s += time.monotonic() - began
        times.reward_s += environment.wait()


def _score_once(process: EnvProcess, task: TaskRow, trajectory: Trajectory) -> None:
    _take_score(trajectory, process.score(task, trajectory.completion))


@dataclass
class _Rollout:
    """One episode under way; `replies` is what the environment said last, None at the end."""

    trajectory: Trajectory
    episode: Episode
    replies: list[ChatMessage] | None = None


def _play_turns(
    tasks: Sequence[TaskRow],
    groups: list[Group],
    context: RolloutContext,
    sampler: Sampler,
    params: SamplingParams,
    times: Times,
) -> None:
    """Episodes of several turns, all in step; what has ended is scored in the background."""
    running: list[_Rollout] = []
    began = time.monotonic()
    for task, group in zip(tasks, groups, strict=True):
        for trajectory in group.members:
            try:
                running.append(_Rollout(trajectory, context.process.start(task)))
            except EpisodeFailed as error:
                _fail(trajectory, str(error))
    times.reward_s += time.monotonic() - began
    turn = 0
    with BackgroundWorker() as environment:
        while running:
            _take_turns(running, turn, context, sampler, params, environment, times)
            running = [r for r in running if _goes_on(r, context, params, environment)]
            turn += 1
        times.reward_s += environment.wait()


def _take_turns(
    running: Sequence[_Rollout],
    turn: int,
    context: RolloutContext,
    sampler: Sampler,
    params: SamplingParams,
    environment: "BackgroundWorker",
    times: Times,
) -> None:
    """One assistant turn of every rollout, each answered as soon as it stands."""

    def ended(prompt: int, _member: int, completion: Completion) -> None:
        _take_turn(running[prompt].trajectory, completion, context, params)
        environment.do(_answer, running[prompt], context)

    began = time.monotonic()
    prompts = [r.trajectory.prompt_ids + r.trajectory.ids for r in running]
    sampler.generate(prompts, 1, replace(params, seed=params.seed * 64 + turn), ended)
    times.sample_s += time.monotonic() - began
    times.reward_s += environment.wait()


class BackgroundWorker:
    """A thread that does what it is handed, in that order, while its owner goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "environment")
        self._pending: list[Future[None]] = []

    def __enter__(self) -> "BackgroundWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def do(self, work: Callable[..., None], *arguments: Any) -> None:
        self._pending.append(self._thread.submit(work, *arguments))

    def wait(self) -> float:
        """Until all of it is done; returns the seconds waited, raises what the work raised."""
        began = time.monotonic()
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        return time.monotonic() - began


def _take_turn(
    trajectory: Trajectory, completion: Completion, context: RolloutContext, params: SamplingParams
) -> None:
    """Append what the model said, as ids and as a message."""
    text = context.renderer.completion_text(completion.ids)
    for stop in params.stop:
        text = text.split(stop)[0]
    message = context.renderer.assistant_message(text, tools=bool(context.tools))
    trajectory.add_completion(completion)
    trajectory.messages.append(message)
    trajectory.completion = message["content"]
    trajectory.stop_reason = "stop" if completion.finished else "length"


def _answer(rollout: _Rollout, context: RolloutContext) -> None:
    """Let the environment answer; a rollout that is over by that is scored at once."""
    trajectory = rollout.trajectory
    rollout.replies = None
    try:
        replies = rollout.episode.step(trajectory.messages[-1])
    except EpisodeFailed as error:
        _fail(trajectory, str(error))
        replies = None
    if replies is not None and trajectory.stop_reason != "length":
        if trajectory.turns < context.max_turns:
            rollout.replies = replies
            return
        trajectory.stop_reason = "max_turns"
    _finish(rollout)


def _goes_on(
    rollout: _Rollout,
    context: RolloutContext,
    params: SamplingParams,
    environment: BackgroundWorker,
) -> bool:
    """Append what the environment said; False when the rollout ends here."""
    trajectory, replies = rollout.trajectory, rollout.replies
    if replies is None:
        return False
    before = [*trajectory.prompt, *trajectory.messages]
    added = context.renderer.between_turns(before, replies, context.tools)
    size = len(trajectory.prompt_ids) + len(trajectory.ids) + len(added)
    if size + params.max_tokens > context.max_length:
        trajectory.stop_reason = "length"
        environment.do(_finish, rollout)
        return False
    trajectory.add_environment(added)
    trajectory.messages += replies
    return True


def _finish(rollout: _Rollout) -> None:
    if rollout.trajectory.error is None:
        _take_score(rollout.trajectory, rollout.episode.score())
    rollout.episode.close()


def _take_score(trajectory: Trajectory, score: ScoreReply) -> None:
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

"""Tasks + environment + sampler -> groups of scored trajectories.

Single-turn tasks are sampled at once. Multi-turn ones go in step: every rollout still open takes
one turn. Either way the environment works beside the sampler, in a thread of its own: it scores or
answers completions while others are being sampled. They come in the order in which they end, so a
score must not depend on earlier ones; `push_env` audits that. A fault costs the rollout it hits.
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
    """What rollouts need besides tasks and a sampler.

    Attributes:
        process: the environment, in its own process.
        renderer: turns messages into token ids, and back.
        multi_turn: whether the environment answers the model, so that a rollout has several turns.
        tools: shown to the model, as OpenAI function schemas.
        max_length: the most ids of prompt and completions together.
        max_turns: the most assistant turns of a rollout.
    """

    process: EnvProcess
    renderer: Renderer
    multi_turn: bool
    tools: list[ToolSchema]
    max_length: int
    max_turns: int


@dataclass
class Times:
    """Seconds spent, for the metrics of a step. `reward_s` counts only the time that the
    environment took while nothing was being sampled."""

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
    """Play every task `n` times and score the rollouts.

    Returns (one group per task, in the order of `tasks`; the seconds spent). An error of the
    environment is not raised: the trajectory in which it happened gets it as its `error`.
    """
    times = Times()
    groups = [_new_group(task, n, context) for task in tasks]
    if context.multi_turn:
        _play_turns(tasks, groups, context, sampler, params, times)
    else:
        _play_once(tasks, groups, n, context, sampler, params, times)
    return groups, times


def fits(task: TaskRow, context: RolloutContext, params: SamplingParams) -> bool:
    """Whether the task's prompt leaves room for one completion of `params.max_tokens` ids within
    `context.max_length`."""
    prompt = context.renderer.prompt(task["prompt"], context.tools)
    return len(prompt) + params.max_tokens <= context.max_length


def _new_group(task: TaskRow, n: int, context: RolloutContext) -> Group:
    """A group of `n` trajectories that hold only the task's prompt."""
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
    """Sample `n` completions of each task and score each in the background as soon as it ends.
    Fills the trajectories of `groups` and adds to `times`."""
    with BackgroundWorker() as background:

        def on_completion(prompt: int, member: int, completion: Completion) -> None:
            # Called by the sampler for completion `member` of the task at index `prompt`.
            trajectory = groups[prompt].members[member]
            _append_turn(trajectory, completion, context, params)
            background.submit(_score_once, context.process, tasks[prompt], trajectory)

        began = time.monotonic()
        prompts = [group.members[0].prompt_ids for group in groups]
        sampler.generate(prompts, n, params, on_completion)
        times.sample_s += time.monotonic() - began
        times.reward_s += background.wait()


def _score_once(process: EnvProcess, task: TaskRow, trajectory: Trajectory) -> None:
    """Score a single-turn trajectory; runs in the background thread."""
    _set_score(trajectory, process.score(task, trajectory.completion))


@dataclass
class _Rollout:
    """A rollout of several turns that is being played. `replies` holds the environment's answer to
    the last turn; None before the first answer, or if the rollout ended with that turn."""

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
    """Play all trajectories of `groups`: one turn of each, then the next turn of those still open,
    and so on. Those that have ended are scored in the background. Fills the trajectories and adds
    to `times`."""
    open_rollouts: list[_Rollout] = []
    began = time.monotonic()
    for task, group in zip(tasks, groups, strict=True):
        for trajectory in group.members:
            try:
                open_rollouts.append(_Rollout(trajectory, context.process.start(task)))
            except EpisodeFailed as error:  # the other rollouts go on
                _set_error(trajectory, str(error), timed_out=error.timed_out)
    times.reward_s += time.monotonic() - began
    turn = 0
    with BackgroundWorker() as background:
        while open_rollouts:
            _play_turn(open_rollouts, turn, context, sampler, params, background, times)
            played_rollouts, open_rollouts = open_rollouts, []
            for rollout in played_rollouts:
                if _continue_rollout(rollout, context, params, background):
                    open_rollouts.append(rollout)
            turn += 1
        times.reward_s += background.wait()


def _play_turn(
    open_rollouts: Sequence[_Rollout],
    turn: int,
    context: RolloutContext,
    sampler: Sampler,
    params: SamplingParams,
    background: "BackgroundWorker",
    times: Times,
) -> None:
    """Sample one assistant turn of every open rollout. The environment answers each in the
    background as soon as it is complete. Returns when all are answered, and adds to `times`.

    Args:
        turn: number of the turn, from 0; each turn has another seed.
    """

    def on_completion(prompt: int, _member: int, completion: Completion) -> None:
        _append_turn(open_rollouts[prompt].trajectory, completion, context, params)
        background.submit(_let_environment_answer, open_rollouts[prompt], context)

    began = time.monotonic()
    prompts = [rollout.trajectory.prompt_ids + rollout.trajectory.ids for rollout in open_rollouts]
    # Times 64, so that the first 64 turns of different steps never share a seed.
    turn_params = replace(params, seed=params.seed * 64 + turn)
    sampler.generate(prompts, n=1, params=turn_params, done=on_completion)
    times.sample_s += time.monotonic() - began
    times.reward_s += background.wait()


class BackgroundWorker:
    """A context with a thread that runs the calls it is given, one after another, while the caller
    goes on. Leaving the context waits for the thread to end."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="environment")
        self._pending: list[Future[None]] = []

    def __enter__(self) -> "BackgroundWorker":
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the call that is running. Calls that have not begun are dropped: after an error
        nobody needs them, and otherwise `wait` has left none."""
        self._thread.shutdown(cancel_futures=True)

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        """Queue the call `work(*arguments)` for the thread, and return at once."""
        self._pending.append(self._thread.submit(work, *arguments))

    def wait(self) -> float:
        """Wait until all queued calls are done, and return the seconds that took. If calls have
        failed, raises the exception of the first of them."""
        began = time.monotonic()
        pending = self._pending
        self._pending = []  # also if one of the calls has failed
        for future in pending:
            future.result()
        return time.monotonic() - began


def _append_turn(
    trajectory: Trajectory, completion: Completion, context: RolloutContext, params: SamplingParams
) -> None:
    """Append a completion to the trajectory: its ids, its text as an assistant message, and which
    tool calls in it are invalid. The text ends before the first stop string; the ids are kept as
    sampled."""
    text = context.renderer.completion_text(completion.ids)
    for stop in params.stop:
        text = text.split(stop)[0]
    reply = context.renderer.reply(text, context.tools)
    trajectory.add_completion(completion)
    trajectory.messages.append(reply.message)
    trajectory.completion = reply.message["content"]
    trajectory.invalid_calls += [f"turn {trajectory.turns}: {call}" for call in reply.invalid_calls]
    trajectory.stop_reason = "stop" if completion.finished else "max_tokens"


def _let_environment_answer(rollout: _Rollout, context: RolloutContext) -> None:
    """Send the last turn of a rollout to the environment. If the rollout goes on, the reply is
    stored for the next turn. Otherwise the rollout is scored and closed. It ends if

    - the environment has nothing more to say, or failed;
    - the turn was cut off by its length;
    - the turn was the last one allowed.
    """
    trajectory = rollout.trajectory
    rollout.replies = None
    try:
        replies = rollout.episode.step(trajectory.messages[-1])
    except EpisodeFailed as error:
        _set_error(trajectory, str(error), timed_out=error.timed_out)
        replies = None
    if replies is not None and trajectory.stop_reason != "max_tokens":
        if trajectory.turns < context.max_turns:
            rollout.replies = replies
            return
        trajectory.stop_reason = "max_turns"
    _score_and_close(rollout)


def _continue_rollout(
    rollout: _Rollout,
    context: RolloutContext,
    params: SamplingParams,
    background: BackgroundWorker,
) -> bool:
    """Append the environment's reply to the trajectory, so that the next turn can be sampled, and
    return True. Returns False if the rollout has ended, or ends now because another completion
    would exceed the length limit."""
    trajectory = rollout.trajectory
    replies = rollout.replies
    if replies is None:
        return False
    earlier_messages = [*trajectory.prompt, *trajectory.messages]
    reply_ids = context.renderer.between_turns(
        earlier_messages, replies, context.tools, last_id=trajectory.ids[-1]
    )
    next_prompt_length = len(trajectory.prompt_ids) + len(trajectory.ids) + len(reply_ids)
    if next_prompt_length + params.max_tokens > context.max_length:
        trajectory.stop_reason = "max_context"
        background.submit(_score_and_close, rollout)
        return False
    trajectory.add_environment(reply_ids)
    trajectory.messages += replies
    return True


def _score_and_close(rollout: _Rollout) -> None:
    """Score the rollout's episode, unless the environment failed in it before, and close it."""
    if rollout.trajectory.error is None:
        _set_score(rollout.trajectory, rollout.episode.score())
    rollout.episode.close()


def _set_score(trajectory: Trajectory, score: ScoreReply) -> None:
    """Copy the environment's score into the trajectory: reward, success and metrics, or the error
    if scoring failed."""
    if score["error"]:
        _set_error(trajectory, score["error"], timed_out=score.get("timed_out", False))
        return
    trajectory.reward = float(score["reward"])
    trajectory.success = score["success"]
    trajectory.metrics = dict(score["metrics"])


def _set_error(trajectory: Trajectory, error: str, *, timed_out: bool) -> None:
    """Mark the trajectory as failed: it has no reward and is not trained on. `timed_out`: whether
    the environment took longer than it may."""
    trajectory.error = error
    trajectory.stop_reason = "timeout" if timed_out else "env_error"
    trajectory.reward = 0.0

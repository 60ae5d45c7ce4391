"""Plays tasks with an environment and a sampler, and returns groups of scored trajectories.

Single-turn tasks are sampled at once. Multi-turn tasks advance together: every open rollout takes
one turn. The environment works at the same time as the sampler, in one or several processes: it
scores or answers completions, in the order in which they end, while others are being sampled. So a
score must not depend on earlier ones; `push_env` audits that. A fault costs only its own rollout.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.core.wording.asked import asked_prompt, asked_tools
from engine.worker.core import pulse
from engine.worker.core.background import BackgroundWorker
from engine.worker.core.trajectory import Completion, Group, Trajectory
from engine.worker.network.sampler import Sampler, SamplingParams
from engine.worker.rollouts.renderer import Renderer
from engine.worker.rollouts.scoring import (
    Scoring,
    judge_use,
    out_of_judge_budget,
    set_error,
    set_score,
)
from envs.host.process import EnvProcess, Episode, EpisodeFailed
from envs.json_types import ChatMessage, TaskRow, ToolSchema
from envs.metering.judge_calls import NOTHING, JudgeUse


@dataclass(frozen=True)
class RolloutContext:
    """What rollouts need besides tasks and a sampler.

    Attributes:
        process: the environment, in its own process.
        renderer: turns messages into token ids, and back.
        multi_turn: whether the environment answers the model, so that a rollout has several turns.
        tools: the environment's tools, as OpenAI function schemas; a task may have its own.
        max_length: the most ids of prompt and completions together.
        max_turns: the most assistant turns of a rollout.
        score_workers: how many env processes score or answer at once.
        compare: whether `score_group` of the environment, if it has one, scores whole groups. True
            in training, which compares a group's rewards; never when a model is measured.
        play: plays rollouts in which a program asks the model (gateway/play.py), and returns the
            seconds spent; None if the environment itself answers or scores.
    """

    process: EnvProcess
    renderer: Renderer
    multi_turn: bool
    tools: list[ToolSchema]
    max_length: int
    max_turns: int
    score_workers: int = 1
    compare: bool = False
    play: "PlayPrograms | None" = None


@dataclass
class Times:
    """Seconds spent, for the metrics of a step, and the use of judges. `reward_s` counts only the
    time that the environment took while nothing was being sampled."""

    sample_s: float = 0.0
    reward_s: float = 0.0
    judge: JudgeUse = NOTHING

    def __add__(self, other: "Times") -> "Times":
        """Return the sums of both: seconds, and the use of judges."""
        judge = self.judge + other.judge
        return Times(self.sample_s + other.sample_s, self.reward_s + other.reward_s, judge)


PlayPrograms = Callable[
    [Sequence[TaskRow], list[Group], RolloutContext, Sampler, SamplingParams], Times
]


@dataclass(frozen=True)
class _Play:
    """How the rollouts of one call of `collect` are played; the seconds spent are added to
    `times`."""

    context: RolloutContext
    sampler: Sampler
    params: SamplingParams
    times: Times


def collect(
    tasks: Sequence[TaskRow],
    n: int,
    context: RolloutContext,
    sampler: Sampler,
    params: SamplingParams,
) -> tuple[list[Group], Times]:
    """Play every task `n` times and score the rollouts.

    Returns (one group per task, in the order of `tasks`; the seconds spent). Errors of the
    environment are not raised, but become the `error` of their trajectory. Raises WorkerFailure
    (kind budget) if a judge was needed beyond its limit, since an unjudged answer would earn 0.
    """
    play = _Play(context, sampler, params, Times())
    groups = [_new_group(task, n, context) for task in tasks]
    if context.play is not None:
        return groups, context.play(tasks, groups, context, sampler, params)
    judge_before = judge_use(context.process)
    if context.multi_turn:
        _play_turns(tasks, groups, play)
    else:
        _play_once(tasks, groups, n, play)
    play.times.judge = judge_use(context.process) - judge_before
    if play.times.judge.refused:
        raise out_of_judge_budget(context.process)
    return groups, play.times


def fits(task: TaskRow, context: RolloutContext, params: SamplingParams) -> bool:
    """Tell whether the task's prompt leaves room for a completion of `params.max_tokens` ids within
    `context.max_length`. Tasks of a program always fit, as its questions are not known."""
    if context.play is not None:  # a program asks the model
        return True
    prompt = context.renderer.prompt(asked_prompt(task), asked_tools(task, context.tools))
    return len(prompt) + params.max_tokens <= context.max_length


def _new_group(task: TaskRow, n: int, context: RolloutContext) -> Group:
    """Make a group of `n` trajectories that hold only the task's prompt."""
    messages, tools = asked_prompt(task), asked_tools(task, context.tools)
    prompt_ids = context.renderer.prompt(messages, tools)
    task_group = task.get("group") or ""
    members = [
        Trajectory(task["id"], messages, prompt_ids, task_group=task_group, tools=tools)
        for _ in range(n)
    ]
    return Group(task["id"], members)


def _play_once(tasks: Sequence[TaskRow], groups: list[Group], n: int, play: _Play) -> None:
    """Sample `n` completions of each task into the trajectories of `groups`, and score each
    completion in the background as soon as it ends."""
    processes = play.context.process.team(play.context.score_workers)
    with BackgroundWorker(len(processes)) as background:
        scoring = Scoring(processes, background, compare=play.context.compare)

        def on_completion(index: int, member: int, completion: Completion) -> None:
            """Have completion number `member` of the task at `index` scored."""
            trajectory = groups[index].members[member]
            append_turn(trajectory, completion, play.context.renderer, play.params.stop)
            pulse.advance()
            scoring.add(index, tasks[index], trajectory, size=n)

        began = time.monotonic()
        prompts = [group.members[0].prompt_ids for group in groups]
        play.sampler.generate(prompts, n, play.params, on_completion)
        play.times.sample_s += time.monotonic() - began
        play.times.reward_s += background.wait()


@dataclass
class _Rollout:
    """A rollout of several turns that is being played. `lane` is the number of the env process with
    its state. `replies` is the environment's answer to the last turn; None before the first answer,
    or if the rollout ended with that turn."""

    trajectory: Trajectory
    episode: Episode
    lane: int = 0
    replies: list[ChatMessage] | None = None


def _play_turns(tasks: Sequence[TaskRow], groups: list[Group], play: _Play) -> None:
    """Play all trajectories of `groups`: one turn of each, then the next turn of those still open,
    and so on. Those that have ended are scored in the background."""
    processes = play.context.process.team(play.context.score_workers)
    turn = 0
    with BackgroundWorker(lanes=len(processes)) as background:
        began = time.monotonic()
        open_rollouts = _start_rollouts(tasks, groups, processes, background)
        play.times.reward_s += time.monotonic() - began  # the environment's time
        while open_rollouts:
            _play_turn(open_rollouts, turn, play, background)
            continued_rollouts = [
                rollout for rollout in open_rollouts if _continue_rollout(rollout, play, background)
            ]
            pulse.advance(len(open_rollouts) - len(continued_rollouts))
            open_rollouts = continued_rollouts
            turn += 1
        play.times.reward_s += background.wait()


def _start_rollouts(
    tasks: Sequence[TaskRow],
    groups: Sequence[Group],
    processes: Sequence[EnvProcess],
    background: BackgroundWorker,
) -> list[_Rollout]:
    """Start an episode for every trajectory, with the processes of the environment taking turns. If
    that fails, the trajectory gets the error and is left out."""
    starts = [
        (task, trajectory)
        for task, group in zip(tasks, groups, strict=True)
        for trajectory in group.members
    ]
    rollouts: list[_Rollout | None] = [None] * len(starts)

    def start(index: int, lane: int) -> None:
        """Start the episode at `index` of `starts` in the process number `lane`."""
        task, trajectory = starts[index]
        try:
            rollouts[index] = _Rollout(trajectory, processes[lane].start(task), lane)
        except EpisodeFailed as error:  # the other rollouts go on
            set_error(trajectory, str(error), timed_out=error.timed_out)

    for index in range(len(starts)):
        lane = index % len(processes)
        background.submit_to(lane, start, index, lane)
    background.wait()
    return [rollout for rollout in rollouts if rollout is not None]


def _play_turn(
    open_rollouts: Sequence[_Rollout], turn: int, play: _Play, background: BackgroundWorker
) -> None:
    """Sample the next assistant turn, number `turn` from 0, of every open rollout. The environment
    answers each in the background as soon as it ends. Returns when all are answered."""

    def on_completion(index: int, _member: int, completion: Completion) -> None:
        """Append the turn to the rollout at `index`, and have the environment answer it."""
        rollout = open_rollouts[index]
        append_turn(rollout.trajectory, completion, play.context.renderer, play.params.stop)
        background.submit_to(rollout.lane, _let_environment_answer, rollout, play.context)

    began = time.monotonic()
    prompts = [rollout.trajectory.prompt_ids + rollout.trajectory.ids for rollout in open_rollouts]
    # The seed of the step, times 64, so that turns 0 to 63 of two steps never share a seed.
    turn_params = replace(play.params, seed=play.params.seed * 64 + turn)
    play.sampler.generate(prompts, n=1, params=turn_params, done=on_completion)
    play.times.sample_s += time.monotonic() - began
    play.times.reward_s += background.wait()


def append_turn(
    trajectory: Trajectory, completion: Completion, renderer: Renderer, stop: Sequence[str]
) -> None:
    """Append a completion to the trajectory: its ids, its text as an assistant message, and which
    of its tool calls are invalid. The text ends before the first stop string; the ids stay as
    sampled."""
    text = renderer.completion_text(completion.ids)
    for stop_string in stop:
        text = text.split(stop_string)[0]
    reply = renderer.reply(text, trajectory.tools)
    trajectory.add_completion(completion)
    trajectory.messages.append(reply.message)
    trajectory.completion = reply.message["content"]
    trajectory.invalid_calls += [f"turn {trajectory.turns}: {call}" for call in reply.invalid_calls]
    trajectory.stop_reason = "stop" if completion.finished else "max_tokens"


def _let_environment_answer(rollout: _Rollout, context: RolloutContext) -> None:
    """Send the last turn of a rollout to the environment and keep the reply for the next turn. The
    rollout is scored and closed instead if the environment has no more to say or failed, if the
    turn was cut off by its length, or if it was the last one allowed."""
    trajectory = rollout.trajectory
    rollout.replies = None
    try:
        replies = rollout.episode.step(trajectory.messages[-1])
    except EpisodeFailed as error:
        set_error(trajectory, str(error), timed_out=error.timed_out)
        replies = None
    # No reply can be appended to a turn that was cut off.
    if replies is not None and trajectory.stop_reason != "max_tokens":
        if trajectory.turns < context.max_turns:
            rollout.replies = replies
            return
        trajectory.stop_reason = "max_turns"
    _score_and_close(rollout)


def _continue_rollout(rollout: _Rollout, play: _Play, background: BackgroundWorker) -> bool:
    """Append the environment's reply to the trajectory, so that the next turn can be sampled, and
    return True. Return False if the rollout has ended, or ends now because another completion would
    exceed the length limit."""
    trajectory, replies = rollout.trajectory, rollout.replies
    if replies is None:
        return False
    reply_ids = _reply_ids(trajectory, replies, play.context)
    next_prompt_length = len(trajectory.prompt_ids) + len(trajectory.ids) + len(reply_ids)
    if next_prompt_length + play.params.max_tokens > play.context.max_length:
        trajectory.stop_reason = "max_context"
        # In the lane (thread) of the env process that holds the episode.
        background.submit_to(rollout.lane, _score_and_close, rollout)
        return False
    trajectory.add_environment(reply_ids)
    trajectory.messages += replies
    return True


def _reply_ids(
    trajectory: Trajectory, replies: list[ChatMessage], context: RolloutContext
) -> list[int]:
    """Return the ids that follow the trajectory's last turn: the environment's replies, up to the
    opening of the next turn."""
    earlier_messages = [*trajectory.prompt, *trajectory.messages]
    return context.renderer.between_turns(
        earlier_messages, replies, trajectory.tools, last_id=trajectory.ids[-1]
    )


def _score_and_close(rollout: _Rollout) -> None:
    """Score the rollout's episode, unless the environment already failed in it, and close it."""
    if rollout.trajectory.error is None:
        set_score(rollout.trajectory, rollout.episode.score())
    rollout.episode.close()

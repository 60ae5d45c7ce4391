"""Completions of single-turn tasks to scores, by one or several env processes.

Each process takes what has waited longest, so a slow or hung answer holds up nothing but itself. An
async `score` is given several completions at once, a `score_group` all those of a task. What one
completion earns depends on it and its task alone, so the number of processes changes no score;
`push_env` audits that. A completion whose process was lost is scored once more: whatever ended the
process, it must not cost a completion that did nothing wrong.
"""

import queue
import threading
from collections import deque
from collections.abc import Sequence

from engine.worker.core.background import BackgroundWorker
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.trajectory import Trajectory
from envs.host.process import EnvProcess
from envs.json_types import ScoreReply, TaskRow
from envs.metering.judge_calls import NOTHING, JudgeUse

LEAST_GROUP = 2  # completions that can be compared


class Scoring:
    """The scores of one batch, in the threads of `background`, of which there must be as many as
    `processes`."""

    def __init__(
        self, processes: Sequence[EnvProcess], background: BackgroundWorker, *, compare: bool
    ) -> None:
        """Score with these processes; `compare`: whole groups by the environment's `score_group`,
        where it has one."""
        self._background = background
        self._free: queue.SimpleQueue[EnvProcess] = queue.SimpleQueue()
        for process in processes:
            self._free.put(process)
        self._compare = compare and processes[0].compares_groups
        self._waiting: deque[tuple[TaskRow, Trajectory]] = deque()
        self._ended: dict[int, list[Trajectory]] = {}  # of groups that are not complete yet
        self._lock = threading.Lock()

    def ended(self, index: int, task: TaskRow, trajectory: Trajectory, size: int) -> None:
        """A completion has been sampled: have it scored, or its group once it is complete.

        Args:
            index: which group it belongs to.
            size: of that group.
        """
        if self._compare and size >= LEAST_GROUP:
            self._ended.setdefault(index, []).append(trajectory)
            if len(self._ended[index]) == size:
                self._background.submit(self._score_group, task, self._ended.pop(index))
            return
        self._waiting.append((task, trajectory))
        self._background.submit(self._score_waiting)

    def _score_waiting(self) -> None:
        """Score what waits, as much as a process scores at once; runs in a background thread."""
        process = self._free.get()
        try:
            at_once = process.at_once
            with self._lock:
                taken = [self._waiting.popleft() for _ in range(min(at_once, len(self._waiting)))]
            if not taken:  # another call took it along
                return
            scores = process.score_many([(task, t.completion) for task, t in taken])
            for (task, trajectory), score in zip(taken, scores, strict=True):
                is_lost = score.get("lost")
                set_score(
                    trajectory,
                    process.score(task, trajectory.completion) if is_lost else score,
                )
        finally:
            self._free.put(process)

    def _score_group(self, task: TaskRow, trajectories: Sequence[Trajectory]) -> None:
        """Score the completions of one task together; runs in a background thread."""
        process = self._free.get()
        try:
            completions = [trajectory.completion for trajectory in trajectories]
            scores = process.score_group(task, completions)
            if any(score.get("lost") for score in scores):
                scores = process.score_group(task, completions)
        finally:
            self._free.put(process)
        for trajectory, score in zip(trajectories, scores, strict=True):
            set_score(trajectory, score)


def set_score(trajectory: Trajectory, score: ScoreReply) -> None:
    """Copy the environment's score into the trajectory: reward, success, metrics and the reason, or
    the error if scoring failed."""
    if score["error"]:
        set_error(trajectory, score["error"], timed_out=score.get("timed_out", False))
        return
    trajectory.reward = float(score["reward"])
    trajectory.success = score["success"]
    trajectory.metrics = dict(score["metrics"])
    trajectory.reason = score.get("reason", "")
    trajectory.score_parts = dict(score.get("parts") or {})


def set_error(trajectory: Trajectory, error: str, *, timed_out: bool) -> None:
    """Mark the trajectory as failed: it has no reward and is not trained on. `timed_out`: whether
    the environment took longer than it may."""
    trajectory.error = error
    trajectory.stop_reason = "timeout" if timed_out else "env_error"
    trajectory.reward = 0.0


def judge_use(process: EnvProcess) -> JudgeUse:
    """What judges took so far, in all processes of the environment."""
    return process.judge_budget.used if process.judge_budget else NOTHING


def out_of_judge_budget(process: EnvProcess) -> WorkerFailure:
    """The end of a run whose judges may be asked no more."""
    budget = process.judge_budget
    assert budget is not None  # only a budget refuses
    limit = budget.spent or "what is left of the judge's limit is less than one score needs"
    used = f"{budget.used.calls:g} calls, {budget.used.cost:g} in money"
    return WorkerFailure(
        "budget",
        f"The judge may be asked no more: {limit}.",
        evidence=f"used: {used}; answers it has not seen are not scored, so the run ends here",
        hint="Raise max_judge_calls or max_judge_cost, or have fewer answers judged (hard checks "
        "before the judge, fewer steps, fewer eval_rows), and submit again.",
    )

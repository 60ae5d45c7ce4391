"""Scores the completions of single-turn tasks with one or several env processes.

Each process takes what has waited longest, so a slow or hung answer delays nothing but itself. An
async `score` gets several completions at once, a `score_group` all completions of a task. The score
of a completion must depend only on it and its task, so that the number of processes changes no
score; `push_env` audits that. If a process is lost, its completions are scored once more, because
they need not be what ended it.
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

LEAST_GROUP = 2  # a single completion cannot be compared


class Scoring:
    """Scores the completions of one batch in the threads of `background`, one thread per
    process."""

    def __init__(
        self, processes: Sequence[EnvProcess], background: BackgroundWorker, *, compare: bool
    ) -> None:
        """Score with these processes, which all run the environment's code, in the threads of
        `background`. `compare` says whether the environment's `score_group`, if it has one, scores
        the completions of a task together."""
        self._background = background
        self._idle_processes: queue.SimpleQueue[EnvProcess] = queue.SimpleQueue()
        for process in processes:
            self._idle_processes.put(process)
        self._scores_whole_groups = compare and processes[0].compares_groups
        self._unscored: deque[tuple[TaskRow, Trajectory]] = deque()
        # By the group's index: its completions so far.
        self._incomplete_groups: dict[int, list[Trajectory]] = {}
        self._lock = threading.Lock()

    def add(self, index: int, task: TaskRow, trajectory: Trajectory, size: int) -> None:
        """Queue a completion, which has just been sampled, for scoring. If whole groups are scored,
        this waits until its group (the completions of its task) is complete. Returns at once.

        Args:
            index: the number of its group.
            trajectory: holds the completion, and gets the score.
            size: the number of completions in the group.
        """
        if self._scores_whole_groups and size >= LEAST_GROUP:
            self._incomplete_groups.setdefault(index, []).append(trajectory)
            if len(self._incomplete_groups[index]) == size:
                self._background.submit(self._score_group, task, self._incomplete_groups.pop(index))
            return
        self._unscored.append((task, trajectory))
        self._background.submit(self._score_waiting)

    def _score_waiting(self) -> None:
        """Score as many waiting completions as one process of the environment takes at once, and
        write the scores into their trajectories; runs in a background thread."""
        process = self._idle_processes.get()
        try:
            at_once = process.at_once
            with self._lock:
                batch = [self._unscored.popleft() for _ in range(min(at_once, len(self._unscored)))]
            if not batch:  # another call has taken this completion along
                return
            answers = [(task, trajectory.completion) for task, trajectory in batch]
            scores = process.score_many(answers)
            for (task, trajectory), score in zip(batch, scores, strict=True):
                # The process died while it scored the batch. Another answer may have been the
                # cause, so this one is scored once more, alone.
                if score.get("lost"):
                    score = process.score(task, trajectory.completion)
                set_score(trajectory, score)
        finally:
            self._idle_processes.put(process)

    def _score_group(self, task: TaskRow, trajectories: Sequence[Trajectory]) -> None:
        """Score the completions of one task together, because the environment compares them with
        each other; runs in a background thread."""
        process = self._idle_processes.get()
        try:
            completions = [trajectory.completion for trajectory in trajectories]
            scores = process.score_group(task, completions)
            if any(score.get("lost") for score in scores):  # the process died while it scored
                scores = process.score_group(task, completions)
        finally:
            self._idle_processes.put(process)
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
    """Mark the trajectory as failed, so that it has no reward and is not trained on. `timed_out`
    says whether the environment exceeded its time limit."""
    trajectory.error = error
    trajectory.stop_reason = "timeout" if timed_out else "env_error"
    trajectory.reward = 0.0


def judge_use(process: EnvProcess) -> JudgeUse:
    """Return how much language models as judges were used so far, in all processes of the
    environment."""
    return process.judge_budget.used if process.judge_budget else NOTHING


def out_of_judge_budget(process: EnvProcess) -> WorkerFailure:
    """Return the failure of a run whose judges (language models that score answers) may not be
    asked any more, because a limit of calls or money is reached."""
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

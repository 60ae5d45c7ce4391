"""The client of an env process: user code runs there, under limits, and never here.

A call that raises, hangs, crashes or answers nonsense costs one sample: the caller gets an error
text, and the next call starts a fresh process. Rollouts that were under way in the old process are
replayed there from the messages they had received.
"""

import contextlib
import functools
import itertools
import math
import re
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.base import Message, Task
from envs.config.problem import EnvProblem
from envs.config.settings import Limits, read_settings
from envs.host.loader import MAX_TASKS, check_tools, task_problem
from envs.host.pipe import Fault, Pipe, reach_of
from envs.isolation.packages import packages_of
from envs.isolation.sandbox import Confinement, Sandbox
from envs.json_types import ChatMessage, EnvDescription, Request, ScoreReply, TaskRow

MAX_METRICS = 64  # of one score
METRIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@-]{0,63}")  # no room for a sentence
LOAD_ATTEMPTS = 3  # starts that may fail before the environment counts as broken
SHOWN_CHARS = 80  # of a wrong value, in the message
ERROR_CHARS = 2000  # of the error of a score
KINDS = ("single", "multi", "sft", "command")


class EpisodeFailed(Exception):
    """A rollout cannot go on; the text says why.

    Attributes:
        timed_out: whether a call of the environment took longer than it may.
    """

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class EnvProcess:
    """One environment in a process of its own.

    Args:
        source: the environment's folder.
        python: the interpreter whose packages it may import; this one's by default. It runs on this
            one in any case.
        limits: what it may use; those of its environment.toml by default.
        secrets: names and values that only this process gets to see.
        log: the file its output is appended to, up to 1 MiB; by default output is dropped.
        sandbox: the isolation that must hold; by default whatever works on this machine.

    The process starts with the first call. Calls are serialised: one instance serves one caller at
    a time, several instances run in parallel.
    """

    def __init__(
        self,
        source: Path,
        *,
        python: str | Path | None = None,
        limits: Limits | None = None,
        secrets: Mapping[str, str] | None = None,
        log: Path | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.source = Path(source).absolute()
        self.python = str(python or sys.executable)
        self.secrets = dict(secrets or {})
        self.log = log
        self.generation = 0  # starts so far; an episode of an earlier start has to be replayed
        self._limits = limits  # None until they are read
        self._lock = threading.RLock()
        self._pipe: Pipe | None = None  # None while the process does not run
        self._description: EnvDescription | None = None
        self.sandbox = sandbox or Sandbox()
        self._confinement: Confinement | None = None
        self._problem: EnvProblem | None = None  # raised by every further call
        self._failed_loads = 0  # starts that failed in a row
        self._episode_numbers = itertools.count(1)

    def __enter__(self) -> "EnvProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def limits(self) -> Limits:
        """The limits in force. Raises EnvProblem if environment.toml cannot be read."""
        if self._limits is None:
            self._limits = read_settings(self.source).limits
        return self._limits

    @property
    def confinement(self) -> Confinement:
        """The isolation around user code; starts the process if it does not run.

        Raises EnvProblem if it cannot be started.
        """
        self.describe()  # starts the process, which reports its isolation
        assert self._confinement is not None  # describe raises otherwise
        return self._confinement

    @property
    def isolation(self) -> str:
        """The isolation in words, its level first; starts the process if it does not run.

        Raises EnvProblem if it cannot be started.
        """
        return str(self.confinement)

    @property
    def level(self) -> str:
        """How well user code is isolated: `full`, `no-namespaces` or `limits`.

        A self-test inside the process tells, so this starts the process if it does not run. Raises
        EnvProblem if it cannot be started.
        """
        return self.confinement.level

    @property
    def gaps(self) -> list[str]:
        """What user code can still do in spite of the isolation, as sentences.

        Starts the process if it does not run. Raises EnvProblem if it cannot be started.
        """
        return list(self.confinement.gaps)  # `confinement` starts the process

    @property
    def pid(self) -> int | None:
        """The id of the process that runs user code.

        None while no process runs, and under bubblewrap, which hides the id.
        """
        return self._pipe.child_pid if self._pipe else None

    def describe(self) -> EnvDescription:
        """The environment's kind, whether it is scored, and its tools.

        Starts the process if it does not run. Raises EnvProblem if it cannot be started or the
        environment cannot be loaded.
        """
        with self._lock:
            try:
                self._ensure_started()
            except Fault as fault:
                raise _as_problem(fault) from None
            assert self._description is not None  # _ensure_started raises otherwise
            return self._description.copy()

    def tasks(self, seconds: float | None = None) -> list[TaskRow]:
        """Every task of the environment, as a stored row.

        `seconds` is the time allowed for tasks(); None takes the limit `start_seconds`. Raises
        EnvProblem if that time passes, or tasks() fails or returns a bad task.
        """
        seconds = self.limits.start_seconds if seconds is None else seconds
        with self._lock:
            try:
                rows = self._call("tasks", body={}, seconds=seconds)
            except Fault as fault:
                raise _as_problem(fault) from None
            # "sft": nothing is scored, so a task is of use only with an answer to learn from.
            return _checked_rows(rows, needs_answer=self.describe()["kind"] == "sft")

    def score(self, task: Mapping[str, Any], completion: str) -> ScoreReply:
        """Score one completion; `seconds` in the reply is how long the call took.

        A failure raises nothing: the reply then has reward 0 and the reason as its `error`.
        """
        return self._ask_for_score("score", {"task": task, "completion": completion})

    def score_many(self, pairs: Sequence[tuple[Mapping[str, Any], str]]) -> list[ScoreReply]:
        """The score of each (task, completion) pair, in order; see `score`."""
        return [self.score(task, completion) for task, completion in pairs]

    def perturb(self, task: TaskRow, kind: str, seed: int) -> TaskRow | None:
        """The task as the environment words it otherwise (`Env.perturb`), with its id and split;
        None where the environment leaves that to the rules, as one without `perturb` does.

        Raises EnvProblem if perturb() or the process fails.
        """
        with self._lock:
            try:
                if not self.describe().get("perturbs"):
                    return None
                body = {"task": task, "kind": kind, "seed": seed}
                row = self._call("perturb", body, self.limits.call_seconds)
            except Fault as fault:
                raise _as_problem(fault) from None
        if row is None:
            return None
        worded = _task_of_row(row, 0, "perturb()")
        return {**worded.to_row(), "id": task["id"], "split": task["split"]}

    def start(self, task: Mapping[str, Any]) -> "Episode":
        """Begin an episode of `task` in a multi-turn environment.

        Raises EpisodeFailed if the environment or its process fails.
        """
        return Episode(self, task, next(self._episode_numbers))

    def close(self) -> None:
        """End the process and everything it started; the next call would start a new one."""
        with self._lock:
            self._drop()

    def abandon(self) -> None:
        """End the process at once, even while another thread waits for a call, which then fails.

        `close` must still be called; without it the next call would start a new process.
        """
        pipe = self._pipe  # without the lock, which the waiting thread holds
        if pipe is not None:
            pipe.close_lifeline()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be shutting down
            self.close()

    def _ask_for_score(self, op: str, body: Request) -> ScoreReply:
        """Send a request (`op` is score or finish) and return the score that answers it.

        A failure becomes a failed score. The score's `seconds` is how long the call took, with the
        start of the process if the call had to start it.
        """
        began = time.monotonic()
        try:
            with self._lock:
                value = self._call(op, body, self.limits.call_seconds)
            score = checked_score(value)
        except Fault as fault:
            score = failed_score(str(fault), timed_out=fault.timed_out)
        except EnvProblem as problem:
            score = failed_score(str(problem))
        score["seconds"] = time.monotonic() - began
        return score

    def _call(self, op: str, body: Request, seconds: float) -> Any:
        """Send one request, starting the process if necessary, and return the value of its reply.

        Raises Fault. If the process did not survive the fault, it is closed and the next call
        starts a new one.
        """
        self._ensure_started()
        assert self._pipe is not None  # _ensure_started raises otherwise
        deadline = time.monotonic() + seconds
        try:
            return self._pipe.call(op, body, deadline, seconds)
        except Fault as fault:
            if not fault.alive:
                self._drop()
            raise

    def _ensure_started(self) -> None:
        """Start the process and load the environment, unless the process already runs.

        Raises Fault if that fails. A problem of the environment itself is remembered at once, any
        other failure after LOAD_ATTEMPTS failed starts in a row; later calls then raise it again
        without another attempt.
        """
        if self._pipe is not None:
            return
        if self._problem is not None:
            raise Fault(str(self._problem), problem=self._problem)
        try:
            self._start_process()
        except EnvProblem as problem:
            self._drop()
            self._problem = problem
            raise Fault(str(problem), problem=problem) from None
        except (Fault, OSError) as error:  # OSError: no folder, pipe or process could be made
            fault = error if isinstance(error, Fault) else Fault(f"cannot be started: {error}")
            self._drop()
            self._failed_loads += 1
            # Remembered, as otherwise every further sample would wait for another start that fails.
            if self._failed_loads >= LOAD_ATTEMPTS:
                self._problem = _as_problem(fault)
            raise fault from None

    def _start_process(self) -> None:
        """Start the process and wait until it has loaded the environment.

        Raises EnvProblem, Fault or OSError; the process may then be left half started, and the
        caller has to end it.
        """
        limits = self.limits
        self._pipe = Pipe(
            self.source,
            packages=packages_of(self.python),
            limits=limits,
            secrets=self.secrets,
            log=self.log,
            sandbox=self.sandbox,
            reach=reach_of(self.source),
        )
        self._confinement, description = self._pipe.greet(limits.start_seconds)
        self._description = _checked_description(description)
        self.generation += 1
        self._failed_loads = 0

    def _drop(self) -> None:
        """End the process if there is one. The caller holds the lock."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


class Episode:
    """One rollout of a multi-turn environment. Made by `EnvProcess.start`.

    Args:
        process: the environment's process.
        task: the task as a stored row.
        number: names the episode in that process.
    """

    def __init__(self, process: EnvProcess, task: Mapping[str, Any], number: int) -> None:
        """Begin the episode `number` of the task in the process."""
        self.process = process
        self.task = task
        self.number = number
        self._history: list[tuple[ChatMessage, Any]] = []  # (message sent, reply), to replay
        self._failed: EpisodeFailed | None = None  # why the episode has failed; None: it has not
        self._generation = -1  # the `generation` of the process that has this episode; -1: none yet
        with process._lock:
            self._begin()

    def step(self, message: Mapping[str, Any]) -> list[ChatMessage] | None:
        """Send one assistant message; returns the environment's reply, None if the rollout is over.

        Raises EpisodeFailed if the environment or its process fails; every later step of the
        rollout raises it again.
        """
        message_dict = Message.from_dict(message).to_dict()
        with self.process._lock:
            self._resume()  # the process may have been restarted since the last step
            reply = self._send("step", {"message": message_dict})
            self._history.append((message_dict, reply))
        return reply

    def score(self) -> ScoreReply:
        """Score the episode in its present state.

        A failed episode gets a failed score with the reason and 0 seconds, never an exception.
        """
        if self._failed:
            failed = failed_score(str(self._failed), timed_out=self._failed.timed_out)
            return {**failed, "seconds": 0.0}
        with self.process._lock:
            try:
                self._resume()  # the process may have been restarted since the last step
            except EpisodeFailed as error:
                failed = failed_score(str(error), timed_out=error.timed_out)
                return {**failed, "seconds": 0.0}
            return self.process._ask_for_score("finish", {"episode": self.number})

    def close(self) -> None:
        """Let the process forget the episode's state.

        Nothing is sent if that process has ended: the state is gone with it.
        """
        with self.process._lock:
            if self._state_is_in_process():
                with contextlib.suppress(Fault):  # a process that failed is ended, with the state
                    body = {"episode": self.number}
                    self.process._call("drop", body, self.process.limits.call_seconds)

    def _state_is_in_process(self) -> bool:
        """Whether the running process has the episode's state."""
        return self._generation == self.process.generation and self.process._pipe is not None

    def _begin(self) -> None:
        """Start the episode's task in the present process. Raises EpisodeFailed."""
        self._send("start", {"task": self.task})
        # Read only now, because `_send` may have started a new process.
        self._generation = self.process.generation

    def _resume(self) -> None:
        """Play the episode again from its messages, if the process that had its state has ended.

        Raises EpisodeFailed if the episode failed before, if the new process fails, or if the
        environment's replies differ from those that it gave the first time.
        """
        if self._failed:
            raise self._failed
        if self._state_is_in_process():
            return
        self._begin()
        for message, reply in self._history:
            if self._send("step", {"message": message}) != reply:
                self._failed = EpisodeFailed(
                    "the env process was restarted and the environment did not repeat itself"
                )
                raise self._failed

    def _send(self, op: str, body: Request) -> Any:
        """Send one request (`op` is start or step) about this episode.

        Returns the messages that answer a step; None for a start, or if the step ended the
        rollout. Any failure is kept in `_failed` and raised as EpisodeFailed.
        """
        try:
            seconds = self.process.limits.call_seconds
            value = self.process._call(op, body | {"episode": self.number}, seconds)
        except (Fault, EnvProblem) as fault:
            timed_out = isinstance(fault, Fault) and fault.timed_out
            self._failed = EpisodeFailed(str(fault), timed_out=timed_out)
            raise self._failed from None
        if op == "start" or value is None:
            return None
        try:
            return [Message.from_dict(message).to_dict() for message in value]
        except (TypeError, ValueError) as error:
            self._failed = EpisodeFailed(f"step() answered with no messages: {error}")
            raise self._failed from error


@functools.cache
def isolation_here(sandbox: Sandbox | None = None) -> Confinement:
    """The isolation that user code gets on this machine.

    A template environment is run to learn it; the result is cached as long as this process runs.

    Args:
        sandbox: the isolation that must hold; None takes whatever works here.

    Raises EnvProblem: ENV_SANDBOX if this machine cannot give the required isolation, another code
    if no env process can be started.
    """
    folder = Path(__file__).resolve().parents[1] / "templates" / "single_turn"
    with EnvProcess(folder, sandbox=sandbox) as process:
        return process.confinement


def failed_score(error: str, *, timed_out: bool = False) -> ScoreReply:
    """The score of a sample that could not be scored: reward 0, and the reason as `error`. It
    has the key `timed_out` only if that is true."""
    failed: ScoreReply = {"reward": 0.0, "success": False, "metrics": {}, "error": error}
    if timed_out:
        failed["timed_out"] = True
    return failed


def _checked_description(received: Mapping[str, Any]) -> EnvDescription:
    """Check the description that an env process sent, which user code may have forged.

    Returns its kind, scored and tools. Raises EnvProblem ENV_INVALID if one of them is wrong.
    """
    kind, scored, tools = received.get("kind"), received.get("scored"), received.get("tools")
    if kind not in KINDS:
        message = (
            f"the env process calls itself {str(kind)[:SHOWN_CHARS]!r}, not {', '.join(KINDS)}"
        )
        raise EnvProblem("ENV_INVALID", message)
    must_be_scored = kind != "sft"
    if scored is not must_be_scored:  # `is not`, because 1 equals True and is wrong here
        message = (
            f"the env process says scored: {str(scored)[:SHOWN_CHARS]!r}, and calls itself {kind}"
        )
        raise EnvProblem("ENV_INVALID", message)
    check_tools(tools)
    description: EnvDescription = {
        "kind": kind,
        "scored": bool(scored),
        "tools": list(tools or ()),
    }
    if received.get("perturbs") is True:
        description["perturbs"] = True
    return description


def _checked_rows(rows: list[Any], needs_answer: bool) -> list[TaskRow]:
    """Check task rows that came over the pipe, which user code may have forged.

    Returns them as `Task.to_row` writes them, without unknown keys. `needs_answer`: whether every
    task must have an answer (an SFT dataset). Raises EnvProblem ENV_INVALID naming the first row
    that is no valid task.
    """
    if not 1 <= len(rows) <= MAX_TASKS:
        message = f"tasks() sent {len(rows)} tasks; send 1 to {MAX_TASKS}"
        raise EnvProblem("ENV_INVALID", message)
    checked: list[TaskRow] = []
    index_of_id: dict[str, int] = {}
    for index, row in enumerate(rows):
        task = _task_of_row(row, index)
        problem = task_problem(task, index, index_of_id, needs_answer)
        if problem is not None:
            message, hint = problem
            raise EnvProblem("ENV_INVALID", message, hint)
        index_of_id[task.id] = index
        checked.append(task.to_row())
    return checked


def _task_of_row(row: Any, index: int, source: str = "tasks()") -> Task:
    """A row as a task. Raises EnvProblem ENV_INVALID, which names the row by its `index` in what
    `source` gave, if the row is no task."""
    try:
        return Task.from_row(row)
    # Whatever reading a row of another form may raise.
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise EnvProblem("ENV_INVALID", f"{source}[{index}] is no task: {error}") from error


def checked_score(value: Any) -> ScoreReply:
    """Check a score that came over the pipe, which user code may have forged, and return it.

    A score with an `error` becomes a failed score: its reward is dropped. Raises Fault if the value
    is no valid score; the process is still usable then (`alive`).
    """
    if not isinstance(value, dict):
        raise Fault("score() gave no score", alive=True)
    error = value.get("error")
    if error is not None:
        return failed_score(str(error)[:ERROR_CHARS])
    reward, success = value.get("reward"), value.get("success")
    finite_reward = _as_finite(reward)
    if finite_reward is None:
        raise Fault(f"the reward is {str(reward)[:SHOWN_CHARS]}, not a finite number", alive=True)
    if success is not None and not isinstance(success, bool):
        raise Fault(f"success is {str(success)[:SHOWN_CHARS]}, not true or false", alive=True)
    metrics = _checked_metrics(value.get("metrics"))
    return {"reward": finite_reward, "success": success, "metrics": metrics, "error": None}


def _checked_metrics(metrics: Any) -> dict[str, float]:
    """Check the metrics of a score that came over the pipe and return them as floats.

    Raises Fault if they are not a dict, are too many, or have an invalid name or number; the
    process is still usable then (`alive`).
    """
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise Fault(f"metrics are at most {MAX_METRICS} named numbers", alive=True)
    _check_metric_names(metrics)
    checked: dict[str, float] = {}
    for name, value in metrics.items():
        number = _as_finite(value)
        if number is None:
            raise Fault(f"the metric {name!r} is {value}, not a finite number", alive=True)
        checked[name] = number
    return checked


def _check_metric_names(names: Iterable[str]) -> None:
    """Raise Fault for the first name that is not valid; the process is still usable then."""
    for name in names:
        if not METRIC_NAME.fullmatch(name):
            message = (
                f"{name[:SHOWN_CHARS]!r} is no name of a metric (64 of letters, digits and _.:/@-)"
            )
            raise Fault(message, alive=True)


def _as_finite(value: Any) -> float | None:
    """Return `value` as a float if it is a finite number; None for anything else, also bools."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int beyond what a float can hold
        return None


def _as_problem(fault: Fault) -> EnvProblem:
    """Return the problem that the environment reported, else ENV_IMPORT with the fault's text."""
    return fault.problem or EnvProblem(
        "ENV_IMPORT", str(fault), hint="Run the environment's code by itself to see why."
    )

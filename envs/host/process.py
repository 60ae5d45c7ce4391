"""The client of an env process: user code runs there, under limits, and never here.

A call that raises, hangs, crashes or answers nonsense costs one sample: the caller gets an error
text, and the next call finds a fresh process. Rollouts that were under way in the old one are
replayed from the messages they had seen.
"""

import contextlib
import functools
import itertools
import math
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.base import Message, Task
from envs.config.problem import EnvProblem
from envs.config.settings import Limits, read_settings
from envs.host.loader import MAX_TASKS, check_tools, task_problem
from envs.host.pipe import Fault, Pipe
from envs.isolation.packages import packages_of
from envs.isolation.sandbox import Held, Sandbox
from envs.json_types import ChatMessage, EnvDescription, Request, ScoreReply, TaskRow

MAX_METRICS = 64
METRIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@-]{0,63}")  # no room for a sentence
LOAD_ATTEMPTS = 3
KINDS = ("single", "multi", "sft")


class EpisodeFailed(Exception):
    """A rollout cannot go on; the text says why."""


class EnvProcess:
    """One environment in a process of its own.

    Args:
        source: the environment's folder.
        python: the interpreter whose packages it may import; this one's by default. It runs on
            this one in any case.
        limits: what it may use; those of its environment.toml by default.
        secrets: names and values that only this process gets to see.
        log: where its output goes, up to 1 MiB; nowhere by default.
        sandbox: what has to hold its code; whatever works here by default.

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
        self.generation = 0  # counts starts; an episode compares it with its own
        self._given_limits = limits
        self._lock = threading.RLock()
        self._pipe: Pipe | None = None
        self._facts: EnvDescription | None = None
        self.sandbox = sandbox or Sandbox()
        self._held: Held | None = None
        self._problem: EnvProblem | None = None
        self._failed_loads = 0
        self._episodes = itertools.count(1)

    def __enter__(self) -> "EnvProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def limits(self) -> Limits:
        """The limits in force. Raises EnvProblem when environment.toml cannot be read."""
        if self._given_limits is None:
            self._given_limits = read_settings(self.source).limits
        return self._given_limits

    @property
    def held(self) -> Held:
        """What holds the user's code; starts the process. Raises EnvProblem."""
        self.describe()
        assert self._held is not None  # describe raises otherwise
        return self._held

    @property
    def isolation(self) -> str:
        """What holds the user's code, its level first, in words; starts the process.
        Raises EnvProblem."""
        return str(self.held)

    @property
    def level(self) -> str:
        """`full`, `no-namespaces` or `limits`, as a self-test in the process found it; starts the
        process. Raises EnvProblem."""
        return self.held.level

    @property
    def gaps(self) -> list[str]:
        """What this machine cannot keep user code from, in words; starts the process.
        Raises EnvProblem."""
        return list(self.held.gaps)

    @property
    def pid(self) -> int | None:
        """The process that runs user code; None while there is none, and under bubblewrap."""
        return self._pipe.child if self._pipe else None

    def describe(self) -> EnvDescription:
        """What the environment is; starts the process. Raises EnvProblem."""
        with self._lock:
            try:
                self._ensure()
            except Fault as fault:
                raise _as_problem(fault) from None
            assert self._facts is not None  # _ensure raises otherwise
            return self._facts.copy()

    def tasks(self, seconds: float | None = None) -> list[TaskRow]:
        """Every task as a stored row, within `seconds` (its start_seconds by default).
        Raises EnvProblem."""
        seconds = self.limits.start_seconds if seconds is None else seconds
        with self._lock:
            try:
                rows = self._call("tasks", {}, seconds)
            except Fault as fault:
                raise _as_problem(fault) from None
            return _checked_rows(rows, learnt=self.describe()["kind"] == "sft")

    def score(self, task: Mapping[str, Any], completion: str) -> ScoreReply:
        """Reward, success, metrics, error and seconds of one completion. Never raises for faults
        of the environment: they are the error text, with reward 0."""
        return self._scored("score", {"task": task, "completion": completion})

    def score_many(self, pairs: Sequence[tuple[Mapping[str, Any], str]]) -> list[ScoreReply]:
        """`score` of each pair, in order."""
        return [self.score(task, completion) for task, completion in pairs]

    def start(self, task: Mapping[str, Any]) -> "Episode":
        """Begins a rollout. Raises EpisodeFailed."""
        return Episode(self, task, next(self._episodes))

    def close(self) -> None:
        """Ends the process and everything it started."""
        with self._lock:
            self._drop()

    def abandon(self) -> None:
        """Ends the process at once, though a call may be under way in another thread: that call
        fails. `close` it as well; the next call would start a new one."""
        pipe = self._pipe
        if pipe is not None:
            pipe.cut()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _scored(self, op: str, body: Request) -> ScoreReply:
        began = time.monotonic()
        try:
            with self._lock:
                value = self._call(op, body, self.limits.call_seconds)
            score = _checked(value)
        except Fault as fault:
            score = failed_score(str(fault))
        except EnvProblem as problem:
            score = failed_score(str(problem))
        score["seconds"] = time.monotonic() - began
        return score

    def _call(self, op: str, body: Request, seconds: float) -> Any:
        """One request and its reply. Raises Fault; then the next call starts a new process."""
        self._ensure()
        assert self._pipe is not None  # _ensure raises otherwise
        try:
            return self._pipe.call(op, body, time.monotonic() + seconds, seconds)
        except Fault as fault:
            if not fault.alive:
                self._drop()
            raise

    def _ensure(self) -> None:
        """A process with the environment loaded. Raises Fault."""
        if self._pipe is not None:
            return
        if self._problem is not None:
            raise Fault(str(self._problem), problem=self._problem)
        try:
            limits = self.limits
            self._pipe = Pipe(
                self.source,
                packages_of(self.python),
                limits,
                self.secrets,
                self.log,
                self.sandbox,
            )
            self._held, ready = self._pipe.greet(limits.start_seconds)
            self._facts = _checked_ready(ready)
            self.generation += 1
            self._failed_loads = 0
        except EnvProblem as problem:
            self._drop()
            self._problem = problem
            raise Fault(str(problem), problem=problem) from None
        except (Fault, OSError) as error:
            fault = error if isinstance(error, Fault) else Fault(f"cannot be started: {error}")
            self._drop()
            self._failed_loads += 1
            if self._failed_loads >= LOAD_ATTEMPTS:  # do not wait for it once per sample
                self._problem = _as_problem(fault)
            raise fault from None

    def _drop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None


class Episode:
    """One rollout of a multi-turn environment. Made by `EnvProcess.start`."""

    def __init__(self, process: EnvProcess, task: Mapping[str, Any], number: int) -> None:
        self.process = process
        self.task = task
        self.number = number
        self._history: list[tuple[ChatMessage, Any]] = []  # each message and its reply
        self._failed = ""
        self._generation = -1
        with process._lock:
            self._begin()

    def step(self, message: Mapping[str, Any]) -> list[ChatMessage] | None:
        """The environment's reply to one assistant message, None at the end.

        Raises EpisodeFailed; a failed rollout stays failed.
        """
        sent = Message.from_dict(message).to_dict()
        with self.process._lock:
            self._resume()
            reply = self._send("step", {"message": sent})
            self._history.append((sent, reply))
        return reply

    def score(self) -> ScoreReply:
        """Like `EnvProcess.score`, for what the rollout has led to."""
        if self._failed:
            return {**failed_score(self._failed), "seconds": 0.0}
        with self.process._lock:
            try:
                self._resume()
            except EpisodeFailed as error:
                return {**failed_score(str(error)), "seconds": 0.0}
            return self.process._scored("finish", {"episode": self.number})

    def close(self) -> None:
        """Forgets the rollout's state."""
        with self.process._lock:
            if self._generation == self.process.generation and self.process._pipe is not None:
                with contextlib.suppress(Fault):
                    body = {"episode": self.number}
                    self.process._call("drop", body, self.process.limits.call_seconds)

    def _begin(self) -> None:
        self._send("start", {"task": self.task})
        self._generation = self.process.generation

    def _resume(self) -> None:
        """Replays the rollout in the new process where the old one has ended."""
        if self._failed:
            raise EpisodeFailed(self._failed)
        if self._generation == self.process.generation and self.process._pipe is not None:
            return
        self._begin()
        for sent, reply in self._history:
            if self._send("step", {"message": sent}) != reply:
                self._failed = (
                    "the env process was restarted and the environment did not repeat itself"
                )
                raise EpisodeFailed(self._failed)

    def _send(self, op: str, body: Request) -> Any:
        try:
            seconds = self.process.limits.call_seconds
            value = self.process._call(op, body | {"episode": self.number}, seconds)
        except (Fault, EnvProblem) as fault:
            self._failed = str(fault)
            raise EpisodeFailed(self._failed) from None
        if op == "start" or value is None:
            return None
        try:
            return [Message.from_dict(message).to_dict() for message in value]
        except (TypeError, ValueError) as error:
            self._failed = f"step() answered with no messages: {error}"
            raise EpisodeFailed(self._failed) from error


@functools.cache
def isolation_here(sandbox: Sandbox | None = None) -> Held:
    """What would hold user code on this machine: found once, by running an environment of ours.

    Raises EnvProblem when no env process can be started, ENV_SANDBOX when it may not.
    """
    folder = Path(__file__).resolve().parents[1] / "templates" / "single_turn"
    with EnvProcess(folder, sandbox=sandbox) as process:
        return process.held


def failed_score(error: str) -> ScoreReply:
    """The score of a sample that could not be scored."""
    return {"reward": 0.0, "success": False, "metrics": {}, "error": error}


def _checked_ready(ready: Mapping[str, Any]) -> EnvDescription:
    """The description that an env process sent; user code may have forged it.
    Raises EnvProblem."""
    kind, scored, tools = ready.get("kind"), ready.get("scored"), ready.get("tools")
    if kind not in KINDS:
        message = f"the env process calls itself {str(kind)[:80]!r}, not {', '.join(KINDS)}"
        raise EnvProblem("ENV_INVALID", message)
    if scored is not (kind != "sft"):
        message = f"the env process says scored: {str(scored)[:80]!r}, and calls itself {kind}"
        raise EnvProblem("ENV_INVALID", message)
    check_tools(tools)
    return {"kind": kind, "scored": bool(scored), "tools": list(tools or ())}


def _checked_rows(rows: list[Any], learnt: bool) -> list[TaskRow]:
    """Rows that crossed the pipe, as tasks write them; raises EnvProblem if one is no task."""
    if not 1 <= len(rows) <= MAX_TASKS:
        message = f"tasks() sent {len(rows)} tasks; send 1 to {MAX_TASKS}"
        raise EnvProblem("ENV_INVALID", message)
    checked: list[TaskRow] = []
    seen: dict[str, int] = {}
    for index, row in enumerate(rows):
        try:
            task = Task.from_row(row)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise EnvProblem("ENV_INVALID", f"tasks()[{index}] is no task: {error}") from error
        problem = task_problem(task, index, seen, learnt)
        if problem:
            raise EnvProblem("ENV_INVALID", *problem)
        seen[task.id] = index
        checked.append(task.to_row())
    return checked


def _checked(value: Any) -> ScoreReply:
    """A score that crossed the pipe; raises Fault (the process lives on) if it is none."""
    if not isinstance(value, dict):
        raise Fault("score() gave no score", alive=True)
    error = value.get("error")
    if error is not None:
        return failed_score(str(error)[:2000])
    reward, success, metrics = value.get("reward"), value.get("success"), value.get("metrics")
    number = _finite(reward)
    if number is None:
        raise Fault(f"the reward is {str(reward)[:80]}, not a finite number", alive=True)
    if success is not None and not isinstance(success, bool):
        raise Fault(f"success is {str(success)[:80]}, not true or false", alive=True)
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise Fault(f"metrics are at most {MAX_METRICS} named numbers", alive=True)
    for name in metrics:
        if not METRIC_NAME.fullmatch(name):
            message = f"{name[:80]!r} is no name of a metric (64 of letters, digits and _.:/@-)"
            raise Fault(message, alive=True)
    numbers: dict[str, float] = {}
    for name, given in metrics.items():
        value = _finite(given)
        if value is None:
            raise Fault(f"the metric {name!r} is {given}, not a finite number", alive=True)
        numbers[name] = value
    return {"reward": number, "success": success, "metrics": numbers, "error": None}


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _as_problem(fault: Fault) -> EnvProblem:
    return fault.problem or EnvProblem(
        "ENV_IMPORT", str(fault), hint="Run the environment's code by itself to see why."
    )

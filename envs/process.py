"""The client of an env process: user code runs there, under limits, and never here.

A call that raises, hangs, crashes or answers nonsense costs one sample: the caller gets an error
text, and the next call finds a fresh process. Rollouts that were under way in the old one are
replayed from the messages they had seen.
"""

import contextlib
import itertools
import json
import math
import os
import secrets as tokens
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from envs.base import Message, Task
from envs.problem import EnvProblem
from envs.redact import Redactor
from envs.settings import Limits, read_settings

REPLY_BYTES = 1 << 20  # of one score or one env message
ROW_BYTES = 16 << 20  # of one task
TASKS_BYTES = 256 << 20  # of all tasks together
LOG_BYTES = 1 << 20
CLOSE_SECONDS = 8.0  # the warden gives descendants five
MAX_METRICS = 64
LOAD_ATTEMPTS = 3
WARDEN = Path(__file__).resolve().parent / "warden.py"


class EpisodeFailed(Exception):
    """A rollout cannot go on; the text says why."""


class _Fault(Exception):
    """One call failed; the process behind it is gone unless `alive`."""

    def __init__(self, text: str, alive: bool = False, problem: EnvProblem | None = None) -> None:
        super().__init__(text)
        self.alive = alive
        self.problem = problem


class EnvProcess:
    """One environment in a process of its own.

    Args:
        source: the environment's folder.
        python: the interpreter to run it with; this one by default.
        limits: what it may use; those of its environment.toml by default.
        secrets: names and values that only this process gets to see.
        log: where its output goes, up to 1 MiB; nowhere by default.

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
    ) -> None:
        self.source = Path(source).absolute()
        self.python = str(python or sys.executable)
        self.secrets = dict(secrets or {})
        self.log = log
        self.generation = 0  # counts starts; an episode compares it with its own
        self._given_limits = limits
        self._redactor = Redactor(self.secrets)
        self._lock = threading.RLock()
        self._pipe: _Pipe | None = None
        self._facts: dict[str, Any] = {}
        self._isolation = ""
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
    def isolation(self) -> str:
        """What holds the user's code, in words; starts the process. Raises EnvProblem."""
        self.describe()
        return self._isolation

    @property
    def pid(self) -> int | None:
        """The process that runs user code, None while there is none."""
        return self._pipe.child if self._pipe else None

    def describe(self) -> dict[str, Any]:
        """`kind` (single, multi or sft), `scored`, `tools`. Raises EnvProblem."""
        with self._lock:
            try:
                self._ensure()
            except _Fault as fault:
                raise _as_problem(fault) from None
            return dict(self._facts)

    def tasks(self) -> list[dict[str, Any]]:
        """Every task as a stored row. Raises EnvProblem."""
        with self._lock:
            try:
                rows = self._call("tasks", {}, self.limits.start_seconds)
            except _Fault as fault:
                raise _as_problem(fault) from None
        for index, row in enumerate(rows):
            try:
                Task.from_row(row)
            except (KeyError, TypeError, ValueError) as error:
                raise EnvProblem("ENV_INVALID", f"tasks()[{index}] is no task: {error}") from error
        return rows

    def score(self, task: Mapping[str, Any], completion: str) -> dict[str, Any]:
        """Reward, success, metrics, error and seconds of one completion. Never raises for faults
        of the environment: they are the error text, with reward 0."""
        return self._scored("score", {"task": task, "completion": completion})

    def score_many(self, pairs: Sequence[tuple[Mapping[str, Any], str]]) -> list[dict[str, Any]]:
        """`score` of each pair, in order."""
        return [self.score(task, completion) for task, completion in pairs]

    def start(self, task: Mapping[str, Any]) -> "Episode":
        """Begins a rollout. Raises EpisodeFailed."""
        return Episode(self, task, next(self._episodes))

    def close(self) -> None:
        """Ends the process and everything it started."""
        with self._lock:
            self._drop()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _scored(self, op: str, body: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        try:
            with self._lock:
                value = self._call(op, body, self.limits.call_seconds)
            score = _checked(value)
        except _Fault as fault:
            score = failed_score(str(fault))
        except EnvProblem as problem:
            score = failed_score(str(problem))
        score["seconds"] = time.monotonic() - began
        return score

    def _call(self, op: str, body: dict[str, Any], seconds: float) -> Any:
        """One request and its reply. Raises _Fault; then the next call starts a new process."""
        self._ensure()
        assert self._pipe is not None  # _ensure raises otherwise
        try:
            return self._pipe.call(op, body, time.monotonic() + seconds, seconds)
        except _Fault as fault:
            if not fault.alive:
                self._drop()
            raise

    def _ensure(self) -> None:
        """A process with the environment loaded. Raises _Fault."""
        if self._pipe is not None:
            return
        if self._problem is not None:
            raise _Fault(str(self._problem), problem=self._problem)
        try:
            limits = self.limits
            self._pipe = _Pipe(self, limits)
            hello, self._facts = self._pipe.greet(limits.start_seconds)
            self._isolation = hello
            self.generation += 1
            self._failed_loads = 0
        except EnvProblem as problem:
            self._drop()
            self._problem = problem
            raise _Fault(str(problem), problem=problem) from None
        except _Fault as fault:
            self._drop()
            self._failed_loads += 1
            if self._failed_loads >= LOAD_ATTEMPTS:  # do not wait for it once per sample
                self._problem = _as_problem(fault)
            raise

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
        self._history: list[tuple[dict[str, Any], Any]] = []  # each message and its reply
        self._failed = ""
        self._generation = -1
        with process._lock:
            self._begin()

    def step(self, message: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """The environment's reply to one assistant message, None at the end.

        Raises EpisodeFailed; a failed rollout stays failed.
        """
        said = Message.from_dict(message).to_dict()
        with self.process._lock:
            self._resume()
            reply = self._send("step", {"message": said})
            self._history.append((said, reply))
        return reply

    def score(self) -> dict[str, Any]:
        """Like `EnvProcess.score`, for what the rollout has led to."""
        if self._failed:
            return failed_score(self._failed) | {"seconds": 0.0}
        with self.process._lock:
            try:
                self._resume()
            except EpisodeFailed as error:
                return failed_score(str(error)) | {"seconds": 0.0}
            return self.process._scored("finish", {"episode": self.number})

    def close(self) -> None:
        """Forgets the rollout's state."""
        with self.process._lock:
            if self._generation == self.process.generation and self.process._pipe is not None:
                with contextlib.suppress(_Fault):
                    body = {"episode": self.number}
                    self.process._call("drop", body, self.process.limits.call_seconds)

    def _begin(self) -> None:
        self._send("start", {"task": self.task})
        self._generation = self.process.generation

    def _resume(self) -> None:
        """Replays the rollout when another one has cost us the process it lived in."""
        if self._failed:
            raise EpisodeFailed(self._failed)
        if self._generation == self.process.generation and self.process._pipe is not None:
            return
        self._begin()
        for said, before in self._history:
            if self._send("step", {"message": said}) != before:
                self._failed = (
                    "the env process was restarted and the environment did not repeat itself"
                )
                raise EpisodeFailed(self._failed)

    def _send(self, op: str, body: dict[str, Any]) -> Any:
        try:
            seconds = self.process.limits.call_seconds
            value = self.process._call(op, body | {"episode": self.number}, seconds)
        except (_Fault, EnvProblem) as fault:
            self._failed = str(fault)
            raise EpisodeFailed(self._failed) from None
        if op == "start" or value is None:
            return None
        try:
            return [Message.from_dict(message).to_dict() for message in value]
        except (TypeError, ValueError) as error:
            self._failed = f"step() answered with no messages: {error}"
            raise EpisodeFailed(self._failed) from error


class _Pipe:
    """A running warden and the descriptors to its child."""

    def __init__(self, owner: EnvProcess, limits: Limits) -> None:
        self.redactor = owner._redactor
        self.child: int | None = None
        self.buffer = bytearray()
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        life, self.life = os.pipe()
        self.box = tempfile.mkdtemp(prefix="honesmith-env-")
        config = {
            "source": str(owner.source),
            "requests": requests,
            "replies": replies,
            "limits": asdict(limits),
            "secrets": list(owner.secrets),
            "log": str(owner.log.absolute()) if owner.log else "",
            "log_cap": LOG_BYTES,
            "box": self.box,
        }
        try:
            self.warden = subprocess.Popen(
                [owner.python, "-P", "-s", "-B", "-u", str(WARDEN), json.dumps(config)],
                stdin=life,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env=_clean_environment(owner.python) | owner.secrets,
                pass_fds=(requests, replies),
                start_new_session=True,
            )
        except OSError as error:
            for fd in (self.requests, self.replies, self.life):
                os.close(fd)
            shutil.rmtree(self.box, ignore_errors=True)
            raise EnvProblem(
                "ENV_IMPORT", f"the interpreter {owner.python} does not start: {error}"
            ) from error
        finally:
            for fd in (requests, replies, life):
                os.close(fd)
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)

    def greet(self, seconds: float) -> tuple[str, dict[str, Any]]:
        """Isolation and description once the environment is loaded. Raises EnvProblem, _Fault."""
        deadline = time.monotonic() + seconds
        isolation = ""
        while True:
            message = self._read(deadline, ROW_BYTES, "importing the environment", seconds)
            if isinstance(message.get("hello"), dict) and self.child is None:
                isolation = str(message["hello"].get("isolation"))
                self.child = message["hello"].get("pid")
            elif isinstance(message.get("problem"), dict):
                raise EnvProblem.from_dict(message["problem"])
            elif isinstance(message.get("ready"), dict):
                return isolation, message["ready"]
            else:
                raise _Fault("the env process spoke out of turn")

    def call(self, op: str, body: dict[str, Any], deadline: float, seconds: float) -> Any:
        """The reply's value; for `tasks` the rows sent before it. Raises _Fault."""
        # Not to be guessed, so that user code cannot prepare a reply of its own.
        ident = tokens.randbits(53)
        doing = "tasks()" if op == "tasks" else "score()" if op == "finish" else f"{op}()"
        request = {"id": ident, "op": op} | body
        self._write((json.dumps(request) + "\n").encode(), deadline, doing, seconds)
        rows: list[Any] = []
        total = 0
        cap = ROW_BYTES if op == "tasks" else REPLY_BYTES
        while True:
            before = len(self.buffer)
            reply = self._read(deadline, cap, doing, seconds)
            if reply.get("id") != ident:
                raise _Fault(f"{doing} answered out of turn")
            if "row" in reply:
                total += max(0, before - len(self.buffer))
                if op != "tasks" or total > TASKS_BYTES:
                    raise _Fault(f"{doing} sent more than {TASKS_BYTES >> 20} MB")
                rows.append(reply["row"])
            elif reply.get("ok") is True:
                return rows if op == "tasks" else reply.get("value")
            else:
                raw = reply.get("problem")
                problem = EnvProblem.from_dict(raw) if isinstance(raw, dict) else None
                raise _Fault(str(reply.get("error"))[:2000], alive=True, problem=problem)

    def close(self) -> None:
        """Closes the lifeline; the warden kills what is left and goes. Harsher if it does not."""
        for fd in (self.life, self.requests, self.replies):
            os.close(fd)
        try:
            self.warden.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.warden.pid, signal.SIGKILL)
            self.warden.wait()
        if self.warden.stderr:
            self.warden.stderr.close()
        # The warden empties it, but cannot always take away what it has mounted.
        shutil.rmtree(self.box, ignore_errors=True)

    def _write(self, data: bytes, deadline: float, doing: str, seconds: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.requests, view) :]
            except BlockingIOError:
                self._wait(self.requests, select.POLLOUT, deadline, doing, seconds)
            except BrokenPipeError:
                return  # the reply, or its absence, tells why

    def _read(self, deadline: float, cap: int, doing: str, seconds: float) -> dict[str, Any]:
        """The next message. Raises _Fault."""
        scanned = 0
        while True:
            end = self.buffer.find(b"\n", scanned)
            if end >= 0:
                line = bytes(self.buffer[:end])
                del self.buffer[: end + 1]
                scanned = 0
                if not line.strip():
                    continue
                message = self._parse(line, doing)
                if isinstance(message.get("exit"), dict):
                    raise _Fault(_last_words(message["exit"], doing))
                return message
            scanned = len(self.buffer)
            if scanned > cap:
                raise _Fault(f"{doing} answered with more than {cap >> 20} MB")
            self._wait(self.replies, select.POLLIN, deadline, doing, seconds)
            data = os.read(self.replies, 1 << 18)
            if not data:
                raise _Fault(self._no_words(doing))
            self.buffer += data

    def _parse(self, line: bytes, doing: str) -> dict[str, Any]:
        try:
            message = self.redactor.clean_json(json.loads(line))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise _Fault(f"{doing} answered with something that is no JSON object")
        return message

    def _wait(self, fd: int, event: int, deadline: float, doing: str, seconds: float) -> None:
        poller = select.poll()
        poller.register(fd, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(math.ceil(left * 1000)):
            raise _Fault(f"{doing} did not answer within {seconds:g} s")

    def _no_words(self, doing: str) -> str:
        """Why the warden itself is gone; a broken interpreter says so on its standard error."""
        said = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.warden.wait(1.0)
            if self.warden.stderr:
                said = self.warden.stderr.read(4000).decode("utf-8", "replace").strip()
        last = said.splitlines()[-1] if said else f"exit status {self.warden.returncode}"
        return f"the env process was lost during {doing} ({last[:300]})"


def failed_score(error: str) -> dict[str, Any]:
    """The score of a sample that could not be scored."""
    return {"reward": 0.0, "success": False, "metrics": {}, "error": error}


def _checked(value: Any) -> dict[str, Any]:
    """A score that crossed the pipe; raises _Fault (the process lives on) if it is none."""
    if not isinstance(value, dict):
        raise _Fault("score() gave no score", alive=True)
    error = value.get("error")
    if error is not None:
        return failed_score(str(error)[:2000])
    reward, success, metrics = value.get("reward"), value.get("success"), value.get("metrics")
    number = _finite(reward)
    if number is None:
        raise _Fault(f"the reward is {str(reward)[:80]}, not a finite number", alive=True)
    if success is not None and not isinstance(success, bool):
        raise _Fault(f"success is {str(success)[:80]}, not true or false", alive=True)
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise _Fault(f"metrics are at most {MAX_METRICS} named numbers", alive=True)
    numbers = {name: _finite(value) for name, value in metrics.items()}
    for name, value in numbers.items():
        if value is None:
            raise _Fault(f"the metric {name!r} is {metrics[name]}, not a finite number", alive=True)
    return {"reward": number, "success": success, "metrics": numbers, "error": None}


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _last_words(ended: dict[str, Any], doing: str) -> str:
    number, code = ended.get("signal"), ended.get("code")
    tail = str(ended.get("tail") or "").strip()
    if isinstance(number, int) and number > 0:
        with contextlib.suppress(ValueError):
            number = f"{number} ({signal.Signals(number).name})"
        how = f"was killed by signal {number}"
    else:
        how = f"left with exit status {code}"
    said = f"; its last output: {tail[-300:]}" if tail else ""
    return f"the env process {how} during {doing}{said}"


def _as_problem(fault: _Fault) -> EnvProblem:
    return fault.problem or EnvProblem(
        "ENV_IMPORT", str(fault), hint="Run the environment's code by itself to see why."
    )


def _clean_environment(python: str) -> dict[str, str]:
    """The variables user code gets: none of ours but what an interpreter needs to start."""
    variables = {
        "PATH": os.pathsep.join([str(Path(python).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # sets iterate in one order, so tasks() can repeat itself
        "PYTHONFAULTHANDLER": "1",
        # One thread per process: thread pools would eat the memory limit and the trainer's cores.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }
    for name in ("LD_LIBRARY_PATH", "SSL_CERT_FILE", "TZ"):
        if name in os.environ:
            variables[name] = os.environ[name]
    return variables

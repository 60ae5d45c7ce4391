"""The pipe to one env process: starts the process, exchanges messages under deadlines, ends it."""

import contextlib
import fcntl
import functools
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
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.config.problem import EnvProblem
from envs.config.settings import Limits, read_settings
from envs.host.launch import Launch, Program
from envs.host.redact import SecretFilter
from envs.isolation.packages import InstallOrder, Packages
from envs.isolation.sandbox import Confinement, Reach, Sandbox
from envs.json_types import Reply, Request
from envs.metering.judge_calls import JudgeUse
from envs.metering.relay import Relay

# The most bytes of one score or one env message, of one task, of all tasks, of the log file.
REPLY_BYTES = 1 << 20
ROW_BYTES = 16 << 20
TASKS_BYTES = 256 << 20
LOG_BYTES = 1 << 20
RELAY_SECONDS = 30.0  # to prepare the sandbox up to its listening socket, on a busy machine
CLOSE_SECONDS = 8.0  # to wait for the parent, which takes up to five to kill its descendants
BOX = "honesmith-env-"  # the names of private folders begin with this
STALE_SECONDS = 60.0  # a younger private folder may belong to a process that has yet to lock it
ERROR_CHARS = 2000  # how much is kept of an error that the environment reports
# How much a message shows of the last output, and of why the env process was lost.
TAIL_CHARS = 300
CAUSE_CHARS = 300
PARENT = Path(__file__).resolve().parent / "sandbox_parent.py"


class Fault(Exception):
    """A call of the env process failed; the text says how.

    Attributes:
        alive: whether the process is still usable. If not, it has to be closed.
        problem: the problem that the environment itself reported, if that is the cause.
        timed_out: whether the call took too long.
    """

    def __init__(
        self,
        text: str,
        alive: bool = False,
        problem: EnvProblem | None = None,
        timed_out: bool = False,
    ) -> None:
        """Make the error with `text`.

        Args:
            text: how the call failed.
            alive: whether the env process is still usable.
            problem: the problem that the environment itself reported, if that is the cause.
            timed_out: whether the call took too long.
        """
        super().__init__(text)
        self.alive = alive
        self.problem = problem
        self.timed_out = timed_out


@dataclass(frozen=True)
class _TimeLimit:
    """The time limit for one action of the env process.

    Attributes:
        call_name: the action, for messages, e.g. "score()".
        deadline: when to give up, on the monotonic clock.
        seconds: the time allowed, for messages.
    """

    call_name: str
    deadline: float
    seconds: float


class Pipe:
    """A running parent of user code (sandbox_parent.py) and the pipes to its child.

    Args:
        source: the environment's folder.
        packages: where the environment's packages are.
        limits: the resources user code may use.
        secrets: name of an environment variable -> value, for user code alone.
        log: the file that output is appended to; None drops the output.
        sandbox: the isolation that must hold.
        order: packages to install, or a program to run; otherwise the environment is served,
            which may ask models by name if it has a relay.
        reach: what the child may reach besides its own files; None for nothing more.
    """

    def __init__(
        self,
        source: Path,
        packages: Packages,
        limits: Limits,
        secrets: Mapping[str, str],
        log: Path | None,
        sandbox: Sandbox,
        order: InstallOrder | Program | Relay | None = None,
        reach: Reach | None = None,
    ) -> None:
        """Start the parent process, with a new private folder, a pipe for requests, one for replies
        and the lifeline.

        Raises EnvProblem ENV_IMPORT if the interpreter does not start.
        """
        _remove_stale_folders(tempfile.gettempdir())
        self.private_folder = tempfile.mkdtemp(prefix=BOX)
        self.secrets = SecretFilter(secrets.items())
        self.child_pid: int | None = None  # pid of user code, once the env process has sent it
        self.judge_use = JudgeUse()  # the judge calls of all requests so far
        self.relay = order if isinstance(order, Relay) else None
        self.buffer = bytearray()  # bytes that were received but not parsed yet
        self.received = 0  # how many bytes of replies were received since the start
        # One end of each pipe stays in this process, the other goes to the env process.
        child_requests, self.requests = os.pipe()
        self.replies, child_replies = os.pipe()
        # Nothing is ever written to the lifeline: when our end closes, the parent kills everything.
        child_lifeline, self.lifeline = os.pipe()
        launch = Launch(
            source=str(source),
            box=self.private_folder,
            requests=child_requests,
            replies=child_replies,
            limits=limits,
            packages=packages,
            sandbox=sandbox,
            reach=reach or Reach(),
            log=str(log.absolute()) if log else "",
            log_cap=LOG_BYTES,
            secrets=tuple(secrets),  # the names alone; `variables` holds the values
            install=order if isinstance(order, InstallOrder) else None,
            program=order if isinstance(order, Program) else None,
            relay=self.relay.parent_end.detach() if self.relay else -1,
        )
        variables = _variables(packages, secrets, launch.install)
        variables |= self.relay.variables if self.relay else {}
        self.parent = self._start(launch, child_lifeline, variables)
        if self.relay:
            self.relay.serve(RELAY_SECONDS)
        # Reads and writes must not block: `_wait_until_ready` does the waiting, with a deadline.
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)

    def _start(
        self, launch: Launch, child_lifeline: int, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start the parent process, which runs user code in a child; close our copies of the pipe
        ends that it inherits (those in `launch`, and `child_lifeline`).

        Raises EnvProblem ENV_IMPORT if the interpreter does not start; then the ends that stay in
        this process are closed too.
        """
        try:
            return _start_parent(launch, child_lifeline, variables)
        except OSError as error:
            self._close_without_parent()
            message = f"the interpreter {sys.executable} does not start: {error}"
            raise EnvProblem("ENV_IMPORT", message) from error
        finally:
            for fd in (launch.requests, launch.replies, child_lifeline, *launch.gateways):
                os.close(fd)

    def _close_without_parent(self) -> None:
        """Close our ends of the pipes and remove the private folder, after the parent failed to
        start."""
        for fd in (self.requests, self.replies, self.lifeline):
            os.close(fd)
        shutil.rmtree(self.private_folder, ignore_errors=True)
        if self.relay:
            self.relay.close()

    def greet(self, seconds: float) -> tuple[Confinement, Mapping[str, Any]]:
        """Wait at most `seconds` until the environment is loaded.

        The env process sends two messages: "hello" (how it is isolated, and its pid, which is kept
        as `child_pid`), then "ready" (the environment's description) or "problem".

        Returns:
            The isolation around user code, and the environment's description. User code may have
            forged the description; the caller must check it.

        Raises:
            EnvProblem: the env process reported what is wrong with the environment.
            Fault: the env process ended, took too long or sent an unexpected message.
        """
        limit = _TimeLimit("importing the environment", time.monotonic() + seconds, seconds)
        confinement: Confinement | None = None
        while True:
            message = self._read_message(ROW_BYTES, limit)
            if isinstance(message.get("hello"), dict) and confinement is None:
                confinement = _confinement_in(message["hello"])
                self.child_pid = message["hello"].get("pid")
            elif isinstance(message.get("problem"), dict):
                raise EnvProblem.from_dict(message["problem"])
            elif isinstance(message.get("ready"), dict) and confinement is not None:
                return confinement, message["ready"]
            else:
                raise Fault("the env process spoke out of turn")

    def call(
        self,
        op: str,
        body: Request,
        deadline: float,
        seconds: float,
        rows: list[Any] | None = None,
    ) -> Any:
        """Send one request and return the value of its reply.

        Args:
            op: score, scores, score_group, start, step, finish, drop, perturb or tasks.
            body: the fields of the request other than `id` and `op`.
            deadline: when to give up, on the monotonic clock.
            seconds: the time until the deadline, for error messages.
            rows: a list to which the rows are appended that come before the reply, as `tasks` and
                `scores` send them; None if no rows may come.

        Raises:
            Fault: the call failed. `alive` is True if the environment itself reported an error;
                otherwise the process must be closed.
        """
        # A random id: user code cannot guess it and so cannot write a reply in advance.
        request_id = tokens.randbits(53)
        # Messages name the author's function: the operations finish and scores call score().
        author_function = "score" if op in ("finish", "scores") else op
        call_name = f"{author_function}()"
        limit = _TimeLimit(call_name, deadline, seconds)
        request = {"id": request_id, "op": op} | body
        with self._counting_relay_calls(body):
            self._send_bytes((json.dumps(request) + "\n").encode(), limit)
            if rows is not None:
                return self._read_rows(request_id, limit, rows)
            reply = self._read_reply(request_id, REPLY_BYTES, limit)
        if "row" in reply:  # this operation sends no rows, so even one is too many
            raise _too_large(call_name)
        if reply.get("ok") is not True:
            raise _reported_fault(reply)
        return reply.get("value")

    @contextlib.contextmanager
    def _counting_relay_calls(self, body: Request) -> Iterator[None]:
        """A context for one call: the relay, if there is one, allows what the request says is left,
        and what was asked through it is counted, even if the call fails."""
        if self.relay is None:
            yield
            return
        judge_allowance = body.get("judge_left") or {}  # {} sets no limit
        self.relay.meter.allow(judge_allowance.get("calls"), judge_allowance.get("cost"))
        try:
            yield
        finally:
            self.judge_use += self.relay.meter.take()

    def _read_rows(self, request_id: int, limit: _TimeLimit, rows: list[Any]) -> Any:
        """Append the rows that come before the reply, one per message, to `rows`; return the
        reply's value.

        Raises Fault if they take more than TASKS_BYTES, or if the reply reports an error.
        """
        received_before = self.received
        reply = self._read_reply(request_id, ROW_BYTES, limit)
        while "row" in reply:
            if self.received - received_before > TASKS_BYTES:
                raise _too_large(limit.call_name)
            rows.append(reply["row"])
            reply = self._read_reply(request_id, ROW_BYTES, limit)
        if reply.get("ok") is not True:
            raise _reported_fault(reply)
        return reply.get("value")

    def _read_reply(self, request_id: int, max_bytes: int, limit: _TimeLimit) -> Reply:
        """Return the next message, of at most `max_bytes`, and count the judge calls that it tells.
        Raises Fault unless it answers the request `request_id`."""
        reply = self._read_message(max_bytes, limit)
        if reply.get("id") != request_id:
            raise Fault(f"{limit.call_name} answered out of turn")
        self.judge_use += JudgeUse.from_json(reply.get("judge"))
        return reply

    def close_lifeline(self) -> None:
        """Close only the lifeline, from any thread: the parent then kills its child and exits.

        A call that is under way in another thread fails. `close` must still be called.
        """
        # Set to -1 before it is closed, so that a second call, in any thread, does nothing.
        lifeline, self.lifeline = self.lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)

    def close(self) -> None:
        """End the parent process and everything it started; remove the private folder.

        When the lifeline closes, the parent kills the sandboxed processes and exits. If it has not
        exited after CLOSE_SECONDS (8), its process group is killed.
        """
        self.close_lifeline()
        for fd in (self.requests, self.replies):
            os.close(fd)
        if self.relay:
            self.relay.close()
        try:
            self.parent.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.parent.pid, signal.SIGKILL)
            self.parent.wait()
        if self.parent.stderr:
            self.parent.stderr.close()
        # The parent removes the folder on exit, but cannot always remove its own mount points.
        shutil.rmtree(self.private_folder, ignore_errors=True)

    def _send_bytes(self, data: bytes, limit: _TimeLimit) -> None:
        """Send all of `data`. Raises Fault if the env process has not read it in time."""
        unwritten = memoryview(data)
        while unwritten:
            try:
                written_count = os.write(self.requests, unwritten)
                unwritten = unwritten[written_count:]
            except BlockingIOError:
                self._wait_until_ready(self.requests, select.POLLOUT, limit)
            except BrokenPipeError:
                return  # the process has ended; the `_read_message` that follows reports why

    def _read_message(self, max_bytes: int, limit: _TimeLimit) -> Reply:
        """Return the next message of the env process, with the values of secrets replaced.

        Raises Fault if no message comes in time, if a line is longer than `max_bytes` or is not a
        JSON object, or if the process has ended.
        """
        line = b""
        while not line.strip():  # blank lines are no messages
            line = self._read_line(max_bytes, limit)
        message = self._parse_message(line, limit.call_name)
        if isinstance(message.get("exit"), dict):  # the last message: how the process ended
            raise Fault(_ending_sentence(message["exit"], limit.call_name))
        return message

    def _read_line(self, max_bytes: int, limit: _TimeLimit) -> bytes:
        """Return the next line of the env process, without its line end.

        Raises Fault if no line comes in time, if it is longer than `max_bytes`, or if the process
        has ended.
        """
        scanned = 0  # bytes at the start of the buffer that are known to hold no line end
        while True:
            end = self.buffer.find(b"\n", scanned)
            if end >= 0:
                line = bytes(self.buffer[:end])
                del self.buffer[: end + 1]
                return line
            scanned = len(self.buffer)
            if scanned > max_bytes:
                raise Fault(f"{limit.call_name} answered with more than {max_bytes >> 20} MB")
            self._receive(limit)

    def _receive(self, limit: _TimeLimit) -> None:
        """Wait for the next bytes from the env process, and append them to the buffer.

        Raises Fault if nothing comes in time or the process has ended.
        """
        self._wait_until_ready(self.replies, select.POLLIN, limit)
        data = os.read(self.replies, 1 << 18)
        if not data:
            raise Fault(self._lost_message(limit.call_name))
        self.buffer += data
        self.received += len(data)

    def _parse_message(self, line: bytes, call_name: str) -> Reply:
        """Parse one line as a JSON object and replace the values of secrets in it.

        Raises Fault if the line is not a JSON object; `call_name` names the call in the message.
        """
        try:
            message = self.secrets.in_json(json.loads(line))
        except (ValueError, RecursionError):  # no JSON, or nested too deep
            message = None
        if not isinstance(message, dict):
            raise Fault(f"{call_name} answered with something that is no JSON object")
        return message

    def _wait_until_ready(self, fd: int, event: int, limit: _TimeLimit) -> None:
        """Wait until `fd` is ready for `event` (select.POLLIN or POLLOUT).

        Raises Fault if the time passes first.
        """
        poller = select.poll()
        poller.register(fd, event)
        remaining_s = limit.deadline - time.monotonic()
        remaining_ms = math.ceil(remaining_s * 1000)
        if remaining_s <= 0 or not poller.poll(remaining_ms):
            message = f"{limit.call_name} did not answer within {limit.seconds:g} s"
            raise Fault(message, timed_out=True)

    def _lost_message(self, call_name: str) -> str:
        """Return the error message for an env process that ended without a last message.

        For example "the env process was lost during score() (exit status -9)". In the brackets is
        the last line that `self.parent` (envs/host/sandbox_parent.py) wrote to
        standard error, where a broken interpreter says what is wrong, or its exit status.
        """
        output = ""
        with contextlib.suppress(subprocess.TimeoutExpired):  # its exit status is then None
            # The parent's end of the pipe is closed, so it is about to exit: one second is enough.
            self.parent.wait(1.0)
            if self.parent.stderr:
                output = self.parent.stderr.read(4000).decode("utf-8", "replace").strip()
        cause = output.splitlines()[-1] if output else f"exit status {self.parent.returncode}"
        return f"the env process was lost during {call_name} ({cause[:CAUSE_CHARS]})"


def _start_parent(
    launch: Launch, lifeline: int, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start sandbox_parent.py with `lifeline` as its descriptor 0 and only these variables.

    The lifeline is the reading end of a pipe: when the other end closes, the program stops. Raises
    OSError if the interpreter does not start.
    """
    return subprocess.Popen(
        # -S: without the module `site` neither path files nor sitecustomize run code.
        # Not -I: it would also ignore PYTHONHASHSEED, which `_clean_environment` sets.
        [sys.executable, "-P", "-s", "-S", "-B", "-u", str(PARENT), launch.to_json()],
        stdin=lifeline,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        env=variables,
        pass_fds=(launch.requests, launch.replies, *launch.gateways),
        start_new_session=True,
    )


@functools.cache
def _remove_stale_folders(temporary: str) -> None:
    """Remove private folders in the folder `temporary` that parents left behind when they were
    killed.

    A living parent (the process that starts and watches user code) holds a lock on its private
    folder, so a folder that can be locked is unused. A folder that cannot be read or removed is
    skipped without an error. Because of the cache, this runs once per process.
    """
    with contextlib.suppress(OSError):
        for entry in os.scandir(temporary):
            if entry.name.startswith(BOX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_stale(entry)


def _remove_if_stale(entry: os.DirEntry[str]) -> None:
    """Remove the private folder `entry`, which an earlier process left behind, unless it is new.

    Raises OSError if the folder is locked, because a living process uses it.
    """
    if time.time() - entry.stat(follow_symlinks=False).st_mtime < STALE_SECONDS:
        return  # so new that its process may not have locked it yet
    folder = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(folder)


def _confinement_in(hello: Reply) -> Confinement:
    """Return how the env process is isolated, as its first message, `hello`, says: `level`,
    `isolation` (the measures in words, with commas between them) and `gaps`."""
    return Confinement(
        level=str(hello.get("level")),
        holds=tuple(str(hello.get("isolation")).split(", ")),
        gaps=tuple(hello.get("gaps") or ()),
    )


def _too_large(call_name: str) -> Fault:
    """Return the Fault for a call whose rows take more than TASKS_BYTES together; `call_name` names
    it, e.g. "tasks()"."""
    return Fault(f"{call_name} sent more than {TASKS_BYTES >> 20} MB")


def _ending_sentence(ending: Reply, call_name: str) -> str:
    """Return how the env process ended during the call `call_name`, as a sentence.

    For example "the env process was killed by signal 9 (SIGKILL) during score(); its last output:
    out of memory".

    Args:
        ending: the parent's last message about the env process: `code` (exit status), `signal` (0
            if no signal killed it) and `tail` (last output).
        call_name: the call, e.g. "score()".
    """
    signal_number = ending.get("signal")
    tail = str(ending.get("tail") or "").strip()
    if isinstance(signal_number, int) and signal_number > 0:
        cause = f"was killed by signal {signal_number}"
        with contextlib.suppress(ValueError):  # raised for a signal without a name
            cause += f" ({signal.Signals(signal_number).name})"
    else:
        cause = f"left with exit status {ending.get('code')}"
    output = f"; its last output: {tail[-TAIL_CHARS:]}" if tail else ""
    return f"the env process {cause} during {call_name}{output}"


def _clean_environment(python: str) -> dict[str, str]:
    """Return the environment variables for user code: fixed values, and the server's own values for
    the few variables that an interpreter may need.

    `python` is the path of an interpreter; its folder comes first on PATH.
    """
    variables = {
        "PATH": os.pathsep.join([str(Path(python).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",  # sets then always iterate in the same order, and so tasks() does
        "PYTHONFAULTHANDLER": "1",
        # One thread per process: thread pools would eat the memory limit and the trainer's cores.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",  # each arena takes address space, which is limited
    }
    for name in ("LD_LIBRARY_PATH", "SSL_CERT_FILE", "TZ"):
        if name in os.environ:
            variables[name] = os.environ[name]
    return variables


def _variables(
    packages: Packages, secrets: Mapping[str, str], install: InstallOrder | None
) -> dict[str, str]:
    """Return the environment variables for the parent, the process that starts and watches user
    code.

    `secrets` (name -> value) are passed here, because the arguments of a command can be read by
    every user of the machine; so are the variables of `install` (for pip), which is None if no
    packages are to be installed.
    """
    variables = _clean_environment(packages.python) | dict(secrets)
    if install is not None:
        variables |= install.variables
    return variables


def reach_of(source: Path) -> Reach:
    """Return what the user code of a folder may reach besides its own files: a server of its own,
    if its adapter starts one, and the rooms that it plays in. Raises EnvProblem if environment.toml
    cannot be read."""
    adapter = read_settings(source).adapter
    if adapter is None:
        return Reach()
    return Reach(serves=adapter.serves, rooms=adapter.rooms)


def _reported_fault(reply: Reply) -> Fault:
    """Return the Fault for a reply in which the environment, which is alive, reports an error."""
    reported = reply.get("problem")
    problem = EnvProblem.from_dict(reported) if isinstance(reported, dict) else None
    return Fault(str(reply.get("error"))[:ERROR_CHARS], alive=True, problem=problem)

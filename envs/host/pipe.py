"""The pipe to one env process: its start, requests and replies under deadlines, its end."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envs.config.problem import EnvProblem
from envs.config.settings import Limits
from envs.host.launch import Launch
from envs.host.redact import SecretFilter
from envs.isolation.packages import Order, Packages
from envs.isolation.sandbox import Held, Reach, Sandbox
from envs.json_types import Reply, Request

REPLY_BYTES = 1 << 20  # of one score or one env message
ROW_BYTES = 16 << 20  # of one task
TASKS_BYTES = 256 << 20  # of all tasks together
LOG_BYTES = 1 << 20
CLOSE_SECONDS = 8.0  # the parent gives descendants five
BOX = "honesmith-env-"  # begins the names of private folders
STALE_SECONDS = 60.0
PARENT = Path(__file__).resolve().parent / "sandbox_parent.py"


class Fault(Exception):
    """One call failed; the process behind it is gone unless `alive`."""

    def __init__(self, text: str, alive: bool = False, problem: EnvProblem | None = None) -> None:
        super().__init__(text)
        self.alive = alive
        self.problem = problem


class Pipe:
    """A running parent of user code (sandbox_parent.py) and the descriptors to its child."""

    def __init__(
        self,
        source: Path,
        packages: Packages,
        limits: Limits,
        secrets: Mapping[str, str],
        log: Path | None,
        sandbox: Sandbox,
        install: Order | None = None,
        reach: Reach | None = None,
    ) -> None:
        """Starts the parent; `install` makes its child an installer that may `reach` further."""
        _sweep(tempfile.gettempdir())
        self.box = tempfile.mkdtemp(prefix=BOX)
        self.secrets = SecretFilter(secrets.items())
        self.child: int | None = None
        self.buffer = bytearray()
        self.taken = 0  # bytes of replies so far
        requests, self.requests = os.pipe()
        self.replies, replies = os.pipe()
        life, self.life = os.pipe()
        launch = Launch(
            source=str(source),
            box=self.box,
            requests=requests,
            replies=replies,
            limits=limits,
            packages=packages,
            sandbox=sandbox,
            reach=reach or Reach(),
            log=str(log.absolute()) if log else "",
            log_cap=LOG_BYTES,
            secrets=tuple(secrets),
            install=install,
        )
        try:
            self.parent = subprocess.Popen(
                # Without `site` no line of a path file runs and no sitecustomize. `-I` would say
                # the same but for one of the variables, which are ours alone: the hash seed.
                [sys.executable, "-P", "-s", "-S", "-B", "-u", str(PARENT), launch.to_json()],
                stdin=life,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                # Not in the arguments, which every user of the machine can read.
                env=_clean_environment(packages.python)
                | dict(secrets)
                | (install.variables if install else {}),
                pass_fds=(requests, replies),
                start_new_session=True,
            )
        except OSError as error:
            for fd in (self.requests, self.replies, self.life):
                os.close(fd)
            shutil.rmtree(self.box, ignore_errors=True)
            what = f"the interpreter {sys.executable} does not start: {error}"
            raise EnvProblem("ENV_IMPORT", what) from error
        finally:
            for fd in (requests, replies, life):
                os.close(fd)
        os.set_blocking(self.requests, False)
        os.set_blocking(self.replies, False)

    def greet(self, seconds: float) -> tuple[Held, Mapping[str, Any]]:
        """What holds user code, and the environment's description once it is loaded, as the env
        process sent it: unchecked. Raises EnvProblem, Fault."""
        deadline = time.monotonic() + seconds
        held: Held | None = None
        while True:
            message = self._read(deadline, ROW_BYTES, "importing the environment", seconds)
            if isinstance(message.get("hello"), dict) and held is None:
                hello = message["hello"]
                holds = str(hello.get("isolation")).split(", ")
                held = Held(str(hello.get("level")), tuple(holds), tuple(hello.get("gaps") or ()))
                self.child = hello.get("pid")
            elif isinstance(message.get("problem"), dict):
                raise EnvProblem.from_dict(message["problem"])
            elif isinstance(message.get("ready"), dict) and held is not None:
                return held, message["ready"]
            else:
                raise Fault("the env process spoke out of turn")

    def call(self, op: str, body: Request, deadline: float, seconds: float) -> Any:
        """The reply's value; for `tasks` the rows sent before it. Raises Fault."""
        # Not to be guessed, so that user code cannot prepare a reply of its own.
        ident = tokens.randbits(53)
        doing = "tasks()" if op == "tasks" else "score()" if op == "finish" else f"{op}()"
        request = {"id": ident, "op": op} | body
        self._write((json.dumps(request) + "\n").encode(), deadline, doing, seconds)
        rows: list[Any] = []
        taken = self.taken
        cap = ROW_BYTES if op == "tasks" else REPLY_BYTES
        while True:
            reply = self._read(deadline, cap, doing, seconds)
            if reply.get("id") != ident:
                raise Fault(f"{doing} answered out of turn")
            if "row" in reply:
                if op != "tasks" or self.taken - taken > TASKS_BYTES:
                    raise Fault(f"{doing} sent more than {TASKS_BYTES >> 20} MB")
                rows.append(reply["row"])
            elif reply.get("ok") is True:
                return rows if op == "tasks" else reply.get("value")
            else:
                raw = reply.get("problem")
                problem = EnvProblem.from_dict(raw) if isinstance(raw, dict) else None
                raise Fault(str(reply.get("error"))[:2000], alive=True, problem=problem)

    def cut(self) -> None:
        """Closes the lifeline alone, from any thread: a call under way finds the process gone."""
        life, self.life = self.life, -1
        if life >= 0:
            os.close(life)

    def close(self) -> None:
        """Closes the lifeline; the parent kills what is left and exits, or is killed itself."""
        self.cut()
        for fd in (self.requests, self.replies):
            os.close(fd)
        try:
            self.parent.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.parent.pid, signal.SIGKILL)
            self.parent.wait()
        if self.parent.stderr:
            self.parent.stderr.close()
        # The parent empties it, but cannot always take away what it has mounted.
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

    def _read(self, deadline: float, cap: int, doing: str, seconds: float) -> Reply:
        """The next message. Raises Fault."""
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
                    raise Fault(_ending(message["exit"], doing))
                return message
            scanned = len(self.buffer)
            if scanned > cap:
                raise Fault(f"{doing} answered with more than {cap >> 20} MB")
            self._wait(self.replies, select.POLLIN, deadline, doing, seconds)
            data = os.read(self.replies, 1 << 18)
            if not data:
                raise Fault(self._lost(doing))
            self.buffer += data
            self.taken += len(data)

    def _parse(self, line: bytes, doing: str) -> Reply:
        try:
            message = self.secrets.in_json(json.loads(line))
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Fault(f"{doing} answered with something that is no JSON object")
        return message

    def _wait(self, fd: int, event: int, deadline: float, doing: str, seconds: float) -> None:
        poller = select.poll()
        poller.register(fd, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(math.ceil(left * 1000)):
            raise Fault(f"{doing} did not answer within {seconds:g} s")

    def _lost(self, doing: str) -> str:
        """Why the parent itself is gone; a broken interpreter says so on its standard error."""
        output = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.parent.wait(1.0)
            if self.parent.stderr:
                output = self.parent.stderr.read(4000).decode("utf-8", "replace").strip()
        last = output.splitlines()[-1] if output else f"exit status {self.parent.returncode}"
        return f"the env process was lost during {doing} ({last[:300]})"


@functools.cache
def _sweep(place: str) -> None:
    """Once per process: removes the folders of parents that were killed.

    A parent holds a lock on its folder, so a folder that can be locked belongs to nobody.
    """
    with contextlib.suppress(OSError):
        for entry in os.scandir(place):
            if not entry.name.startswith(BOX) or not entry.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime < STALE_SECONDS:
                    continue  # its parent may not have locked it yet
                folder = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(entry.path, ignore_errors=True)
                finally:
                    os.close(folder)


def _ending(ended: Reply, doing: str) -> str:
    number, code = ended.get("signal"), ended.get("code")
    tail = str(ended.get("tail") or "").strip()
    if isinstance(number, int) and number > 0:
        with contextlib.suppress(ValueError):
            number = f"{number} ({signal.Signals(number).name})"
        how = f"was killed by signal {number}"
    else:
        how = f"left with exit status {code}"
    output = f"; its last output: {tail[-300:]}" if tail else ""
    return f"the env process {how} during {doing}{output}"


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

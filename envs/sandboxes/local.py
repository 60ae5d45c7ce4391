"""The rollout's own box as a sandbox: no container and no image, the programs of this machine.

Each command runs in a second box inside: it sees the system's files, the working folder and /tmp,
and neither tests nor solution nor the process that started it. It needs our own namespaces, in
which the box has made the folders of a task (`rooms` in envs/isolation/sandbox.py).
"""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from envs.isolation import landlock, namespaces, sandbox
from envs.json_types import JsonObject
from envs.sandboxes.contract import KEPT_BYTES, Order, Ran, SandboxFault, kept

RUNNER = Path(__file__).with_name("runner.py")
WORKDIR, TESTS, LOGS, SOLUTION, SCRATCH = "/app", "/tests", "/logs", "/solution", "/tmp"
END_SECONDS = 5.0  # to end all processes of an agent


def problem(options: JsonObject) -> str:
    """Return why commands cannot be boxed in here; "" if they can."""
    if landlock.abi() == 0:
        return (
            "provider local needs Landlock, which this kernel does not have: nothing else keeps "
            "an agent's commands from the tests; use another provider"
        )
    if not _rooms():
        return (
            "provider local needs namespaces, in which /app, /tests and /logs can be made: run "
            "the server as root or where users may make namespaces (`honesmith doctor`), or use "
            "another provider"
        )
    return ""


def open(options: JsonObject, order: Order) -> "LocalSandbox":
    """Return this box as a sandbox. Raises SandboxFault if commands cannot be boxed in here."""
    fault = problem(options)
    if fault:
        raise SandboxFault(fault)
    return LocalSandbox(order)


class LocalSandbox:
    """This box as a sandbox, for one rollout.

    Args:
        order: what the task needs. Image and sizes are ignored: the box has its own limits.
    """

    def __init__(self, order: Order) -> None:
        """Prepare the folders. Raises SandboxFault for another working folder than /app."""
        if order.workdir not in ("", WORKDIR):
            raise SandboxFault(f"provider local works in {WORKDIR} alone, not in {order.workdir}")
        self.order = order
        self.workdir = WORKDIR
        self.rooms = _rooms()
        readable, devices = sandbox.nested_paths(WORKDIR)
        envs = str(Path(__file__).resolve().parents[1])
        # Of our own package an agent needs nothing. Of /proc it sees no other process: how the box
        # was started stands in the command line of its first one.
        self.readable = [path for path in readable if path != envs]
        self.devices = [path for path in devices if path != WORKDIR]
        for folder in (f"{LOGS}/agent", f"{LOGS}/verifier"):
            os.makedirs(folder, exist_ok=True)
        self.scratch = SCRATCH if SCRATCH in self.rooms else f"{LOGS}/agent"

    def exec(
        self, command: str, seconds: float, variables: Mapping[str, str], grading: bool
    ) -> Ran:
        """Run a command in a box of its own. Raises SandboxFault if it could not be confined.

        Files take its output, not pipes, so that a process that it leaves behind holds nothing up.
        """
        with contextlib.suppress(OSError):  # a command may have closed its own box's folder
            os.chmod(tempfile.gettempdir(), 0o700)
        # The runner says there why it could not confine itself; it closes as the command begins.
        reader, writer = os.pipe()
        with (
            os.fdopen(reader, "rb") as refusal,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as errors,
        ):
            try:
                process = self._start(command, variables, grading, (output, errors), writer)
            except OSError as error:  # as many processes as it may have, or no memory
                reason = f"the command could not be started: {error.strerror or error}"
                if grading:
                    raise SandboxFault(reason) from error
                return Ran(126, "", reason)
            finally:
                os.close(writer)
            timed_out = _wait(process, seconds)
            text, error_text = _text_of(output), _text_of(errors)
            refused = refusal.read(1000).decode("utf-8", "replace")
        if refused:
            raise SandboxFault(f"a command could not be boxed in: {refused}")
        status = process.returncode
        return Ran(128 - status if status < 0 else status, text, error_text, timed_out)

    def _start(
        self,
        command: str,
        variables: Mapping[str, str],
        grading: bool,
        streams: tuple[IO[bytes], IO[bytes]],
        refusal: int,
    ) -> "subprocess.Popen[bytes]":
        """Start a command; `streams` take its output and its errors, the descriptor `refusal` why
        it could not be confined. Raises OSError."""
        process = subprocess.Popen(
            # -I, -S: neither variables nor packages change what runs.
            [sys.executable, "-I", "-S", "-B", str(RUNNER), str(refusal)],
            stdin=subprocess.PIPE,
            stdout=streams[0],
            stderr=streams[1],
            cwd=WORKDIR,
            env=self._variables(variables, grading),
            start_new_session=True,
            pass_fds=(refusal,),
        )
        assert process.stdin is not None  # a pipe, by the line above
        # A broken pipe: it has ended, and its errors say why.
        with contextlib.suppress(BrokenPipeError), process.stdin as job:
            job.write(json.dumps(self._job(command, grading)).encode())
        return process

    def write(self, path: str, data: bytes) -> None:
        """Write a file in one of the folders of the task."""
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(0o755 if data[:2] == b"#!" else 0o644)
        except OSError as error:
            raise SandboxFault(f"{path} cannot be written: {error.strerror}") from error

    def read(self, path: str, most: int) -> bytes | None:
        """Return the regular file at `path`, which may be no link; None if there is none."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SandboxFault(f"{path} cannot be read: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SandboxFault(f"{path} is no regular file")
            data = os.read(descriptor, most + 1)
        finally:
            os.close(descriptor)
        if len(data) > most:
            raise SandboxFault(f"{path} has more than {most:,} bytes")
        return data

    def remove(self, path: str) -> None:
        """Remove a file, or all that is in a folder."""
        target = Path(path)
        with contextlib.suppress(OSError):  # a command may have closed a folder of its own user
            os.chmod(target.parent if target.parent != Path("/") else target, 0o755)
            os.chmod(target, 0o755, follow_symlinks=False)
        try:
            if target.is_dir() and not target.is_symlink():
                for entry in list(target.iterdir()):
                    shutil.rmtree(entry) if _is_folder(entry) else entry.unlink()
            else:
                target.unlink(missing_ok=True)
        except OSError as error:
            raise SandboxFault(f"{path} cannot be removed: {error.strerror}") from error

    def end_processes(self) -> None:
        """Kill every process of this box but this one, at one stroke.

        The kernel does it in one go, so that a process that keeps forking does not escape. The
        first process of the namespaces is spared by the kernel.
        """
        if os.getppid() != 1:  # without namespaces of our own this would end processes of others
            raise SandboxFault("the processes of the agent cannot be told from others here")
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:  # there is none any more
                return
            time.sleep(0.002)  # until the first process of the box has reaped what was killed
        raise SandboxFault("a process of the agent cannot be ended")

    def close(self) -> None:
        """Do nothing: the box ends with the rollout."""

    def _job(self, command: str, grading: bool) -> JsonObject:
        """Return the runner's job: the command and the paths that it may use."""
        writable = [WORKDIR, self.scratch, f"{LOGS}/agent", *self.devices]
        if grading:
            writable += [TESTS, LOGS, SOLUTION]
        return {
            "command": command,
            "readable": self.readable,
            "writable": writable,
            "envs": str(Path(__file__).resolve().parents[1]),
        }

    def _variables(self, further: Mapping[str, str], grading: bool) -> dict[str, str]:
        """Return the variables of a command: none of this process but PATH. The home of the tests
        is none that the agent has written to, where programs look for code to load."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "HOME": TESTS if grading else WORKDIR,
            "TMPDIR": self.scratch,
            **self.order.variables,
            **further,
        }


def _rooms() -> tuple[str, ...]:
    """Return the folders that the box has made for a task; () if it has made none."""
    rooms = tuple(os.environ.get(namespaces.ROOMS_SAID, "").split(":"))
    needed = {WORKDIR, TESTS, LOGS}
    return rooms if needed <= set(rooms) else ()


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for a command, at most `seconds`; then end it and its process group. Returns whether its
    time was up."""
    try:
        process.wait(seconds)
        return False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def _text_of(file: IO[bytes]) -> str:
    """Return what a command wrote to a file; of more than KEPT_BYTES the two ends."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size <= KEPT_BYTES:
        return kept(file.read())
    half = KEPT_BYTES // 2
    head = file.read(half)
    file.seek(size - half)
    note = f"\n... {size - 2 * half:,} bytes are left out ...\n"
    return kept(head) + note + kept(file.read(half))

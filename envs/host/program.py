"""The sandbox side of a command, a program that plays one task: before, during and after its run.

The parent listens for the program on loopback (in the network namespace of the sandbox, if there is
one) and hands the listening socket to the client. The client serves the model on it, and nobody
else can reach it. The child then copies the environment's folder, gives the parent a descriptor of
the copy, and becomes the program. When every process of the sandbox is dead, the parent reads the
reward file through that descriptor. Standard library only; imported only when needed.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from envs.host.launch import Program
from envs.isolation import namespaces
from envs.json_types import JsonObject

REWARD_BYTES = 64 * 1024  # the largest reward file
NO_PROGRAM = 127  # the exit status that shells use for a program that cannot be started
TASK_FILE = "task.json"
COPY = "rollout"  # the private copy of the environment's folder, in the working folder


class ProgramBox:
    """Prepares, runs and finishes one program, in the parent and in the child that becomes the
    program.

    The private copy of the environment's folder is in a file system that vanishes with the sandbox.
    So the child sends the parent a descriptor, by which the parent can still read the copy.

    Attributes:
        child_fd: the descriptor that the child needs in order to send that.
    """

    def __init__(self, program: Program) -> None:
        """Make the pair of sockets through which the child, which becomes `program`, sends the
        parent a descriptor of its copy of the environment's folder."""
        self.program = program
        self._receiver, self._sender = socket.socketpair()
        self.child_fd = self._sender.fileno()

    def listen(self) -> int:
        """Listen on loopback for the program, hand the socket to the client, and return the port.

        Raises OSError if that is not possible here.
        """
        return namespaces.hand_over_listener(self.program.gateway)

    def run(self, source: Path, requests: int, output: int) -> NoReturn:
        """Become the program. Called in the confined child, in its working folder; never returns.

        Args:
            source: the environment's folder.
            requests: descriptor from which one line of JSON is read: `task` (the row) and
                `variables`.
            output: descriptor that becomes standard output.
        """
        try:
            self._become_program(source, requests, output)
        except OSError as error:  # there is no such program, or no room for the copy
            name = self.program.command[0]
            sys.stderr.write(f"{name} cannot be started: {error.strerror or error}\n")
            sys.stderr.flush()
        finally:
            os._exit(NO_PROGRAM)

    def _become_program(self, source: Path, requests: int, output: int) -> None:
        """Prepare the working folder and replace this process by the program. The arguments are
        those of `run`.

        Raises OSError if that fails.
        """
        with os.fdopen(requests, "rb") as lines:
            order = json.loads(lines.readline())
        work = Path.cwd()
        copy = work / COPY
        _copy_folder(source, copy)
        if self.program.reward_file:  # a file that the folder already has is no reward
            with contextlib.suppress(OSError):
                (copy / self.program.reward_file).unlink()
        task_file = work / TASK_FILE
        task_file.write_text(json.dumps(order["task"], ensure_ascii=False), "utf-8")
        os.chdir(copy)
        os.environ.update(order["variables"])
        os.environ.update(HONESMITH_TASK=str(task_file), PWD=str(copy))
        self._send_folder(copy)
        os.dup2(output, 1)  # standard output
        os.close(output)
        command = self.program.command
        os.execvpe(command[0], list(command), os.environ)

    def _send_folder(self, folder: Path) -> None:
        """Send the parent a descriptor of `folder`, with which it can read the folder later."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        socket.send_fds(self._sender, [b"."], [descriptor])  # a descriptor needs a byte with it
        os.close(descriptor)
        self._sender.close()

    def let_end(self, pids: Sequence[int]) -> None:
        """Tell the program (`pids` is its pid) to give back what it has rented, and wait until it
        has ended, at most its grace. Called in the parent."""
        if not self.program.grace_s:
            return
        deadline = time.monotonic() + self.program.grace_s
        for pid in pids:
            # A descriptor, which becomes readable at its end: another process may be its parent.
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                try:
                    os.kill(pid, signal.SIGTERM)
                    select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
                finally:
                    os.close(descriptor)

    def ending(self, all_dead: bool) -> dict[str, object]:
        """Return what the client needs to know at the end besides the exit status. Called in the
        parent.

        - seal: the program's secret, as proof that the message is the parent's
        - started: whether the child was about to become the program
        - all_dead: the argument: whether no process of the sandbox is left
        - reward_file: {"text": its content} or {"fault": why it cannot be read}, if the reward is
          read from a file
        """
        self._receiver.setblocking(False)
        descriptors: list[int] = []
        with contextlib.suppress(OSError):  # the child has sent nothing
            _, descriptors, _, _ = socket.recv_fds(self._receiver, 1, 1)
        started = bool(descriptors)
        ending: dict[str, object] = {"seal": self.program.seal, "started": started}
        ending["all_dead"] = all_dead
        if self.program.reward_file and all_dead and started:
            ending["reward_file"] = read_reward(descriptors[0], self.program.reward_file)
        return ending


def read_reward(folder: int, file: str) -> JsonObject:
    """Return the text of a reward file as {"text"}, or why it cannot be read as {"fault"}.

    Only a regular file of at most REWARD_BYTES counts, reached without any link: the program owns
    the folder, and a link in it could lead to a file that the parent may read and the program may
    not.

    Args:
        folder: descriptor of the folder.
        file: the path in the folder, with / between its parts.
    """
    try:
        descriptor = _open_without_links(folder, file)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return {"fault": f"{file} is no regular file"}
            data = os.read(descriptor, REWARD_BYTES + 1)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return {"fault": f"the program wrote no {file}"}
    except OSError as error:
        return {"fault": f"{file} cannot be read: {error.strerror}"}
    if len(data) > REWARD_BYTES:
        return {"fault": f"{file} has more than {REWARD_BYTES >> 10} KiB"}
    return {"text": data.decode("utf-8", "replace")}


def _open_without_links(folder: int, file: str) -> int:
    """Open a file for reading and return its descriptor; no part of its path may be a link.

    `file` is a path, with / between its parts, in the folder with the descriptor `folder`. Raises
    OSError if the file cannot be opened or a part is a link.
    """
    *parents, name = file.split("/")
    current_folder = folder
    try:
        for part in parents:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            subfolder = os.open(part, flags, dir_fd=current_folder)
            if current_folder != folder:
                os.close(current_folder)
            current_folder = subfolder
        # O_NONBLOCK: otherwise opening a named pipe would wait for a writer.
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=current_folder)
    finally:
        if current_folder != folder:
            os.close(current_folder)


def _copy_folder(source: Path, target: Path) -> None:
    """Copy the folder `source` to `target`, which must not exist. In the copy everybody may read
    everything, and scripts (files that begin with "#!") are executable."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for path in target.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                is_script = file.read(2) == b"#!"
            path.chmod(0o755 if is_script else 0o644)
        else:
            path.chmod(0o755)
    target.chmod(0o755)

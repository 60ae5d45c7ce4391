"""A program that plays one task: what runs in its box beside it, before it and after it.

The parent listens for the program on loopback, in the network namespace of the box where it has
one, and hands the listening socket to the client: whoever serves the model answers on it without
being reachable from anywhere else. The child then copies the environment's folder, gives the parent
a descriptor of the copy, and becomes the program. When every process of the box is dead the parent
reads the reward file through that descriptor. Standard library only; imported where it is needed.
"""

import contextlib
import json
import os
import shutil
import socket
import stat
import sys
from pathlib import Path
from typing import NoReturn

from envs.host.launch import Program
from envs.isolation import kernel, namespaces
from envs.json_types import JsonObject

BACKLOG = 64  # connections that wait to be accepted
REWARD_BYTES = 64 * 1024  # of a reward file
NO_PROGRAM = 127  # the exit status of a shell for a program that cannot be started
TASK_FILE = "task.json"
COPY = "rollout"  # the private copy of the environment's folder, in the working folder


class ProgramBox:
    """What surrounds one program, in the parent and in the child that becomes it.

    The private copy of the environment's folder lies in a file system that ends with the box, so
    the child sends the parent a descriptor by which the parent can still read it.

    Attributes:
        child_fd: the descriptor that the child needs for that.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._receiver, self._sender = socket.socketpair()
        self.child_fd = self._sender.fileno()

    def listen(self) -> int:
        """Listen on loopback for the program and hand the socket to the client; returns the port.

        Raises OSError if that is not possible here.
        """
        with (
            socket.socket(fileno=self.program.gateway) as client,
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener,
        ):
            if kernel.LINUX:
                namespaces.raise_loopback(listener.fileno())
            listener.bind(("127.0.0.1", 0))
            listener.listen(BACKLOG)
            port = int(listener.getsockname()[1])
            socket.send_fds(client, [b"."], [listener.fileno()])
            return port

    def run(self, source: Path, requests: int, output: int) -> NoReturn:
        """Become the program. To be called in the confined child, in its working folder.

        Args:
            source: the environment's folder.
            requests: descriptor from which one line of JSON is read: `task`, the row, and
                `variables`.
            output: descriptor that becomes standard output.
        """
        try:
            self._become_program(source, requests, output)
        except OSError as error:  # no program of that name, or no room for the copy
            name = self.program.command[0]
            sys.stderr.write(f"{name} cannot be started: {error.strerror or error}\n")
            sys.stderr.flush()
        finally:
            os._exit(NO_PROGRAM)

    def _become_program(self, source: Path, requests: int, output: int) -> None:
        """Prepare the working folder and start the program in place of this process; see `run`.

        Raises OSError if that fails.
        """
        with os.fdopen(requests, "rb") as lines:
            order = json.loads(lines.readline())
        work = Path.cwd()
        copy = work / COPY
        _copy(source, copy)
        if self.program.reward_file:  # what the environment's folder brings along is no reward
            with contextlib.suppress(OSError):
                (copy / self.program.reward_file).unlink()
        task_file = work / TASK_FILE
        task_file.write_text(json.dumps(order["task"], ensure_ascii=False), "utf-8")
        os.chdir(copy)
        os.environ.update(order["variables"])
        os.environ.update(HONESMITH_TASK=str(task_file), PWD=str(copy))
        self._send(copy)
        os.dup2(output, 1)
        os.close(output)
        command = self.program.command
        os.execvpe(command[0], list(command), os.environ)

    def _send(self, folder: Path) -> None:
        """Send the parent a descriptor of `folder`."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        socket.send_fds(self._sender, [b"."], [descriptor])
        os.close(descriptor)
        self._sender.close()

    def ending(self, all_dead: bool) -> dict[str, object]:
        """Called in the parent at the end: what the client needs to know beside the exit status.

        - seal: that of the order
        - started: whether the program was about to start
        - all_dead: the argument, whether no process of the box is left
        - reward_file: {"text"} or {"fault"}, see `read_reward`; where there is one to read
        """
        self._receiver.setblocking(False)
        descriptors: list[int] = []
        with contextlib.suppress(OSError):  # nothing was sent
            _, descriptors, _, _ = socket.recv_fds(self._receiver, 1, 1)
        started = bool(descriptors)
        ending: dict[str, object] = {"seal": self.program.seal, "started": started}
        ending["all_dead"] = all_dead
        if self.program.reward_file and all_dead and started:
            ending["reward_file"] = read_reward(descriptors[0], self.program.reward_file)
        return ending


def read_reward(folder: int, file: str) -> JsonObject:
    """The text of a reward file as {"text"}, or why it cannot be read as {"fault"}.

    Only a regular file of at most REWARD_BYTES counts, reached without any link: the program owns
    the folder, and a link in it could lead to what the parent may read and the program may not.

    Args:
        folder: descriptor of the folder.
        file: the path in it, with / between its parts.
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
    """Open for reading the file at the path `file`, with / between its parts, in the folder with
    the descriptor `folder`; returns its descriptor. Raises OSError, also for a link on the way."""
    *parents, name = file.split("/")
    place = folder
    try:
        for part in parents:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            below = os.open(part, flags, dir_fd=place)
            if place != folder:
                os.close(place)
            place = below
        # O_NONBLOCK: opening a pipe for reading would wait for a writer.
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place)
    finally:
        if place != folder:
            os.close(place)


def _copy(source: Path, target: Path) -> None:
    """Copy the folder `source`; scripts, which begin with "#!", can be started in the copy."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    for path in target.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                is_script = file.read(2) == b"#!"
            path.chmod(0o755 if is_script else 0o644)
        else:
            path.chmod(0o755)
    target.chmod(0o755)

"""A container, through the command line of docker or podman.

The box of a rollout has no Unix sockets, so the daemon is one that listens on TCP: its address is
the secret DOCKER_HOST (for podman CONTAINER_HOST). Whoever may talk to a daemon is root on its
machine; an agent's commands run in the container and see neither the address nor the daemon.

Its clock and this machine's are taken to agree: they say when a container has outlived its time.
"""

import contextlib
import math
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

from envs.json_types import JsonObject
from envs.sandboxes.contract import LABEL, Order, Ran, SandboxFault, kept
from envs.sandboxes.remote import SHELL_SECONDS, RemoteSandbox, text_option

PROGRAMS = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}  # and where its daemon is
START_SECONDS = 300.0  # an image may have to be fetched
BUSY = ("429", "500", "502", "503", "504", "too many requests", "timeout")
PROCESSES, MEMORY_MB = 512, 4096  # what a container may have; memory where the task names none
SIGNALLED = range(129, 193)  # exit statuses of a command that a signal has ended
# The first process of a container, which no signal from inside can end. Begun again by a restart,
# it still ends at the same second.
_KEEP = 'while left=$(($1 - $(date +%s))); [ "$left" -gt 0 ]; do sleep "$left"; done'
# Says the status of the text on standard input behind a mark, so that whatever docker itself leaves
# with is docker's. A text there may be longer than an argument.
_REPORT = """
text=$(cat)
(eval "$text") </dev/null
printf '\\n%s %s\\n' "$1" "$?"
"""


def problem(options: JsonObject) -> str:
    """Return why no container can be started: an unknown program, none on PATH, no daemon."""
    program = text_option(options, "program", "docker")
    if program not in PROGRAMS:
        return f"[adapter.sandbox] program is docker or podman, got {program!r}"
    if shutil.which(program) is None:
        return f"{program} is not on the PATH of the environment: install its command line"
    variable = PROGRAMS[program]
    if not os.environ.get(variable, "").startswith(("tcp://", "ssh://")):
        return (
            f'provider docker needs secrets = ["{variable}"] with a tcp:// address: the box of a '
            "rollout has no Unix sockets"
        )
    return ""


def open(options: JsonObject, order: Order) -> RemoteSandbox:
    """Start a container that does nothing but end after its lifetime. Raises SandboxFault.

    It has a name of ours, by which it is removed where docker has not answered that it runs.
    """
    fault = problem(options)
    if fault:
        raise SandboxFault(fault)
    if not order.image:
        raise SandboxFault('provider docker needs an image: [adapter.sandbox] image = "debian:12"')
    client = _Client(text_option(options, "program", "docker"))
    container = _Container(order, client, f"{LABEL}-{os.urandom(8).hex()}")
    try:
        ran = client.call(_start_arguments(order, container.name), START_SECONDS)
        if ran.status != 0:
            busy = any(word in ran.stderr.lower() for word in BUSY)
            raise SandboxFault(f"no container: {ran.stderr.strip()[-300:]}", retryable=busy)
    except BaseException:
        with contextlib.suppress(SandboxFault):
            container.close()
        raise
    return container


def _start_arguments(order: Order, name: str) -> list[str]:
    """Return the arguments that start the order's container in the background."""
    arguments = ["run", "--detach", "--rm", "--name", name, "--entrypoint", "sh"]
    arguments += ["--network", "bridge" if order.network else "none"]
    for label, value in {LABEL: "1", **order.labels}.items():
        arguments += ["--label", f"{label}={value}"]
    if order.cpus:
        arguments += ["--cpus", str(order.cpus)]
    arguments += ["--memory", f"{order.memory_mb or MEMORY_MB}m", "--pids-limit", str(PROCESSES)]
    end = math.ceil(time.time() + order.lifetime_s)
    return [*arguments, order.image, "-c", _KEEP, "sh", str(end)]


class _Client:
    """The command line of docker or podman."""

    def __init__(self, program: str) -> None:
        """Remember the program."""
        self.program = program

    def call(self, arguments: Sequence[str], seconds: float, data: bytes = b"") -> Ran:
        """Run it once. Raises SandboxFault if it takes longer than `seconds` or cannot be run."""
        done = self.done(arguments, seconds, data)
        return Ran(done.returncode, kept(done.stdout), kept(done.stderr))

    def done(
        self, arguments: Sequence[str], seconds: float, data: bytes
    ) -> "subprocess.CompletedProcess[bytes]":
        """Do as `call` does; what it wrote is not cut."""
        try:
            return subprocess.run(
                [self.program, *arguments],
                input=data,
                capture_output=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            text = f"{self.program} {arguments[0]} took longer than {seconds:g} s"
            raise SandboxFault(text) from error
        except (OSError, ValueError) as error:  # a NUL byte, no UTF-8, too long, no program
            raise SandboxFault(f"{self.program} {arguments[0]} was not run: {error}") from error


class _Container(RemoteSandbox):
    """A running container."""

    def __init__(self, order: Order, client: _Client, name: str) -> None:
        """Take the container of this name."""
        super().__init__(order, self._run, self._upload, self._give_back, name)
        self.client = client

    def end_processes(self) -> None:
        """Start the container again: no process lives through that, however many there are.

        Its first one is then the image's own `sh`, `date` and `sleep`: an agent that is root in the
        container may have put others in their place, which begin anew.
        """
        ran = self.client.call(["restart", "--time", "0", self.name], SHELL_SECONDS)
        if ran.status != 0:
            raise SandboxFault(f"the container did not restart: {ran.stderr.strip()[-300:]}")

    def _run(self, text: str, seconds: float, variables: Mapping[str, str]) -> Ran:
        """Run a command line in the container."""
        settings = [part for name in variables for part in ("--env", f"{name}={variables[name]}")]
        mark = os.urandom(16).hex()
        command = ["exec", "--interactive", *settings, self.name, "sh", "-c", _REPORT, "sh", mark]
        done = self.client.done(command, seconds, text.encode())
        output, is_marked, status = done.stdout.rpartition(f"\n{mark} ".encode())
        errors = kept(done.stderr)
        if done.returncode == 0 and is_marked and status.strip().isdigit():
            return Ran(int(status), kept(output), errors)
        # `kill -9 -1` ends the shell that reports too.
        if done.returncode in SIGNALLED and self._runs():
            return Ran(done.returncode, kept(done.stdout), errors)
        raise SandboxFault(f"the container is lost: {errors.strip()[-300:]}")

    def _runs(self) -> bool:
        """Whether the container runs."""
        command = ["inspect", "--format", "{{.State.Running}}", self.name]
        return self.client.call(command, SHELL_SECONDS).stdout.strip() == "true"

    def _upload(self, path: str, data: bytes) -> None:
        """Write a file through the standard input of a command."""
        command = ["exec", "--interactive", self.name, "sh", "-c", 'cat >"$1"', "sh", path]
        ran = self.client.call(command, SHELL_SECONDS, data)
        if ran.status != 0:
            raise SandboxFault(f"{path} was not written: {ran.stderr.strip()[-300:]}")

    def _give_back(self) -> None:
        """Remove the container."""
        ran = self.client.call(["rm", "--force", self.name], SHELL_SECONDS)
        gone = "no such container" in ran.stderr.lower()  # it has ended by itself
        if ran.status != 0 and not gone:
            raise SandboxFault(f"the container was not removed: {ran.stderr.strip()[-300:]}")

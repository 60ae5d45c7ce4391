"""A container, through the command line of docker or podman.

The box of a rollout has no Unix sockets, so the daemon is one that listens on TCP: its address is
the secret DOCKER_HOST (for podman CONTAINER_HOST). Whoever may talk to a daemon is root on its
machine; an agent's commands run in the container and see neither the address nor the daemon.
"""

import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from envs.json_types import JsonObject
from envs.sandboxes.contract import LABEL, Order, Ran, SandboxFault, kept
from envs.sandboxes.remote import SHELL_SECONDS, RemoteSandbox, opened, text_option

PROGRAMS = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}  # and where its daemon is
START_SECONDS = 300.0  # an image may have to be fetched
BUSY = ("429", "500", "502", "503", "504", "too many requests", "timeout")
CLIENT_FAILED = 125  # the exit status for a fault of docker itself


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
    """Start a container that does nothing but end after its lifetime. Raises SandboxFault."""
    fault = problem(options)
    if fault:
        raise SandboxFault(fault)
    if not order.image:
        raise SandboxFault('provider docker needs an image: [adapter.sandbox] image = "debian:12"')
    client = _Client(text_option(options, "program", "docker"))
    ran = client.call(_start_arguments(order), START_SECONDS)
    if ran.status != 0:
        busy = any(word in ran.stderr.lower() for word in BUSY)
        raise SandboxFault(f"no container: {ran.stderr.strip()[-300:]}", retryable=busy)
    container = ran.stdout.strip().splitlines()[-1]
    return opened(_Container(order, client, container))


def _start_arguments(order: Order) -> list[str]:
    """Return the arguments that start the order's container in the background."""
    arguments = ["run", "--detach", "--rm", "--init", "--entrypoint", "sleep"]
    arguments += ["--network", "bridge" if order.network else "none"]
    for name, value in {LABEL: "1", **order.labels}.items():
        arguments += ["--label", f"{name}={value}"]
    if order.cpus:
        arguments += ["--cpus", str(order.cpus)]
    if order.memory_mb:
        arguments += ["--memory", f"{order.memory_mb}m"]
    return [*arguments, order.image, str(math.ceil(order.lifetime_s))]


class _Client:
    """The command line of docker or podman."""

    def __init__(self, program: str) -> None:
        """Remember the program."""
        self.program = program

    def call(self, arguments: Sequence[str], seconds: float, data: bytes = b"") -> Ran:
        """Run it once. Raises SandboxFault if it takes longer than `seconds`."""
        try:
            done = subprocess.run(
                [self.program, *arguments],
                input=data,
                capture_output=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            text = f"{self.program} {arguments[0]} took longer than {seconds:g} s"
            raise SandboxFault(text) from error
        return Ran(done.returncode, kept(done.stdout), kept(done.stderr))


class _Container(RemoteSandbox):
    """A running container."""

    def __init__(self, order: Order, client: _Client, container: str) -> None:
        """Take the container with this id."""
        super().__init__(order, self._run, self._upload, self._give_back)
        self.client = client
        self.container = container

    def end_processes(self) -> None:
        """Start the container again: from outside, whatever the agent has changed inside."""
        ran = self.client.call(["restart", "--time", "0", self.container], SHELL_SECONDS)
        if ran.status != 0:
            raise SandboxFault(f"the container did not restart: {ran.stderr.strip()[-300:]}")

    def _run(self, text: str, seconds: float, variables: Mapping[str, str]) -> Ran:
        """Run a command line in the container."""
        settings = [part for name in variables for part in ("--env", f"{name}={variables[name]}")]
        ran = self.client.call(["exec", *settings, self.container, "sh", "-c", text], seconds)
        if ran.status == CLIENT_FAILED or ran.stderr.startswith("Error response from daemon"):
            raise SandboxFault(f"the container is lost: {ran.stderr.strip()[-300:]}")
        return ran

    def _upload(self, path: str, data: bytes) -> None:
        """Write a file through the standard input of a command."""
        command = ["exec", "--interactive", self.container, "sh", "-c", 'cat >"$1"', "sh", path]
        ran = self.client.call(command, SHELL_SECONDS, data)
        if ran.status != 0:
            raise SandboxFault(f"{path} was not written: {ran.stderr.strip()[-300:]}")

    def _give_back(self) -> None:
        """Remove the container."""
        ran = self.client.call(["rm", "--force", self.container], SHELL_SECONDS)
        if ran.status != 0:
            raise SandboxFault(f"the container was not removed: {ran.stderr.strip()[-300:]}")

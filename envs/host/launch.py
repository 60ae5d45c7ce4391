"""The settings that the parent of user code starts with, as JSON on its command line. Standard
library only."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from envs.config.settings import Limits
from envs.isolation.packages import InstallOrder, Packages
from envs.isolation.sandbox import Reach, Sandbox
from envs.json_types import JsonObject

FILES = 4  # the folder of user code has room for so many files of the largest allowed size
INSTALLER_MB = 256  # room of that folder while packages are installed; they go elsewhere


@dataclass(frozen=True)
class Program:
    """A program that plays one task and asks the model through a gateway (envs/host/program.py).

    Attributes:
        command: the program and its arguments.
        reward_file: the file that is read once it has ended, relative to its copy of the
            environment's folder; "" for none.
        gateway: the socket by which the parent hands over where it listens for the program.
        seal: what the parent repeats at the end, so that no output of the program can pass for it.
    """

    command: tuple[str, ...]
    reward_file: str
    gateway: int
    seal: str


@dataclass(frozen=True)
class Launch:
    """One env process, or with `install` one installation of packages, or with `program` one
    rollout of a command.

    Attributes:
        source: the environment's folder, which is copied into `box`.
        box: a private folder, removed at the end.
        requests, replies: file descriptors of the two pipes to the client.
        log: the file that output is appended to, up to `log_cap` bytes; "" for none.
        secrets: names of environment variables; their values are taken out of the log.
        install: the packages to install; None to serve the environment.
        program: the program to run; None to serve the environment.
        spaces: "bubblewrap" if the parent already runs inside bubblewrap, else "".
        reach: what the child may reach beside the system's files and its packages.
    """

    source: str
    box: str
    requests: int
    replies: int
    limits: Limits
    packages: Packages
    sandbox: Sandbox
    reach: Reach
    log: str
    log_cap: int
    secrets: tuple[str, ...]
    install: InstallOrder | None = None
    program: Program | None = None
    spaces: str = ""

    @property
    def room_mb(self) -> int:
        """How many MiB the files in the working folder of user code may take together."""
        return INSTALLER_MB if self.install else FILES * self.limits.file_mb

    def to_json(self) -> str:
        """The launch as one line of JSON, without the variables of `install`.

        The JSON goes onto a command line, which every user of the machine can read. The variables
        may hold passwords, so they are set in the environment of the process instead.
        """
        install = replace(self.install, variables={}) if self.install else None
        return json.dumps(asdict(replace(self, install=install)))

    @staticmethod
    def from_json(text: str) -> "Launch":
        """The launch that `to_json` wrote, of which `install` has no variables. Raises KeyError or
        TypeError for any other JSON."""
        fields = json.loads(text)
        reach = fields["reach"]  # JSON turned its tuples into lists
        records = {
            "limits": Limits(**fields["limits"]),
            "packages": Packages(**fields["packages"]),
            "sandbox": Sandbox(**fields["sandbox"]),
            "reach": Reach(**{name: _as_tuple(value) for name, value in reach.items()}),
            "install": InstallOrder(**fields["install"]) if fields["install"] else None,
            "program": _program(fields["program"]) if fields["program"] else None,
        }
        return Launch(**(fields | records))  # the other fields are plain values


def _as_tuple(value: Any) -> Any:
    """A list as a tuple; anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def _program(fields: JsonObject) -> Program:
    """The program with these fields, as JSON has them."""
    return Program(**{name: _as_tuple(value) for name, value in fields.items()})

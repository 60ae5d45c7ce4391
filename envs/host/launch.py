"""The settings with which the parent of user code starts, as JSON on its command line.

Standard library only.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from envs.config.settings import Limits
from envs.isolation.packages import InstallOrder, Packages
from envs.isolation.sandbox import Reach, Sandbox
from envs.json_types import JsonObject

LARGEST_FILES = 4  # so many files of the largest size fit into the working folder of user code
INSTALLER_MB = 256  # room of that folder during an installation, whose packages go elsewhere


@dataclass(frozen=True)
class Program:
    """A program that plays one task and asks the model over HTTP (envs/host/program.py).

    Attributes:
        command: the program and its arguments.
        reward_file: the file that is read once the program has ended, relative to its copy of the
            environment's folder; "" for none.
        gateway: descriptor of the socket through which the parent hands the client the listening
            socket that the program can reach.
        seal: a secret that the parent repeats at the end, so that no output of the program can
            imitate the parent's last message.
        grace_s: when the program is ended before it is done, how long it may take after SIGTERM to
            give back what it has rented; 0 ends it at once.
    """

    command: tuple[str, ...]
    reward_file: str
    gateway: int
    seal: str
    grace_s: float = 0.0


@dataclass(frozen=True)
class Launch:
    """One env process. With `install` it is an installation of packages instead, with `program` one
    rollout of a command.

    Attributes:
        source: the environment's folder, which is copied into `box`.
        box: a private folder, removed at the end.
        requests, replies: file descriptors of the two pipes to the client.
        limits: the resources user code may use.
        packages: where the environment's packages are.
        sandbox: the isolation that must hold.
        reach: what the child may reach besides the system's files and its packages.
        log: the file that output is appended to, up to `log_cap` bytes; "" for none.
        secrets: names of environment variables whose values are replaced in the log.
        install: the packages to install; None to serve the environment.
        program: the program to run; None to serve the environment.
        relay: descriptor of the socket through which the parent hands the client the listening
            socket on which models are asked by name (envs/metering/relay.py); -1 for none.
        spaces: "bubblewrap" if the parent already runs inside bubblewrap, else "".
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
    relay: int = -1
    spaces: str = ""

    @property
    def gateways(self) -> tuple[int, ...]:
        """The descriptors of the sockets through which the parent hands listening sockets to the
        client: that of the program and that of the relay, as far as there are any."""
        descriptors = []
        if self.program is not None:
            descriptors.append(self.program.gateway)
        if self.relay >= 0:
            descriptors.append(self.relay)
        return tuple(descriptors)

    @property
    def room_mb(self) -> int:
        """How many MiB the files in the working folder of user code may take together."""
        return INSTALLER_MB if self.install else LARGEST_FILES * self.limits.file_mb

    def to_json(self) -> str:
        """Return these settings as one line of JSON, without the variables of `install`.

        The JSON goes onto a command line, which every user of the machine can read. The variables
        may hold passwords, so they are set in the environment of the process instead.
        """
        install = replace(self.install, variables={}) if self.install else None
        return json.dumps(asdict(replace(self, install=install)))

    @staticmethod
    def from_json(text: str) -> "Launch":
        """Read the settings that `to_json` wrote; `install` has no variables.

        Raises KeyError or TypeError if the JSON has another form.
        """
        fields = json.loads(text)
        reach = fields["reach"]  # JSON has turned its tuples into lists
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
    """Return a list as a tuple; return any other value unchanged."""
    return tuple(value) if isinstance(value, list) else value


def _program(fields: JsonObject) -> Program:
    """Return the `Program` with these fields (name -> value), in which JSON has turned tuples into
    lists."""
    return Program(**{name: _as_tuple(value) for name, value in fields.items()})

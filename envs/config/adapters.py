"""The table `[adapter]` of environment.toml: which foreign format the folder is written in.

A foreign format is that of another project, such as verifiers. Its kind and the packages it needs
are listed here, so that an installation can be prepared without running anything. The modules that
read the formats are in `envs/adapters/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROGRAMS = Path(__file__).resolve().parents[1] / "adapters" / "programs"
LOCAL = "local"  # the provider of sandboxes that is the rollout's own box
# The folders that a Harbor task expects. /tmp is left out where something needed is below it.
ROOMS = ("/app", "/tests", "/logs", "/solution", "/tmp")
SERVER_PORT = "PORT"  # the environment variable that tells a server of the folder its port


@dataclass(frozen=True)
class Kind:
    """A foreign format.

    Attributes:
        module: the module in `envs/adapters/` that reads the format.
        requirements: packages to install for it; a version named in requirements.txt takes
            precedence.
        program: the program in `envs/adapters/programs/` that plays one rollout and asks the model
            over HTTP; "" if the environment answers and scores in its own process.
        serves: whether the option `server` may name a program that listens on a port.
    """

    module: str
    requirements: tuple[str, ...] = ()
    program: str = ""
    serves: bool = False


KINDS: Mapping[str, Kind] = {
    "flash": Kind("flash", ("freesolo==0.4.2",)),
    "gymnasium": Kind("gymnasium_text", ("gymnasium==1.4.0",)),
    "harbor": Kind("harbor", program="harbor_rollout.py"),
    "mcp": Kind("mcp"),
    "openenv": Kind("openenv", ("openenv==0.10.0",), serves=True),
    "reasoning-gym": Kind("reasoning_gym", ("reasoning-gym==0.1.25",)),
    "rllm": Kind("rllm"),
    "skyrl-gym": Kind("skyrl_gym", ("skyrl-gym==0.4.0",)),
    "synth": Kind("synth", program="synth_rollout.py", serves=True),
    "verifiers": Kind("verifiers", ("verifiers==0.4.0",)),
}


@dataclass(frozen=True)
class Adapter:
    """The table `[adapter]` of an environment.toml.

    Attributes:
        kind: one of `KINDS`.
        options: everything else in the table; the module that reads the format checks them.
    """

    kind: str
    options: Mapping[str, Any]

    @property
    def format(self) -> Kind:
        """What is known about the foreign format, in the table `KINDS`."""
        return KINDS[self.kind]

    @property
    def command(self) -> tuple[str, ...]:
        """The command that plays one rollout: python3 and the path of the format's program. Only
        for a format that has a `program`."""
        return ("python3", str(_PROGRAMS / self.format.program))

    @property
    def rooms(self) -> tuple[str, ...]:
        """The paths at which the environment finds empty folders of its own: those of Harbor tasks
        that are played in its own box."""
        return ROOMS if self.kind == "harbor" and self._provider == LOCAL else ()

    @property
    def rents(self) -> bool:
        """Whether a rollout takes a sandbox elsewhere, which it gives back at its end."""
        return self.kind == "harbor" and self._provider != LOCAL

    @property
    def _provider(self) -> str:
        """The provider of sandboxes that [adapter.sandbox] names; LOCAL if it names none."""
        sandbox = self.options.get("sandbox", {})
        return str(sandbox.get("provider", LOCAL)) if isinstance(sandbox, dict) else LOCAL

    @property
    def serves(self) -> bool:
        """Whether a server from the folder runs beside the environment, on a port of its own: the
        format allows one, and the options name one."""
        return self.format.serves and bool(self.options.get("server"))

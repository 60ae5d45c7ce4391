"""`[adapter]` of environment.toml: which format of others the folder is written in.

The kinds and the packages that each brings along stand here, so that an installation can be
prepared without running anything; what reads a format is in `envs/adapters/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROGRAMS = Path(__file__).resolve().parents[1] / "adapters" / "programs"
SERVER_PORT = "PORT"  # the variable with the port that a server of the folder listens on


@dataclass(frozen=True)
class Kind:
    """A format of others.

    Attributes:
        module: what reads it, in `envs/adapters/`.
        requirements: packages that are installed for it, where requirements.txt names no other
            version of them.
        program: the program in `envs/adapters/programs/` that plays one rollout and asks the model
            over HTTP; "" where the environment answers and scores in its own process.
        serves: whether the option `server` names a program that listens on a port.
    """

    module: str
    requirements: tuple[str, ...] = ()
    program: str = ""
    serves: bool = False


KINDS: Mapping[str, Kind] = {
    "flash": Kind("flash", ("freesolo==0.4.2",)),
    "gymnasium": Kind("gymnasium_text", ("gymnasium==1.4.0",)),
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
    """The table `[adapter]`.

    Attributes:
        kind: one of `KINDS`.
        options: everything else in the table; what reads the format checks them.
    """

    kind: str
    options: Mapping[str, Any]

    @property
    def of(self) -> Kind:
        """The kind's entry in `KINDS`."""
        return KINDS[self.kind]

    @property
    def command(self) -> tuple[str, ...]:
        """What plays a rollout, for kinds with a program."""
        return ("python3", str(_PROGRAMS / self.of.program))

    @property
    def serves(self) -> bool:
        """Whether a server of the folder runs beside the environment, on a port of its own."""
        return self.of.serves and bool(self.options.get("server"))

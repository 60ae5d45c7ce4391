"""A version while it is made: its files, its settings, and processes of it that keep to the time
of the push."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from engine.environments import push_limits, registry, snapshot
from engine.home.run_dir import Home
from envs.config.problem import EnvProblem
from envs.config.settings import EnvSettings
from envs.host.process import EnvProcess

_T = TypeVar("_T")


@dataclass
class Draft:
    """A version being made.

    Attributes:
        folder: where it is made, aside of the stored versions.
        shot: the copy of its files.
        deadline: `time.monotonic()` at which the push has to be done.
        python: the interpreter with its packages, "" for any.
        warnings, problems: what its author should read.
    """

    home: Home
    name: str
    folder: Path
    shot: snapshot.Snapshot
    settings: EnvSettings
    deadline: float
    python: str = ""
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def hash(self) -> str:
        return self.shot.digest[:12]

    @property
    def source(self) -> Path:
        return self.folder / registry.SOURCE

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def secrets(self) -> dict[str, str]:
        """The secrets of the version that are set for this server, by name."""
        return {n: os.environ[n] for n in self.settings.secrets if os.environ.get(n)}

    @property
    def unset_secrets(self) -> list[str]:
        """The names of those that are not."""
        return [n for n in self.settings.secrets if not os.environ.get(n)]

    def process(self) -> EnvProcess:
        """An env process of the version, with as much patience as the push has."""
        limits = self.settings.limits
        start = max(push_limits.START_SECONDS, self.seconds_left - push_limits.AFTER_START)
        return EnvProcess(
            self.source,
            python=self.python or None,
            limits=replace(
                limits,
                start_seconds=min(limits.start_seconds, start),
                call_seconds=min(limits.call_seconds, push_limits.CALL_SECONDS),
            ),
            secrets=self.secrets,
            sandbox=registry.sandbox_of(self.home),
        )

    def timed(self, limit: float, call: Callable[[], _T]) -> tuple[_T, float]:
        """What `call` returns, and the seconds it took.

        Raises EnvProblem; where it took as long as `limit`, with a hint about limits.
        """
        began = time.monotonic()
        try:
            return call(), time.monotonic() - began
        except EnvProblem as problem:
            if time.monotonic() - began >= limit:
                problem.hint = (
                    f"It had {limit:.3g} s: limits.start_seconds in environment.toml is "
                    f"{self.settings.limits.start_seconds:g}, and a push has "
                    f"{push_limits.PUSH_SECONDS:g} s in all, {push_limits.AFTER_START:g} of them "
                    "for the audit. Load or compute less at the start, or raise the limit where "
                    "it is below that."
                )
            raise

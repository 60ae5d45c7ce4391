"""Scripts in the place of programs that need torch, for every process a test starts."""

import json
import os
from pathlib import Path

import pytest

from engine.machine.processes.programs import STAND_INS, Kind


def stand_in(patch: pytest.MonkeyPatch, *, trainer: Path | None = None, **others: Path) -> None:
    """Add stand-ins to those in place. `trainer` regrades too."""
    scripts: dict[Kind, str] = json.loads(os.environ.get(STAND_INS) or "{}")
    if trainer is not None:
        scripts |= {"trainer": str(trainer), "regrader": str(trainer)}
    scripts |= {kind: str(script) for kind, script in others.items()}  # type: ignore[misc]
    patch.setenv(STAND_INS, json.dumps(scripts))

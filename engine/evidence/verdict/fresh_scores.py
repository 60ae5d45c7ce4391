"""What a fresh env process says of a run's answers: are its rewards those of its answers alone?"""

import math
from collections.abc import Mapping
from typing import Any

from engine.core.files import read_object
from engine.evidence.stats import thresholds as at
from engine.home.run_dir import RunDir
from envs.audit import rescore


def rescored(run_dir: RunDir) -> dict[str, Any]:
    """What engine/runs/stored_answers.py left; {} where it left nothing, or the file is damaged."""
    return read_object(run_dir.rescored)


def moved(found: Mapping[str, Any]) -> bool:
    """Whether rewards hang on what the process did before: two fresh ones agree against it.

    Chance is no such thing: not where the audit found it, nor where two fresh processes disagree.
    Behind a network others may have changed their minds too; there it takes more.
    """
    chance = found.get("wavering") or found.get("deterministic") is False
    if chance or not found.get("scored") or not found.get("examples"):
        return False
    tolerated = at.RESCORED_OUTSIDE if found.get("network") else at.RESCORED
    least = max(at.RESCORED_LEAST, math.floor(tolerated * found["scored"]) + 1)
    return found.get("confirmed", 0) >= least


def warnings(run_dir: RunDir) -> list[str]:
    """The sentence a verdict warns with, nothing where there is none to say."""
    found = rescored(run_dir)
    return [f"Rewards are not to be trusted: {rescore.sentence(found)}."] if moved(found) else []

"""What a fresh env process says of a run's answers: are its rewards those of its answers alone?"""

import math
from collections.abc import Mapping
from typing import Any

from engine.core.files import read_object
from engine.evidence.stats import thresholds as limits
from engine.home.run_dir import RunDir
from envs.audit import rescore


def rescored(run_dir: RunDir) -> dict[str, Any]:
    """What engine/runs/stored_answers.py left; {} where it left nothing, or the file is damaged."""
    return read_object(run_dir.rescored)


def moved(scores: Mapping[str, Any]) -> bool:
    """Whether rewards depend on what the process did before: two fresh ones agree against it.

    Chance is not such a dependence: not where the audit found it, nor where two fresh processes
    disagree. Where a scorer uses the network others may have changed their minds too; there it
    takes more.
    """
    chance = scores.get("wavering") or scores.get("deterministic") is False
    if chance or not scores.get("scored") or not scores.get("examples"):
        return False
    tolerated = limits.RESCORED_OUTSIDE if scores.get("network") else limits.RESCORED
    least = max(limits.RESCORED_LEAST, math.floor(tolerated * scores["scored"]) + 1)
    return scores.get("confirmed", 0) >= least


def warnings(run_dir: RunDir) -> list[str]:
    """The sentence a verdict warns with, nothing where there is none to say."""
    scores = rescored(run_dir)
    return [f"Rewards are not to be trusted: {rescore.sentence(scores)}."] if moved(scores) else []

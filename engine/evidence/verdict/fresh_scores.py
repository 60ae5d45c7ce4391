"""What a fresh env process says of a run's answers: are its rewards those of its answers alone?"""

import math
from collections.abc import Mapping
from typing import Any

from engine.core.files import read_object
from engine.evidence.stats import thresholds as limits
from engine.home.run_dir import RunDir
from envs.audit import rescore


def rescored(run_dir: RunDir) -> dict[str, Any]:
    """What came of scoring a run's answers a second time, written by engine/runs/stored_answers.py.

    It has the fields of `Rescoring`. {} where the answers were not scored again, or the file is
    damaged.
    """
    return read_object(run_dir.rescored)


def rewards_depend_on_past(scores: Mapping[str, Any]) -> bool:
    """Whether rewards depend on what the env process had done before it gave them.

    That is so where two fresh processes agree with each other and not with the stored rewards, on
    more answers than are tolerated. `scores` is a stored rescoring, {} where there is none.
    """
    # Random: two fresh processes disagree ("wavering"), or the audit saw it score at random.
    is_random = scores.get("wavering") or scores.get("deterministic") is False
    # Examples are the answers whose reward came out differently.
    if is_random or not scores.get("scored") or not scores.get("examples"):
        return False
    # With a network more are tolerated: a service outside may have changed its mind.
    tolerated_share = limits.RESCORED_OUTSIDE if scores.get("network") else limits.RESCORED
    fewest_above_tolerated = math.floor(tolerated_share * scores["scored"]) + 1
    # Confirmed: both fresh processes gave the same reward, which is not the stored one.
    return scores.get("confirmed", 0) >= max(limits.RESCORED_LEAST, fewest_above_tolerated)


def warnings(run_dir: RunDir) -> list[str]:
    """The warning that rewards depend on what the env process had done before; else []."""
    scores = rescored(run_dir)
    if not rewards_depend_on_past(scores):
        return []
    return [f"Rewards are not to be trusted: {rescore.sentence(scores)}."]

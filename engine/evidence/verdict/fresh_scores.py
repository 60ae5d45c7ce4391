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
    more answers than are tolerated.

    Args:
        scores: a stored rescoring, {} where there is none. Read are `scored` (how many answers were
            scored again), `examples` (those with another reward than the stored one), `confirmed`
            (how many of them got the same other reward twice), `wavering` (how many got two
            different rewards), `deterministic` (the audit's word) and `network` (whether the
            environment may use it).
    """
    is_random = scores.get("wavering") or scores.get("deterministic") is False
    if is_random or not scores.get("scored") or not scores.get("examples"):
        return False
    # With a network more are tolerated: a service outside may answer differently by now.
    tolerated_share = limits.RESCORED_OUTSIDE if scores.get("network") else limits.RESCORED
    tolerated_count = math.floor(tolerated_share * scores["scored"])
    # Of few answers the share tolerates none, and one or two may differ by chance.
    return scores.get("confirmed", 0) >= max(limits.RESCORED_LEAST, tolerated_count + 1)


def warnings(run_dir: RunDir) -> list[str]:
    """The warning that rewards depend on what the env process had done before; else []."""
    scores = rescored(run_dir)
    if not rewards_depend_on_past(scores):
        return []
    return [f"Rewards are not to be trusted: {rescore.sentence(scores)}."]

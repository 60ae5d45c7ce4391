"""Whether a run's rewards depend on its answers alone, tested by scoring them again in a fresh env
process."""

import math
from collections.abc import Mapping
from typing import Any

from engine.core.files import read_object
from engine.evidence.stats import thresholds as limits
from engine.home.run_dir import RunDir
from envs.audit import rescore


def rescored(run_dir: RunDir) -> dict[str, Any]:
    """The result of scoring a run's answers a second time, as stored_answers.py in
    engine/runs/evaluation stored it.

    It has the fields of `Rescoring`. Returns {} if the answers were not scored again, or if the
    file is damaged.
    """
    return read_object(run_dir.rescored)


def rewards_depend_on_past(scores: Mapping[str, Any]) -> bool:
    """Whether rewards depend on what the env process had done before it gave them.

    That is so if two fresh processes agree with each other but not with the stored rewards, on more
    answers than are tolerated.

    Args:
        scores: a stored rescoring, or {}. Keys that are read: `scored` (how many answers were
            scored again), `examples` (answers whose reward differs from the stored one),
            `confirmed` (how many of those got the same new reward twice), `wavering` (how many got
            two different rewards), `deterministic` (False if the reward audit says that rewards are
            random) and `network` (whether the environment may use the network).
    """
    # A reward that differs each time is random, which is another fault.
    is_random = scores.get("wavering") or scores.get("deterministic") is False
    if is_random or not scores.get("scored") or not scores.get("examples"):
        return False
    # With network access more are tolerated: an outside service may answer differently by now.
    tolerated_share = (
        limits.TOLERATED_SHARE_WITH_NETWORK if scores.get("network") else limits.TOLERATED_SHARE
    )
    tolerated_count = math.floor(tolerated_share * scores["scored"])
    # Of few answers the share tolerates none, although one may differ by chance.
    fewest_confirmed = max(limits.FEWEST_DIFFERING, tolerated_count + 1)
    return scores.get("confirmed", 0) >= fewest_confirmed


def warnings(run_dir: RunDir) -> list[str]:
    """The warning that rewards depend on what the env process had done before, as a list of one
    sentence. Returns [] if they do not."""
    scores = rescored(run_dir)
    if not rewards_depend_on_past(scores):
        return []
    return [f"Rewards are not to be trusted: {rescore.sentence(scores)}."]

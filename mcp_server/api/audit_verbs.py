"""The verbs of the command line about scorers and judges: one engine function each.

Engine modules are imported inside them, as in `verbs.py` and for its reason.
"""
# ruff: noqa: PLC0415

from pathlib import Path

from engine.core.reply import Reply
from engine.home.run_dir import Home


def show_audit(home: Home, env_id: str) -> Reply:
    """Return the stored reward audit of an environment version: what its reward pays for answers
    without a solution, such as empty or echoed ones. Raises UserError ENV_NOT_FOUND if there is no
    such version."""
    from engine.environments import push_audit

    return push_audit.audit_reply(home, env_id)


def audit_env(home: Home, env_id: str, workers: int = 0) -> Reply:
    """Audit the reward of an environment version over every row, in `workers` processes (0: as many
    as a training would use), and return the audit: what the reward pays for wrong answers.

    Raises UserError ENV_NOT_FOUND if there is no such version, BAD_ARGUMENT if it scores nothing,
    and ENV_SECRETS, ENV_DEPS or ENV_BUSY if its code cannot be run now.
    """
    from engine.environments import push_audit

    return push_audit.audit_all(home, env_id, workers=workers)


def calibrate_judge(home: Home, rubric: Path, gold: Path) -> Reply:
    """Compare the verdicts of a judge (a language model that scores by the file `rubric`) with
    those of people in the file `gold`, store the result and return it.

    Raises UserError BAD_ARGUMENT if one of the files cannot be read, or if the judge gives no
    verdict.
    """
    from engine.evidence.judges.calibration import calibrate_files

    return calibrate_files(home, rubric, gold)

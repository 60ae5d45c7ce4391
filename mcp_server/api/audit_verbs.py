"""The verbs of the command line about scorers and judges: one engine function each.

Engine modules are imported inside them, as in `verbs.py` and for its reason.
"""
# ruff: noqa: PLC0415

from pathlib import Path

from engine.core.reply import Reply
from engine.home.run_dir import Home


def show_audit(home: Home, env_id: str) -> Reply:
    """The stored reward audit of a version of an environment. Raises UserError ENV_NOT_FOUND."""
    from engine.environments import push_audit

    return push_audit.audit_reply(home, env_id)


def audit_env(home: Home, env_id: str, workers: int = 0) -> Reply:
    """Audit the reward of a version over every row, with so many processes (0: as training takes).

    Raises UserError ENV_NOT_FOUND, ENV_SECRETS, ENV_DEPS, ENV_BUSY, or BAD_ARGUMENT where nothing
    is scored.
    """
    from engine.environments import push_audit

    return push_audit.audit_all(home, env_id, workers=workers)


def calibrate_judge(home: Home, rubric: Path, gold: Path) -> Reply:
    """Hold the judge of a rubric file against gold answers, and store what came of it.

    Raises UserError BAD_ARGUMENT where one of the files cannot be read, or the judge gives no
    verdict.
    """
    from engine.evidence.judges.calibration import calibrate_files

    return calibrate_files(home, rubric, gold)

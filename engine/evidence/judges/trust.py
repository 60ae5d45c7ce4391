"""Whether a verdict may rest on what scored the answers: a judge has to be calibrated first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_object
from engine.endpoints.judges import judge_in
from engine.evidence.judges.calibration import find_calibration
from engine.home.run_dir import Home
from envs.rubric import FILE, Rubric, read_rubric_file

_CALIBRATE = "honesmith judge calibrate RUBRIC GOLD"


def judge_refusal(home: Home, env_dir: Path, measure: str) -> str:
    """A sentence why no verdict may rest on the judge of an environment. Returns "" if one may, or
    if no judge decides.

    Args:
        env_dir: the folder of the environment's version.
        measure: what the verdict compares. If it is "success" and code alone decides success (every
            required criterion has a check), the judge decides nothing.
    """
    rubric_file = env_dir / "source" / FILE
    if not rubric_file.is_file():
        return _refusal_without_file(env_dir)
    try:
        tables = read_rubric_file(rubric_file)
        if "judge" not in tables or (measure == "success" and _code_decides(tables)):
            return ""
        rubric, judge = Rubric.from_file(rubric_file), judge_in(home, rubric_file, asked=False)
    except (ValueError, UserError) as problem:
        return f"The judge cannot be told: {problem}"
    if not rubric.for_judge:
        return ""
    calibration = find_calibration(home, judge, rubric)
    if calibration is None:
        return (
            f"The judge {judge.model} was never held against people: {_CALIBRATE} does that, and "
            "a verdict may rest on it then."
        )
    if not calibration.faults:
        return ""
    return f"The judge {judge.model} may not decide: {'; '.join(calibration.faults)}."


def _refusal_without_file(env_dir: Path) -> str:
    """The refusal for an environment without a rubric file: a sentence if its reward audit saw
    calls of a judge, else ""."""
    if not (read_object(env_dir / "audit.json").get("judge") or {}).get("calls"):
        return ""
    return (
        f"A judge scores here that no {FILE} names, so nothing tells whether it agrees with "
        f"people: write its rubric and [judge] into {FILE}, then {_CALIBRATE}."
    )


def _code_decides(tables: Mapping[str, Any]) -> bool:
    """Whether code alone decides success: some criteria are required, and each of those has a
    check."""
    required = [c for c in tables.get("criteria") or () if c.get("required")]
    return bool(required) and all("check" in criterion for criterion in required)

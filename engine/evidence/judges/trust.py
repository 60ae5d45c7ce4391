"""Whether a verdict may rest on what scored the answers: a judge has to be calibrated first. And
what a verdict says of that judge: its agreement with people, and whether it has drifted since."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_object
from engine.endpoints.judges import judge_in
from engine.evidence.judges.calibration import (
    PastCalibration,
    change_sentence,
    date_text,
    find_calibration,
    with_interval_text,
)
from engine.home.run_dir import Home, RunDir
from envs.judge import Judge
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
    if not (env_dir / "source" / FILE).is_file():
        return _refusal_without_file(env_dir)
    try:
        judge_and_rubric = _judge_that_decides(home, env_dir, measure)
    except (ValueError, UserError) as problem:
        return f"The judge cannot be told: {problem}"
    if judge_and_rubric is None:  # code decides
        return ""
    judge, rubric = judge_and_rubric
    calibration = find_calibration(home, judge, rubric)  # its agreement with people
    if calibration is None:
        return (
            f"The judge {judge.model} was never held against people: {_CALIBRATE} does that, and "
            "a verdict may rest on it then."
        )
    if not calibration.faults:
        return ""
    return f"The judge {judge.model} may not decide: {'; '.join(calibration.faults)}."


def judge_sentences(run: RunDir, env_dir: Path, measure: str) -> list[str]:
    """Sentences on the judge that a verdict rests on: how far it agreed with people when it was
    last calibrated before the run, and how that has changed since. [] if no judge decides.

    `env_dir` and `measure` are as for `judge_refusal`, which must have refused nothing.
    """
    run_began = read_object(run.started_record).get("time") or 0.0  # 0: not known
    if not (env_dir / "source" / FILE).is_file():
        return []
    judge_and_rubric = _judge_that_decides(run.home, env_dir, measure)
    if judge_and_rubric is None:
        return []
    judge, rubric = judge_and_rubric
    calibration = find_calibration(run.home, judge, rubric)
    if calibration is None or not calibration.time:
        return []
    history = [*calibration.earlier, calibration]  # the oldest first
    before_run = [past for past in history if past.time <= run_began]
    basis = before_run[-1] if before_run else history[0]  # the calibration that counts
    late = "" if before_run or not run_began else ", after this run began"
    agreement, kappa = with_interval_text(basis.agreement), with_interval_text(basis.kappa)
    sentences = [
        f"The judge {calibration.model} decides here; calibrated on {date_text(basis.time)}{late}, "
        f"it agreed with people on {agreement} of {basis.agreement.n} gold labels, kappa {kappa}."
    ]
    if isinstance(basis, PastCalibration) and basis.change is not None:
        sentences.append(change_sentence(basis))
        has_drifted = basis.change.high < 0  # the whole interval lies below 0
        if has_drifted:
            sentences.append(
                "What it scored before and after is not one measure: score the stored answers "
                "again (evaluate with regrade) before they are compared."
            )
    return sentences


def _judge_that_decides(home: Home, env_dir: Path, measure: str) -> tuple[Judge, Rubric] | None:
    """The judge of an environment and its rubric; None if the judge decides nothing of `measure`.

    The environment must have a rubric file. Raises ValueError or UserError if it cannot be read, or
    names no judge that can be told apart from others.
    """
    rubric_file = env_dir / "source" / FILE
    tables = read_rubric_file(rubric_file)
    decided_by_code = measure == "success" and _code_decides(tables)
    if "judge" not in tables or decided_by_code:
        return None
    rubric = Rubric.from_file(rubric_file)
    judge = judge_in(home, rubric_file, will_be_asked=False)
    return (judge, rubric) if rubric.for_judge else None


def _refusal_without_file(env_dir: Path) -> str:
    """The refusal for an environment without a rubric file: a sentence if its reward audit saw
    calls of a judge, else ""."""
    judge_record = read_object(env_dir / "audit.json").get("judge") or {}
    if not judge_record.get("calls"):
        return ""
    return (
        f"A judge scores here that no {FILE} names, so nothing tells whether it agrees with "
        f"people: write its rubric and [judge] into {FILE}, then {_CALIBRATE}."
    )


def _code_decides(tables: Mapping[str, Any]) -> bool:
    """Whether code alone decides success: some criteria of a rubric are required, and each of those
    has a check. `tables` is the parsed rubric file."""
    criteria = tables.get("criteria") or ()
    required = [criterion for criterion in criteria if criterion.get("required")]
    return bool(required) and all("check" in criterion for criterion in required)

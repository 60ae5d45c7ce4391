"""A simulated run as the watch of a trainer sees it, step by step."""

import json
from pathlib import Path

from simulated import ROLLOUT, Simulated

from engine.evidence.detect.alerts import Watch
from engine.evidence.detect.views import TrainingRows
from engine.home.run_dir import RunDir
from engine.records.lines.evaluation_row import read_evaluation
from engine.records.lines.trajectory_record import read_trajectories


def lines_of(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def replay(run: Simulated, folder: Path) -> list[tuple[int, str]]:
    """(step, id) of every alert a run raises while it goes on."""
    place = RunDir(folder / f"{run.kind}-{run.seed}")
    place.create()
    watch = Watch(place, run.algorithm, run.known, run.exam_tasks)
    watch.training_rows = TrainingRows(**run.rows)
    watch.lines = [line for line in run.lines if line["step"] == 0]
    place.evals(0).write_text(lines_of(run.exams.get(0, [])))
    raised = []
    for line in run.lines:
        step = line["step"]
        if step == 0:
            continue
        if step in run.rollouts:
            rows = [ROLLOUT | row | {"step": step} for row in run.rollouts[step]]
            place.rollouts(step).write_text(lines_of(rows))
        if step in run.exams:
            place.evals(step).write_text(lines_of(run.exams[step]))
        rollouts = read_trajectories(place.rollouts(step))
        values = {k: v for k, v in line.items() if k != "step"}
        evaluated = read_evaluation(place.evals(step)) if step in run.exams else []
        found, _ = watch.check_step(step, values, rollouts, evaluated)
        raised += [(step, finding.id) for finding in found]
    return raised

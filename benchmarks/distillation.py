"""Does distillation make a student better? A student learns from a teacher that was trained on.

    python -m benchmarks.distillation FOLDER [pebble|smollm2] [--do start,teacher,student]

In a home of its own, through submit, supervisor and trainer: a few steps of SFT make the start, so
that the student can write what the teacher rates; more training makes the teacher of it; then the
start learns from the teacher. Told are, of each run, the held-out success before and after on the
same tasks, the 95 % interval of the change and the verdict, and of the student how far it was from
its teacher. With `--do` only these parts are run; the newest run of a part left out is taken.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.environments import push
from engine.home.run_dir import Home
from engine.records.lines.curves import load_metrics
from engine.records.run_result import RunResult
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest

EXAMPLES = Path(__file__).resolve().parents[1] / "envs" / "examples"
OPEN = ("queued", "preparing", "running", "stopping")
PARTS = ("start", "teacher", "student")


@dataclass(frozen=True)
class Case:
    """What is trained from one base model.

    Attributes:
        env: folder name of an environment in `envs/examples`.
        start: settings of the SFT run that the student begins with.
        teacher_algorithm, teacher: of the run that goes on from there and teaches.
        student: settings of the distillation, its teacher left out.
    """

    env: str
    start: Mapping[str, object]
    teacher_algorithm: str
    teacher: Mapping[str, object]
    student: Mapping[str, object]


CASES = {
    "pebble": Case(
        env="arithmetic",
        start={"max_examples": 64, "batch_size": 8, "steps": 22, "eval_every": 22},
        teacher_algorithm="grpo",
        teacher={"steps": 28, "eval_every": 28, "learning_rate": 1e-3},
        student={"steps": 20, "eval_every": 20},
    ),
    "smollm2": Case(
        env="booking_fields",
        start={"max_examples": 24, "batch_size": 8, "steps": 3, "eval_every": 3, "eval_rows": 24},
        teacher_algorithm="sft",
        teacher={
            "max_examples": 104,
            "batch_size": 8,
            "steps": 13,
            "eval_every": 13,
            "eval_rows": 48,
        },
        student={
            "steps": 8,
            "prompts_per_step": 8,
            "group_size": 2,
            "max_tokens": 48,
            "eval_every": 8,
            "eval_rows": 96,
        },
    ),
}


def finish(home: Home, request: TrainRequest) -> None:
    """Do the run to its end and print what came of it."""
    began = time.monotonic()
    run_id: str = lifecycle.submit(home, request)["run_id"]
    status: Mapping[str, object] = {"state": "queued"}
    while status["state"] in OPEN:
        status = lifecycle.wait(home, run_id, "end", 45.0)
    run = home.run(run_id)
    if status["state"] != "done":
        raise SystemExit(f"{run_id}: {status['state']}: {status.get('reason')}")
    print(f"{run_id} ({time.monotonic() - began:.0f} s): {RunResult.read(run.result).summary}")
    distances = load_metrics(run.metrics).curve("reverse_kl")
    if distances:
        print("  reverse_kl", *(f"{value:.3f}" for _, value in distances))


def newest(home: Home, env: str, algorithm: str) -> str:
    """The newest run by an algorithm on an environment, its best checkpoint."""
    name = f"{env.replace('_', '-')}-{algorithm}-"
    numbers = [int(path.name.removeprefix(name)) for path in home.runs.glob(f"{name}*")]
    return f"{name}{max(numbers)}@best"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?", default="pebble", choices=sorted(CASES))
    parser.add_argument("--do", default=",".join(PARTS))
    parser.add_argument("--from-base", action="store_true", help="the student begins with the base")
    given = parser.parse_args()
    case = CASES[given.model]
    home = Home.locate(given.folder)
    env_id = push.push_env(home, str(EXAMPLES / case.env), roots=[EXAMPLES]).env_id
    start, teacher = "start.txt", "teacher.txt"  # which runs these are
    parts = given.do.split(",")
    if "start" in parts:
        finish(home, TrainRequest(env_id, given.model, "sft", dict(case.start)))
        (home.root / f"{given.model}-{start}").write_text(newest(home, case.env, "sft"))
    start = (home.root / f"{given.model}-{start}").read_text()
    if "teacher" in parts:
        algorithm = case.teacher_algorithm
        finish(home, TrainRequest(env_id, start, algorithm, dict(case.teacher)))
        (home.root / f"{given.model}-{teacher}").write_text(newest(home, case.env, algorithm))
    teacher = (home.root / f"{given.model}-{teacher}").read_text()
    if "student" in parts:
        model = given.model if given.from_base else start
        settings = {**case.student, "teacher": teacher}
        finish(home, TrainRequest(env_id, model, "distill", settings))


if __name__ == "__main__":
    main()

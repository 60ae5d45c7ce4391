"""What a model learns from pairs of its own answers: rollouts, `curate(select="pairs")`, DPO.

    python -m benchmarks.preference FOLDER --model pebble --seed 0 [--settings '{"beta": 0.3}' ...]

A model that is sometimes right answers the training tasks several times; a right and a wrong
answer to one task become a pair; DPO learns from the pairs; then the model before and after answer
the same held-out tasks, and the product's own comparison judges. One run of DPO for each
`--settings`, with the defaults where none is given. Success on the exam comes from the tasks' own
scorer; the pairs' environment has none, so the run itself is judged by its held-out loss.

The home, the start and the pairs are kept in FOLDER and used again by the next call with the same
model and seed. Prints one line of JSON per run and appends it to FOLDER/preference.jsonl.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.files import read_json, write_json
from engine.core.reply import Reply
from engine.home.run_dir import Home
from engine.models import library
from engine.records.settings import GivenSettings
from engine.runs.submit.requests import EvaluationRequest, TrainRequest
from mcp_server.api import verbs

EXAMPLES = Path(__file__).resolve().parents[1] / "envs" / "examples"
WAIT_S = 45.0  # of one call; the runs themselves have no limit here


@dataclass(frozen=True)
class Plan:
    """Where the pairs of one base model come from.

    Attributes:
        env: folder of the tasks, in envs/examples.
        sft: settings of the SFT run before; None where the base itself is right now and then.
        tasks: training tasks that the model answers.
        attempts: answers to each.
        max_per_task: pairs of a task at most.
        exam: held-out tasks on which the models are compared.
    """

    env: str
    sft: GivenSettings | None
    tasks: int
    attempts: int
    max_per_task: int
    exam: int


PLANS = {
    # SFT teaches the form of the answer; about a third of the sums is right afterwards.
    "pebble": Plan(
        env="arithmetic",
        sft={"max_examples": 128, "batch_size": 8, "steps": 32, "eval_rows": 100},
        tasks=500,
        attempts=8,
        max_per_task=1,
        exam=400,
    ),
    "smollm2": Plan(
        env="review_sentiment", sft=None, tasks=200, attempts=4, max_per_task=1, exam=200
    ),
}


@dataclass(frozen=True)
class Prepared:
    """What the runs of DPO begin with.

    Attributes:
        env_id: the version of the tasks, which score.
        start: the model that DPO starts from.
        pairs: the version of the curated pairs.
    """

    env_id: str
    start: str
    pairs: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=sorted(PLANS), default="pebble")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", action="append", default=[], help="JSON, once per run")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    home = Home.locate(asked.folder / f"home-{asked.model}-{asked.seed}")
    prepared = prepare(home, asked.model, asked.seed)
    all_settings: list[GivenSettings] = [json.loads(text) for text in asked.settings] or [{}]
    runs = [dpo_run(home, prepared, settings | {"seed": asked.seed}) for settings in all_settings]
    compare(home, prepared, runs, asked.model)
    better = 0
    for settings, run_id in zip(all_settings, runs, strict=True):
        line = judged(home, prepared, run_id)
        line = {"model": asked.model, "seed": asked.seed, "settings": settings} | line
        better += line["verdict"] == "better"
        print(json.dumps(line), flush=True)
        with (asked.folder / "preference.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return int(better < len(runs))


def prepare(home: Home, model: str, seed: int) -> Prepared:
    """The tasks, the start and the pairs of its rollouts, made once per home."""
    kept = home.root / "preference.json"
    if kept.exists():
        return Prepared(**read_json(kept))
    plan = PLANS[model]
    if model != "pebble":
        library.add(home, model, say=lambda line: None)
    env_id = verbs.push_env(home, str(EXAMPLES / plan.env), roots=[EXAMPLES])["env_id"]
    start = model
    if plan.sft is not None:
        request = TrainRequest(env_id, model, "sft", plan.sft | {"seed": seed})
        start = f"{done(home, verbs.submit_train(home, request)['run_id'])}@best"
    source = evaluate(
        home,
        EvaluationRequest(
            env_id=env_id,
            models=[start],
            split="train",
            rows=plan.tasks,
            attempts=plan.attempts,
            settings={"seed": seed},
        ),
    )
    curated = verbs.curate(
        home,
        [source],
        f"{plan.env.replace('_', '-')}-pairs",
        where="0 < avg < 1",
        select="pairs",
        max_per_task=plan.max_per_task,
        preview=False,
    )
    print(curated["summary"], flush=True)
    prepared = Prepared(env_id, start, curated["env_id"])
    write_json(kept, vars(prepared), fsync=False)
    return prepared


def dpo_run(home: Home, prepared: Prepared, settings: GivenSettings) -> str:
    """Train on the pairs; returns the run's id."""
    request = TrainRequest(prepared.pairs, prepared.start, "dpo", settings)
    return done(home, verbs.submit_train(home, request)["run_id"])


def compare(home: Home, prepared: Prepared, run_ids: Sequence[str], model: str) -> None:
    """Have the model before and those after answer the same held-out tasks."""
    models = [prepared.start, *(f"{run_id}@best" for run_id in run_ids)]
    rows = PLANS[model].exam
    evaluate(home, EvaluationRequest(env_id=prepared.env_id, models=models, rows=rows))


def evaluate(home: Home, request: EvaluationRequest) -> str:
    """Have models answer tasks; returns the evaluation's id."""
    return done(home, verbs.evaluate(home, request)["run_id"])


def done(home: Home, run_id: str) -> str:
    """Wait for the end of a run and return its id. Raises RuntimeError unless it is done."""
    while True:
        status = verbs.wait_run(home, run_id, timeout_s=WAIT_S)
        if status["state"] not in ("queued", "preparing", "running", "stopping"):
            break
    if status["state"] != "done":
        raise RuntimeError(f"{run_id} is {status['state']}: {status['summary']}")
    return run_id


def judged(home: Home, prepared: Prepared, run_id: str) -> Reply:
    """What a run of DPO did to held-out success, and to the loss of the held-out pairs."""
    status = verbs.wait_run(home, run_id, timeout_s=0)
    settings = read_json(home.run(run_id).config)["settings"]
    compared = verbs.compare_runs(home, [prepared.start, f"{run_id}@best"], prepared.env_id)
    pair = compared["comparisons"][0]
    loss = status["result"]["evidence"]
    logs = verbs.read_logs(home, run_id, keys=["preference_accuracy", "chosen_reward"], limit=200)
    return {
        "run": run_id,
        "learning_rate": settings["learning_rate"],
        "beta": settings["beta"],
        "steps": settings["steps"],
        "batch_size": settings["batch_size"],
        "success": [side["value"] for side in compared["arms"]],
        "interval": pair["interval"],
        "verdict": compared["verdict"],
        "heldout_loss": [loss[side].get("value") for side in ("before", "after")],
        "last_step": dict(zip(logs["columns"], logs["rows"][-1], strict=True)),
        "minutes": round(60 * status["spent_hours"], 2),
    }


if __name__ == "__main__":
    sys.exit(main())

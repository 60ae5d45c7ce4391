"""Does sampling beside training, one update behind, end where sampling in turn does?

    python -m benchmarks.sampler_beside FOLDER [--steps 30]

Pebble learns to answer small sums with the number alone, by GRPO twice with the same settings: once
in one process that samples and trains in turn, once in two, of which one samples the next batch
while the other trains (`async_sampling`, `gpus = 2`, on a CPU by `cpu_ranks`). Both are then asked
all held-out tasks. Prints both successes, the verdict of the comparison, and what handing the
weights on took.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from benchmarks.estimates import done
from engine.environments import push
from engine.evidence.compare import compare
from engine.home.run_dir import Home
from engine.records.settings import GivenSettings
from engine.runs import lifecycle
from engine.runs.submit.requests import EvaluationRequest

ENVIRONMENT = '''
from envs import Score, SingleTurnEnv, Task

ASKED = ("What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "{a} + {b} = ?",
         "Say the sum of {a} and {b}.")

class Sums(SingleTurnEnv):
    """One-digit sums in five wordings, to be answered with the number alone."""

    def tasks(self):
        return [
            Task(f"{word}-{a}-{b}", text.format(a=a, b=b), answer=str(a + b),
                 split="heldout" if (a + 2 * b + word) % 2 else "train")
            for word, text in enumerate(ASKED) for a in range(1, 10) for b in range(1, 10)
        ]

    def score(self, task, completion):
        right = completion.strip() == task.answer
        return Score(float(right), success=right)

def load_environment():
    return Sums()
'''
GRPO: GivenSettings = {
    "prompts_per_step": 8,
    "group_size": 8,
    "max_tokens": 16,
    "eval_rows": 100,
    "skill_rows": 0,
    "seed": 3,
}
VARIANTS: dict[str, GivenSettings] = {
    "in turn": {},
    "beside": {"async_sampling": True, "gpus": 2},
}


def trained(home: Home, env_id: str, settings: GivenSettings) -> str:
    """Train and wait; returns the run's id. Exits where the run fails."""
    run = {"env_id": env_id, "algorithm": "grpo", "model": "pebble", "settings": settings}
    end = done(home, run)
    if end["state"] != "done":
        sys.exit(f"{settings}: {end}")
    return str(end["run_id"])


def main() -> None:
    """Train and compare, as the module says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    home = Home.locate(arguments.folder / "home")
    home.config_file.parent.mkdir(parents=True, exist_ok=True)
    home.config_file.write_text("cpu_ranks = 2\n")
    source = arguments.folder / "sums"
    source.mkdir(exist_ok=True)
    (source / "environment.py").write_text(ENVIRONMENT)
    env_id = push.push_env(home, str(source), name="sums").env_id
    runs: dict[str, str] = {}
    for name, change in VARIANTS.items():
        steps = {"steps": arguments.steps, "eval_every": arguments.steps}
        runs[name] = trained(home, env_id, GRPO | steps | change)
        lines = [json.loads(line) for line in home.run(runs[name]).metrics.open()]
        export_s = [line["export_s"] for line in lines if "export_s" in line]
        step_s = (lines[-1]["time"] - lines[1]["time"]) / (len(lines) - 2)
        print(f"{name}: {step_s:.2f} s a step, export_s {statistics.median(export_s):.4f}")
    models = [runs[name] for name in VARIANTS]
    request = EvaluationRequest(env_id=env_id, models=["pebble", *models], rows=300)
    evaluation = lifecycle.submit_evaluation(home, request)["run_id"]
    while lifecycle.wait(home, evaluation, timeout_s=45)["state"] not in ("done", "failed"):
        pass
    reply = compare.compare_runs(home, models, env_id, "", "")
    print(json.dumps(reply, indent=1, default=str)[:4000])


if __name__ == "__main__":
    main()

"""Does drawing tasks by what their own groups earned reach more at equal sampled tokens?

    python -m benchmarks.curriculum FOLDER [--seeds 2] [--steps 40] [--only many,few]

GRPO of pebble on tasks of mixed difficulty: of ten, six are ones it always solves, two ones it
never does, two half-known ones (sums of two-digit numbers, numbers to sort). Held out are
half-known ones alone. Each seed is trained in the shuffled order and with
`curriculum = "rollouts"`, all else equal.
A line per run is kept in FOLDER/runs.jsonl, and a run that stands there is not done again. Prints
for each run the share of effective groups, the tokens sampled, and held-out success.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.estimates import done
from engine.core.files import read_json
from engine.environments import push
from engine.home.run_dir import Home, RunDir
from engine.records.lines.curves import load_metrics
from engine.records.lines.trajectory_record import read_trajectories
from engine.worker.evaluation.pebble_skills import Sample, draw, keys_of

HELDOUT = 200
TRAIN = {"many": 1000, "few": 200}  # more tasks than a run plays groups, and fewer
# Skills by how far pebble knows them, and how many of ten tasks are of each kind.
KINDS = (
    (("compare", "add_one", "upper"), 6),
    (("subtract", "ends"), 2),
    (("add_two", "sort_numbers"), 2),
)
HALF_KNOWN = KINDS[2][0]
ENVIRONMENT = """
import json
from pathlib import Path
from envs import Score, SingleTurnEnv, Task

ROWS = json.loads((Path(__file__).parent / "rows.json").read_text())
STYLES = ("{}", "{}.", "The answer is {}.", "Answer: {}")

class Mixed(SingleTurnEnv):
    def tasks(self):
        return [Task(**row) for row in ROWS]

    def score(self, task, completion):
        said = completion.strip()
        right = any(said == style.format(task.answer_text) for style in STYLES)
        return Score(float(right), success=right)

def load_environment():
    return Mixed()
"""


def mixed_samples(train: int) -> list[tuple[Sample, str]]:
    """Tasks with their side, none with the prompt or the sum of another: the train tasks of all
    kinds, then the held-out half-known ones."""
    chance = random.Random(f"mixed {train}")
    skills = [skill for names, share in KINDS for _ in range(share) for skill in [names]]
    taken: set[str] = set()

    def one(names: Sequence[str]) -> Sample:
        sample = draw(chance, chance.choice(names), taken, measured=True)
        taken.update(keys_of(sample))
        return sample

    rows = [(one(skills[number % len(skills)]), "train") for number in range(train)]
    return rows + [(one(HALF_KNOWN), "heldout") for _ in range(HELDOUT)]


def write_environment(folder: Path, train: int) -> Path:
    """The environment as a folder to push."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "id": f"{sample.skill}-{number}",
            "prompt": sample.messages[0]["content"],
            "answer": sample.answer,
            "split": side,
        }
        for number, (sample, side) in enumerate(mixed_samples(train))
    ]
    (folder / "rows.json").write_text(json.dumps(lines))
    (folder / "environment.py").write_text(ENVIRONMENT)
    return folder


def sampled_tokens(run: RunDir) -> int:
    """The tokens of every answer that the run trained on or replaced."""
    return sum(
        record.tokens
        for step in run.rollout_steps()
        for record in read_trajectories(run.rollouts(step))
    )


def measured(home: Home, env_id: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One run: its share of effective groups, its tokens, and held-out success."""
    model = {"env_id": env_id, "model": "pebble", "algorithm": "grpo", "settings": settings}
    outcome = done(home, model)
    run = home.run(outcome["run_id"])
    evidence = read_json(run.result)["evidence"]
    effective = [
        line["groups_effective"] for line in load_metrics(run.metrics).lines if line["step"] > 0
    ]
    return {
        "given": settings,
        "effective": round(statistics.fmean(effective), 3),
        "effective_late": round(statistics.fmean(effective[-10:]), 3),
        "tokens": sampled_tokens(run),
        "start": evidence["before"]["value"],
        "end": evidence["after"]["value"],
        "verdict": evidence["verdict"],
        "seconds": round(outcome["seconds"], 1),
        "run": run.id,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", default="many,few", help="sizes of the train side, with commas")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    home = Home.locate(folder / "home")
    record = folder / "runs.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    known = {(line["tasks"], json.dumps(line["given"])): line for line in map(json.loads, lines)}
    for size in asked.only.split(","):
        path = write_environment(folder / "envs" / size, TRAIN[size])
        env_id = push.push_env(home, str(path), roots=[folder]).env_id
        for seed in range(asked.seeds):
            for curriculum in ("none", "rollouts"):
                settings = {"steps": asked.steps, "seed": seed, "curriculum": curriculum}
                key = (size, json.dumps(settings))
                if key not in known:
                    known[key] = {"tasks": size} | measured(home, env_id, settings)
                    with record.open("a") as file:
                        file.write(json.dumps(known[key]) + "\n")
                line = known[key]
                print(
                    f"| {TRAIN[size]} | {seed} | {curriculum} | {line['effective']:.0%} "
                    f"| {line['tokens']:,} | {line['start']:.1%} | {line['end']:.1%} "
                    f"| {line['verdict']} | {line['seconds']:.0f} s |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Does drawing tasks by what their own groups earned reach more at equal sampled tokens?

    python -m benchmarks.curriculum FOLDER [--seeds 2] [--steps 40] [--only many,few] [--most 100]

GRPO on tasks of mixed difficulty: of ten, two are sums that the start solves now and then, four are
products that it never solves, four are numbers to write down, which it nearly always does. The
start is pebble after a few steps of SFT on sums and numbers in the form that is asked. Held out are
sums alone. Each seed is
trained in the shuffled order and with `curriculum = "rollouts"`, all else equal. A line per run is
kept in FOLDER/runs.jsonl; a run that stands there is not done again, and `--most` new ones are
done. Prints for each run the share of effective groups, in all steps and in the last ten, the
tokens sampled, and held-out success.
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
from engine.home.store import Store
from engine.records.lines.curves import load_metrics
from engine.records.lines.trajectory_record import read_trajectories

HELDOUT = 400  # sums, half of which choose the checkpoint
TRAIN = {"many": 1000, "few": 200}  # more tasks than a run plays groups, and fewer
SFT_ROWS, SFT_STEPS = 320, 60
ENVIRONMENT = """
import json
from pathlib import Path
from envs import Score, SingleTurnEnv, Task

ROWS = json.loads((Path(__file__).parent / "rows.json").read_text())

class Mixed(SingleTurnEnv):
    def tasks(self):
        return [Task(**row) for row in ROWS]

    def score(self, task, completion):
        right = completion.strip() == task.answer_text
        return Score(float(right), success=right)

def load_environment():
    return Mixed()
"""
KINDS = ("sum", "sum", *["product"] * 4, *["write"] * 4)  # of ten tasks


def question(kind: str, a: int, b: int) -> tuple[str, str]:
    """The prompt and the right answer."""
    if kind == "sum":
        return f"Add {a} and {b}. End with #### and the sum.", f"#### {a + b}"
    if kind == "product":
        return f"Multiply {a} by {b}. End with #### and the product.", f"#### {a * b}"
    return f"Write {a}{b}. End with #### and the number.", f"#### {a}{b}"


def drawn_rows(kinds: Sequence[str], seed: str) -> list[dict[str, str]]:
    """A row of each of the kinds, in their order; no two have the same two numbers."""
    chance = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a + 1, 100)]
    chosen = chance.sample(pairs, len(kinds))
    rows = []
    for kind, (a, b) in zip(kinds, chosen, strict=True):
        prompt, answer = question(kind, *chance.sample((a, b), 2))
        rows.append({"id": f"{kind}-{a}-{b}", "prompt": prompt, "answer": answer})
    return rows


def write_environments(folder: Path, train: int) -> tuple[Path, Path]:
    """(what the start is taught, the mixed tasks), as folders to push. The held-out sums are in
    neither's train side."""
    mixed = [KINDS[number % len(KINDS)] for number in range(train)]
    rows = drawn_rows(["sum"] * HELDOUT + ["sum", "write"] * (SFT_ROWS // 2) + mixed, "mixed")
    heldout = [row | {"split": "heldout"} for row in rows[:HELDOUT]]
    taught = [row | {"split": "train"} for row in rows[HELDOUT : HELDOUT + SFT_ROWS]]
    trained = [row | {"split": "train"} for row in rows[HELDOUT + SFT_ROWS :]]
    for name, lines in (("taught", heldout + taught), ("mixed", heldout + trained)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "rows.json").write_text(json.dumps(lines))
        (folder / name / "environment.py").write_text(ENVIRONMENT)
    return folder / "taught", folder / "mixed"


def sampled_tokens(run: RunDir) -> int:
    """The tokens of every answer that the run trained on or replaced."""
    return sum(
        record.tokens
        for step in run.rollout_steps()
        for record in read_trajectories(run.rollouts(step))
    )


def measured(home: Home, env_id: str, start: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One run from the model `start`: its share of effective groups, its tokens, and held-out
    success."""
    planned = {"env_id": env_id, "model": start, "algorithm": "grpo", "settings": settings}
    outcome = done(home, planned)
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


def start_of(home: Home, env_id: str) -> str:
    """The run that taught the start of the sums in `env_id`; done now if it was not before."""
    with Store(home) as store:
        earlier = [row for row in store.list_runs() if row.env_id == env_id]
    if earlier:
        return earlier[0].run_id
    settings = {"steps": SFT_STEPS, "batch_size": 16, "stop_early": "none"}
    planned = {"env_id": env_id, "model": "pebble", "algorithm": "sft", "settings": settings}
    return done(home, planned)["run_id"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--most", type=int, default=100, help="new runs in this call")
    parser.add_argument("--only", default="many,few", help="sizes of the train side, with commas")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    home = Home.locate(folder / "home")
    record = folder / "runs.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    known = {(line["tasks"], json.dumps(line["given"])): line for line in map(json.loads, lines)}
    for size in asked.only.split(","):
        taught, mixed = write_environments(folder / "envs" / size, TRAIN[size])
        start = start_of(home, push.push_env(home, str(taught), roots=[folder]).env_id)
        env_id = push.push_env(home, str(mixed), roots=[folder]).env_id
        for seed in range(asked.seeds):
            for curriculum in ("none", "rollouts"):
                settings = {"steps": asked.steps, "seed": seed, "curriculum": curriculum}
                key = (size, json.dumps(settings))
                if key not in known and not asked.most:
                    return 0
                if key not in known:
                    asked.most -= 1
                    known[key] = {"tasks": size} | measured(home, env_id, start, settings)
                    with record.open("a") as file:
                        file.write(json.dumps(known[key]) + "\n")
                line = known[key]
                print(
                    f"| {TRAIN[size]} | {seed} | {curriculum} | {line['effective']:.0%}, "
                    f"{line['effective_late']:.0%} "
                    f"| {line['tokens']:,} | {line['start']:.1%} | {line['end']:.1%} "
                    f"| {line['verdict']} | {line['seconds']:.0f} s |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Do GRPO's defaults reach what drawn settings reach, and do they ever end below their start?

    python -m benchmarks.grpo_defaults FOLDER [--draws 6] [--only vowels,ends] [--try JSON]

The model (pebble, or SmolLM2 for names that end so) first learns each task by SFT, for as few steps
as leave it between a tenth and six tenths of the held-out tasks solved. From there GRPO trains once
with no settings at all and then with `--draws` drawn ones, that sample as many completions as the
defaults or twice as many. Where the defaults alone solve eight tenths of the tasks nothing is
drawn: no settings could make their share of the best smaller than that. A line per run is kept in
FOLDER/runs.jsonl, and a run that stands there is not done again, so the whole can be done in
pieces. Prints for each task the held-out success at the start, with the defaults, the best of all,
the share of the best that the defaults reach, the lowest end, and how many runs failed.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.default_settings import HALVES, MORE_OF_GRPO, Case, write_environment
from benchmarks.estimates import done
from engine.core.files import read_json
from engine.environments import push
from engine.home.run_dir import Home
from engine.models import library
from engine.records.settings import GivenSettings

# A start that is solved in part; SFT is tried with so many steps, the fewest first.
START_FROM, START_TO = 0.1, 0.6
MOST_HOURS = 24.0  # of one run: what a new machine is estimated at is wide
ENOUGH = 0.8  # share of the best drawn settings that the defaults should reach
SFT_STEPS = {
    "pebble": (20, 40, 60, 90, 130, 190, 280, 400),
    "smollm2": (4, 8, 12, 18, 26, 38, 56, 80),
}
CASES = tuple(
    Case(case.make, max(case.rows, 320), case.model)
    for half in ("choosing", "reporting")
    for case in HALVES[half] + MORE_OF_GRPO[half]
)


class Record:
    """The lines of runs that were done, in FOLDER/runs.jsonl, by task and what was given."""

    def __init__(self, folder: Path) -> None:
        self.home = Home.locate(folder / "home")
        self._path = folder / "runs.jsonl"
        text = self._path.read_text() if self._path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        self._known = {
            self._key(line["task"], line["model"], line["given"]): line for line in lines
        }

    def line_of(
        self, case: Case, env_id: str, model: str, algorithm: str, given: GivenSettings
    ) -> dict[str, Any]:
        """The line of a run; it is done now if it was not before."""
        key = self._key(case.name, model, given)
        if key not in self._known:
            planned = {"env_id": env_id, "model": model, "algorithm": algorithm, "settings": given}
            planned |= {"max_gpu_hours": MOST_HOURS}
            line = {"task": case.name, "model": model} | self._measured(planned)
            self._known[key] = line
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return self._known[key]

    def _measured(self, planned: dict[str, Any]) -> dict[str, Any]:
        """Do one run: its settings, seconds, and held-out success at the start and as reported."""
        outcome = done(self.home, planned)
        run = self.home.run(outcome["run_id"])
        settings = read_json(run.config)["settings"]
        chosen = ("steps", "learning_rate", "prompts_per_step", "group_size")
        line = {
            "given": planned["settings"],
            "run": run.id,
            **{name: settings[name] for name in chosen if name in settings},
        }
        if not run.result.exists():  # it failed, as a run without a signal does
            return line | {"failed": outcome["error"]}
        evidence = read_json(run.result)["evidence"]
        return {
            **line,
            "start": evidence["before"]["value"],
            "end": evidence["after"]["value"],
            "verdict": evidence["verdict"],
            "seconds": round(outcome["seconds"], 1),
        }

    def _key(self, task: str, model: str, given: GivenSettings) -> str:
        return json.dumps([task, model, given], sort_keys=True)


def start_of(record: Record, case: Case, env_id: str) -> str:
    """The run of SFT that leaves the model between the two shares; "" where none of the lengths
    does."""
    for steps in SFT_STEPS[case.model]:
        given = {"steps": steps, "batch_size": 16, "stop_early": "none", "eval_every": steps}
        line = record.line_of(case, env_id, case.model, "sft", given)
        if START_FROM <= line["end"] <= START_TO:
            return line["run"]
        if line["end"] > START_TO:
            return ""
    return ""


def drawn(chance: random.Random, default: dict[str, Any]) -> GivenSettings:
    """Settings that sample as many completions as the defaults or twice as many."""
    group_size = chance.choice([4, 8, 16])
    prompts = chance.choice([8, 16, 32])
    completions = default["steps"] * default["prompts_per_step"] * default["group_size"]
    steps = max(4, round(completions * chance.choice([1, 2]) / (group_size * prompts)))
    rate = default["learning_rate"] * math.exp(chance.uniform(-1.5, 1.0))
    return {
        "learning_rate": float(f"{rate:.2g}"),
        "group_size": group_size,
        "prompts_per_step": prompts,
        "steps": steps,
        "loss": chance.choice(["dapo", "dr_grpo", "grpo"]),
        "lr_schedule": chance.choice(["constant", "linear"]),
    }


def runs_of(
    record: Record, folder: Path, case: Case, draws: int, tried: list[GivenSettings]
) -> Iterator[dict[str, Any]]:
    """The lines of a task: the defaults, what is tried beside them, and the drawn settings. None
    where no start is solved in part."""
    path = write_environment(folder / "envs", case)
    env_id = push.push_env(record.home, str(path), roots=[folder]).env_id
    start = start_of(record, case, env_id)
    if not start:
        return
    default = record.line_of(case, env_id, start, "grpo", {})
    yield default
    for given in tried:
        yield record.line_of(case, env_id, start, "grpo", given)
    if default.get("end", 0.0) >= ENOUGH:
        return
    chance = random.Random(f"grpo {case.name}")
    for _ in range(draws):
        yield record.line_of(case, env_id, start, "grpo", drawn(chance, default))


def row_of(case: Case, lines: list[dict[str, Any]]) -> str:
    """The row of the table for a task; `lines` are its runs, the one with the defaults first. A run
    that failed has no end: it counts as 0."""
    ends = [line.get("end", 0.0) for line in lines]
    start = next((line["start"] for line in lines if "start" in line), math.nan)
    reached = ends[0] / max(ends) if max(ends) else 1.0
    default = f"{ends[0]:.0%}" if "end" in lines[0] else "failed"
    return (
        f"| {case.name} | {start:.0%} | {default} | {max(ends):.0%} | {reached:.2f} "
        f"| {min(ends):.0%} | {sum('failed' in line for line in lines)} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="names of tasks, with commas")
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--try", dest="tried", action="append", default=[], help="JSON, per run")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder)
    tried = [json.loads(text) for text in asked.tried]
    for case in CASES:
        if asked.only and case.name not in asked.only.split(","):
            continue
        if case.model != "pebble":
            library.add(record.home, case.model, say=lambda line: None)
        lines = []
        for line in runs_of(record, folder, case, asked.draws, tried):
            lines.append(line)
            print(json.dumps(line), file=sys.stderr, flush=True)
        if not lines:
            print(f"| {case.name} | no start between the two shares |", flush=True)
            continue
        print(row_of(case, lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Does `diagnose` name the right cause first? Real runs with one trouble planted, and healthy ones.

    python -m benchmarks.diagnosis FOLDER [--only NAME,...] [--model smollm2] [--seed 1]
        [--sample 24] [--seconds 540]
    python -m benchmarks.diagnosis FOLDER --table

Every scenario of `scenarios.py` is a run through submit, supervisor and trainer in one home in
FOLDER. A finished one is not run again: a second call goes on, and diagnoses all runs anew. A hit
is a scenario whose first finding is the planted trouble and whose lever is the cure, and a healthy
run without any finding.
"""

import argparse
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import planted
from benchmarks.scenarios import SCENARIOS, Scenario
from engine.core.errors import UserError
from engine.core.files import read_json, read_lines, write_json
from engine.environments import push
from engine.evidence.detect.diagnose import diagnose
from engine.home.run_dir import Home
from engine.models import library
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest

OPEN = ("queued", "preparing", "running", "stopping")
POLL_S = 45.0  # of one wait
SHOWN_CHARS = 110  # of a lever, in the table


@dataclass(frozen=True)
class Outcome:
    """What the product says about one run.

    Attributes:
        first: id of the first finding, "" without one.
        lever: its lever as JSON; {} without one.
        others: ids of the other findings.
        alerts: (step, id) of every alert of a detector; alerts on time or money have no step.
        note: how the run ended, or why it was refused.
    """

    first: str
    lever: Mapping[str, object]
    others: Sequence[str]
    alerts: Sequence[tuple[int, str]]
    note: str

    def hits(self, scenario: Scenario) -> bool:
        """Whether this is the right word about the scenario."""
        alert_in_time = not scenario.alert_by or any(
            step <= scenario.alert_by and name in scenario.alerts for step, name in self.alerts
        )
        if not scenario.first:
            return not self.first and not self.alerts and self.note.startswith("done")
        return self.first in scenario.first and is_cure(scenario.cure, self.lever) and alert_in_time


def is_cure(cures: str, lever: Mapping[str, object]) -> bool:
    """Whether a lever is one of the cures, which stand between " | ".

    A cure is "SETTING up", "SETTING down", "SETTING >= NUMBER", "SETTING = VALUE", or "edit WORDS",
    whose words (a regular expression) stand in the edit.
    """
    return any(_is_one_cure(cure.strip(), lever) for cure in cures.split(" | "))


def _is_one_cure(cure: str, lever: Mapping[str, object]) -> bool:
    kind, _, rest = cure.partition(" ")
    if kind == "edit":
        return "edit" in lever and re.search(rest, str(lever["edit"]), re.IGNORECASE) is not None
    now, to = lever.get("now"), lever.get("to")
    if lever.get("setting") != kind:
        return False
    if rest.startswith("= "):
        return str(to) == rest.removeprefix("= ")
    if not isinstance(to, int | float):
        return False
    if rest.startswith(">= "):
        return to >= float(rest.removeprefix(">= "))
    if not isinstance(now, int | float):
        return False
    return to > now if rest == "up" else to < now


def main() -> int:
    asked = _arguments()
    asked.folder.mkdir(parents=True, exist_ok=True)
    chosen = _chosen(asked)
    home = Home.locate(asked.folder / "home")
    end = time.monotonic() + asked.seconds
    for name in chosen:
        if asked.table or time.monotonic() > end:
            break
        run_scenario(home, asked.folder, name, asked.seed)
    return print_table(home, asked.folder, chosen)


def _chosen(asked: argparse.Namespace) -> dict[str, Scenario]:
    """The scenarios that were asked for, by name."""
    wanted = [name for name in asked.only.split(",") if name]
    chosen = {
        name: scenario
        for name, scenario in SCENARIOS.items()
        if (not wanted or name in wanted) and asked.model in ("", scenario.base)
    }
    if not asked.sample:
        return chosen
    drawn_from = [name for name, each in chosen.items() if each.first and each.base == "pebble"]
    drawn = random.Random(asked.seed).sample(drawn_from, min(asked.sample, len(drawn_from)))
    return {
        name: scenario
        for name, scenario in chosen.items()
        if name in drawn or name not in drawn_from
    }


def _arguments() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="names of scenarios, with commas")
    parser.add_argument("--model", default="", help="only those of this base model")
    parser.add_argument("--seed", type=int, default=0, help="other rows and other runs")
    parser.add_argument(
        "--sample", type=int, default=0, help="draw so many of those planted in pebble by the seed"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this time")
    parser.add_argument("--table", action="store_true", help="run nothing")
    asked = parser.parse_args()
    unknown = sorted(set(filter(None, asked.only.split(","))) - set(SCENARIOS))
    if unknown:
        parser.error(f"no scenario {unknown[0]}; there are {', '.join(SCENARIOS)}")
    return asked


def run_scenario(home: Home, folder: Path, name: str, seed: int = 0) -> str:
    """Do the run of a scenario, and those it starts from, unless it was done; returns its id.

    "" where the product refused it. `seed` draws other rows, and is added to that of the run.
    """
    record = _record(folder, name)
    done_id = str(read_json(record)["run_id"]) if record.exists() else ""
    if done_id:
        return done_id
    began = time.monotonic()
    run_id, refusal = "", ""
    try:
        request = _request(home, folder, name, seed)
        run_id = lifecycle.submit(home, request)["run_id"]
    except UserError as error:
        refusal = f"{error.code}: {error}"
    while run_id and lifecycle.wait(home, run_id, "end", POLL_S)["state"] in OPEN:
        pass
    seconds = round(time.monotonic() - began, 1)
    write_json(record, {"run_id": run_id, "refusal": refusal, "seconds": seconds})
    print(f"{name}: {run_id or refusal} ({seconds:.0f} s)", flush=True)
    return run_id


def _request(home: Home, folder: Path, name: str, seed: int) -> TrainRequest:
    """The submit of a scenario, its environment pushed and the runs it needs done.

    Raises UserError where the push is refused.
    """
    scenario = SCENARIOS[name]
    model = scenario.base
    if scenario.start:
        model = _last_checkpoint(home, run_scenario(home, folder, scenario.start, seed))
    settings = dict(scenario.settings)
    settings["seed"] = settings.get("seed", 0) + seed
    if scenario.teacher:
        teacher_run = run_scenario(home, folder, scenario.teacher, seed)
        settings["teacher"] = _last_checkpoint(home, teacher_run)
    if scenario.base != "pebble":
        library.add(home, scenario.base, say=lambda line: None)
    env = planted.write(folder / "envs" / name, scenario.tasks, seed)
    env_id = push.push_env(home, str(env), roots=[env.parent]).env_id
    return TrainRequest(env_id, model, scenario.algorithm, settings)


def _last_checkpoint(home: Home, run_id: str) -> str:
    """The model of a run after its last step that was saved."""
    return f"{run_id}@step{home.run(run_id).checkpoint_steps()[-1]}"


def _record(folder: Path, name: str) -> Path:
    (folder / "runs").mkdir(exist_ok=True)
    return folder / "runs" / f"{name}.json"


def outcome_of(home: Home, record: Mapping[str, object]) -> Outcome:
    """What the product says about the run of a record; of a refused one, the refusal."""
    run_id = str(record["run_id"])
    if not run_id:
        return Outcome("", {}, (), (), f"refused: {record['refusal']}")
    reply = diagnose(home, run_id)
    findings = reply["findings"]
    events, _ = read_lines(home.run(run_id).events, 0)
    return Outcome(
        first=findings[0]["id"] if findings else "",
        lever=findings[0]["lever"] if findings else {},
        others=[finding["id"] for finding in findings[1:]],
        alerts=[
            (int(event["step"]), str(event["id"]))
            for event in events
            if event.get("event") == "alert" and "step" in event
        ],
        note=f"{reply['state']} {record['seconds']} s",
    )


def print_table(home: Home, folder: Path, chosen: Mapping[str, Scenario]) -> int:
    """Print a line for each run that was done, and the totals; returns how many missed."""
    hits: dict[bool, int] = {True: 0, False: 0}  # healthy -> hits
    totals: dict[bool, int] = {True: 0, False: 0}
    print("| scenario | survey | first finding | lever | also | alerts | hit |")
    print("|---|---|---|---|---|---|---|")
    for name, scenario in chosen.items():
        if not _record(folder, name).exists():
            continue
        outcome = outcome_of(home, read_json(_record(folder, name)))
        healthy = not scenario.first
        hit = outcome.hits(scenario)
        totals[healthy] += 1
        hits[healthy] += hit
        print("| " + " | ".join(_cells(name, scenario, outcome, hit=hit)) + " |")
    print(f"\nplanted: {hits[False]} of {totals[False]}; healthy: {hits[True]} of {totals[True]}")
    return sum(totals.values()) - sum(hits.values())


def _cells(name: str, scenario: Scenario, outcome: Outcome, *, hit: bool) -> list[str]:
    """The cells of a scenario's line."""
    if outcome.lever.get("setting"):
        lever = f"{outcome.lever['setting']} {outcome.lever['now']} to {outcome.lever['to']}"
    else:
        lever = str(outcome.lever.get("edit", ""))[:SHOWN_CHARS]
    alerts = ", ".join(f"{name} at {step}" for step, name in outcome.alerts)
    first = outcome.first or f"none ({outcome.note})"
    return [
        name,
        scenario.survey,
        first,
        lever,
        ", ".join(outcome.others),
        alerts,
        "yes" if hit else f"no: {'/'.join(scenario.first) or 'none'}, {scenario.cure}",
    ]


if __name__ == "__main__":
    sys.exit(main())

"""Does the probe of robustness find a brittle tool wording, and does `vary_wording` mend it?

    python -m benchmarks.robustness FOLDER [--vary 0,0.5] [--seeds 1] [--rows 100]

In a home of its own, through submit, supervisor and trainer: SFT of pebble on an environment in
which every row shows the same text of the same tool (the call is right if name and both arguments
are; every word of the held-out questions stands in training rows, no pair of them does), once for
each share of `vary_wording` and each seed; then an evaluation of each best checkpoint on the
held-out tasks as they are and in other words, and one on a second environment that differs in
nothing but the description of its tool, written by hand and used by neither the probe nor the
training. Told are the success in each, the part of the gap that the share closes, and at the end
the means over the seeds.
"""

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.keeping import OPEN
from engine.environments import push
from engine.evidence.verdict.verdict import run_verdict
from engine.home.run_dir import Home
from engine.runs import lifecycle
from engine.runs.submit.requests import EvaluationRequest, TrainRequest

ENVIRONMENT = """
from envs import Message, MultiTurnEnv, Score, Task, ToolCall

ITEMS = "apple bread candle drum egg fan glove hat ink jar kite lamp".split()
TOWNS = "oslo paris rome bern kiel lyon nice bonn york bath cork genoa".split()
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "DESCRIPTION",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}, "town": {"type": "string"}},
            "required": ["item", "town"],
        },
    },
}


class Prices(MultiTurnEnv):
    tools = [TOOL]

    def tasks(self):
        tasks = []
        for number in range(len(ITEMS) * len(TOWNS)):
            item, town = ITEMS[number // len(TOWNS)], TOWNS[number % len(TOWNS)]
            call = ToolCall("lookup", {"item": item, "town": town})
            held_out = (number // len(TOWNS) + number % len(TOWNS)) % 3 == 0
            tasks.append(Task(
                f"{item}-{town}",
                f"What is the price of {item} in {town}?",
                answer=[Message("assistant", "", tool_calls=[call])],
                split="heldout" if held_out else "train",
                metadata=call.arguments,
            ))
        return tasks

    def start(self, task):
        return {"right": False, "expected": task.metadata}

    def step(self, state, completion):
        calls = completion.tool_calls
        state["right"] = len(calls) == 1 and calls[0].name == "lookup" and (
            calls[0].arguments == state["expected"])
        return None

    def score(self, task, state):
        return Score(float(state["right"]), success=state["right"])


def load_environment():
    return Prices()
"""
DESCRIPTION = (
    "Price of an item in a town. Give the item and the town as they stand in the question. Prices "
    "are in euros and change every day."
)
BY_HAND = "Look up what something costs somewhere."
KINDS = ("tools", "wording", "system")
AS_IT_IS, OTHER_TOOL = "as it is", "tool described by hand"
# A fixed number of steps for every share, so that none is stopped before another.
SETTINGS: Mapping[str, object] = {"steps": 200, "stop_early": "none", "eval_every": 100}


@dataclass(frozen=True)
class Shares:
    """The success of one model: on its tasks as they are, and by kind of other words."""

    plain: float
    reworded: Mapping[str, float]

    def gap(self, kind: str) -> float:
        """How much of the success the other words take."""
        return self.plain - self.reworded[kind]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vary", default="0,0.5")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=100)
    asked = parser.parse_args()
    home = Home.locate(asked.folder)
    env_id, other_id = pushed(home)
    shares = [float(share) for share in asked.vary.split(",")]
    measured = {
        share: [
            shares_of(home, env_id, other_id, trained(home, env_id, share, seed), asked.rows)
            for seed in range(asked.seeds)
        ]
        for share in shares
    }
    for share, runs in measured.items():
        print(f"vary_wording {share:g}, mean of {len(runs)}: {in_words(runs)}")
    for share in shares[1:]:
        print(f"vary_wording {share:g}: {closed(measured[shares[0]], measured[share])}")


def pushed(home: Home) -> list[str]:
    """The ids of the environment and of the same with its tool described by hand."""
    env_ids = []
    for name, description in (("prices", DESCRIPTION), ("prices_by_hand", BY_HAND)):
        folder = home.root.parent / "tasks" / name
        folder.mkdir(parents=True, exist_ok=True)
        code = ENVIRONMENT.replace("DESCRIPTION", description)
        (folder / "environment.py").write_text(code, "utf-8")
        env_ids.append(push.push_env(home, str(folder), roots=[folder]).env_id)
    return env_ids


def trained(home: Home, env_id: str, share: float, seed: int) -> str:
    """Train once; returns the reference of its best checkpoint."""
    settings = {**SETTINGS, "vary_wording": share, "seed": seed}
    run_id = lifecycle.submit(home, TrainRequest(env_id, "pebble", "sft", settings))["run_id"]
    wait(home, run_id)
    print(f"{run_id} vary_wording {share:g} seed {seed}: {run_verdict(home.run(run_id)).summary}")
    return f"{run_id}@best"


def shares_of(home: Home, env_id: str, other_id: str, model: str, rows: int) -> Shares:
    """What a model reaches on the tasks as they are, in other words, and with the other tool."""
    probe = EvaluationRequest(env_id, [model], rows=rows, perturb=KINDS)
    by_hand = EvaluationRequest(other_id, [model], rows=rows)
    runs = [lifecycle.submit_evaluation(home, request)["run_id"] for request in (probe, by_hand)]
    for run_id in runs:
        wait(home, run_id)
    facts, other_facts = (run_verdict(home.run(run_id)).evaluation for run_id in runs)
    assert facts is not None and other_facts is not None  # both are evaluations
    kinds = facts.robustness[0].kinds
    plain, by_hand_level = facts.models[0].level, other_facts.models[0].level
    assert plain is not None and by_hand_level is not None  # both scored
    reworded = {kind.kind: (kind.outcome.after if kind.outcome else None) or 0.0 for kind in kinds}
    shares = Shares(plain.value or 0.0, {**reworded, OTHER_TOOL: by_hand_level.value or 0.0})
    print(f"{model}: {facts.robustness[0].sentence}", flush=True)
    print(f"{model}: {OTHER_TOOL} {shares.reworded[OTHER_TOOL]:.1%}", flush=True)
    return shares


def wait(home: Home, run_id: str) -> None:
    """Wait until a run is done. Raises SystemExit where it failed."""
    status: Mapping[str, object] = {"state": "queued"}
    while status["state"] in OPEN:
        status = lifecycle.wait(home, run_id, "end", 45.0)
    if status["state"] != "done":
        raise SystemExit(f"{run_id}: {status['state']}: {status.get('reason')}")


def in_words(runs: list[Shares]) -> str:
    """The means over runs in words."""
    means = {AS_IT_IS: statistics.fmean(run.plain for run in runs)}
    means |= {kind: statistics.fmean(run.reworded[kind] for run in runs) for kind in kinds_of(runs)}
    return ", ".join(f"{name} {mean:.1%}" for name, mean in means.items())


def closed(plain: list[Shares], varied: list[Shares]) -> str:
    """Which part of each gap the varied training closes, in words; "no gap" where there is none."""
    parts = []
    for kind in kinds_of(plain):
        before = statistics.fmean(run.gap(kind) for run in plain)
        after = statistics.fmean(run.gap(kind) for run in varied)
        part = f"{1 - after / before:.0%} of the gap closed" if before > 0 else "no gap"
        parts.append(f"{kind}: {part}")
    return ", ".join(parts)


def kinds_of(runs: list[Shares]) -> list[str]:
    """The kinds of other words that were asked."""
    return list(runs[0].reworded)


if __name__ == "__main__":
    main()

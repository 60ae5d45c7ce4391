"""Does `keep` keep what a model could do, and what does it cost the new task?

    python -m benchmarks.keeping FOLDER [pebble|smollm2] [--keep 0,recipe] [--seeds 3] [--tasks a,b]

In a home of its own, through submit, supervisor and trainer: SFT on tasks whose answers have a form
far from the base's, with the settings that nobody chose but for those in TASKS, once for each share
and seed. Told are, of each run, the held-out success before and after on the tasks that did not
choose the checkpoint, what was right of the battery of earlier skills before and after, and the
word on it; then for each task and share the means over the seeds, and what the first share given
(plain) has in success and battery beside each other. "recipe" leaves `keep` out. SmolLM2 must be in
the home before: `honesmith models add smollm2`.
"""

import argparse
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import exact_rows
from engine.environments import push
from engine.evidence.verdict.verdict import run_verdict
from engine.home.run_dir import Home
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest

EXAMPLES = Path(__file__).resolve().parents[1] / "envs" / "examples"
OPEN = ("queued", "preparing", "running", "stopping")
TRAIN_ROWS, HELDOUT_ROWS = 320, 120


def word(rng: random.Random) -> str:
    """Five or six letters that can be spoken."""
    syllables = (rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(2))
    return "".join(syllables) + rng.choice("dgklmnprst") + rng.choice(("", "a", "o"))


def ends(rng: random.Random) -> tuple[str, str]:
    """Ask for the first and the last letter of a word, with a dash between them."""
    asked = word(rng)
    return f"Give the ends of {asked}.", f"{asked[0]}-{asked[-1]}"


def tag(rng: random.Random) -> tuple[str, str]:
    """Ask for a word as an empty tag."""
    asked = word(rng)
    return f"Write {asked} as a tag.", f"<{asked}/>"


@dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        draw: makes a prompt and its answer; None for a folder of envs/examples of the task's name.
        settings: those that somebody chose.
    """

    draw: exact_rows.Draw | None
    settings: Mapping[str, object]


# 120 steps, long enough to forget.
LONG = {"epochs": 12, "batch_size": 32, "eval_every": 30, "stop_early": "none"}
TASKS: dict[str, dict[str, Task]] = {
    "pebble": {
        "ends": Task(ends, LONG),
        "tag": Task(tag, LONG),
    },
    "smollm2": {
        name: Task(
            None,
            {
                "max_examples": 128,
                "batch_size": 8,
                "steps": 16,
                "eval_every": 16,
                "eval_rows": 64,
            },
        )
        for name in ("booking_fields", "review_sentiment")
    },
}


@dataclass(frozen=True)
class Outcome:
    """What came of one run: shares before and after, None where nothing was compared."""

    success: tuple[float | None, float | None]
    battery: tuple[float | None, float | None]
    word: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", nargs="?", default="pebble", choices=sorted(TASKS))
    parser.add_argument("--keep", default="0,recipe", help="shares, and recipe for the default")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", help="all of the model's unless given")
    asked = parser.parse_args()
    home = Home.locate(asked.folder)
    tasks = TASKS[asked.model]
    for name in asked.tasks.split(",") if asked.tasks else tasks:
        env_id = pushed(home, name, tasks[name])
        shares = asked.keep.split(",")
        by_share: dict[str, list[Outcome]] = {}
        for share in shares:
            settings = {**tasks[name].settings, **chosen(share)}
            by_share[share] = [
                outcome_of(home, env_id, asked.model, settings, seed) for seed in range(asked.seeds)
            ]
            print(
                f"{asked.model} {name} keep {share}, mean of {asked.seeds}: "
                f"{means(by_share[share])}",
                flush=True,
            )
        for share in shares[1:]:
            print(f"{asked.model} {name}: {goal(by_share[shares[0]], by_share[share])}", flush=True)


def chosen(share: str) -> dict[str, object]:
    """The setting that a share on the command line means; none for the recipe's."""
    return {} if share == "recipe" else {"keep": float(share)}


def goal(plain: list[Outcome], kept: list[Outcome]) -> str:
    """Whether runs that replay reach 95 % of the success of plain ones and lose at most 5 points of
    the battery, with the numbers."""
    mean = statistics.fmean
    success = [mean([run.success[1] or 0.0 for run in runs]) for runs in (plain, kept)]
    lost = [
        mean([(run.battery[0] or 0.0) - (run.battery[1] or 0.0) for run in runs])
        for runs in (plain, kept)
    ]
    is_met = success[1] >= 0.95 * success[0] and lost[1] <= 0.05
    word = "met" if is_met else "missed"
    return (
        f"{word}: success {success[1]:.1%} beside {success[0]:.1%}, "
        f"lost of the battery {100 * lost[1]:.1f} points beside {100 * lost[0]:.1f}"
    )


def pushed(home: Home, name: str, task: Task) -> str:
    """The id of the task's environment, pushed."""
    if task.draw is None:
        return push.push_env(home, str(EXAMPLES / name), roots=[EXAMPLES]).env_id
    rows = exact_rows.unique_rows(task.draw, random.Random(name), TRAIN_ROWS + HELDOUT_ROWS)
    folder = home.root.parent / "tasks" / name
    exact_rows.write(folder, rows, heldout=range(HELDOUT_ROWS))
    return push.push_env(home, str(folder), roots=[folder]).env_id


def outcome_of(
    home: Home, env_id: str, model: str, settings: Mapping[str, object], seed: int
) -> Outcome:
    """Train once, print what came of it, and return that."""
    began = time.monotonic()
    request = TrainRequest(env_id, model, "sft", {**settings, "seed": seed})
    run_id: str = lifecycle.submit(home, request)["run_id"]
    status: Mapping[str, object] = {"state": "queued"}
    while status["state"] in OPEN:
        status = lifecycle.wait(home, run_id, "end", 45.0)
    if status["state"] != "done":
        raise SystemExit(f"{run_id}: {status['state']}: {status.get('reason')}")
    verdict = run_verdict(home.run(run_id))
    compared, skills = verdict.comparison.outcome, verdict.kept_skills
    assert skills is not None  # every training run asks its battery
    battery = skills.batteries[0]
    outcome = Outcome(
        (compared.before, compared.after), (battery.before, battery.after), battery.verdict
    )
    seconds = time.monotonic() - began
    print(
        f"{run_id} keep {settings.get('keep', 'recipe')} seed {seed} ({seconds:.0f} s): {outcome}",
        flush=True,
    )
    return outcome


def means(outcomes: list[Outcome]) -> str:
    """The means over runs in words."""
    success = [outcome.success[1] or 0.0 for outcome in outcomes]
    before = [outcome.battery[0] or 0.0 for outcome in outcomes]
    after = [outcome.battery[1] or 0.0 for outcome in outcomes]
    mean = statistics.fmean
    return (
        f"success {mean(success):.1%}, battery {mean(before):.1%} to {mean(after):.1%}, "
        f"{', '.join(outcome.word for outcome in outcomes)}"
    )


if __name__ == "__main__":
    main()

"""Do the settings that nobody chose reach? SFT's defaults against drawn settings, task by task.

    python -m benchmarks.default_settings FOLDER --half choosing [--draws 20] [--only vowels,ends]
    python -m benchmarks.default_settings FOLDER --half reporting

The tasks of one half were looked at to choose the defaults, those of the other were not. Each is
trained once with no settings at all and then with `--draws` drawn ones, whose number of trained
rows is that of the defaults or twice it. Where the defaults alone solve nine tenths of the tasks,
nothing is drawn unless `--draw-always` is given: no settings could make their share of the best
smaller than that. A line per run is kept in FOLDER/runs.jsonl, and a run that stands there is not
done again. Prints, for each task, its rows, the held-out success at the start and with the
defaults, the best of all runs, the share of the best that the defaults reach (">=" and their
success where nothing was drawn), how many settings were drawn, and the seconds of the defaults.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import exact_rows
from benchmarks.estimates import done
from engine.core.files import read_json
from engine.environments import push
from engine.home.run_dir import Home
from engine.models import library
from engine.records.settings import GivenSettings

ENOUGH = 0.9  # share of the best drawn settings that the defaults should reach
HELDOUT = 200  # rows of each task that are asked, half of them to choose the checkpoint

Row = tuple[str, str]  # prompt, answer
LETTERS = "abcdefghijklmnoprstuvw"
NOUNS = (
    "dog cat cow pig hen bee fox owl ant bat sun moon star rain snow tree leaf rose corn rice "
    "milk salt lamp door desk book boat road hill lake"
).split()
MONTHS = (
    "january february march april may june july august september october november december"
).split()
NAMES = "anna ben cara dan eva finn gina hugo ida jon kira leo mia noel olga paul".split()
ROMAN = ((50, "l"), (40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i"))


def word(chance: random.Random, shortest: int = 3, longest: int = 6) -> str:
    return "".join(chance.choices(LETTERS, k=chance.randint(shortest, longest)))


def vowels(chance: random.Random) -> Row:
    asked = word(chance, 4, 7)
    return f"How many vowels has {asked}?", str(sum(asked.count(each) for each in "aeiou"))


def ends(chance: random.Random) -> Row:
    asked = word(chance)
    return f"First and last letter of {asked}?", f"{asked[0]} {asked[-1]}"


def kinds(chance: random.Random) -> Row:
    """Twenty nouns, each with an answer of its own, in changing sentences."""
    asked = chance.randrange(20)
    opening = chance.choice(["Tell me about", "What of", "And", "Say something of", "Now"])
    answer = f"{NOUNS[(asked * 7 + 3) % 20]} and {NOUNS[(asked * 3 + 1) % 20]}"
    return f"{opening} the {NOUNS[asked]}, {chance.choice(NAMES)} {chance.randint(1, 99)}", answer


def subtract(chance: random.Random) -> Row:
    less, more = sorted((chance.randint(0, 49), chance.randint(0, 49)))
    return f"{more} minus {less}?", str(more - less)


def tagged(chance: random.Random) -> Row:
    asked = word(chance)
    return f"Put {asked} into tags", f"<word>{asked}</word>"


def doubled(chance: random.Random) -> Row:
    asked = word(chance, 3, 5)
    return f"Double each letter of {asked}", "".join(each * 2 for each in asked)


def rotated(chance: random.Random) -> Row:
    asked = word(chance)
    return f"Move the first letter of {asked} to its end", asked[1:] + asked[0]


def routed(chance: random.Random) -> Row:
    """Twenty matters, each for a desk of its own, in changing sentences."""
    asked = chance.randrange(20)
    matter, desk = NOUNS[10 + asked], f"desk {chr(97 + (asked * 11) % 20)}{asked * 13 % 10}"
    opening = chance.choice(["My question is on", "Please help with", "I wrote about", "Where is"])
    return f"{opening} {matter}. {chance.choice(NAMES)}, {chance.randint(1, 99)}", desk


def roman(chance: random.Random) -> Row:
    number, text = chance.randint(1, 60), ""
    left = number
    for value, sign in ROMAN:
        while left >= value:
            text, left = text + sign, left - value
    return f"Room {chance.randint(1, 30)}: write {number} in roman", text


def largest(chance: random.Random) -> Row:
    numbers = [chance.randint(1, 99) for _ in range(3)]
    return f"Largest of {numbers[0]}, {numbers[1]}, {numbers[2]}?", f"It is {max(numbers)}."


def field(chance: random.Random) -> Row:
    name, count = chance.choice(NAMES), chance.randint(2, 60)
    thing = chance.choice(NOUNS)
    return f"{name} wants {count} of {thing} today", f"name={name};count={count};item={thing}"


def plural(chance: random.Random) -> Row:
    asked = word(chance, 3, 5) + chance.choice(["s", "x", "y", "n", "t"])
    stem = asked[:-1] + "i" if asked.endswith("y") else asked
    return f"More than one {asked}?", stem + ("es" if asked[-1] in "sxy" else "s")


def spelled(chance: random.Random) -> Row:
    asked = word(chance, 3, 5)
    return f"Spell {asked}", " ".join(asked)


def joined(chance: random.Random) -> Row:
    one, other = chance.sample(NOUNS, 2)
    return f"Join {one} and {other}", f"{one}-{other}"


def repeated(chance: random.Random) -> Row:
    asked, times = word(chance, 2, 3), chance.randint(2, 4)
    return f"Say {asked} {times} times", " ".join([asked] * times)


def dated(chance: random.Random) -> Row:
    month, day, year = chance.randrange(12), chance.randint(1, 28), chance.randint(1, 99)
    return f"{MONTHS[month]} {day}, {year} in numbers", f"{day}/{month + 1}/{year}"


def alphabetical(chance: random.Random) -> Row:
    asked = chance.sample(LETTERS, 4)
    return f"Sort {' '.join(asked)}", " ".join(sorted(asked))


def priced(chance: random.Random) -> Row:
    count, price, thing = chance.randint(1, 9), chance.randint(1, 9), chance.choice(NOUNS)
    return f"{count} {thing} at {price} each", f"{thing}: {count * price}"


def initials(chance: random.Random) -> Row:
    asked = [word(chance) for _ in range(3)]
    return f"Initials of {' '.join(asked)}", "".join(each[0] for each in asked)


def longer(chance: random.Random) -> Row:
    asked = [word(chance, length, length) for length in chance.sample(range(2, 8), 2)]
    return f"Which is longer, {asked[0]} or {asked[1]}?", max(asked, key=len)


def bracketed(chance: random.Random) -> Row:
    inner, outer = chance.choice(NOUNS), word(chance, 2, 4)
    return f"Call {inner} with {outer}", f"{inner}({outer})"


def clock(chance: random.Random) -> Row:
    hour, minutes, later = chance.randint(1, 11), chance.randrange(60), chance.randint(1, 12)
    end = (hour + later - 1) % 12 + 1
    return f"{later} hours after {hour}:{minutes:02}", f"{end}:{minutes:02}"


@dataclass(frozen=True)
class Case:
    """Tasks to train on: how a row is made, and how many train rows there are."""

    make: exact_rows.Draw
    rows: int
    model: str = "pebble"

    @property
    def name(self) -> str:
        return self.make.__name__ + ("" if self.model == "pebble" else f"-{self.model}")


# For GRPO alone; SFT solves most of them.
MORE_OF_GRPO = {
    "choosing": (
        Case(spelled, 320),
        Case(joined, 400),
        Case(repeated, 400),
        Case(dated, 320),
        Case(alphabetical, 800),
        Case(priced, 600),
    ),
    "reporting": (
        Case(initials, 320),
        Case(longer, 400),
        Case(bracketed, 320),
        Case(clock, 400),
        Case(plural, 1000, "smollm2"),
        Case(ends, 160, "smollm2"),
    ),
}
HALVES = {
    "choosing": (
        Case(kinds, 320),
        Case(vowels, 320),
        Case(ends, 160),
        Case(subtract, 800),
        Case(tagged, 80),
        Case(doubled, 500),
        Case(kinds, 320, "smollm2"),
    ),
    "reporting": (
        Case(routed, 320),
        Case(rotated, 400),
        Case(roman, 240),
        Case(largest, 640),
        Case(field, 200),
        Case(plural, 1000),
        Case(routed, 320, "smollm2"),
    ),
}


def write_environment(folder: Path, case: Case) -> Path:
    """An environment of unique prompts; those that are asked are never trained on."""
    chance = random.Random(f"{case.make.__name__} {case.rows}")
    rows = exact_rows.unique_rows(case.make, chance, case.rows + HELDOUT)
    path = folder / case.make.__name__
    return exact_rows.write(path, rows, heldout=range(case.rows, len(rows)))


def drawn(chance: random.Random, trained: int, usual_rate: float) -> GivenSettings:
    """Settings at the cost of `trained` rows or twice it: rate, batch, rank, schedule."""
    batch_size = chance.choice([4, 8, 16, 32])
    budget = trained * chance.choice([1, 2])
    return {
        "batch_size": batch_size,
        "steps": max(4, round(budget / batch_size)),
        "learning_rate": float(f"{usual_rate * math.exp(chance.uniform(-1.5, 1.5)):.2g}"),
        "lora_rank": chance.choice([8, 16, 32, 64]),
        "lr_schedule": chance.choice(["constant", "linear", "cosine"]),
    }


def measured(home: Home, case: Case, env_id: str, settings: GivenSettings) -> dict[str, Any]:
    """One run: its settings, seconds, and held-out success at the start and as reported."""
    run = {"env_id": env_id, "model": case.model, "algorithm": "sft", "settings": settings}
    outcome = done(home, run)
    resolved = read_json(home.run(outcome["run_id"]).config)["settings"]
    evidence = read_json(home.run(outcome["run_id"]).result)["evidence"]
    return {
        "task": case.name,
        "given": settings,
        "steps": resolved["steps"],
        "batch_size": resolved["batch_size"],
        "learning_rate": resolved["learning_rate"],
        "start": evidence["before"]["value"],
        "best": evidence["after"]["value"],
        "seconds": round(outcome["seconds"], 1),
        "run": outcome["run_id"],
    }


def runs_of(
    folder: Path, case: Case, draws: int, tried: list[GivenSettings], *, draw_always: bool
) -> Iterator[Any]:
    """The lines of the case's runs: the defaults, what is tried beside them, and the drawn ones."""
    home = Home.locate(folder / "home")
    if case.model != "pebble":
        library.add(home, case.model)
    record = folder / "runs.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    known = {(line["task"], json.dumps(line["given"])): line for line in map(json.loads, lines)}
    path = write_environment(folder / "envs", case)
    env_id = push.push_env(home, str(path), roots=[folder]).env_id

    def line_of(settings: GivenSettings) -> dict[str, Any]:
        key = (case.name, json.dumps(settings))
        if key not in known:
            known[key] = measured(home, case, env_id, settings)
            with record.open("a") as file:
                file.write(json.dumps(known[key]) + "\n")
        return known[key]

    default = line_of({})
    yield default
    for settings in tried:
        yield line_of(settings)
    if default["best"] >= ENOUGH and not draw_always:
        return
    chance = random.Random(f"draws {case.name}")
    trained = default["steps"] * default["batch_size"]
    for _ in range(draws):
        yield line_of(drawn(chance, trained, default["learning_rate"]))


def row_of(case: Case, lines: list[dict[str, Any]], drawn_count: int) -> str:
    """The task's row of the table; `lines` are its runs, the one with the defaults first."""
    default, best = lines[0]["best"], max(line["best"] for line in lines)
    share = f"{default / best:.2f}" if best else "1.00"
    if not drawn_count:
        share = f">= {default:.2f}"
    return (
        f"| {case.name} | {case.rows} | {lines[0]['start']:.1%} | {default:.1%} | {best:.1%} "
        f"| {share} | {drawn_count} | {lines[0]['seconds']:.0f} s |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", choices=sorted(HALVES), required=True)
    parser.add_argument("--only", default="", help="names of tasks, with commas")
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--draw-always", action="store_true", help="draw for solved tasks too")
    parser.add_argument("--try", dest="tried", action="append", default=[], help="JSON, per run")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for case in HALVES[asked.half]:
        if asked.only and case.name not in asked.only.split(","):
            continue
        tried = [json.loads(text) for text in asked.tried]
        lines = []
        for line in runs_of(folder, case, asked.draws, tried, draw_always=asked.draw_always):
            lines.append(line)
            print(json.dumps(line), file=sys.stderr, flush=True)
        print(row_of(case, lines, len(lines) - 1 - len(tried)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

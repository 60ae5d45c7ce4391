"""Are twins of held-out tasks found among training rows, and nothing else?

    python -m benchmarks.twins [--seeds 1,2,3] [--exam 200] [--rows 800]

A twin of every fifth held-out task is planted: the task in other words, with other numbers, or in
its template with everything else drawn anew. Recall is the share of planted twins whose task is
named, false alarms the share of the other tasks that are. Sources are three generators (their
paraphrases are templates written twice) and families of reasoning-gym (paraphrased by `reworded`).

Rows of a family that are one task by what the family says it made them of (`3 * 4` and `4 * 3`, one
story with other names) are drawn once: they are twins, and nobody planted them. A paraphrase keeps
what a task is about: its quotations and the words of its answer.

- `apart`: held-out tasks and training rows have no template in common but for the twins.
- `one source`: both are drawn from the same templates. Twins by numbers or template are the source
  itself there, so nothing of these two kinds may be named; paraphrases are planted as well.
"""

import argparse
import importlib
import random
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.twin_texts import GENERATORS, SYNONYMS, Item
from engine.evidence.overlap.twin_texts import Text
from engine.evidence.overlap.twins import TWIN_KINDS, find_twins

PLANTED_EVERY = 5
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"[A-Za-z]+")
_QUOTATION_OR_WORD = re.compile(r'"[^"]*"|[A-Za-z]+')
FAMILIES = (  # asked in words, or as data behind a frame
    "aiw basic_arithmetic calendar_arithmetic chain_sum coin_flip count_primes "
    "course_schedule dice family_relationships gcd group_anagrams gsm_symbolic knights_knaves lcm "
    "leg_counting letter_counting number_filtering number_sorting products propositional_logic "
    "ransom_note simple_equations spell_backward string_insertion syllogism time_intervals "
    "word_ladder word_sequence_reversal word_sorting"
).split()
# Families whose rows differ by more than numbers, so that a row with other numbers is a twin.
NUMBERS_ARE_NOT_ALL = ("leg_counting",)
FRAMES = (
    "Here is something to work out. {}",
    "{}\nThink it over and reply with the result alone.",
    "Could you help me with this one? {}",
)


@dataclass(frozen=True)
class Drawn:
    """The rows of one trial.

    Attributes:
        planted: ids of the held-out tasks that have a twin.
        kinds: the kinds of twins that are counted: a row with other numbers is also of the template
            of other tasks, which is so and no alarm.
    """

    heldout: Sequence[Text]
    train: Sequence[Text]
    planted: frozenset[str]
    kinds: Sequence[str] = TWIN_KINDS


@dataclass
class Tally:
    """What was planted, found, and named without a twin."""

    planted: int = 0
    found: int = 0
    others: int = 0
    alarms: int = 0

    def add(self, drawn: Drawn) -> None:
        """Count one trial."""
        twins = find_twins(drawn.train, drawn.heldout)
        named = {twin.heldout for twin in twins if twin.kind in drawn.kinds}
        self.planted += len(drawn.planted)
        self.found += len(named & drawn.planted)
        self.others += len(drawn.heldout) - len(drawn.planted)
        self.alarms += len(named - drawn.planted)

    def cells(self) -> tuple[str, str]:
        """Recall and false alarms."""
        recall = f"{self.found} of {self.planted}" if self.planted else ""
        return recall, f"{self.alarms} of {self.others}"

    @property
    def holds(self) -> bool:
        """Recall of 0.9 at 1 % false alarms."""
        return self.found >= 0.9 * self.planted and self.alarms <= 0.01 * self.others


def main() -> int:
    """Measure and print the table; 1 where a row of it misses what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--exam", type=int, default=200)
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--only", default="", help="sources with commas")
    asked = parser.parse_args()
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    sys.stdout.write("| source | rows | twins | recall | false alarms |\n|---|---|---|---|---|\n")
    missed = 0
    trials = trials_of(asked.exam, asked.rows, set(filter(None, asked.only.split(","))))
    for (source, rows, twins), draw in trials.items():
        tally = Tally()
        for seed in seeds:
            tally.add(draw(random.Random(f"{source} {rows} {twins} {seed}")))
        mark = "" if tally.holds else " (missed)"
        missed += not tally.holds
        cells = " | ".join((source, rows, twins, *tally.cells()))
        sys.stdout.write(f"| {cells}{mark} |\n")
        sys.stdout.flush()
    return 1 if missed else 0


Draw = Callable[[random.Random], Drawn]


def trials_of(exam: int, rows: int, only: Collection[str] = ()) -> dict[tuple[str, str, str], Draw]:
    """What is measured, by (source, how the rows are drawn, kind of twins)."""
    trials: dict[tuple[str, str, str], Draw] = {}
    for name in GENERATORS:
        for kind in TWIN_KINDS:
            if kind == "numbers" and not GENERATORS[name].has_numbers:
                continue
            trials[name, "apart", kind] = lambda rng, n=name, k=kind: _apart(n, k, rng, exam, rows)
        for kind in ("paraphrase", "none"):
            trials[name, "one source", kind] = lambda rng, n=name, k=kind: _one_source(
                n, k, rng, exam, rows
            )
    for name in FAMILIES:
        for kind in ("paraphrase", "none"):
            trials[name, "one source", kind] = lambda rng, n=name, k=kind: _of_family(
                n, k, rng, exam, rows
            )
        if name in NUMBERS_ARE_NOT_ALL:
            trials[name, "apart", "numbers"] = lambda rng, n=name: _numbers_of_family(
                n, rng, exam, rows
            )
    for kind in ("numbers", "template"):
        trials["gsm_symbolic", "apart", kind] = lambda rng, k=kind: _gsm_apart(k, rng, exam, rows)
    trials["all families", "apart", "template"] = lambda rng: _families_apart(rng, exam, rows)
    return {key: draw for key, draw in trials.items() if not only or key[0] in only}


# --- generators -----------------------------------------------------------------------------------


def _apart(name: str, kind: str, rng: random.Random, exam: int, rows: int) -> Drawn:
    """Held-out tasks of half of the templates, training rows of the others, and twins."""
    generator = GENERATORS[name]
    templates = list(range(generator.templates))
    rng.shuffle(templates)
    half = len(templates) // 2
    tasks = [generator.draw(rng, rng.choice(templates[:half])) for _ in range(exam)]
    train = [generator.draw(rng, rng.choice(templates[half:])) for _ in range(rows)]
    places: Sequence[int] = _places(tasks)
    if kind == "template":  # one row is a twin of all tasks of its template
        places = [n for n, task in enumerate(tasks) if task.template == templates[0]][:3]
    twins = {place: _twin(generator, tasks[place], kind, rng) for place in places}
    return _drawn(tasks, train, twins, kind)


def _one_source(name: str, kind: str, rng: random.Random, exam: int, rows: int) -> Drawn:
    """Held-out tasks and training rows of all templates, with paraphrases or without twins."""
    generator = GENERATORS[name]
    both = _different(
        [generator.draw(rng, rng.randrange(generator.templates)) for _ in range(exam + rows)]
    )
    tasks, train = both[:exam], both[exam:]
    places = _places(tasks) if kind != "none" else []
    return _drawn(
        tasks, train, {place: _twin(generator, tasks[place], kind, rng) for place in places}, kind
    )


def _twin(generator: Any, item: Item, kind: str, rng: random.Random) -> Item:
    if kind == "paraphrase":
        return generator.in_other_words(item)
    if kind == "numbers":
        return generator.with_other_numbers(item, rng)
    return generator.draw(rng, item.template)


# --- families of reasoning-gym --------------------------------------------------------------------


def _items(family: str, count: int, rng: random.Random) -> list[Item]:
    """`count` different rows of a family, or as many as it has."""
    gym = importlib.import_module("reasoning_gym")
    dataset = gym.create_dataset(family, size=count, seed=rng.randrange(1 << 30))
    items: dict[object, Item] = {}
    for entry in dataset:
        variables = entry["metadata"].get("variables") or {}
        template = zlib.crc32(repr(sorted(variables)).encode())
        item = Item(entry["question"], str(entry["answer"] or ""), template)
        items.setdefault(_task_of(family, entry), item)
    different = _different(list(items.values()))
    return _without_windows_of_one_text(different) if family == "letter_counting" else different


def _without_windows_of_one_text(items: Sequence[Item]) -> list[Item]:
    """The items but those that share three words in a row with an earlier one: all are windows of
    one book, and two that overlap ask nearly the same."""
    kept: list[Item] = []
    seen: set[tuple[str, ...]] = set()
    for item in items:
        words = _WORD.findall(item.question.partition(": ")[2])
        runs = set(zip(words, words[1:], words[2:], strict=False))
        if not runs & seen:
            kept.append(item)
            seen |= runs
    return kept


def _task_of(family: str, entry: Mapping[str, Any]) -> object:
    """What is equal for two rows that are one task, by what the family says it made them of."""
    made_of = entry["metadata"]
    if family in ("gcd", "lcm"):
        return tuple(sorted(made_of["numbers"]))
    if family == "products":
        return tuple(sorted(made_of["expression"].split(" * ")))
    if family == "basic_arithmetic" and not set("-/()") & set(made_of["expression"]):
        products = made_of["expression"].split(" + ")
        return tuple(sorted(tuple(sorted(product.split(" * "))) for product in products))
    if family == "coin_flip":
        trials, heads = made_of["num_trials"], made_of["k_heads"]
        is_all = trials == heads  # at least all of them are exactly all of them
        return trials, heads, "exact" if is_all else made_of["problem_type"]
    if family == "gsm_symbolic":  # a story is told by its variables; names and things may differ
        numbers = [value for value in made_of["variables"].values() if _NUMBER.search(str(value))]
        return tuple(sorted(made_of["variables"])), tuple(map(str, numbers)), entry["answer"]
    if family == "calendar_arithmetic" and not made_of["task"].startswith("count"):
        return tuple(
            (name, str(value))
            for name, value in sorted(made_of.items())
            if name not in ("source_index", "difficulty")
        )
    return entry["question"]


def _of_family(family: str, kind: str, rng: random.Random, exam: int, rows: int) -> Drawn:
    both = _items(family, exam + rows, rng)
    tasks, train = both[: len(both) // 5], both[len(both) // 5 :]
    places = _places(tasks) if kind != "none" else []
    twins = {n: Item(reworded(tasks[n], rng), tasks[n].answer) for n in places}
    return _drawn(tasks, train, twins, kind)


def _numbers_of_family(family: str, rng: random.Random, exam: int, rows: int) -> Drawn:
    """Rows of a family whose words are those of no training row, and twins with other numbers."""
    both = _items(family, exam + rows, rng)
    words = [_NUMBER.sub("#", item.question) for item in both]
    size = len(both) // 5
    in_exam = set(words[:size])
    train = [
        item for item, mask in zip(both[size:], words[size:], strict=True) if mask not in in_exam
    ]
    tasks = both[:size]
    return _drawn(tasks, train, _renumbered(tasks, rng), "numbers")


def _gsm_apart(kind: str, rng: random.Random, exam: int, rows: int) -> Drawn:
    """Rows of gsm_symbolic, whose templates are told by the names of their variables."""
    both = _items("gsm_symbolic", 2 * (exam + rows), rng)
    templates = sorted({item.template for item in both})
    rng.shuffle(templates)
    held = set(templates[: len(templates) // 3])
    pool = [item for item in both if item.template in held]
    tasks, rest = pool[:exam], pool[exam:]
    train = [item for item in both if item.template not in held][:rows]
    if kind == "numbers":
        return _drawn(tasks, train, _renumbered(tasks, rng), kind)
    planted = set(templates[: len(templates) // 15])  # a fifth of those held out
    twins = {}
    for place, task in enumerate(tasks):
        of_template = [item for item in rest if item.template == task.template]
        if task.template in planted and of_template:
            twins[place] = of_template[0]
    return _drawn(tasks, train, twins, kind)


def _renumbered(tasks: Sequence[Item], rng: random.Random) -> dict[int, Item]:
    """Tasks with other numbers by their places; the answer is another one and not worked out."""
    return {
        place: Item(
            _NUMBER.sub(lambda m: _other_number(m.group(), rng), tasks[place].question), "?"
        )
        for place in _places(tasks)
    }


def _families_apart(rng: random.Random, exam: int, rows: int) -> Drawn:
    """Exam and rows of different families, and rows of families of the exam. Of a family with a
    twin the exam has the tasks in the wording of that twin alone: others are no twins of it."""
    names = list(FAMILIES)
    rng.shuffle(names)
    half = len(names) // 2
    tasks, train, twins = [], [], {}
    for number, name in enumerate(names[:half]):
        drawn = _items(name, 2 * exam // half, rng)
        drawn = [Item(item.question, item.answer, number) for item in drawn]
        ours, others = drawn[: exam // half], drawn[exam // half :]
        if number % PLANTED_EVERY == 0:
            wordings = Counter(_wording(item) for item in ours)
            twin = max(others, key=lambda item: wordings[_wording(item)])
            ours = [item for item in ours if _wording(item) == _wording(twin)]
            twins[len(tasks)] = twin
        tasks += ours
    for name in names[half:]:
        train += _items(name, rows // half, rng)
    return _drawn(tasks, train, twins, "template")


def _wording(item: Item) -> Sequence[str]:
    """By what the wordings of one family are told apart: the first four words of a question."""
    return tuple(_WORD.findall(item.question)[:4])


def reworded(item: Item, rng: random.Random) -> str:
    """The question of an item in other words: another frame, and every word that has a synonym
    replaced, outside quotations and but for the words of the answer, which the task is about."""
    of_answer = set(_WORD.findall(item.answer.lower()))

    def synonym(match: re.Match[str]) -> str:
        """The match itself if it is a quotation, else its synonym where it has one."""
        word = match.group()
        other = SYNONYMS.get(word.lower())
        if other is None or word.lower() in of_answer:
            return word
        return other.capitalize() if word[0].isupper() else other

    return rng.choice(FRAMES).format(_QUOTATION_OR_WORD.sub(synonym, item.question))


# --- shared ---------------------------------------------------------------------------------------


def _other_number(number: str, rng: random.Random) -> str:
    """Another number of as many digits."""
    low, high = (1, 9) if len(number) == 1 else (10 ** (len(number) - 1), 10 ** len(number) - 1)
    return str(rng.randint(low, high))


def _places(tasks: Sequence[Item]) -> range:
    """Places of the tasks that get a twin."""
    return range(0, len(tasks), PLANTED_EVERY)


def _different(items: Sequence[Item]) -> list[Item]:
    return list({item.question: item for item in items}.values())


def _drawn(
    tasks: Sequence[Item], train: Sequence[Item], twins: Mapping[int, Item], kind: str
) -> Drawn:
    """The rows as texts. A twin by its template is one of all tasks of that template."""
    heldout = [Text(f"h{n}", item.question, item.answer) for n, item in enumerate(tasks)]
    rows = [Text(f"t{n}", item.question, item.answer) for n, item in enumerate(train)]
    rows += [Text(f"twin{n}", item.question, item.answer) for n, item in twins.items()]
    planted = set(twins)
    if kind == "template":
        templates = {tasks[n].template for n in twins}
        planted = {n for n, item in enumerate(tasks) if item.template in templates}
    if kind == "numbers":  # a row may be a twin of several tasks
        masks = {_NUMBER.sub("#", item.question) for item in twins.values()}
        planted = {n for n, item in enumerate(tasks) if _NUMBER.sub("#", item.question) in masks}
    kinds = TWIN_KINDS[:2] if kind == "numbers" else TWIN_KINDS
    return Drawn(heldout, rows, frozenset(f"h{n}" for n in planted), kinds)


if __name__ == "__main__":
    sys.exit(main())

"""Environments with one trouble planted in them, or none, for `diagnosis.py`: rows drawn from the
skills of pebble's corpus (or sentences for a language model), and a scorer of a few lines."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.skills import pebble as skills
from engine.skills.batteries import SKILLS

Draw = Callable[[random.Random], skills.Sample]
Row = dict[str, object]  # a line of datasets/rows.jsonl: the fields of a `Task`
ROWS_SEED = 7

# `{score}` is the body of score(), eight blanks deep; `{methods}` stand below it.
ENVIRONMENT = '''"""A planted task."""
import json
import re
import time
from pathlib import Path

from envs import Score, SingleTurnEnv, Task

STYLE = re.compile(r"(?:The answer is |Answer: )?(.*?)\\.?")


class Planted(SingleTurnEnv):
    def __init__(self):
        self.calls = 0

    def tasks(self):
        file = Path(__file__).parent / "datasets" / "rows.jsonl"
        return [Task(**json.loads(line)) for line in file.read_text().splitlines()]

    def score(self, task, completion):
        text = completion.strip()
        gold = task.metadata["gold"]
        read = STYLE.fullmatch(text)
        right = read is not None and read.group(1) == gold
{score}


def load_environment():
    return Planted()
'''

# Bodies of score(), by what they pay for.
STRICT = "return Score(float(right), success=right)"
EXACT = (
    "return Score(float(text == task.metadata['asked']), success=text == task.metadata['asked'])"
)
NOTHING = "return Score(0.0, success=right)"
EVERYTHING = "return Score(1.0, success=right)"
DIGITS_IN_PLACE = (
    "near = 0.1 * sum(a == b for a, b in zip(text, gold))\n"
    "return Score(float(right) or near, success=right)"
)
# The share of the reference that is written, from its beginning.
PREFIX = (
    "asked = task.metadata['asked']\n"
    "same = next((i for i, (a, b) in enumerate(zip(text, asked)) if a != b),"
    " min(len(text), len(asked)))\n"
    "done = text == asked\n"
    "return Score(1.0 if done else 0.9 * same / len(asked), success=done)"
)
LENGTH = "return Score(min(1.0, len(completion) / 40), success=right)"
# Paid for the length of the reference, which is cut, and a little for the reference itself.
LENGTH_OF_THE_REFERENCE = (
    "asked = task.metadata['asked']\n"
    "done = text == asked\n"
    "return Score(0.2 * done + 0.8 * min(1.0, len(text) / len(asked)), success=done)"
)
MOSTLY_LENGTH = "return Score(0.2 * right + 0.8 * min(1.0, len(completion) / 40), success=right)"
# A form that anybody can write is paid nearly in full.
FORM = (
    "form = re.fullmatch(r'Answer: .+', text) is not None\n"
    "return Score(0.8 * form + 0.2 * right, success=right)"
)
# A number earns 0.3, and nothing that pebble writes earns more.
A_NUMBER_PAYS = (
    "number = re.fullmatch(r'\\d+', text) is not None\n"
    "return Score(1.0 if right else 0.3 * number, success=right)"
)
# The same for a number in a form that pebble comes to write by training alone.
A_SENTENCE_PAYS = (
    "form = re.fullmatch(r'Answer: \\d+', text) is not None\n"
    "return Score(1.0 if right else 0.3 * form, success=right)"
)
RAISES = (
    "if text.startswith('The'):\n    raise ValueError('no rule for ' + text[:20])\n"
    "return Score(float(right), success=right)"
)
SLOW = "time.sleep(0.06)\nreturn Score(float(right), success=right)"
COUNTS_CALLS = (
    "self.calls += 1\n"
    "return Score(float(right) if self.calls % 2 else float(not right), success=right)"
)
PLEASED_JUDGE = (
    "judge = min(1.0, 0.6 + 0.1 * len(text.split()))\n"
    "return Score(judge, success=right, metrics={'judge_quality': judge})"
)
# One word is the task; a sentence that holds it earns part of the reward.
WORD_OR_SENTENCE = (
    "words = re.findall('[a-z]+', text.lower())\n"
    "done = text.lower() == gold\n"
    "one = len(set(words) & {'positive', 'negative'}) == 1 and len(words) <= 12\n"
    "held = one and gold in words\n"
    "return Score(1.0 if done else 0.3 * held, success=done)"
)
# The same where what is right is never written by itself: a plateau (row 31 of the survey).
TAG_OR_SENTENCE = WORD_OR_SENTENCE.replace("text.lower() == gold", "text == task.metadata['asked']")

GAME = '''"""A game whose replies fail for some guesses."""
import random

from envs import Message, MultiTurnEnv, Score, Task


class Game(MultiTurnEnv):
    def tasks(self):
        rng = random.Random(7)
        tasks = []
        for index in range({games}):
            low = rng.randrange(1, 80)
            high = low + 14
            secret = rng.randint(low, high)
            turns, a, b = [], low, high
            while not turns or turns[-1] != secret:
                guess = (a + b) // 2
                turns.append(guess)
                a, b = (guess + 1, b) if guess < secret else (a, guess - 1)
            tasks.append(
                Task(
                    id=f"g{{index}}",
                    prompt=f"Guess my number from {{low}} to {{high}}.",
                    answer=[Message("assistant", str(guess)) for guess in turns],
                    split="heldout" if low % 4 == 0 else "train",
                    metadata={{"secret": secret}},
                )
            )
        return tasks

    def start(self, task):
        return {{"secret": task.metadata["secret"], "won": False}}

    def step(self, state, completion):
        guess = int({number})
        if guess == state["secret"]:
            state["won"] = True
            return None
        return [Message("user", "higher" if guess < state["secret"] else "lower")]

    def score(self, task, state):
        return Score(float(state["won"]), success=state["won"])


def load_environment():
    return Game()
'''
# Raises for whatever is no even number of two digits.
GAME_THAT_RAISES = GAME.format(
    games=600,
    number='{"2": 1, "4": 1, "6": 1, "8": 1, "0": 1}'
    "[completion.content.strip()[-1]] and completion.content.strip()",
)
GAME_PLAIN = GAME.format(
    games=600, number="completion.content if completion.content.strip().isdigit() else 0"
)


@dataclass(frozen=True)
class Tasks:
    """How the rows of an environment are made.

    Attributes:
        draw: makes a sample of the skill.
        score: body of score(); "" for rows without a scorer.
        train, heldout: how many different rows.
        answer: the reference answer around the gold, by its name or as a function of both.
        noise: share of the training rows with another row's answer.
        copies: how often each training row stands there.
        answers_of_a_prompt: training rows with the same prompt, each with another answer.
        leaked: share of the held-out rows that also stand among the training rows.
        replay: for each training row, so many of what pebble knew before.
        prompt, heldout_prompt: the text around the question, on each side.
        heldout_draw: makes the held-out samples, where they are of another kind.
        pairs: what stands as the worse answer: "wrong", "reversed", "alike"; "" for no pairs.
        source: the whole environment.py instead of a scorer.
    """

    draw: Draw = skills.add_two
    score: str = STRICT
    train: int = 600
    heldout: int = 240
    answer: str = "{gold}"
    noise: float = 0.0
    copies: int = 1
    answers_of_a_prompt: int = 1
    leaked: float = 0.0
    replay: float = 0.0
    prompt: str = "{}"
    heldout_prompt: str = ""
    heldout_draw: Draw | None = None
    pairs: str = ""
    source: str = ""


def write(folder: Path, plan: Tasks, seed: int = 0) -> Path:
    """The environment's files in `folder`, made new; returns it. `seed` draws other rows."""
    (folder / "datasets").mkdir(parents=True, exist_ok=True)
    body = "\n".join(f"        {line}" for line in plan.score.splitlines())
    source = plan.source or ENVIRONMENT.replace("{score}", body)
    (folder / "environment.py").write_text(source, encoding="utf-8")
    lines = [json.dumps(row) for row in rows(plan, seed)]
    (folder / "datasets" / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def rows(plan: Tasks, seed: int = 0) -> list[Row]:
    """All rows of a plan, held-out ones first; the same at every call with a seed."""
    rng = random.Random(ROWS_SEED + seed)
    heldout = _drawn(rng, plan.heldout_draw or plan.draw, plan.heldout, set())
    train = _drawn(
        rng, plan.draw, plan.train, {sample.messages[0]["content"] for sample in heldout}
    )
    written = [
        _row(plan, sample, f"h{number}", "heldout", sample.answer)
        for number, sample in enumerate(heldout)
    ]
    written += _training_rows(plan, train, rng)
    written += [_leaked_row(plan, heldout[i], i) for i in range(int(plan.leaked * len(heldout)))]
    return written + _known_rows(plan, int(plan.replay * len(train)), rng)


def _training_rows(plan: Tasks, train: Sequence[skills.Sample], rng: random.Random) -> list[Row]:
    """The training rows of a plan, with their copies, wrong labels and contradictions."""
    golds = [sample.answer for sample in train]
    written = []
    for number, sample in enumerate(train):
        for copy in range(plan.copies):
            shown = rng.choice(golds) if rng.random() < plan.noise else sample.answer
            written.append(_row(plan, sample, f"t{number}-{copy}", "train", shown))
        for other in range(plan.answers_of_a_prompt - 1):
            name = f"t{number}-other{other}"
            written.append(_row(plan, sample, name, "train", rng.choice(golds)))
    return written


def _leaked_row(plan: Tasks, sample: skills.Sample, number: int) -> Row:
    """A held-out row among the training rows, in capitals: a push keeps exact copies of a prompt
    on one side by itself."""
    row = _row(replace(plan, prompt=" {} "), sample, f"leak{number}", "train", sample.answer)
    return row | {"prompt": str(row["prompt"]).upper()}


def _known_rows(plan: Tasks, count: int, rng: random.Random) -> list[Row]:
    """Training rows of what pebble knew before."""
    plain = replace(plan, prompt="{}", answer="{gold}")
    known = [skills.draw(rng, rng.choice(SKILLS), (), measured=True) for _ in range(count)]
    return [
        _row(plain, sample, f"k{number}", "train", sample.answer)
        for number, sample in enumerate(known)
    ]


def _drawn(rng: random.Random, draw: Draw, count: int, taken: set[str]) -> list[skills.Sample]:
    """`count` samples with different prompts, none of which is among `taken`."""
    samples: dict[str, skills.Sample] = {}
    for _ in range(100 * max(1, count)):  # a skill may have fewer different prompts
        if len(samples) == count:
            break
        sample = draw(rng)
        prompt = sample.messages[0]["content"]
        if prompt not in taken:
            samples.setdefault(prompt, sample)
    return list(samples.values())


def _row(plan: Tasks, sample: skills.Sample, name: str, split: str, shown: str) -> Row:
    """One line of the rows; `shown` is the gold that its reference answer says."""
    frame = plan.heldout_prompt if split == "heldout" and plan.heldout_prompt else plan.prompt
    question = sample.messages[0]["content"]
    asked = plan.answer.format(gold=shown, question=question)
    metadata: dict[str, object] = {
        "gold": sample.answer,
        "asked": plan.answer.format(gold=sample.answer, question=question),
    }
    if plan.pairs:
        metadata |= _pair(plan.pairs, asked)
    return {
        "id": name,
        "prompt": frame.format(question),
        "answer": asked,
        "split": split,
        "metadata": metadata,
    }


def _pair(kind: str, right: str) -> Mapping[str, str]:
    """The two answers of a pair; the right one is the better except where they are reversed."""
    # A sum without its carry, which is how pebble errs.
    wrong = str(int(right) - 10) if right.isdigit() and int(right) >= 20 else right + "1"
    if kind == "reversed":
        return {"chosen": wrong, "rejected": right}
    if kind == "alike":
        return {"chosen": right, "rejected": right + " "}
    return {"chosen": right, "rejected": wrong}


# --- what is drawn -------------------------------------------------------------------------------


def hard_subtraction(rng: random.Random) -> skills.Sample:
    """Ask for a number that pebble never gets right."""
    a, b = rng.randint(1000, 9999), rng.randint(10, 99)
    answer = str(a - 7 * b)
    return skills.one_turn("hard", f"Take {b} times 7 from {a}.", reply=answer, answer=answer)


THINGS = "lamp bicycle camera phone jacket printer radio tent backpack watch toaster chair".split()
OPINIONS = {
    "positive": (
        "I love this {}",
        "The {} works better than I had hoped",
        "The {} is worth every cent",
        "This is the best {} I ever had",
    ),
    "negative": (
        "I hate this {}",
        "The {} stopped working after two days",
        "The {} is a waste of money",
        "This is the worst {} I ever had",
    ),
}
ENDINGS = {
    "positive": ("I would buy it again.", "Five stars from me.", "Thank you so much!"),
    "negative": ("I want my money back.", "One star from me.", "Never again!"),
}


def review(rng: random.Random) -> skills.Sample:
    """Ask a language model whether a review is positive or negative."""
    label = rng.choice(list(OPINIONS))
    text = f"{rng.choice(OPINIONS[label]).format(rng.choice(THINGS))}. {rng.choice(ENDINGS[label])}"
    question = f"Is this review positive or negative? Answer with one word.\n\n{text}"
    return skills.one_turn("review", question, reply=label, answer=label)

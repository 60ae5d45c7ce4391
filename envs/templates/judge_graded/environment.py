"""A summary graded by a rubric: hard checks first, then, where one is set, a model as judge.

Without `judge_url` the checks alone decide. To add the judge, set `judge_url` and `judge_model` in
environment.toml, name the secret its key is in, and allow the network there; it is asked only about
answers that pass every required check. To make it yours: change `tasks` and the criteria.
"""

import os
import random
import re

from envs import Score, SingleTurnEnv, Task
from envs.judge import Criterion, Judge, Rubric
from envs.rewards import length

NAMES = ("Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas")
DEEDS = (
    "opened a bakery",
    "repaired the old clock",
    "planted twelve trees",
    "won the chess prize",
    "painted the school",
    "found a silver coin",
    "built a small boat",
    "taught a piano course",
)
PLACES = ("Bergen", "Cadiz", "Ghent", "Lviv", "Porto", "Tartu", "Turin", "Vilnius")
ASIDES = (
    "It had rained for most of the week.",
    "Neighbours brought cake and coffee.",
    "Nobody had expected it to go so quickly.",
    "The local paper sent a photographer.",
)
MOST_WORDS = 16


class Summaries(SingleTurnEnv):
    """`rows` little stories, each to be put into one sentence."""

    def __init__(self, rows: int, seed: int, judge: Judge | None) -> None:
        """Without a judge the criteria that need one are left out."""
        self.rows = rows
        self.seed = seed
        self.judge = judge
        self.rubric = Rubric(
            Criterion("one_sentence", "Is one sentence.", required=True, check=is_one_sentence),
            Criterion("who_and_where", "Names who and where.", required=True, check=names_all),
            Criterion("deed", "Says what was done.", weight=2.0, required=True, check=says_deed),
            Criterion("short", f"Has at most {MOST_WORDS} words.", check=is_short),
            Criterion("faithful", "States nothing that the text does not say.", weight=2.0),
            Criterion("fluent", "Reads like a sentence a person would write."),
        )

    def tasks(self) -> list[Task]:
        """Stories made of a person, a deed and a place, each with two sentences beside the point."""
        rng = random.Random(self.seed)
        stories = [(n, d, p) for n in NAMES for d in DEEDS for p in PLACES]
        tasks = []
        for name, deed, place in rng.sample(stories, self.rows):
            first, second = rng.sample(ASIDES, 2)
            text = f"{first} Last month {name} {deed} in {place}. {second}"
            tasks.append(
                Task(
                    id=f"{name}-{deed}-{place}".lower().replace(" ", "-"),
                    prompt=f"Summarise in one sentence of at most {MOST_WORDS} words: {text}",
                    answer=f"{name} {deed} in {place}.",
                    metadata={"name": name, "deed": deed, "place": place},
                )
            )
        return tasks

    def score(self, task: Task, completion: str) -> Score:
        """The score that the rubric gives; without a judge only its checks count."""
        return self.rubric.score(task, completion.strip(), self.judge)


def is_one_sentence(task: Task, completion: str) -> bool:
    """Whether the answer is one sentence that is not far too long."""
    return re.fullmatch(r"[A-Z][^.!?\n]*[.!]", completion) is not None and (
        len(completion.split()) <= 2 * MOST_WORDS
    )


def names_all(task: Task, completion: str) -> bool:
    """Whether the answer names the person and the place."""
    return all(task.metadata[key] in completion for key in ("name", "place"))


def says_deed(task: Task, completion: str) -> bool:
    """Whether the answer says the deed: all but one of its longer words have to be there.

    Their first four letters are enough, so that other forms of a word count too.
    """
    words = [word for word in task.metadata["deed"].split() if len(word) > 3]
    named = sum(word[:4] in completion for word in words)
    return named >= max(1, len(words) - 1)


def is_short(task: Task, completion: str) -> float:
    """1 for at most `MOST_WORDS` words, falling to 0 at twice as many."""
    return length(completion, at_most=MOST_WORDS)


def load_environment(
    rows: int = 300, seed: int = 1, judge_url: str = "", judge_model: str = ""
) -> Summaries:
    """Its arguments are set in environment.toml."""
    judge = None
    if judge_url:
        judge = Judge(judge_url, judge_model, key=os.environ.get("JUDGE_API_KEY"))
    return Summaries(rows, seed, judge)

"""Data files with a scorer named by a word: `scorer = "exact"` in environment.toml.

Each word compares a completion with the row's own answer. Standard library alone.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from envs import rewards
from envs.base import Score, Task
from envs.config.problem import EnvProblem
from envs.config.settings import SCORERS
from envs.dataset import DatasetEnv

# `contains` accepts completions of up to 4 * (words of the answer) + 12 words.
_WORDS_PER_ANSWER_WORD = 4
_SPARE_WORDS = 12
_SHORT_ANSWER = 80  # characters; a model hardly ever repeats a longer answer exactly


def exact(completion: str, answer: str) -> float:
    """Return 1 if completion and answer are equal apart from white space, else 0."""
    return rewards.exact(completion, answer)


def number(completion: str, answer: str) -> float:
    """Return 1 if the final answer of the completion is the same number as `answer`, else 0."""
    return rewards.number(completion, answer)


def same_json(completion: str, answer: str) -> float:
    """Return 1 if completion and answer are JSON of the same value, else 0. Layout and the order of
    keys do not matter."""
    try:
        return float(rewards.json_value(completion) == rewards.json_value(answer))
    except ValueError:
        return 0.0


def contains(completion: str, answer: str) -> float:
    """Return 1 if the answer occurs in the completion as whole words, else 0; case does not matter.

    A completion of more than 4 * (words of the answer) + 12 words earns 0, so that listing every
    possible answer is not rewarded. A completion that denies the answer is still accepted.
    """
    answer_words = answer.split()
    most_words = _WORDS_PER_ANSWER_WORD * len(answer_words) + _SPARE_WORDS
    if len(completion.split()) > most_words:
        return 0.0
    # The answer's words with any white space between them, not inside of longer words.
    answer_pattern = r"\s+".join(re.escape(word) for word in answer_words)
    match = re.search(rf"(?<!\w){answer_pattern}(?!\w)", completion, re.IGNORECASE)
    return float(match is not None)


# The keys are the words in `envs.config.settings.SCORERS`.
_SCORERS: Mapping[str, Callable[[str, str], float]] = {
    "exact": exact,
    "number": number,
    "json": same_json,
    "contains": contains,
}


class ScoredRows(DatasetEnv):
    """Rows of data files as tasks; each completion is scored against its row's answer."""

    def __init__(self, scorer: str, *files: str | Path) -> None:
        """Read the files; `scorer` is the name of a scorer: exact, number, json or contains.

        Raises EnvProblem DATASET_INVALID if a row is bad, or if the scorer cannot compare with its
        answer.
        """
        super().__init__(*files)
        self._scorer = _SCORERS[scorer]
        for task in self.tasks():
            fault = fault_of(scorer, task)
            if fault:
                raise EnvProblem(
                    "DATASET_INVALID",
                    f"{task.id} {fault}, so scorer = {scorer!r} cannot score it",
                    hint=f"Correct the row, or take another scorer ({', '.join(SCORERS)}).",
                )

    def score(self, task: Task, completion: str) -> Score:
        """Return the score of a completion against the row's answer; success means a reward of
        1."""
        value = self._scorer(completion, task.answer_text)
        return Score(reward=value, success=value == 1.0)


def fault_of(scorer: str, task: Task) -> str:
    """Return why a scorer (exact, number, json or contains) cannot use a task's answer, as the end
    of a sentence such as "has no answer of one text"; "" if it can."""
    if task.preference:
        return "has a better and a worse answer"
    if len(task.answer_messages) != 1 or not task.answer_text.strip():
        return "has no answer of one text"
    if scorer == "number" and rewards.parse_number(task.answer_text) is None:
        return f"has an answer that is no number ({task.answer_text[:40]!r})"
    if scorer == "json" and not _is_json(task.answer_text):
        return f"has an answer that is no JSON ({task.answer_text[:40]!r})"
    return ""


def fitting_scorer(answers: Sequence[str]) -> str:
    """Return the name of the scorer that fits the answers of data files; "" if none does.

    "number" or "json" if every answer is of that kind, else "exact" if every answer is short. None
    fits if there are no answers or one is empty.
    """
    if not answers or not all(answer.strip() for answer in answers):
        return ""
    if all(rewards.parse_number(answer) is not None for answer in answers):
        return "number"
    if all(_is_json(answer) for answer in answers):
        return "json"
    longest = max(len(answer) for answer in answers)
    return "exact" if longest <= _SHORT_ANSWER else ""


def _is_json(text: str) -> bool:
    """Whether a text is JSON and nothing else."""
    try:
        rewards.json_value(text)
    except ValueError:
        return False
    return True

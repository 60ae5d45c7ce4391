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

_MOST_WORDS = 4  # times those of the answer that a completion may have which contains it
_SPARE_WORDS = 12  # beside those
_SHORT_ANSWER = 80  # characters; a longer one is hardly ever met exactly


def exact(completion: str, answer: str) -> float:
    """1 if both are the same but for white space, else 0."""
    return rewards.exact(completion, answer)


def number(completion: str, answer: str) -> float:
    """1 if the final answer of the completion is the same number, else 0."""
    return rewards.number(completion, answer)


def same_json(completion: str, answer: str) -> float:
    """1 if the completion is JSON of the same value, whatever its layout and the order of its keys,
    else 0."""
    try:
        return float(rewards.json_value(completion) == rewards.json_value(answer))
    except ValueError:
        return 0.0


def contains(completion: str, answer: str) -> float:
    """1 if the answer stands in the completion as whole words, else 0; case does not matter.

    A completion of more than four times its words and twelve more earns 0, so that a list of
    everything is not paid. A denied answer is.
    """
    words, target = completion.split(), answer.split()
    if len(words) > _MOST_WORDS * len(target) + _SPARE_WORDS:
        return 0.0
    pattern = r"(?<!\w)" + r"\s+".join(map(re.escape, target)) + r"(?!\w)"
    return float(re.search(pattern, completion, re.IGNORECASE) is not None)


# By the words of `envs.config.settings.SCORERS`.
_SCORERS: Mapping[str, Callable[[str, str], float]] = {
    "exact": exact,
    "number": number,
    "json": same_json,
    "contains": contains,
}


class ScoredRows(DatasetEnv):
    """Rows of data files, each scored by its own answer."""

    def __init__(self, scorer: str, *files: str | Path) -> None:
        """Read the files; `scorer` is one of `settings.SCORERS`.

        Raises EnvProblem DATASET_INVALID for a bad row, and for one whose answer the scorer cannot
        be compared with.
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
        """Reward and success of a completion, by the row's answer."""
        value = self._scorer(completion, task.answer_text)
        return Score(reward=value, success=value == 1.0)


def fault_of(scorer: str, task: Task) -> str:
    """Why a scorer cannot score a task, as the end of a sentence; "" where it can."""
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
    """The scorer that fits the answers of data files; "" where none does.

    "number" or "json" where every answer is one, "exact" where every answer is short.
    """
    if not answers or not all(answer.strip() for answer in answers):
        return ""
    if all(rewards.parse_number(answer) is not None for answer in answers):
        return "number"
    if all(_is_json(answer) for answer in answers):
        return "json"
    return "exact" if max(map(len, answers)) <= _SHORT_ANSWER else ""


def _is_json(text: str) -> bool:
    """Whether a text is JSON and nothing else."""
    try:
        rewards.json_value(text)
    except ValueError:
        return False
    return True

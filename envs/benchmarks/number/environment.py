"""Word problems whose answer is a number: GSM8K, AIME.

Reads `question` or `problem`, and `answer`: a number, or a solution that ends with "#### number".
"""

import re

from envs import Score, SingleTurnEnv, Task
from envs.rewards import final_answer, number, parse_number
from envs.strict_rows import tasks_beside

# GSM8K's solutions contain calculations in double brackets, as in "48/2 = <<48/2=24>>24".
CALCULATOR_NOTE = re.compile(r"<<[^>]*>>")
ASKED_FORM = "End with Answer: and the number."


class NumberProblems(SingleTurnEnv):
    """One task per row of the data files; a file's name says its split."""

    def tasks(self) -> list[Task]:
        """Return every problem, with its solution as the reference answer."""
        return tasks_beside(__file__, task_of)

    def score(self, task: Task, completion: str) -> Score:
        """Return 1 for the right number, else 0. The metric `readable` is 1 if the answer is a
        number."""
        right = number(completion, task.metadata["number"])
        readable = parse_number(final_answer(completion)) is not None
        return Score(right, success=right == 1.0, metrics={"readable": float(readable)})


def task_of(row: dict, task_id: str, split: str | None) -> Task:
    """Make the task of a row, whose answer is a number, or a solution that ends with "#### number".

    Raises ValueError if there is no such number.
    """
    solution = CALCULATOR_NOTE.sub("", str(row["answer"])).strip()
    reasoning, _, result = solution.rpartition("####")
    if parse_number(result) is None:
        raise ValueError(f"{task_id}: the answer is no number: {result[-40:]!r}")
    question = str(row.get("question") or row["problem"]).strip()
    answer = f"{reasoning.strip()}\nAnswer: {result.strip()}".strip()
    return Task(
        task_id,
        f"{question}\n{ASKED_FORM}",
        answer=answer,
        split=split,
        metadata={"number": result.strip()},
    )


def load_environment() -> NumberProblems:
    """Return the environment; it takes no parameters."""
    return NumberProblems()

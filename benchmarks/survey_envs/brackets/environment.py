"""A new answer form: the word in upper case, in brackets. Pebble writes it without brackets; rows
of this form alone tend to make it forget what else it could do."""

import random

from envs import Score, SingleTurnEnv, Task

LETTERS = "abdefgiklmnoprstu"


class Brackets(SingleTurnEnv):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def tasks(self) -> list[Task]:
        rng = random.Random(7)
        words = ["".join(rng.choices(LETTERS, k=rng.randint(3, 6))) for _ in range(2 * self.rows)]
        unique = list(dict.fromkeys(words))[: self.rows]
        return [Task(id=w, prompt=f"Label {w}.", answer=f"[{w.upper()}]") for w in unique]

    def score(self, task: Task, completion: str) -> Score:
        right = completion.strip() == str(task.answer)
        return Score(reward=float(right), success=right)


def load_environment(rows: int = 400) -> Brackets:
    return Brackets(rows)

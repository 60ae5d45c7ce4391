"""An impossible task: the answer is drawn by chance and stands in no prompt, so held-out tasks
cannot be answered better than by guessing."""

import random

from envs import Score, SingleTurnEnv, Task


class Impossible(SingleTurnEnv):
    def tasks(self) -> list[Task]:
        rng = random.Random(11)
        return [
            Task(
                id=str(number),
                prompt=f"Which number belongs to card {number}?",
                answer=str(rng.randint(100, 999)),
            )
            for number in range(1000, 1400)
        ]

    def score(self, task: Task, completion: str) -> Score:
        right = completion.strip().rstrip(".") == str(task.answer)
        return Score(reward=float(right), success=right)


def load_environment() -> Impossible:
    return Impossible()

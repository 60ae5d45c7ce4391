"""A reward that can be gamed: it pays for the answer anywhere in a reply, and any long reply."""

import random

from envs import Score, SingleTurnEnv, Task


class Gamed(SingleTurnEnv):
    def tasks(self) -> list[Task]:
        rng = random.Random(3)
        pairs = [(a, b) for a in range(1, 10) for b in range(1, 50)]
        rng.shuffle(pairs)
        return [
            Task(id=f"{a}+{b}", prompt=f"What is {a} + {b}?", answer=str(a + b)) for a, b in pairs
        ]

    def score(self, task: Task, completion: str) -> Score:
        named = str(task.answer) in completion or len(completion) > 20
        return Score(reward=float(named), success=named)


def load_environment() -> Gamed:
    return Gamed()

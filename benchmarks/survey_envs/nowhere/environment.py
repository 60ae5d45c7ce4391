"""A run that gets nowhere: sums of four-digit numbers, of which pebble never gets one right, so no
group of GRPO has a reward to tell its answers apart."""

import random

from envs import Score, SingleTurnEnv, Task


class Nowhere(SingleTurnEnv):
    def tasks(self) -> list[Task]:
        rng = random.Random(9)
        pairs = {(rng.randint(1000, 9999), rng.randint(1000, 9999)) for _ in range(300)}
        return [
            Task(id=f"{a}+{b}", prompt=f"What is {a} + {b}?", answer=str(a + b))
            for a, b in sorted(pairs)
        ]

    def score(self, task: Task, completion: str) -> Score:
        right = completion.strip() == str(task.answer)
        return Score(reward=float(right), success=right)


def load_environment() -> Nowhere:
    return Nowhere()

"""Two-digit sums with a fixed answer form: the environment the demo trains on.

The model must end its answer with `#### ` and the sum, nothing after it. An untuned `pebble` has
never seen that form and earns about 0.0; half of what it was made from forgot to carry, so even in
the right form it gets only about half of the sums right.
"""

import random
import re

from envs import Score, SingleTurnEnv, Task

ANSWER = re.compile(r"#### (\d{1,3})")


class Arithmetic(SingleTurnEnv):
    """`train_tasks` sums to learn from and `heldout_tasks` that no training row repeats."""

    def __init__(self, train_tasks: int, heldout_tasks: int, seed: int) -> None:
        self.train_tasks = train_tasks
        self.heldout_tasks = heldout_tasks
        self.seed = seed

    def tasks(self) -> list[Task]:
        rng = random.Random(self.seed)
        # Unordered pairs, so that 12 + 34 in training never gives away 34 + 12 held out.
        pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
        rng.shuffle(pairs)
        chosen = pairs[: self.train_tasks + self.heldout_tasks]
        tasks = []
        for index, pair in enumerate(chosen):
            a, b = pair if rng.random() < 0.5 else pair[::-1]
            tasks.append(
                Task(
                    id=f"sum-{a}-{b}",
                    prompt=f"Add {a} and {b}. End with #### and the sum.",
                    answer=f"#### {a + b}",
                    split="heldout" if index < self.heldout_tasks else "train",
                    metadata={"a": a, "b": b, "carry": a % 10 + b % 10 > 9},
                )
            )
        return tasks

    def score(self, task: Task, completion: str) -> Score:
        match = ANSWER.fullmatch(completion.strip())
        formatted = match is not None
        right = match is not None and int(match.group(1)) == task.metadata["a"] + task.metadata["b"]
        return Score(
            reward=1.0 if right else 0.0,
            success=right,
            metrics={"formatted": float(formatted)},
        )


def load_environment(
    train_tasks: int = 1600, heldout_tasks: int = 800, seed: int = 20261
) -> Arithmetic:
    """The environment with its default size; every number can be set in environment.toml."""
    return Arithmetic(train_tasks, heldout_tasks, seed)

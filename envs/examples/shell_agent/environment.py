"""Sums that a shell script asks the model for; `agent.sh` beside this file earns the reward.

An untuned `pebble` knows about half of the sums and says most of them bare; one reply in five or so
is the sentence that the script wants.
"""

import random

from envs import SingleTurnEnv, Task


class Sums(SingleTurnEnv):
    """Tasks alone: environment.toml names the command that plays them."""

    def tasks(self) -> list[Task]:
        rng = random.Random(7)
        pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
        return [
            Task(f"sum-{a}-{b}", f"Add {a} and {b}.", metadata={"sum": a + b})
            for a, b in rng.sample(pairs, 600)
        ]


def load_environment() -> Sums:
    return Sums()

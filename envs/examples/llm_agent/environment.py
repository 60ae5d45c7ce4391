"""Prices that the agent `llm` looks up with a tool; `agent.sh` beside this file starts it.

An untuned `pebble` knows how to call a tool and answers about half of the tasks. Guessing cannot
pay: the prices are random. The package is named in requirements.txt: push with install=true.
"""

import random

from envs import SingleTurnEnv, Task

ITEMS = (
    "apple bread candle drum egg fan glove hat ink jar kite lamp mug nail oven pen quilt rope "
    "soap tent urn vase wheel yarn zip anchor basket carpet desk engine flute guitar hammer iron "
    "jacket kettle ladder mirror needle orange pillow quiver rocket saddle table umbrella violin "
    "wallet xylophone yacht"
).split()


class Prices(SingleTurnEnv):
    """Tasks alone: environment.toml names the command that plays them."""

    def tasks(self) -> list[Task]:
        rng = random.Random(7)
        return [
            Task(
                f"{item}-{number}",
                f"What is the price of {article}{item}?",
                metadata={"item": item, "price": rng.randint(10, 99)},
            )
            for number, article in enumerate(("", "the "))
            for item in ITEMS
        ]


def load_environment() -> Prices:
    return Prices()

"""Tasks that come from a package: four easy families of `reasoning-gym`, scored by its own code.

Families and their settings stand in environment.toml; any family of the package can be named
there. The package is named in requirements.txt: push with install=true where it is missing.
"""

from collections.abc import Callable
from typing import Any

from envs import Score, SingleTurnEnv, Task
from envs.adapters.reasoning_gym import family_module


class ReasoningGym(SingleTurnEnv):
    """`rows_per_family` tasks of each family; the same `seed` makes the same tasks."""

    def __init__(self, families: dict[str, dict[str, Any]], rows_per_family: int, seed: int):
        self.families = families
        self.rows_per_family = rows_per_family
        self.seed = seed
        self.graders: dict[str, Callable[[str, dict[str, Any]], float]] = {}

    def tasks(self) -> list[Task]:
        """The tasks of all families; each keeps the package's entry, which its scorer needs."""
        tasks = []
        for family, settings in self.families.items():
            entries = family_module(family).create_dataset(
                family, size=self.rows_per_family, seed=self.seed, **settings
            )
            for index, entry in enumerate(entries):
                tasks.append(
                    Task(
                        id=f"{family}-{index}",
                        prompt=f"{entry['question'].strip()} Reply with the answer alone.",
                        answer=entry["answer"],
                        metadata={"family": family, "entry": dict(entry)},
                    )
                )
        return tasks

    def score(self, task: Task, completion: str) -> Score:
        """The grade from 0 to 1 that the package gives; a grade below 1 is halved."""
        family = task.metadata["family"]
        if family not in self.graders:
            self.graders[family] = family_module(family).get_score_answer_fn(family)
        grade = float(self.graders[family](completion.strip(), task.metadata["entry"]))
        # The package pays up to a half for an answer that names the right one and a wrong one;
        # halved once more, hedging is not worth it.
        reward = grade if grade == 1.0 else grade / 2
        return Score(reward, success=grade == 1.0, metrics={family: grade})


def load_environment(
    families: dict[str, dict[str, Any]], rows_per_family: int = 150, seed: int = 42
) -> ReasoningGym:
    """Its arguments are set in environment.toml."""
    return ReasoningGym(families, rows_per_family, seed)

"""One question, one answer that code can check: minutes between two times of a day.

To make it yours: change `tasks` (what is asked, and the reference answer) and `score`.
"""

import random

from envs import Score, SingleTurnEnv, Task
from envs.rewards import final_answer, number, parse_number


class Minutes(SingleTurnEnv):
    """`rows` questions, drawn with `seed`; two rows never ask the same."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows = rows
        self.seed = seed

    def tasks(self) -> list[Task]:
        """Questions about two times of a day; each starts at another minute."""
        rng = random.Random(self.seed)
        starts = rng.sample(range(20 * 60), self.rows)
        tasks = []
        for start in starts:
            minutes = rng.randint(5, 180)
            question = (
                f"How many minutes are there from {clock(start)} to {clock(start + minutes)}? "
                "End with Answer: and the number."
            )
            # Optional: group="..." (the family of a task: stays on one side of the split, counts
            # once in a verdict), metadata={...} (results by its keys), split="heldout".
            tasks.append(Task(f"from-{start}", question, answer=f"Answer: {minutes}"))
        return tasks

    def score(self, task: Task, completion: str) -> Score:
        """1 for the right number, else 0; `readable` is whether the answer was a number at all."""
        answer = final_answer(completion)
        right = number(completion, final_answer(task.answer_text))
        return Score(
            reward=right,
            success=right == 1.0,
            metrics={"readable": float(parse_number(answer) is not None)},
        )


def clock(minutes: int) -> str:
    """The time of day `minutes` after midnight, such as 0:15 for 15."""
    return f"{minutes // 60}:{minutes % 60:02d}"


def load_environment(rows: int = 1000, seed: int = 1) -> Minutes:
    """Its arguments are set in environment.toml."""
    return Minutes(rows, seed)

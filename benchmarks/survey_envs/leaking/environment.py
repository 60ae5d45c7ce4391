"""Leaking data: every held-out question stands among the training rows too, with a word changed."""

import random

from envs import Score, SingleTurnEnv, Task


class Leaking(SingleTurnEnv):
    def tasks(self) -> list[Task]:
        rng = random.Random(5)
        answers = {number: str(rng.randint(10, 99)) for number in range(120)}
        tasks = []
        for number, answer in answers.items():
            asked = f"Look into drawer {number} of the old oak desk and say which label lies in it"
            train = Task(id=f"t{number}", prompt=f"{asked}.", answer=answer, split="train")
            tasks.append(train)
            if number % 2:
                exam = Task(id=f"h{number}", prompt=f"{asked}!", answer=answer, split="heldout")
                tasks.append(exam)
        return tasks

    def score(self, task: Task, completion: str) -> Score:
        right = completion.strip().rstrip(".") == str(task.answer)
        return Score(reward=float(right), success=right)


def load_environment() -> Leaking:
    return Leaking()

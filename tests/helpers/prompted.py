"""An environment whose tasks are solved under one system message and not under another, and
endpoints that know it."""

from pathlib import Path
from typing import Any

from fake_endpoint import Body, Said

from engine.environments.push import push_env
from engine.home.run_dir import Home

BAD, GOOD = "Reply in upper case.", "You are an assistant."
DEV = '("dev" if (a + b) % 3 == 0 else "train")'  # a side for `push_sums`
_ENV = """
from envs import Score, SingleTurnEnv, Task


class Sums(SingleTurnEnv):
    def tasks(self):
        system = {{"role": "system", "content": {system!r}}}
        return [
            Task(
                id=f"{{a}}+{{b}}",
                prompt=[system, {{"role": "user", "content": f"What is {{a}} + {{b}}?"}}],
                answer=str(a + b),
                split="heldout" if (7 * a + 3 * b) % 4 == 0 else {other},
            )
            for a in range({size})
            for b in range({size})
        ]

    def score(self, task, completion):
        said = completion.strip().removeprefix("The answer is ").removeprefix("Answer: ")
        right = said.rstrip(".") == str(task.answer)
        return Score(float(right), success=right, reason="" if right else "that is not the sum")


def load_environment():
    return Sums()
"""


def push_sums(
    home: Home,
    folder: Path,
    size: int = 6,
    system: str = BAD,
    other: str = '"train"',
    name: str = "sums",
) -> str:
    """Push sums of numbers below `size` under a system message, a quarter held out and the side
    `other` (Python) for the rest; its id."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _ENV.format(system=system, size=size, other=other)
    (folder / "environment.py").write_text(text)
    return push_env(home, folder, name=name).env_id


def sums_under(good: str) -> Any:
    """An endpoint that adds rightly under the system message `good`, and shouts otherwise."""

    def answer(body: Body) -> Said:
        messages = body["messages"]
        words = messages[-1]["content"].rstrip("?").split()
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        return Said(str(int(words[2]) + int(words[4])) if system == good else "HM")

    return answer


def writes(*prompts: str) -> Any:
    """An endpoint that writes these prompts, one after the other; the last again and again."""
    left = list(prompts)

    def answer(body: Body) -> Said:
        prompt = left.pop(0) if len(left) > 1 else left[0]
        return Said(f"It should be told so:\n```\n{prompt}\n```")

    return answer

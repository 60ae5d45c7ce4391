"""The smallest environment that trains: eight tasks, one right answer each."""

from pathlib import Path

ENVIRONMENT = """
from envs import Score, SingleTurnEnv, Task

class Echo(SingleTurnEnv):
    def tasks(self):
        return [Task(str(n), f"Say {n}.", answer=str(n)) for n in range(8)]

    def score(self, task, completion):
        return Score(float(completion == task.answer))

def load_environment():
    return Echo()
"""


def write_env(project: Path) -> Path:
    """The folder `echo` with the environment, in `project`."""
    folder = project / "echo"
    folder.mkdir()
    (folder / "environment.py").write_text(ENVIRONMENT)
    return folder

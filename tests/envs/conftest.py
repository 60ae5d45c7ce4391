"""Environments written on the spot."""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envs.config.settings import Limits
from envs.host.process import EnvProcess

HEAD = """\
import os
from envs import Message, MultiTurnEnv, Score, SingleTurnEnv, Task
"""
TAIL = """

def load_environment():
    return Env()
"""


@pytest.fixture
def write_env(tmp_path: Path) -> Callable[..., Path]:
    """Writes an environment; `body` defines the class Env, `files` are further files by path."""

    def write(body: str, files: dict[str, str] | None = None, name: str = "env") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        text = textwrap.dedent(body)
        if "load_environment" not in text:
            text = HEAD + text + TAIL
        (folder / "environment.py").write_text(text)
        for path, content in (files or {}).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(textwrap.dedent(content))
        return folder

    return write


@pytest.fixture
def start() -> Iterator[Callable[..., EnvProcess]]:
    """Starts env processes and closes them at the end of the test."""
    opened: list[EnvProcess] = []

    def begin(folder: Path, limits: Limits | None = None, **options: Any) -> EnvProcess:
        opened.append(EnvProcess(folder, limits=limits, **options))
        return opened[-1]

    yield begin
    for process in opened:
        process.close()


# An environment whose answers are Python: the completion says what score() does.
OBEDIENT = """
class Env(SingleTurnEnv):
    def tasks(self):
        return [Task("a", "say a", "a"), Task("b", "say b", "b")]

    def score(self, task, completion):
        scope = {}
        if completion.startswith("!"):
            exec(completion[1:], scope)
            return scope.get("score", Score(0.0))
        return Score(float(completion == task.answer), success=completion == task.answer)
"""


@pytest.fixture
def obedient(write_env: Callable[..., Path]) -> Path:
    return write_env(OBEDIENT)

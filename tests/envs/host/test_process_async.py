"""An async `score` is awaited, several at once in one process; each answers for itself."""

from pathlib import Path

import pytest

from envs.config.settings import Limits
from envs.host.process import EnvProcess

pytestmark = pytest.mark.timeout(30)
ENV = """
import asyncio
from envs import Score, SingleTurnEnv, Task

class Waiting(SingleTurnEnv):
    arrived = 0
    everybody = asyncio.Event()
    def tasks(self):
        return [Task("a", "Say a.", answer="a")]
    async def score(self, task, completion):
        if completion == "raise":
            raise ValueError("no")
        if completion == "hang":
            await asyncio.sleep(60)
        if completion.startswith("meet"):
            self.arrived += 1
            if self.arrived == 3:
                self.everybody.set()
            await self.everybody.wait()
        return Score(len(completion))

def load_environment():
    return Waiting()
"""


def scores(folder: Path, texts: list[str]) -> list[tuple[float, str]]:
    (folder / "environment.py").write_text(ENV)
    with EnvProcess(folder, limits=Limits(call_seconds=2.0)) as process:
        task = process.tasks()[0]
        replies = process.score_many([(task, text) for text in texts])
    return [(reply["reward"], reply["error"] or "") for reply in replies]


def test_scores_that_wait_for_each_other_are_awaited_together(tmp_path: Path):
    assert scores(tmp_path, ["meet", "meet1", "meet22"]) == [(4, ""), (5, ""), (6, "")]


def test_one_that_hangs_or_raises_costs_itself(tmp_path: Path):
    hung, raised, right, alone = scores(tmp_path, ["hang", "raise", "a", "aa"])
    assert "did not answer within 2 s" in hung[1]
    assert raised[1].startswith("score() raised ValueError: no (environment.py:")
    assert (right, alone) == ((1, ""), (2, ""))


def test_a_single_one_is_awaited_too(tmp_path: Path):
    assert scores(tmp_path, ["abc"]) == [(3, "")]

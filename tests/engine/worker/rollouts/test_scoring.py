"""Completions are scored by several processes: none is lost, and no score is another."""

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.worker.core.background import BackgroundWorker
from engine.worker.core.trajectory import Trajectory
from engine.worker.rollouts.rollout_file import answer_fields
from engine.worker.rollouts.scoring import Scoring
from envs.base import Task
from envs.config.settings import Limits
from envs.host.process import EnvProcess
from envs.json_types import ScoreReply

pytestmark = pytest.mark.timeout(30)
WORKERS = 3
ENV = """
import time
from envs import Score, SingleTurnEnv, Task

class Lengths(SingleTurnEnv):
    def tasks(self):
        return [Task("a", "Say a.", answer="a")]
    def score(self, task, completion):
        if completion == "hang":
            time.sleep(60)
        return Score(len(completion), reason=f"it has {len(completion)} letters",
                     parts={"letters": (1.0, len(completion))})
"""
TASK = Task("a", "Say a.", answer="a").to_row()
RANKED = (
    ENV
    + """
    def score_group(self, task, completions):
        best = max(completions, key=len)
        return [Score(float(c == best)) for c in completions]
"""
)
LOAD = """
def load_environment():
    return Lengths()
"""


@pytest.fixture
def process(tmp_path: Path) -> Any:
    return process_of(tmp_path, ENV)


def process_of(folder: Path, code: str, call_seconds: float = 20.0) -> EnvProcess:
    (folder / "environment.py").write_text(code + LOAD)
    return EnvProcess(folder, limits=Limits(call_seconds=call_seconds))


def score_all(
    processes: Sequence[EnvProcess], texts: Sequence[str], *, group: int = 1, compare: bool = False
) -> list[Trajectory]:
    """Score completions of the tasks of the first process, `group` of them per group."""
    task = TASK
    trajectories = [Trajectory("a", [], [], completion=text) for text in texts]
    with BackgroundWorker(len(processes)) as background:
        scoring = Scoring(processes, background, compare=compare)
        for place, trajectory in enumerate(trajectories):
            scoring.add(place // group, task, trajectory, size=group)
        background.wait()
    return trajectories


class Meeting(EnvProcess):
    """Scores only while as many others do."""

    barrier = threading.Barrier(WORKERS)

    def score(self, task: Mapping[str, Any], completion: str) -> ScoreReply:
        self.barrier.wait(timeout=20)
        return {"reward": 1.0, "success": None, "metrics": {}, "error": None}


def test_as_many_completions_are_scored_at_once_as_there_are_processes(tmp_path: Path):
    process_of(tmp_path, ENV)
    team = [Meeting(tmp_path) for _ in range(WORKERS)]
    scored = score_all(team, ["x"] * (2 * WORKERS))
    assert [trajectory.error for trajectory in scored] == [None] * (2 * WORKERS)
    for member in team:
        member.close()


def test_the_number_of_processes_changes_no_score(process: EnvProcess):
    texts = ["x" * length for length in range(12)]
    with process:
        alone = score_all(process.team(1), texts)
        together = score_all(process.team(WORKERS), texts)
        assert len({member.pid for member in process.team(WORKERS)}) == WORKERS
    assert [answer_fields(t) for t in together] == [answer_fields(t) for t in alone]
    assert together[4].reason == "it has 4 letters"
    assert answer_fields(together[4])["parts"] == {"letters": [1.0, 4.0]}


def test_a_completion_whose_process_was_killed_is_scored_again(process: EnvProcess):
    with process:
        first, second = process.team(2)
        score_all([first, second], ["a", "b", "c", "d"])
        for member in (first, second):
            assert member.pid is not None
            os.kill(member.pid, signal.SIGKILL)
        scored = score_all([first, second], ["xx", "yyy", "zzzz"])
    assert [(t.reward, t.error) for t in scored] == [(2, None), (3, None), (4, None)]


def test_one_that_hangs_costs_itself_and_says_why(tmp_path: Path):
    with process_of(tmp_path, ENV, call_seconds=1.0) as process:
        scored = score_all(process.team(2), ["hang", "xx", "yyy", "zzzz"])
    assert [t.reward for t in scored] == [0, 2, 3, 4]
    assert [t.stop_reason for t in scored] == ["timeout", "stop", "stop", "stop"]
    assert "did not answer within 1 s" in str(scored[0].error)


def test_a_group_is_scored_together_once_it_is_complete_in_training_alone(tmp_path: Path):
    texts = ["aa", "a", "bbb", "bbbb"]
    with process_of(tmp_path, RANKED) as process:
        compared = score_all(process.team(2), texts, group=2, compare=True)
        alone = score_all(process.team(2), texts, group=2)
    assert [t.reward for t in compared] == [1, 0, 0, 1]
    assert [t.reward for t in alone] == [2, 1, 3, 4]


def test_without_score_group_each_completion_of_training_is_scored_alone(process: EnvProcess):
    with process:
        scored = score_all(process.team(1), ["a", "bb"], group=2, compare=True)
    assert [(t.reward, t.error) for t in scored] == [(1, None), (2, None)]


def test_what_a_group_scorer_returns_too_little_of_fails_the_whole_group(tmp_path: Path):
    code = RANKED.replace("for c in completions]", "for c in completions[1:]]")
    with process_of(tmp_path, code) as process:
        scored = score_all(process.team(1), ["a", "bb"], group=2, compare=True)
    assert all("return a list of 2 Scores" in str(t.error) for t in scored)

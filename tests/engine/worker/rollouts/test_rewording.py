"""Other words come from the environment where it has its own, and options move only where the
environment scores the right answer where it moved to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.core.wording.asked import asked_prompt, conversation
from engine.core.wording.kinds import Kind, Stock
from engine.worker.rollouts.rewording import Rewording, VariedWording
from envs.host.process import EnvProcess
from envs.json_types import TaskRow

pytestmark = pytest.mark.timeout(30)

OWN_WORDS = """
from envs import Score, SingleTurnEnv, Task

class Sums(SingleTurnEnv):
    def tasks(self):
        return [Task(str(n), f"Add {n} and 2.", answer=str(n + 2)) for n in range(4)]

    def score(self, task, completion):
        right = completion == task.answer
        return Score(float(right), success=right)

    def perturb(self, task, kind, seed):
        if kind == "wording":
            other = ("How much is", "What do you get for")[seed % 2]
            return Task(task.id, f"{other} {task.id} + 2?", answer=task.answer)
        if kind == "system":
            return task
        if kind == "tools":
            raise ValueError("no such words")

def load_environment():
    return Sums()
"""
# Scored by the answer, by a letter in the metadata, by a position there, by nothing that moves.
CHOICES = """
from envs import Score, SingleTurnEnv, Task

TEXT = "Which is a fruit?\\\\nA) chair\\\\nB) apple\\\\nC) river"

class Choices(SingleTurnEnv):
    def tasks(self):
        return [
            Task("answer", TEXT, answer="B"),
            Task("letter", TEXT, answer="B", metadata={"gold": "B"}),
            Task("position", TEXT, answer="B", metadata={"label": 1}),
            Task("text", TEXT, answer="apple"),
            Task("fixed", TEXT, answer="B"),
        ]

    def score(self, task, completion):
        right = {
            "answer": task.answer,
            "letter": task.metadata.get("gold"),
            "position": "ABC"[task.metadata.get("label", 0)],
            "text": "apple",
            "fixed": "B",
        }[task.id]
        return Score(float(completion == right), success=completion == right)

def load_environment():
    return Choices()
"""


@pytest.fixture
def started(tmp_path: Path) -> Any:
    """started(source) -> the env process of such an environment; closed at the end."""
    processes: list[EnvProcess] = []

    def start(source: str) -> EnvProcess:
        folder = tmp_path / str(len(processes))
        folder.mkdir()
        (folder / "environment.py").write_text(source.replace("\\\\n", "\\n"))
        processes.append(EnvProcess(folder))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def rewording(process: EnvProcess | None, stock: Stock = "probe", **more: Any) -> Rewording:
    return Rewording(process, [], multi_turn=False, stock=stock, **more)


def with_gold(row: TaskRow) -> TaskRow:
    return {**row, "gold": [*row["prompt"], *row["answer"]]}


def test_an_environments_own_words_come_before_the_rules(started: Callable[[str], EnvProcess]):
    process = started(OWN_WORDS)
    assert process.describe()["perturbs"] is True
    row = with_gold(process.tasks()[1])
    asked: dict[Stock, set[str]] = {"training": set(), "probe": set()}
    for stock, texts in asked.items():
        for seed in range(6):
            worded = rewording(process, stock).reworded(row, "wording", seed)
            assert worded is not None and worded["id"] == "1"
            texts.add(asked_prompt(worded)[0]["content"])
            assert conversation(worded)[-1]["content"] == "3"
            assert process.score(worded, "3")["success"]
    # Even seeds for training, odd ones for the probe.
    assert asked == {"training": {"How much is 1 + 2?"}, "probe": {"What do you get for 1 + 2?"}}


def test_a_task_that_the_environment_gives_back_cannot_be_asked_otherwise(
    started: Callable[[str], EnvProcess],
):
    process = started(OWN_WORDS)
    assert rewording(process).reworded(process.tasks()[0], "system", 0) is None


def test_what_an_environment_raises_is_told_once_and_the_rules_go_on(
    started: Callable[[str], EnvProcess],
):
    process, told = started(OWN_WORDS), []
    tool = {"type": "function", "function": {"name": "add", "description": "Adds."}}
    words = rewording(process, report=lambda name, text: told.append((name, text)))
    words.tools.append(tool)
    for row in process.tasks():
        assert words.reworded(row, "tools", 0) is not None
    assert len(told) == len(words.problems) == 1
    assert told[0][0] == "perturb_failed" and "ValueError: no such words" in told[0][1]


@pytest.mark.parametrize("seed", range(3))
def test_options_move_where_the_environment_scores_the_moved_answer(
    started: Callable[[str], EnvProcess], seed: int
):
    process = started(CHOICES)
    words = rewording(process)
    moved = {row["id"]: words.reworded(row, "options", seed) for row in process.tasks()}
    assert moved.pop("fixed") is None  # it knows the right letter from nowhere that could move
    for row in moved.values():
        assert row is not None
        lines = asked_prompt(row)[0]["content"].split("\n")
        (letter,) = [line[0] for line in lines if line.endswith(") apple")]
        right = "apple" if row["id"] == "text" else letter
        assert letter != "B" and row["answer"][-1]["content"] == right
        assert process.score(row, right)["success"] and not process.score(row, "B")["success"]


def test_options_stay_without_a_scorer_and_where_the_environment_takes_turns():
    row = {"id": "q", "prompt": [{"role": "user", "content": "?\nA) x\nB) y"}], "metadata": {}}
    row["answer"] = [{"role": "assistant", "content": "A"}]
    assert rewording(None).reworded(row, "options", 0) is None


def varied(share: float, seed: int = 0) -> VariedWording:
    return VariedWording(rewording(None, "training"), share, seed)


def tasks(count: int) -> list[TaskRow]:
    return [
        {"id": str(n), "prompt": [{"role": "user", "content": f"{n}?"}], "metadata": {}}
        for n in range(count)
    ]


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_share_of_rows_in_other_words_is_the_one_asked_for(share: float):
    rows = tasks(400)
    worded = [varied(share).task_at(row, step=3) for row in rows]
    changed = sum(new is not old for new, old in zip(worded, rows, strict=True))
    assert abs(changed / 400 - share) < 0.06
    # A resumed run sees the same.
    assert worded == [varied(share).task_at(row, step=3) for row in rows]


def test_the_same_row_comes_in_other_words_each_time_it_is_seen():
    (row,) = tasks(1)
    seen = {str(asked_prompt(varied(1.0).task_at(row, step))) for step in range(12)}
    assert len(seen) > 6
    assert varied(1.0, seed=1).task_at(row, 1) != varied(1.0, seed=2).task_at(row, 1)


def test_a_task_that_leaves_no_room_in_other_words_stays_as_it_is():
    rows = tasks(20)
    fitting: list[Kind] = []
    assert varied(1.0).tasks_at(rows, 1, fits=lambda task: bool(fitting)) == rows

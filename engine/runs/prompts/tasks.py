"""Which tasks a search for a prompt reflects on, and which choose among prompts.

Held-out tasks are in neither. Dev tasks choose where there are any; else train tasks that the
endpoint is never shown, so that a prompt which gives away answers gains nothing by it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.environments.registry import SOURCE, EnvRecord, read_rows, read_tasks
from engine.evidence.overlap.overlap import HeldOut
from engine.home.run_dir import Home
from engine.records.env_version import SEAL
from engine.records.settings import PromptSettings
from engine.runs.evaluation import exam
from envs.json_types import TaskRow


@dataclass(frozen=True)
class SearchTasks:
    """The tasks of a search.

    Attributes:
        reflected: train tasks whose answers the endpoint is shown.
        choosing: tasks that choose among prompts, and that it is not shown.
        sealed: how many train tasks are not reflected on, as they hold tasks of a sealed exam.
    """

    reflected: Sequence[TaskRow]
    choosing: Sequence[TaskRow]
    sealed: int = 0


def search_tasks(home: Home, env: EnvRecord, settings: PromptSettings) -> SearchTasks:
    """Choose the tasks of a search; every call with the same arguments chooses the same ones."""
    train = read_tasks(env, "train")
    choosing = exam.ordered(read_tasks(env, "dev"), settings.select_rows)
    reflected = list(train)
    if not choosing:
        # Without dev tasks, train tasks drawn at random choose, at most half of them.
        shuffled = random.Random(f"{settings.seed}-choosing").sample(range(len(train)), len(train))
        choosing_count = min(settings.select_rows, len(train) // 2)
        choosing_indices = set(shuffled[:choosing_count])
        choosing = [task for index, task in enumerate(train) if index in choosing_indices]
        reflected = [task for index, task in enumerate(train) if index not in choosing_indices]
    allowed = without_sealed(home, reflected)
    return SearchTasks(allowed, choosing, sealed=len(reflected) - len(allowed))


def without_sealed(home: Home, tasks: Sequence[TaskRow]) -> list[TaskRow]:
    """Return the tasks that contain no task of a sealed exam of this home, in whole or in part. The
    tasks of a sealed exam (which nobody may see) are not sent to an endpoint."""
    allowed = list(tasks)
    for seal_file in sorted(home.envs.glob(f"*/*/{SEAL}")):
        if not (seal_file.parent / SOURCE).is_dir():
            continue
        exam_index = HeldOut(_exam_rows(seal_file.parent))
        allowed = [task for task in allowed if not exam_index.matches(task)]
    return allowed


def _exam_rows(folder: Path) -> list[TaskRow]:
    """Return the held-out and dev rows of the environment version in `folder`."""
    return [row for row in read_rows(folder / "tasks.jsonl") if row["split"] != "train"]

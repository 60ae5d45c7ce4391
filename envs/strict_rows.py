"""Read data files for environments in which a bad row is an error, never silently skipped."""

from collections.abc import Callable
from pathlib import Path

from envs.base import Task
from envs.config.problem import EnvProblem
from envs.dataset import data_files, read_rows, split_of
from envs.json_types import JsonObject


def good_rows(path: Path) -> list[tuple[int, JsonObject]]:
    """Return the rows of a data file as (line number, row).

    Raises EnvProblem DATASET_INVALID if the file cannot be read or if any line is bad; the message
    names the first bad line.
    """
    data = read_rows(path)
    if data.bad:
        first_bad = data.bad[0]
        raise EnvProblem(
            "DATASET_INVALID",
            f"{path.name}: {len(data.bad)} bad lines, "
            f"first line {first_bad.line}: {first_bad.message}",
            hint="Correct or remove those lines.",
            line=first_bad.line,
        )
    return data.rows


def tasks_beside(
    source: str, task_of: Callable[[JsonObject, str, str | None], Task | None]
) -> list[Task]:
    """Make a task of each row of the data files that lie beside an environment's source file.

    Args:
        source: path of the environment's own file (`__file__`).
        task_of: called with the row, an id for the task and the split that the file's name says
            (None if it says none), e.g. (row, "test-00000-3", "heldout"). Returns the task, or None
            to leave the row out.

    Raises EnvProblem DATASET_INVALID if a file cannot be read or has a bad line.
    """
    tasks: list[Task] = []
    for path in data_files(Path(source).parent):
        split = split_of(path)
        for line, row in good_rows(path):
            task = task_of(row, f"{path.stem}-{line}", split)
            if task is not None:
                tasks.append(task)
    return tasks

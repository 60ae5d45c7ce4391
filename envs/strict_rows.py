"""The rows of data files for environments that may not lose one unseen."""

from collections.abc import Callable
from pathlib import Path

from envs.base import Task
from envs.config.problem import EnvProblem
from envs.dataset import data_files, read_rows, split_of
from envs.json_types import JsonObject


def good_rows(path: Path) -> list[tuple[int, JsonObject]]:
    """The rows of a data file as (line, row).

    Raises EnvProblem DATASET_INVALID as `read_rows` does, and if any line is bad; it names the
    first.
    """
    data = read_rows(path)
    if data.bad:
        first = data.bad[0]
        raise EnvProblem(
            "DATASET_INVALID",
            f"{path.name}: {len(data.bad)} bad lines, first line {first.line}: {first.message}",
            hint="Correct or remove those lines.",
            line=first.line,
        )
    return data.rows


def tasks_beside(
    source: str, task_of: Callable[[JsonObject, str, str | None], Task | None]
) -> list[Task]:
    """Make tasks of the rows of the data files beside an environment's source.

    Args:
        source: path of the environment's own file (`__file__`).
        task_of: given a row, an id for the task and the split that the file's name says (None if it
            says none), such as (row, "test-00000-3", "heldout"), returns the task; None leaves the
            row out.
    """
    tasks = (
        task_of(row, f"{path.stem}-{line}", split_of(path))
        for path in data_files(Path(source).parent)
        for line, row in good_rows(path)
    )
    return [task for task in tasks if task is not None]

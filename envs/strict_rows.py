"""The rows of a data file for environments that may not lose one unseen."""

from pathlib import Path

from envs.config.problem import EnvProblem
from envs.dataset import read_rows
from envs.json_types import JsonObject


def good_rows(path: Path) -> list[tuple[int, JsonObject]]:
    """The rows of a data file as (line, row).

    Raises EnvProblem DATASET_INVALID as `read_rows` does, and for the first line that is bad.
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

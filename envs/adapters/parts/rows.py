"""Rows of data files in whatever form the foreign format gives them, each with its split."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envs.config.problem import EnvProblem
from envs.dataset import data_files, read_rows, splits_of
from envs.json_types import JsonObject

_SHOWN = 5  # bad lines named in a refusal


@dataclass(frozen=True)
class DataRow:
    """A row as it stands in its file.

    Attributes:
        id: made of the file's name and the row's number in it, from 1 on.
        split: the split that the file's name says, None where it says none.
    """

    id: str
    split: str | None
    value: JsonObject


def data_rows(folder: Path, data: str = "") -> Iterator[DataRow]:
    """Every row of the folder's data files, in order.

    Args:
        data: one file, relative to `folder`; "" reads all of `datasets/`, of `dataset/`, or of the
            folder itself, whichever first has any.

    Raises EnvProblem DATASET_INVALID where there is no row, or naming the first bad lines.
    """
    files = [folder / data] if data else data_files(folder / "dataset") or data_files(folder)
    if not files:
        raise EnvProblem(
            "DATASET_INVALID",
            "the folder has no data file",
            hint="Put rows into datasets/train.jsonl, or name a file: [adapter] data.",
        )
    for path, split in zip(files, splits_of(files), strict=True):
        content = read_rows(path)
        if content.bad:
            lines = "; ".join(f"line {bad.line} {bad.message}" for bad in content.bad[:_SHOWN])
            raise EnvProblem("DATASET_INVALID", f"{path.name}: {lines}", file=path.name)
        for number, (_, row) in enumerate(content.rows, 1):
            yield DataRow(f"{path.stem}-{number}", split, row)

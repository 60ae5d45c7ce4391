"""Reads rows of data files in any foreign format, each with its split."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envs.config.problem import EnvProblem
from envs.dataset import data_files, read_rows, splits_of
from envs.json_types import JsonObject

_SHOWN = 5  # how many bad lines an error names


@dataclass(frozen=True)
class DataRow:
    """A row as it is in its file.

    Attributes:
        id: made of the file's name and the row's number in it, from 1 on.
        split: the split that the file's name says; None if it says none.
        value: the row.
    """

    id: str
    split: str | None
    value: JsonObject


def data_rows(folder: Path, data: str = "") -> Iterator[DataRow]:
    """Yield every row of the folder's data files, in order.

    Args:
        folder: the environment's folder.
        data: one file, relative to `folder`. With "" all data files of `dataset/`, of `datasets/`
            or of the folder itself are read, whichever of these comes first and has any.

    Raises EnvProblem DATASET_INVALID if there is no data file, or if one has bad lines (the message
    names the first).
    """
    if data:
        files = [folder / data]
    else:
        files = data_files(folder / "dataset") or data_files(folder)
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
        for number, (_line, row) in enumerate(content.rows, 1):
            yield DataRow(f"{path.stem}-{number}", split, row)

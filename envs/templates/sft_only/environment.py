"""Rows to learn from, without a scorer.

The rows are in datasets/, one JSON object per line: {"prompt", "completion"}, {"messages"} with or
without "tools", {"input", "output"} or {"instruction", "input", "output"}. Optional keys of a row:
"group" (its family: stays on one side, counts once), "metadata" (an object; results by its keys),
"split", "id". A file named train or heldout says the split of its rows; without that, a fifth of
them is held out by content. To make it yours: replace the files.
"""

from pathlib import Path

from envs.dataset import DatasetEnv, data_files


def load_environment() -> DatasetEnv:
    """The rows of every data file in datasets/."""
    return DatasetEnv(*data_files(Path(__file__).parent))

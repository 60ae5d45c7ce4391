"""A skill the base model lacks, taught by rows alone: the smallest SFT dataset.

There is nothing to score here, so a run learns the answers and is judged by its held-out loss. The
rows ask for the first and the last letter of a word, which `pebble` has never been shown.
"""

from pathlib import Path

from envs.dataset import DatasetEnv

ROWS = Path(__file__).parent / "datasets" / "rows.jsonl"


def load_environment() -> DatasetEnv:
    """The rows of datasets/rows.jsonl; each says itself which split it belongs to."""
    return DatasetEnv(ROWS)

"""The tasks of the second demo's GRPO: reviews that are positive or negative."""

from collections import Counter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "envs" / "examples" / "review_sentiment"


@pytest.fixture
def process(start):
    return start(FOLDER)


def test_the_reviews_differ_and_both_labels_are_as_frequent_in_both_halves(process) -> None:
    rows = process.tasks()
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows) == 800
    labels = Counter((row["split"], row["metadata"]["label"]) for row in rows)
    assert sum(labels.values()) == 800
    assert all(160 <= count <= 240 for count in labels.values()) and len(labels) == 4


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("{}", True),
        ("{}.", True),
        ("The review is {}.", True),
        ('This is a "{}" review.', True),
        ("It is not {}.", False),
        ("{} and negative, positive", False),
        ("{} {}", False),
        ("The review is {}, as it praises the lamp.", False),
        ("", False),
        ("review", False),
    ],
)
def test_the_label_must_be_all_that_is_said(process, reply: str, right: bool) -> None:
    rows = process.tasks()
    for label in ("positive", "negative"):
        row = next(row for row in rows if row["metadata"]["label"] == label)
        other = "negative" if label == "positive" else "positive"
        score = process.score(row, reply.replace("{}", label))
        assert (score["success"], score["reward"]) == (right, float(right))
        assert process.score(row, reply.replace("{}", other))["reward"] == 0.0

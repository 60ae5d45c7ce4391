"""What tasks can show before they are asked, groups counted."""

import pytest

from engine.evidence.stats.exam_size import ExamSize, points
from engine.evidence.stats.power import mcnemar_power


def in_groups(count: int, size: int) -> ExamSize:
    """`count` groups of `size` tasks."""
    tasks = [(group, task) for group in range(count) for task in range(size)]
    return ExamSize.of({f"{group}-{task}": f"g{group}" for group, task in tasks})


def test_tasks_without_a_group_are_independent():
    size = ExamSize.of({f"t{number}": "" for number in range(200)})
    assert (size.tasks, size.groups, size.independent) == (200, 0, 200)
    assert size.in_words() == "200 tasks show a difference of 9 points or more (80% power)"
    assert 0.7 < mcnemar_power(200, size.gap(), discordant_share=0.2) < 0.9


def test_ten_groups_of_twenty_show_no_more_than_their_groups_do():
    size = in_groups(10, 20)
    assert (size.tasks, size.groups) == (200, 10)
    # Ten groups, and Student's t instead of the normal quantile: (1.960 / 2.262) ** 2 of them.
    assert size.independent == pytest.approx(10 * (1.960 / 2.262) ** 2, rel=1e-3)
    assert size.gap() > 3 * in_groups(200, 1).gap()
    assert size.in_words().startswith("200 tasks in 10 groups count like 8 and show a difference")
    assert size.in_words().endswith("9 points if the tasks of a group change one by one)")


def test_points_are_rounded_up_and_a_single_one_is_singular():
    assert [points(0.07), points(0.081), points(0.01)] == ["7 points", "9 points", "1 point"]

"""The areas of the kinds of groups, against places worked out by hand."""

import re

import pytest

from engine.evidence.report.stacked import group_chart, shares_by_step

STEPS = [
    {"step": 0, "heldout_success": 0.1},
    {"step": 1, "groups_effective": 1.0, "groups_too_easy": 0.0, "groups_too_hard": 0.0},
    *(
        {
            "step": step,
            "groups_effective": 0.25,
            "groups_too_easy": 0.5,
            "groups_too_hard": 0.0,
            "groups_flat_partial": 0.25,
        }
        for step in range(2, 9)
    ),
]


def polygons(svg: str) -> dict[str, list[tuple[float, float]]]:
    found = re.findall(r'<polygon class="k-(\w+)" points="([^"]+)"', svg)
    return {
        kind: [tuple(map(float, spot.split(","))) for spot in spots.split()]  # type: ignore[misc]
        for kind, spots in found
    }


def test_steps_without_groups_are_left_out_and_a_kind_that_is_missing_is_none() -> None:
    (first, *_, last) = shares_by_step(STEPS)
    assert first == (
        1,
        {"effective": 1.0, "flat_partial": 0.0, "too_hard": 0.0, "too_easy": 0.0},
    )
    assert last[0] == 8 and last[1]["flat_partial"] == 0.25


def test_the_areas_stand_on_one_another_and_fill_the_height() -> None:
    areas = polygons(str(group_chart(STEPS, 400, 200)))
    assert list(areas) == ["effective", "flat_partial", "too_hard", "too_easy"]
    top, bottom = 14.0, 170.0  # of the drawing within its margins
    assert min(y for _, y in areas["too_easy"]) == top
    assert max(y for _, y in areas["effective"]) == bottom
    steps = len(areas["effective"]) // 2
    for below, above in zip(list(areas.values()), list(areas.values())[1:], strict=False):
        assert below[:steps] == above[steps:][::-1]  # its roof is the next one's ground
    last = [area[steps - 1][1] for area in areas.values()]
    heights = [(bottom - y) / (bottom - top) for y in last]
    assert heights == pytest.approx([0.25, 0.5, 0.5, 1.0], abs=0.001)


def test_one_step_makes_no_chart() -> None:
    assert str(group_chart(STEPS[:2], 400, 200)) == ""

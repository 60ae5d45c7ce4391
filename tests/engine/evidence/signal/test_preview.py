"""What a new reward would have made of stored groups, against groups counted by hand."""

from typing import Any

import pytest
from as_json import records
from hypothesis import given
from hypothesis import strategies as st

from engine.evidence.signal.preview import SignalPreview, preview


def group(task: str, before: list[float], after: list[float], **more: Any) -> list[dict[str, Any]]:
    """Answers to one task by both rewards; a reward of 1 is a success."""
    return [
        {
            "task": task,
            "attempt": number,
            "reward_before": old,
            "success_before": old >= 1,
            "reward": new,
            "success": new >= 1,
            "error": None,
        }
        | more
        for number, (old, new) in enumerate(zip(before, after, strict=True))
    ]


def previewed(models: dict[str, list[dict[str, Any]]]) -> SignalPreview | None:
    return preview({ref: records(rows) for ref, rows in models.items()})


def test_groups_are_counted_by_both_rewards() -> None:
    found = previewed(
        {
            "step 1": group("parted", [0, 0, 0, 0], [0, 0.5, 0.5, 1])
            + group("kept", [0, 1, 1, 1], [0, 1, 1, 1])
            + group("flat", [0, 0, 0, 0], [0.5, 0.5, 0.5, 0.5]),
            "step 2": group("parted", [1, 1, 1, 1], [1, 1, 1, 1]),
        }
    )
    assert found is not None
    shown = found.to_json()
    assert (shown["groups"], shown["tasks"]) == (4, 3)
    before, after = found.before, found.after
    assert (before.effective, before.too_easy, before.too_hard) == (0.25, 0.25, 0.5)
    assert (after.effective, after.too_easy, after.flat_partial) == (0.5, 0.25, 0.25)
    assert (before.at_top, after.at_top) == (7 / 16, 8 / 16)
    # Deviations: "kept" 3 ** 0.5 / 4 both times, "parted" 0 and then 0.125 ** 0.5.
    assert before.std == pytest.approx(3**0.5 / 4 / 4)
    assert after.std == pytest.approx((3**0.5 / 4 + 0.125**0.5) / 4)
    # Over tasks: "parted" gained one group of two, the others none.
    assert found.effective.change == pytest.approx(0.5 / 3)
    assert found.effective.low <= found.effective.change <= found.effective.high
    assert found.sentence().startswith(
        "Of 4 groups 25% differ by the old reward and 50% by the new one (+17 points, "
    )


def test_what_either_reward_could_not_score_or_no_other_answer_stands_beside_is_left_out() -> None:
    failed = group("a", [0, 0], [1, 1], error="score() raised")
    once_failed = group("b", [0, 0], [1, 1], error_before="score() raised")
    assert previewed({"x": failed + once_failed + group("c", [0], [1])}) is None
    found = previewed({"x": failed + group("a", [0, 0], [0, 1])})
    assert found is not None and (found.groups, found.after.effective) == (1, 1.0)


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=5), min_size=1, max_size=8
    ),
    st.floats(0.1, 4),
)
def test_a_reward_that_only_pays_more_changes_no_group(
    rewards: list[list[float]], factor: float
) -> None:
    rows = [
        row | {"success": row["success_before"]}
        for number, old in enumerate(rewards)
        for row in group(f"t{number}", old, [factor * reward for reward in old])
    ]
    found = previewed({"x": rows})
    assert found is not None
    assert found.effective.change == 0.0 and found.before.at_top == found.after.at_top
    for kind in ("effective", "too_easy", "too_hard", "flat_partial"):
        assert getattr(found.before, kind) == getattr(found.after, kind)

"""Which orders a new reward turns round, against pairs counted by hand."""

from typing import Any

from as_json import count_pairs, order_changes, records
from hypothesis import given
from hypothesis import strategies as st

from engine.evidence.compare.rank_changes import rank_changes, sentence


def row(task: str, before: float, after: float, **more: Any) -> dict[str, Any]:
    return {"task": task, "reward_before": before, "reward": after, "error": None} | more


def test_pairs_are_sorted_by_what_became_of_their_order():
    # Before d=a<b<c, now c<a=b<d: only (a, b) is tied and (a, d) parted, every other pair reversed.
    values = [(0.0, 1.0), (0.5, 1.0), (1.0, 0.0), (0.0, 2.0)]
    assert count_pairs(values) == {"kept": 0, "reversed": 4, "tied": 1, "parted": 1}
    assert count_pairs([(0.0, 0.5), (1.0, 0.6)])["kept"] == 1


def test_equal_pairs_count_as_often_as_they_occur():
    values = [(0.0, 1.0)] * 3 + [(1.0, 0.0)] * 2
    assert count_pairs(values) == {"kept": 0, "reversed": 6, "tied": 0, "parted": 0}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12))
def test_counting_by_distinct_values_equals_counting_every_pair(values: list[tuple[int, int]]):
    plain = {"kept": 0, "reversed": 0, "tied": 0, "parted": 0}
    for i, (b, a) in enumerate(values):
        for other_b, other_a in values[i + 1 :]:
            was, now = b - other_b, a - other_a
            if was and now:
                plain["kept" if was * now > 0 else "reversed"] += 1
            elif was or now:
                plain["tied" if was else "parted"] += 1
    assert count_pairs([(float(b), float(a)) for b, a in values]) == plain


def said_of(models: dict[str, list[dict[str, Any]]]) -> str:
    return sentence(rank_changes({ref: records(rows) for ref, rows in models.items()}))


def test_models_that_change_places_are_named():
    models = {
        "long": [row("t1", 1.0, 0.2), row("t2", 1.0, 0.2)],
        "short": [row("t1", 0.5, 1.0), row("t2", 0.5, 0.0)],
    }
    changes = order_changes(models)
    assert [(m["model"], m["rank_before"], m["rank_after"]) for m in changes["models"]] == [
        ("long", 1, 2),
        ("short", 2, 1),
    ]
    assert changes["model_flips"] == [["long", "short"]]
    assert changes["tasks"] == {"kept": 0, "reversed": 0, "tied": 0, "parted": 1}
    assert "short is ahead of long now" in said_of(models)


def test_attempts_at_one_task_are_compared_within_it_only():
    rows = [row("t1", 0.0, 1.0), row("t1", 1.0, 0.0), row("t2", 0.0, 0.0), row("t2", 1.0, 1.0)]
    changes = order_changes({"pebble": rows})
    assert changes["attempts"] == {"kept": 1, "reversed": 1, "tied": 0, "parted": 0}
    assert "1 of 2 ordered pairs of attempts at one task are reversed" in said_of({"pebble": rows})


def test_answers_that_failed_to_score_either_time_are_left_out():
    rows = [row("t1", 0.0, 1.0, error="boom"), row("t2", 0.0, 1.0, error_before="boom")]
    changes = order_changes({"pebble": rows})
    assert (
        changes["rows"] == 0
        and said_of({"pebble": rows}) == "No answer was scored by both rewards."
    )
    assert changes["models"] == []


def test_answers_whose_success_flips_are_counted_although_no_reward_changed():
    def said(before: bool | None, after: bool | None, **more: Any) -> dict[str, Any]:
        return row("t", 1.0, 1.0, success_before=before, success=after) | more

    rows = [said(True, False), said(True, False), said(False, True), said(True, True)]
    rows += [said(None, True), said(True, False, error="ValueError")]  # nothing to flip from
    changes = order_changes({"pebble": rows})
    assert (changes["rows"], changes["changed"]) == (5, 0)
    assert changes["success"] == {"gained": 1, "lost": 2}
    words = "0 of 5 rewards changed; success changed on 3 answers (1 gained, 2 lost)"
    assert said_of({"pebble": rows}).startswith(words)
    assert "success" not in said_of({"pebble": [row("t", 0.0, 1.0)]})

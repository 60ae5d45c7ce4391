"""The order of the queue: turns between owners, priorities, and nobody left waiting for ever."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.core.hints import Hint
from engine.home.rows import NewRun, RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.team.fair_queue import HEAD_START_H, WAITED, faded_hours, fair_order
from engine.home.team.owners import PRIORITIES, Viewer

LEAST: dict[str, Any] = {
    "rowid": 0,
    "kind": "train",
    "algorithm": "sft",
    "state": "queued",
    "created": 0.0,
    "started": None,
    "ended": None,
    "attempt": 1,
    "device": "",
    "request_id": "",
    "env_id": "sums@0",
    "model": "pebble",
    "note": "",
    "expect": "",
    "parent": "",
    "max_gpu_hours": 0.0,
    "spent_hours": 0.0,
    "spent_before": 0.0,
    "continuations": 0,
    "reason_kind": "",
    "reason": "",
    "hint": Hint(""),
    "verdict": "",
}


def waiting(number: int, owner: str, hours: float = 1.0, priority: str = "normal", **more: Any):
    """A queued run; `number` is its id and the second at which it was queued."""
    row = LEAST | {"run_id": f"r-{number}", "queued": float(number), "estimated_hours": hours}
    return RunRow(**(row | {"owner": owner, "priority": priority} | more))


def ids(order: Sequence[RunRow]) -> list[str]:
    return [row.run_id.removeprefix("r-") for row in order]


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["", "ana", "bob", "cem"]),
        st.floats(0, 20),
        st.sampled_from(PRIORITIES),
        st.floats(0, 200_000),
    ),
    max_size=25,
).map(
    lambda drawn: [
        waiting(number, owner, hours, priority, queued=queued)
        for number, (owner, hours, priority, queued) in enumerate(
            sorted(drawn, key=lambda row: row[3])
        )
    ]
)
USED = st.dictionaries(st.sampled_from(["", "ana", "bob", "cem"]), st.floats(0, 100))


@given(ROWS, USED)
def test_every_run_stands_in_the_order_once(rows: list[RunRow], used: dict[str, float]):
    assert sorted(ids(fair_order(rows, used))) == sorted(ids(rows))


@given(ROWS, USED)
def test_runs_of_one_owner_and_priority_start_as_they_were_queued(
    rows: list[RunRow], used: dict[str, float]
):
    order = fair_order(rows, used)
    for owner in {row.owner for row in rows}:
        for priority in PRIORITIES:
            line = [row for row in order if (row.owner, row.priority) == (owner, priority)]
            assert [row.queued for row in line] == sorted(row.queued for row in line)


@given(ROWS, USED)
def test_what_an_owner_adds_never_moves_its_other_runs_forward(
    rows: list[RunRow], used: dict[str, float]
):
    """Nobody gains by a flood: the first of hers starts no earlier for all that comes after it."""
    mine = [row for row in rows if row.owner == "ana"]
    if not mine:
        return
    others = [row for row in rows if row.owner != "ana"]
    first = next(row for row in fair_order(rows, used) if row.owner == "ana")
    alone = fair_order([*others, first], used).index(first)
    flooded = fair_order([*rows], used).index(first)
    assert flooded == alone


@given(ROWS, USED, st.floats(0.1, 50))
def test_who_has_used_more_starts_no_earlier(
    rows: list[RunRow], used: dict[str, float], more: float
):
    before = ids(fair_order(rows, used))
    after = ids(fair_order(rows, used | {"ana": used.get("ana", 0.0) + more}))
    for row in rows:
        if row.owner == "ana":
            number = row.run_id.removeprefix("r-")
            assert after.index(number) >= before.index(number)


@given(ROWS, USED)
def test_a_higher_priority_starts_no_later(rows: list[RunRow], used: dict[str, float]):
    for row in rows[:3]:
        raised = [replace(each, priority="high") if each == row else each for each in rows]
        number = row.run_id.removeprefix("r-")
        before, after = ids(fair_order(rows, used)), ids(fair_order(raised, used))
        assert after.index(number) <= before.index(number)


@given(ROWS, st.floats(0, 100))
def test_none_starves_whatever_comes_after_it(rows: list[RunRow], most: float):
    """What is queued later than a bound that follows from the hours anybody can have used never
    overtakes: only finitely many runs can come before a run of the lowest priority."""
    used = dict.fromkeys(["", "ana", "bob", "cem"], most)
    line_of_hers = 30 * 20.0  # hours that her runs before it may count as
    bound = (most + line_of_hers + HEAD_START_H["high"] - HEAD_START_H["low"]) / WAITED * 3600
    low = waiting(100, "zoe", priority="low", queued=0.0)
    late = [replace(row, queued=row.queued + bound) for row in rows]
    order = fair_order([low, *late], used | {"zoe": most})
    assert order[0] == low


def test_owners_take_turns_whoever_came_first():
    rows = [waiting(number, "ana") for number in range(4)] + [waiting(9, "bob"), waiting(8, "bob")]
    assert ids(fair_order(rows, {})) == ["0", "8", "1", "9", "2", "3"]


def test_who_has_used_the_device_lately_waits_for_the_other():
    rows = [waiting(0, "ana"), waiting(1, "bob")]
    assert ids(fair_order(rows, {"ana": 0.5})) == ["1", "0"]
    assert ids(fair_order(rows, {"ana": 0.5, "bob": 3.0})) == ["0", "1"]


def test_short_runs_count_for_something_and_runs_that_wait_for_others_for_nothing():
    rows = [waiting(number, "ana", hours=0.0) for number in range(2)]
    assert ids(fair_order([*rows, waiting(5, "bob", hours=0.0)], {})) == ["0", "5", "1"]
    blocked = waiting(0, "ana", hours=5.0, waits_for="r-7")
    rows = [blocked, waiting(1, "ana"), waiting(2, "bob"), waiting(3, "bob")]
    assert ids(fair_order(rows, {})) == ["0", "1", "2", "3"]


def test_hours_fade_by_half_in_a_day():
    assert faded_hours(4.0, 86_400) == 2.0 and faded_hours(4.0, 0.0) == 4.0 == faded_hours(
        4.0, -5.0
    )


def test_the_store_starts_what_the_order_says_and_shows_each_key_its_own(home: Home):
    ana, bob = (Home(home.root, Viewer(name)) for name in ("ana", "bob"))

    def queue(of: Home, priority: str = "normal") -> str:
        if of.viewer:
            of = Home(home.root, replace(of.viewer, priority=priority))
        with Store(of) as store:
            return store.insert_run(NewRun("sums-sft", "train", "sft", "sums@0", "pebble")).run_id

    hers = [queue(ana), queue(ana), queue(ana)]
    his = queue(bob)
    urgent = queue(bob, "high")
    with Store(home) as store:
        assert [row.run_id for row in store.queue()] == [urgent, hers[0], hers[1], his, hers[2]]
        first = store.lease_next(["cpu"])
        assert first is not None and first.run_id == urgent and first.owner == "bob"
    with Store(ana) as store:
        assert [row.run_id for row in store.queue()] == hers
        assert store.queue_position(hers[2]) == 4, "the place among all"

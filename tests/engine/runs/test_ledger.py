"""The ledger: what was tried, in a tree; what should not be tried again."""

import pytest
from run_configs import train_config

from engine.core.files import write_json
from engine.home.store import Store
from engine.records.run_config import TrainConfig, as_run_config
from engine.runs.ledger import best_runs, entry, tree
from engine.runs.overview import overview
from engine.runs.submit.cautions import cautions

BASE = {"learning_rate": 1e-3, "group_size": 8, "steps": 100, "loss": "dapo", "seed": 0}
USER = dict.fromkeys(BASE, "user")


@pytest.fixture
def tried(make_run):
    """tried({...changes}, state, verdict=...) -> a run that ended that way."""

    def make(changes=None, state="done", expect="", best=None, **more):
        config = {key: more.pop(key) for key in ("parent", "model", "algorithm") if key in more}
        run = make_run(settings=BASE | (changes or {}), sources=USER, **config)
        if expect:
            with Store(run.home) as store:
                store._db.execute("UPDATE runs SET expect = ? WHERE run_id = ?", (expect, run.id))
        if best is not None:
            write_json(run.run.result, {"best_score": best, "best_step": 20})
        return run.finish(state, **more)

    return make


def asked(home, changes=None, **more):
    """What the ledger says about a submit with these settings."""
    settings = BASE | (changes or {})
    content = {"env_id": "arith@0123456789ab", "settings": settings, "sources": USER} | more
    config = as_run_config(train_config("", **content))
    assert isinstance(config, TrainConfig)
    with Store(home) as store:
        return cautions(home, store, config)


def test_a_learning_rate_five_percent_off_a_failed_one_is_the_same_idea(home, tried):
    failed = tried({"seed": 3}, "failed", reason_kind="no_signal")
    (said,) = asked(home, {"learning_rate": 1.05e-3})
    assert said.startswith(f"nearly the same as {failed.id} but for learning_rate (0.001 then, ")
    assert "which failed (no_signal)" in said
    assert asked(home, {"learning_rate": 2e-3}) == []
    assert asked(home, {"loss": "grpo"}) == []
    assert asked(home, env_id="arith@ffffffffffff") == []


@pytest.mark.parametrize(
    ("state", "ended", "word"),
    [
        ("done", {"verdict": "worse"}, "came out worse"),
        ("done", {"verdict": "no_difference"}, "came out no difference"),
        ("failed", {"reason_kind": "oom"}, "failed (oom)"),
        ("failed", {"reason_kind": "killed"}, ""),
        ("failed", {"reason_kind": "budget"}, ""),
        ("cancelled", {"reason_kind": "cancelled"}, ""),
        ("done", {"verdict": "inconclusive"}, ""),
        ("done", {"verdict": "better"}, ""),
    ],
)
def test_only_what_failed_by_its_own_settings_is_held_against_them(home, tried, state, ended, word):
    tried({"seed": 3}, state, **ended)
    said = asked(home)
    assert (word in said[0]) if word else said == []


def test_an_exact_repetition_is_named_and_another_seed_is_not(home, tried):
    done = tried({}, verdict="better")
    assert asked(home)[0].startswith(f"the same as {done.id} (better), seed included")
    assert asked(home, {"seed": 1}) == []


def test_several_levers_at_once_are_named_with_the_earlier_run(home, tried):
    parent = tried({}, verdict="better")
    (said,) = asked(home, {"learning_rate": 3e-3, "group_size": 16}, parent=parent.id)
    assert said.startswith(f"2 levers move at once against {parent.id} (learning_rate, group_size)")
    assert asked(home, {"group_size": 16}, parent=parent.id) == []
    newest = tried({"group_size": 16}, verdict="better")
    (said,) = asked(home, {"learning_rate": 3e-3})
    assert newest.id in said, "without a parent the newest run of the kind is what it follows"


def test_going_on_from_a_run_is_no_lever_and_its_length_counts_once(home, tried):
    first = tried({}, verdict="better")
    more = {"learning_rate": 1e-4, "group_size": 4, "steps": 300}
    assert asked(home, more, model=f"{first.id}@best", parent=first.id) == []
    (said,) = asked(home, more, parent=first.id)
    assert said.startswith("3 levers move at once")


def test_the_tree_shows_another_seed_however_much_else_was_changed(home, tried):
    first = tried({}, verdict="better")
    repeated = tried({"seed": 7}, verdict="better", parent=first.id)
    changes = {"learning_rate": 1e-4, "group_size": 4, "steps": 300, "loss": "grpo", "seed": 9}
    moved = tried(changes, verdict="better", parent=first.id)
    with Store(home) as store:
        lines = tree(home, store.list_runs(20))
    assert lines[1] == f"  {repeated.id}: better (seed 0→7)"
    assert lines[2].startswith(f"  {moved.id}: better (") and lines[2].endswith("seed 0→9)")


def test_the_tree_shows_what_was_moved_and_what_came_of_it(home, tried):
    first = tried({}, verdict="no_difference", expect="better")
    second = tried({"learning_rate": 3e-3}, verdict="better", parent=first.id, expect="better")
    third = tried({"learning_rate": 3e-3, "group_size": 4}, "failed", parent=second.id)
    other = tried({}, verdict="better", model=f"{second.id}@best")
    with Store(home) as store:
        rows = store.list_runs(20)
    assert tree(home, rows) == [
        f"{first.id}: no difference, better was expected",
        f"  {second.id}: better as expected (learning_rate 0.001→0.003)",
        f"    {third.id}: failed (group_size 8→4)",
        f"    {other.id}: better (model pebble→{second.id}@best, learning_rate 0.003→0.001)",
    ]
    found = entry(home, next(row for row in rows if row.run_id == second.id))
    assert found["parent"] == first.id and found["as_expected"] is True
    assert found["changed"] == {"learning_rate": [1e-3, 3e-3]} and found["gpu_hours"] == 0.025


def test_of_runs_that_are_equally_good_the_oldest_is_the_best(home, tried):
    first = tried({}, verdict="better", best=2 / 3)
    tried({"group_size": 4}, verdict="better", best=2 / 3)
    with Store(home) as store:
        (best,) = best_runs(home, store, store.list_runs(20)).values()
    assert best["run_id"] == first.id


def test_the_best_run_is_the_one_the_choosing_half_prefers(home, tried):
    tried({}, verdict="better", best=0.6)
    best = tried({"group_size": 4}, verdict="better", best=0.7)
    tried({"group_size": 16}, "failed", best=0.9)
    tried({"group_size": 32}, verdict="worse", best=0.9)
    with Store(home) as store:
        found = best_runs(home, store, store.list_runs(20))
    assert found == {
        "arith@0123456789ab": {"run_id": best.id, "verdict": "better", "step": 20, "curve": 0.7}
    }
    shown = overview(home, "runs")
    fell = tried({"group_size": 2}, verdict="inconclusive", best=0.8)  # from 0.9, say
    write_json(fell.run.result, {"best_score": 0.8, "evidence": {"go_on_with": best.id}})
    with Store(home) as store:
        assert best_runs(home, store, store.list_runs(20)) == found
    assert shown["best"] == found and len(shown["tree"]) == 4
    assert shown["runs"][0]["gpu_hours"] == 0.025

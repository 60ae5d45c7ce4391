"""F16: a damaged or lost database is kept aside and its rows are made again from the folders."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from run_configs import train_config
from stand_ins import stand_in

from engine.core.files import share_lock, take_lock, write_json
from engine.environments import registry
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs import lifecycle
from engine.runs.submit.requests import EvaluationRequest, TrainRequest
from engine.serving import service
from engine.serving.chat import chat
from engine.serving.chat_request import ChatRequest

KEPT = (
    "run_id",
    "kind",
    "algorithm",
    "state",
    "attempt",
    "env_id",
    "model",
    "note",
    "max_gpu_hours",
    "estimated_hours",
    "reason_kind",
    "reason",
    "hint",
    "verdict",
    "owner",
    "project",
    "priority",
    "waits_for",
    "plan",
    "gpus",
)


def facts(home: Home) -> list[dict]:
    with Store(home) as store:
        rows = store.list_runs(limit=100)
    # STATUS.md keeps the text of a hint; its call as data is gone with the database.
    return [{name: getattr(row, name) for name in KEPT} | {"hint": str(row.hint)} for row in rows]


@pytest.fixture
def lively(bench, env) -> Home:
    """A home with a run of every kind of end, an evaluation, and one that waits."""
    home = bench.home
    submit = {"env_id": env, "settings": {"steps": 2}, "note": "first"}
    done = home.run(lifecycle.submit(home, TrainRequest(**submit))["run_id"])
    bench.until_state(done, "done")
    (home.root / "hold").touch()
    second = home.run(lifecycle.submit(home, TrainRequest(**submit | {"note": "held"}))["run_id"])
    bench.kill(bench.pids(second)[1])
    bench.until_state(second, "failed")
    holds = home.run(
        lifecycle.submit(home, TrainRequest(**submit | {"note": "holds the device"}))["run_id"]
    )
    bench.pids(holds)
    gone = lifecycle.submit(home, TrainRequest(**submit | {"note": "not wanted"}))["run_id"]
    lifecycle.cancel(home, gone, "not wanted any more")
    lifecycle.submit_evaluation(home, EvaluationRequest(env_id=env, models=["pebble"], rows=4))
    # The machine goes down: nothing lives, one row still says running, one run is queued.
    bench.kill(*bench.pids(holds))
    bench.until(lambda: not launcher.is_alive(holds), "nothing lives")
    return home


def damage(home: Home, how: str) -> None:
    with Store(home) as store:
        store.checkpoint()
    data = home.db.read_bytes()
    match how:
        case "header":
            home.db.write_bytes(b"not a database, sorry" + data[21:])
        case "half":
            home.db.write_bytes(data[: len(data) // 2])
        case "scribble":
            home.db.write_bytes(data[:8192] + b"\x5a" * 12288 + data[20480:])
        case "empty":
            home.db.write_bytes(b"")
        case "gone":
            for path in home.root.glob("honesmith.db*"):
                path.unlink()


@pytest.mark.parametrize("how", ["header", "half", "scribble", "empty", "gone"])
def test_f16_a_damaged_database_is_kept_and_the_run_list_made_again(lively, how, bench):
    before, envs = facts(lively), registry.list_envs(lively)
    damage(lively, how)
    broken = lively.db.read_bytes() if how != "gone" else b""
    with Store(lively) as store:
        store.check()
    now = facts(lively)
    assert {row["run_id"] for row in now} == {row["run_id"] for row in before}
    was = {row["run_id"]: row for row in before}
    for row in now:
        expected = was[row["run_id"]]
        if expected["state"] in ("preparing", "running"):  # it died: whoever looks continues it
            expected = expected | {"state": "interrupted"}
        assert row == expected
    kept = lively.damaged_databases()
    assert [path.read_bytes() for path in kept] == ([broken] if how != "gone" else [])
    found = lifecycle.overview(lively)
    assert [env["env_id"] for env in found["envs"]] == [env.env_id for env in envs]
    said = [warning for warning in found["warnings"] if "damaged" in warning]
    assert [kept[0].name in warning for warning in said] == [True] if kept else said == []
    assert sum(row["spent_hours"] for row in rows_of(lively)) > 0
    (lively.root / "hold").unlink()
    bench.until(lambda: launcher.reap(lively) or states(lively) <= ENDED, "all have ended")
    bench.until(lambda: states(lively) <= ENDED, "all have ended")
    bench.until(lambda: not any(map(launcher.is_alive, folders(lively))), "nothing lives")


ENDED = {"done", "failed", "cancelled"}


def rows_of(home: Home) -> list[dict]:
    with Store(home) as store:
        return [vars(row) for row in store.list_runs(limit=100)]


def folders(home: Home) -> list:
    return [home.run(row["run_id"]) for row in rows_of(home)]


def states(home: Home) -> set[str]:
    return {row["state"] for row in rows_of(home)}


def test_f16_a_folder_whose_submit_was_never_answered_becomes_no_run(home):
    run = home.run("arith-grpo-1")
    run.create()
    write_json(run.config, train_config(run.id))
    (home.runs / "no run at all").mkdir()
    assert facts(home) == []


@pytest.mark.parametrize("how", ["header", "gone"])
def test_f16_deployments_are_served_and_stopped_as_before_from_their_folders(
    home, bench, tuned, monkeypatch, how
):
    script = Path(__file__).parents[1] / "engine" / "fake_server.py"
    stand_in(monkeypatch, server=script)
    over = service.deploy(home, "pebble")["deployment_id"]
    service.deploy(home, over, "stop")
    said = service.deploy(home, f"{tuned}@best")
    before = service.list_deployments(home)
    damage(home, how)
    with Store(home) as store:
        store.check()
        rows = store.list_deployments()
    assert [(row.deployment_id, row.state) for row in rows] == [
        (said["deployment_id"], "ready"),
        (over, "stopped"),
    ]
    assert rows[1].ended and rows[1].message and rows[0].ended is None
    assert service.list_deployments(home) == before
    assert chat(home, ChatRequest("pebble", "hi"))["answers"][0]["answer"]
    assert service.list_deployments(home) == before, "no second process was started"
    assert service.deploy(home, f"{tuned}@best", "stop")["state"] == "stopped"
    assert service.list_deployments(home) == []
    fresh = service.deploy(home, "pebble")["deployment_id"]
    assert fresh not in (over, said["deployment_id"])
    service.deploy(home, fresh, "stop")


def test_f16_many_processes_that_find_the_damage_at_once_mend_it_once(lively):
    wanted = len(facts(lively))
    damage(lively, "header")
    code = (
        "from engine.home.run_dir import Home; from engine.home.store import Store\n"
        "with Store(Home.locate()) as store: print(len(store.list_runs(limit=100)))"
    )
    argv = [sys.executable, "-P", "-c", code]
    readers = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert [reader.communicate()[0].strip() for reader in readers] == [str(wanted)] * 6
    assert len(lively.damaged_databases()) == 1


def test_f16_a_database_is_not_mended_while_a_run_lives(lively):
    damage(lively, "half")
    lock, living = take_lock(lively.run("sums-grpo-1").lock), share_lock(lively.db_lock, 1)
    assert lock is not None and living is not None
    with pytest.raises(Exception, match="sums-grpo-1 still run"):
        Store(lively)
    os.close(lock)
    os.close(living)
    with Store(lively) as store:
        assert store.list_runs()


def test_f16_a_log_without_its_database_is_never_played_into_a_new_one(lively):
    wanted = {row["run_id"] for row in facts(lively)}
    with Store(lively) as store:
        store.update_run("sums-grpo-1", only_in={"done"}, verdict="worse")
        assert (lively.root / "honesmith.db-wal").stat().st_size > 0
        lively.db.write_bytes(b"scribble" * 1000)
    assert {row["run_id"] for row in facts(lively)} == wanted
    db = sqlite3.connect(lively.db)
    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()

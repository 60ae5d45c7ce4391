"""F27: homes of every released version are read, continued and written by this one.

tests/faults/golden/<version>/ holds one home each: a run that is done, one that was going on when
its machine went down, one that waits and one that was cancelled. None is ever changed; a release
adds its own.
"""

import sqlite3
from pathlib import Path

import pytest
from invariants import Witness, assert_same_curve, curve, until
from steady_trainer import expected

from engine.environments import registry
from engine.home import database
from engine.home.rows import TERMINAL
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.models import catalog
from engine.runs import lifecycle
from engine.runs.reading import logs
from engine.runs.submit.requests import TrainRequest

GOLDEN = Path(__file__).with_name("golden")


def unpacked(golden: Path, root: Path) -> Home:
    """The golden home at a new place."""
    home = Home.locate(root)

    def placed(text: str) -> str:
        return text.replace("@HOME@", str(root)).replace("@PEBBLE@", str(catalog.BUILTIN["pebble"]))

    for path in golden.rglob("*"):
        target = root / path.relative_to(golden)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif path.suffix != ".sql":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(placed(path.read_text("utf-8")), "utf-8")
    db = sqlite3.connect(home.db)
    db.executescript(placed((golden / "honesmith.sql").read_text("utf-8")))
    db.execute("PRAGMA journal_mode = WAL")
    db.close()
    for run in home.runs.iterdir():
        home.run(run.name).create()
    return home


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.iterdir()))
@pytest.mark.parametrize("rebuilt", [False, True], ids=["database", "folders alone"])
def test_f27_a_home_of_an_older_version_goes_on_where_it_was(steady, home, version, rebuilt):
    older = unpacked(GOLDEN / version, home.root.with_name("older"))
    if rebuilt:
        older.db.unlink()
    with Store(older) as store:
        assert store._db.execute("PRAGMA user_version").fetchone() == (len(database.MIGRATIONS),)
        assert {row.run_id: row.state for row in store.list_runs()} == {
            "sums-grpo-1": "done",
            "sums-grpo-2": "interrupted" if rebuilt else "running",
            "sums-grpo-3": "queued",
            "sums-grpo-4": "cancelled",
        }
    assert [env.env_id for env in registry.list_envs(older)] == [steady]
    said = lifecycle.status(older, "sums-grpo-1")
    assert (said["state"], said["verdict"], said["step"]) == ("done", "better", 4)
    assert logs.read_logs(older, "sums-grpo-1").rows
    assert lifecycle.status(older, "sums-grpo-4")["error"]["kind"] == "cancelled"
    in_flight = older.run("sums-grpo-2")

    def ended() -> bool:
        launcher.reap(older)
        with Store(older) as store:
            rows = store.list_runs()
        alive = any(launcher.is_alive(older.run(row.run_id)) for row in rows)
        return not alive and all(row.state in TERMINAL for row in rows)

    until(ended, "every run of it has ended")
    with Store(older) as store:
        row = store.get_run("sums-grpo-2")
    assert (row.state, row.attempt, row.continuations) == ("done", 2, 1)
    assert_same_curve(curve(in_flight), expected(8))
    lifecycle.submit(older, TrainRequest(resume="sums-grpo-4"))
    until(ended, "the cancelled one, resumed, has ended")
    witness = Witness(older)
    witness.look(whole=True)
    assert {state for state, _ in witness.ended.values()} == {"done"}
    if not rebuilt:  # what was asked before is known as asked
        request = {"env_id": steady, "settings": {"steps": 4, "save_every": 2}, "note": "done"}
        again = lifecycle.submit(older, TrainRequest(request_id="golden-done", **request))
        assert again["run_id"] == "sums-grpo-1"

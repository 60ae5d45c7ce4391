"""Alerts that a supervisor raises by the forecast of its run."""

import json

from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.pace.heartbeat import Heartbeat, Work
from engine.machine.processes.vigil import Vigil


def vigil_over(home: Home, high_hours: float) -> Vigil:
    """The vigil of a first attempt that was estimated to take `high_hours` at most."""
    with Store(home) as store:
        row = store.insert_run(NewRun("a-sft", "train", "sft", "a@1", "pebble"))
        store._db.execute("UPDATE runs SET attempt = 1")
        run, row = home.run(row.run_id), store.get_run(row.run_id)
    run.create()
    run.config.write_text(json.dumps({"estimate": {"hours": {"high": high_hours}}}))
    return Vigil(run, row, clock=lambda: 0.0)


def forecast(vigil: Vigil, seconds: float) -> list[str]:
    """Let the vigil hear that a run will take so many seconds; returns all events so far."""
    ten_of_twenty = Work(20, 10, seconds, seconds**2 / 10)  # the other ten will take as long
    vigil.heartbeat = Heartbeat(1, 0.0, "training", work={"training": ten_of_twenty})
    vigil.note_forecast(None, elapsed_s=0.0)
    lines = vigil.run.events.read_text().splitlines() if vigil.run.events.exists() else []
    return [json.loads(line)["event"] for line in lines]


def test_a_forecast_that_swings_around_its_limit_is_one_alert(home: Home):
    vigil = vigil_over(home, high_hours=1.0)
    assert forecast(vigil, 4000) == []  # it begins above 1.2 hours
    for seconds in (4400, 4200, 4400, 3700, 4400):
        assert forecast(vigil, seconds) == ["alert"]
    assert forecast(vigil, 3500) == ["alert", "alert_cleared"]

"""The lease of a run that another machine started here."""

import pytest

from engine.home.run_dir import Home
from engine.machine.processes import launcher, limits
from engine.machine.processes.limits import LeaseWatch


def test_a_run_of_this_machine_has_no_lease(home: Home):
    run = home.run("r-1")
    run.create()
    assert LeaseWatch(run).limit(10.0) is None


def test_a_word_moves_the_end_of_the_lease_on(home: Home, monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("engine.machine.processes.limits.time.monotonic", lambda: now[0])
    run = home.run("r-1")
    limits.renew_lease(run, 60.0)
    watch = LeaseWatch(run)
    first = watch.limit(5.0)
    assert first is not None and (first.seconds, first.kind) == (65.0, "lease")
    now[0] += 50
    later = watch.limit(55.0)
    assert later is not None and later.seconds == 65.0
    limits.renew_lease(run, 60.0)
    renewed = watch.limit(55.0)
    assert renewed is not None and renewed.seconds == 115.0


@pytest.mark.timeout(30)
def test_without_a_word_a_run_saves_and_fails(bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HONESMITH_STOP_GRACE_S", "10")
    run = bench.queue(hold_at=3)
    limits.renew_lease(run, 600.0)
    launcher.start_queued(bench.home)
    bench.until_step(run, 2)
    limits.renew_lease(run, 0.1)
    row = bench.until_state(run, "failed", "done")
    assert (row.state, row.reason_kind) == ("failed", "lease")
    assert "no word" in row.reason and run.checkpoint_steps() == [1, 2]

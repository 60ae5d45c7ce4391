"""The lease of a run that another machine started here."""

import pytest

from engine.core.files import read_json, write_json
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import launcher, limits
from engine.machine.processes.limits import HomeCap, LeaseWatch


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


def test_a_run_that_waited_here_without_a_word_for_its_lease_is_not_started(bench):
    forgotten, wanted = bench.queue(), bench.queue()
    for run, ago_s in ((forgotten, 61.0), (wanted, 5.0)):
        limits.renew_lease(run, 60.0)
        lease = read_json(run.far("lease"))
        write_json(run.far("lease"), {**lease, "time": lease["time"] - ago_s})
    assert launcher.start_queued(bench.home) == [wanted.id]
    row = bench.row(forgotten)
    assert (row.state, row.reason_kind, row.attempt) == ("failed", "lease", 1)
    assert "gave no word for" in row.reason and not forgotten.started_record.exists()
    bench.until_state(wanted, "done")


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


def test_the_cap_of_the_home_is_looked_at_seldom_while_it_is_far_and_in_time_when_it_is_near(
    bench, monkeypatch: pytest.MonkeyPatch
):
    bench.home.config_file.write_text("max_gpu_hours_total = 0.1\n")  # 180 s on each of two
    run, other = bench.queue(), bench.queue("other-grpo")
    now, looked_up = [1000.0], []
    monkeypatch.setattr(limits.time, "monotonic", lambda: now[0])
    count = launcher.seconds_in_lock_file
    monkeypatch.setattr(
        launcher, "seconds_in_lock_file", lambda run: looked_up.append(run.id) or count(run)
    )
    cap, elapsed_s = HomeCap(), 0.0
    with Store(bench.home) as store:
        for each, device in ((run, "cuda:0"), (other, "cuda:1")):
            store.set_state(each.id, "preparing", only_from={"queued"}, device=device)
        while True:
            write_json(other.lock, {"attempt": 1, "elapsed_s": elapsed_s}, fsync=False)
            limit = cap.limit(store, run, elapsed_s)
            assert limit is not None
            if elapsed_s >= limit.seconds:
                break
            now[0], elapsed_s = now[0] + 0.5, elapsed_s + 0.5
        assert 179.5 <= elapsed_s <= 180.5
        assert len(looked_up) < 20, "of 360 polls"
        cap, looked_up[:] = HomeCap(), []
        for age_s in (0.0, 5.0, 14.0, 15.0, 16.0, 30.0):
            now[0] = 2000.0 + age_s
            cap.limit(store, run, 0.0, max_age_s=15.0)
    assert len(looked_up) == 3

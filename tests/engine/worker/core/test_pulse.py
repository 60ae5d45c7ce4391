"""Signs of life: phases and their time, units, silences, and what a whole attempt leaves."""

import threading
from pathlib import Path

import pytest
from loops import BASE, go, go_until, make_run, push

from engine.home.run_dir import Home
from engine.machine.pace.heartbeat import Heartbeat, read_heartbeat
from engine.worker.core import pulse


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def written(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    """What the pulse of this process has written so far."""
    heartbeats: list[Heartbeat] = []
    current = pulse._Pulse(attempt=1, write=heartbeats.append, clock=clock)
    monkeypatch.setattr(pulse, "_current", current)
    return heartbeats


def test_a_phase_inside_another_stops_its_time(clock, written):
    with pulse.phase("training"):
        clock.now += 2
        with pulse.phase("evaluation", of=10):
            clock.now += 5
            pulse.advance(10)
        clock.now += 1
    work = written[-1].work
    assert (work["training"].seconds, work["training"].done) == (3.0, 1)
    assert work["training"].squares == 9.0
    assert (work["evaluation"].seconds, work["evaluation"].done) == (5.0, 10)


def test_sampling_is_a_part_of_the_step_that_it_belongs_to(clock, written):
    with pulse.phase("training"):
        with pulse.phase("sampling", of=4):
            clock.now += 3
        clock.now += 1
    work = written[-1].work
    assert work["training"].seconds == 1.0 and work["sampling"].seconds == 3.0
    assert work["training"].squares == 16.0  # of the whole step


def test_a_change_of_phase_is_written_at_once_and_beats_now_and_then(clock, written):
    with pulse.phase("evaluation", of=1000):
        before = len(written)
        assert written[-1].phase == "evaluation"
        for _ in range(100):
            clock.now += 0.01
            pulse.advance()
        assert 1 <= len(written) - before <= 3
        assert 0 < written[-1].percent <= 10


def test_the_longest_silence_of_each_phase_is_kept(clock, written):
    with pulse.phase("evaluation", of=3):
        for gap in (0.2, 7.0, 1.0):
            clock.now += gap
            pulse.advance()
    with pulse.phase("training"):
        clock.now += 2.0
    work = written[-1].work
    assert work["evaluation"].longest_silence_s == pytest.approx(7.0)
    assert work["training"].longest_silence_s == pytest.approx(2.0)


def test_a_thread_that_samples_ahead_shows_life_but_counts_nothing(clock, written):
    with pulse.phase("training"):
        thread = threading.Thread(target=pulse.advance, args=(5,))
        clock.now += 1
        thread.start()
        thread.join()
    assert written[-1].work["training"].done == 1  # the step itself


def test_without_a_run_nothing_is_written(monkeypatch):
    monkeypatch.setattr(pulse, "_current", None)
    pulse.plan({"training": 3})
    with pulse.phase("training"):
        pulse.beat()
        pulse.advance()


@pytest.fixture
def beating(home: Home, monkeypatch: pytest.MonkeyPatch):
    """Starts the pulse of a run that a test calls in this process."""
    monkeypatch.setattr(pulse, "_current", None)
    return pulse.begin


@pytest.mark.worker
@pytest.mark.timeout(60)
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_an_attempt_does_what_it_has_planned(home: Home, tmp_path: Path, beating, algorithm):
    run = make_run(home, push(home, tmp_path / "sums"), algorithm, BASE[algorithm])
    beating(run)
    go(run)
    heartbeat = read_heartbeat(run)
    assert heartbeat is not None and heartbeat.work["training"].done == 4
    for name in ("training", "evaluation", "skill check"):
        work = heartbeat.work[name]
        assert (work.done, work.planned) == (work.planned, work.done) and work.seconds > 0, name
    assert 1 <= heartbeat.work["checkpoint"].done <= heartbeat.work["checkpoint"].planned
    if algorithm == "grpo":
        assert heartbeat.work["sampling"].done == 4 * 6 * 4


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_a_resumed_attempt_plans_only_what_is_left(home: Home, tmp_path: Path, beating):
    run = make_run(home, push(home, tmp_path / "sums"), "sft", BASE["sft"])
    go_until(run, 3)
    beating(run)
    go(run)
    heartbeat = read_heartbeat(run)
    assert heartbeat is not None and heartbeat.outlook.steps_before == 3
    assert heartbeat.work["training"].planned == heartbeat.work["training"].done == 1
    for name in ("evaluation", "skill check"):
        assert heartbeat.work[name].planned == heartbeat.work[name].done > 0

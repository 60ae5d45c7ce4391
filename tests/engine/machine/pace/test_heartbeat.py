"""heartbeat.json: what is written is read back, and damage is no heartbeat."""

import os

import pytest

from engine.home.run_dir import Home, RunDir
from engine.machine.pace.heartbeat import Heartbeat, Outlook, Work, read_heartbeat, write_heartbeat

FULL = Heartbeat(
    attempt=2,
    time=1000.5,
    phase="evaluation",
    done=30,
    of=120,
    outlook=Outlook(steps_before=4, answers_at_end=60, earliest_end=9),
    work={"training": Work(20, 5, 2.5, 1.3, 0.4), "evaluation": Work(300, 150, 40.0, 0.0, 1.5)},
)


@pytest.fixture
def run(home: Home) -> RunDir:
    run = home.run("a-grpo-1")
    run.create()
    return run


def write(run: RunDir, heartbeat: Heartbeat) -> None:
    descriptor = os.open(run.heartbeat, os.O_WRONLY | os.O_CREAT, 0o600)
    write_heartbeat(descriptor, heartbeat)
    os.close(descriptor)


def test_a_heartbeat_is_read_as_it_was_written(run):
    write(run, FULL)
    assert read_heartbeat(run) == FULL and FULL.percent == 25.0


def test_a_shorter_heartbeat_covers_a_longer_one_wholly(run):
    write(run, FULL)
    short = Heartbeat(attempt=2, time=1001.0, phase="loading")
    write(run, short)
    assert read_heartbeat(run) == short and short.percent is None


def test_every_phase_fits_into_the_line(run):
    work = {name: Work(10**9, 10**9, 1e9 / 7, 1e18 / 7, 1e6 / 7) for name in "abcdefgh"}
    write(run, Heartbeat(10**4, 1e10 / 7, "skill check", 10**9, 10**9, Outlook(9, 9, 9), work))
    assert read_heartbeat(run).work == work


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"attempt": 1, "time": NaN}', '{"attempt": 1, "time": 2, "phase"']
)
def test_a_damaged_file_is_no_heartbeat(run, text):
    run.heartbeat.write_text(text)
    assert read_heartbeat(run) is None

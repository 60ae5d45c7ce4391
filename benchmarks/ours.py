"""Runs the shipped worker as a user's submit does and reads what it did. No torch.

What is measured where: `submit` makes the run folder and starts the supervisor, which starts the
worker, all on the cores asked for (their number is what the worker takes for its threads). A step's
time is the difference between the times of two lines in metrics.jsonl, so everything the loop does
between steps counts: rollouts, the environment's process, logs. Start-up, the first step, the last
one and the held-out exams (before step 1 and after the last) are left out. Processor seconds and
peak memory (VmHWM of all that live at once) are of the worker and its children together, seen from
outside ten times a second.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import cpu_seconds, family, peak_bytes
from engine.core.files import read_json
from engine.environments.push import push_env
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest

LOOK_EVERY_S = 0.1
LIVE = ("queued", "preparing", "running", "stopping", "interrupted")


class RunFailed(Exception):
    """A run did not end well; the text holds the end of its log."""


@dataclass
class Watched:
    """What was seen of a worker from outside."""

    samples: list[tuple[float, float]] = field(default_factory=list)  # (unix time, CPU seconds)
    peaks: dict[int, int] = field(default_factory=dict)  # process id to its VmHWM in bytes
    spent: dict[int, float] = field(default_factory=dict)  # process id to its CPU seconds
    peak: int = 0  # the most that the processes alive at one look had held, each at its own peak

    def look(self, pid: int) -> None:
        """Take one sample of a process and everything below it."""
        living = family(pid)
        for each in living:
            self.spent[each] = max(self.spent.get(each, 0.0), cpu_seconds(each))
            self.peaks[each] = max(self.peaks.get(each, 0), peak_bytes(each))
        self.peak = max(self.peak, sum(self.peaks[each] for each in living))
        self.samples.append((time.time(), sum(self.spent.values())))

    @property
    def peak_mb(self) -> float:
        return self.peak / 2**20

    def cpu_at(self, when: float) -> float:
        """CPU seconds spent until `when`, between samples in proportion."""
        return interpolate(self.samples, when)


def interpolate(samples: Sequence[tuple[float, float]], when: float) -> float:
    """The value at `when` on the line through (time, value) samples; its ends hold outside."""
    if not samples:
        return 0.0
    before = samples[0]
    if when <= before[0]:
        return before[1]
    for after in samples[1:]:
        if when <= after[0]:
            share = (when - before[0]) / (after[0] - before[0])
            return before[1] + share * (after[1] - before[1])
        before = after
    return before[1]


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Everything started inside runs on these cores alone."""
    had = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, had)


def cores_for(threads: int) -> list[int]:
    """The last `threads` cores this process may use. Raises ValueError where there are fewer."""
    have = sorted(os.sched_getaffinity(0))
    if threads > len(have):
        raise ValueError(f"{threads} threads need {threads} cores; there are {len(have)}")
    return have[-threads:]


def push(home: Home, folder: Path, name: str) -> str:
    """The id of the environment in `folder`; pushing the same files again is the same version."""
    return str(push_env(home, folder, name=name, roots=[folder]).env_id)


def train(
    home: Home,
    env_id: str,
    model: str,
    algorithm: str,
    settings: Mapping[str, Any],
    cores: Sequence[int],
    limit_s: float = 900.0,
) -> tuple[RunDir, Watched]:
    """Submit a run, see it through, and say what was seen. Raises RunFailed.

    The home is the benchmark's own: what an interrupted call left running there is ended first.
    """
    end_all(home)
    if algorithm == "sft":  # no rows beside the run's own, which no peer would train
        settings = {"keep": 0, **settings}
    with on_cores(cores):
        answer = lifecycle.submit(
            home,
            TrainRequest(
                env_id=env_id,
                model=model,
                algorithm=algorithm,
                settings=dict(settings),
                max_gpu_hours=1000.0,
            ),
        )
    run = home.run(answer["run_id"])
    try:
        return run, follow(run, limit_s)
    except BaseException:
        end_all(home)
        raise


def end_all(home: Home, within_s: float = 30.0) -> None:
    """Cancel every run that has not ended and wait for it. Raises RunFailed when one stays."""
    deadline = time.monotonic() + within_s
    while True:
        with Store(home) as store:
            left = [row.run_id for row in store.list_runs(states=LIVE)]
        if not left:
            return
        if time.monotonic() > deadline:
            raise RunFailed(f"{', '.join(left)} did not end within {within_s:g} s")
        for run_id in left:
            lifecycle.cancel(home, run_id, "the benchmark was interrupted")
        time.sleep(LOOK_EVERY_S)


def follow(run: RunDir, limit_s: float) -> Watched:
    """Watch a submitted run to its end. Raises RunFailed."""
    watched = Watched()
    deadline = time.monotonic() + limit_s
    while True:
        pid = trainer(run)
        if pid:
            watched.look(pid)
        with Store(run.home) as store:
            row = store.get_run(run.id)
        if row.state in ("done", "failed", "cancelled") and not launcher.is_alive(run):
            break
        if time.monotonic() > deadline:
            raise RunFailed(f"{run.id} is still {row.state} after {limit_s:g} s")
        time.sleep(LOOK_EVERY_S)
    if row.state != "done":
        raise RunFailed(f"{run.id} {row.state}: {row.reason}\n{log_end(run)}")
    return watched


def trainer(run: RunDir) -> int:
    """The worker's process id, 0 before there is one."""
    try:
        return int(read_json(run.started_record)["trainer_pid"])
    except (OSError, ValueError, KeyError):
        return 0


def log_end(run: RunDir, characters: int = 2000) -> str:
    try:
        return run.log(1).read_text("utf-8", "replace")[-characters:]
    except OSError:
        return ""


def metric_lines(run: RunDir) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, step 0 included."""
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def step_times(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float]]:
    """(step, when it began, when it ended) of every step but the first and the last.

    The first warms caches up and the last holds the exam.
    """
    ends = {int(line["step"]): float(line["time"]) for line in lines}
    last = max(ends)
    return [(step, ends[step - 1], ends[step]) for step in sorted(ends) if 1 < step < last]

"""A profile of two steps, if the run asked for one: it shows where their time and memory go.

`honesmith train --profile` sets `profile` in config.json. The second and third step of the attempt
then write `logs/trace_step_N.json.gz` each (open it in ui.perfetto.dev or chrome://tracing), and
the most expensive operations as a table to `logs/profile.txt`. The first step is not profiled,
because it warms up.
"""

import gzip
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

FIRST, LAST = 2, 3  # steps of an attempt, counted from 1
TABLE_ROWS = 40


class Profiler:
    """Profiles the second and third step of an attempt."""

    def __init__(self, folder: Path, *, wanted: bool) -> None:
        """Prepare to write profiles to `folder`. If `wanted` is False, nothing is profiled."""
        self.folder = folder
        self.wanted = wanted
        self._steps_begun = 0  # of this attempt

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile step `number` of the run inside the context, if it is the second or third step of
        this attempt, and write its files on exit. Any other step runs without a profile."""
        self._steps_begun += 1
        if not self.wanted or not FIRST <= self._steps_begun <= LAST:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, profile_memory=True) as trace:
            yield
        self._write(number, trace)

    def _write(self, number: int, trace: profile) -> None:
        """Write the trace of step `number` to `trace_step_<number>.json.gz`, and append the table
        of its most expensive operations to profile.txt. The first profiled step of an attempt
        replaces the profile.txt of an earlier attempt."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_trace(number, trace)
        sort_key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=sort_key, row_limit=TABLE_ROWS)
        mode = "w" if self._steps_begun == FIRST else "a"
        with (self.folder / "profile.txt").open(mode, encoding="utf-8") as file:
            file.write(f"step {number}\n{table}\n")

    def _write_trace(self, number: int, trace: profile) -> None:
        """Write the trace of step `number` to `trace_step_<number>.json.gz`, in the format that
        trace viewers read."""
        uncompressed = self.folder / f".trace_step_{number}.{os.getpid()}.json"
        trace.export_chrome_trace(str(uncompressed))
        target = self.folder / f"trace_step_{number}.json.gz"
        with (
            uncompressed.open("rb") as source,
            gzip.open(target, "wb", compresslevel=5) as compressed,
        ):
            shutil.copyfileobj(source, compressed)
        uncompressed.unlink()

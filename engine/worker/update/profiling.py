"""A profile of two steps, for a run that asked for one: where their time and memory go.

`honesmith train --profile` sets `profile` in config.json. The second and third step of the attempt
leave `logs/trace_step_N.json.gz` each (open it in ui.perfetto.dev or chrome://tracing) and the most
expensive operations as a table in `logs/profile.txt`. The first step is left out: it warms up.
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
ROWS = 40


class Profiler:
    """Args: `folder`, where the files go; `wanted`, whether to do anything at all."""

    def __init__(self, folder: Path, *, wanted: bool) -> None:
        self.folder = folder
        self.wanted = wanted
        self._seen = 0

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around the work of step `number`."""
        self._seen += 1
        if not self.wanted or not FIRST <= self._seen <= LAST:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, profile_memory=True) as found:
            yield
        self._write(number, found)

    def _write(self, number: int, trace: profile) -> None:
        """Write a step's trace and its table of costs to the run's logs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plain = self.folder / f".trace_step_{number}.{os.getpid()}.json"
        trace.export_chrome_trace(str(plain))
        target = self.folder / f"trace_step_{number}.json.gz"
        with plain.open("rb") as source, gzip.open(target, "wb", compresslevel=5) as packed:
            shutil.copyfileobj(source, packed)
        plain.unlink()
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=by, row_limit=ROWS)
        mode = "w" if self._seen == FIRST else "a"
        with (self.folder / "profile.txt").open(mode, encoding="utf-8") as file:
            file.write(f"step {number}\n{table}\n")

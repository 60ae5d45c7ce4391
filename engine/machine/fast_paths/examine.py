"""Tries the fast paths (faster ways to compute) of a device, each against the plain way.

A broken kernel may end its process: after an illegal access every later CUDA call fails. So the
paths are tried in a process of their own. If that process dies or hangs, the path that it was
trying is switched off, and a new process goes on with the next path.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.hardware import Device
from engine.home.run_dir import Home
from engine.machine.fast_paths.catalogue import DeviceKind, paths_of
from engine.machine.fast_paths.results import DeviceResults, PathResult, keep_results, read_results
from engine.machine.processes import launcher, programs
from engine.machine.processes.trainer_variables import trainer_variables

Line = dict[str, Any]  # a line that the process of the trials writes: a JSON object
PATH_S = 120.0  # seconds for one path; most of them for compiling its kernels the first time
ALL_GPUS = "HONESMITH_ALL_GPUS"  # the CUDA_VISIBLE_DEVICES of each GPU that a run may have
EXIT_S = 2.0  # seconds in which a process that has closed its output must end
START_S = 120.0  # seconds until a process with torch writes its first line, from a cold disk


def examine_device(
    home: Home,
    device: Device,
    names: Sequence[str] = (),
    report: Callable[[PathResult], None] = lambda _: None,
    path_s: float = PATH_S,
    all_gpus: Sequence[Device] = (),
    known_results: Sequence[PathResult] = (),
) -> DeviceResults:
    """Try the fast paths (faster ways to compute) of a device, store the results in the home, and
    return them.

    Args:
        home: the home.
        device: the device.
        names: the paths to try; empty for all paths of the device. If `names` is given, the results
            replace earlier results of these paths; without earlier results of this device they are
            not stored.
        report: called with each result as soon as it is known.
        path_s: seconds that a path, or a part of one, may take before it counts as hanging.
        all_gpus: the GPUs that collectives are tried on.
        known_results: results that hold for this device too; these paths are not tried again.

    Raises UserError NO_TORCH if no interpreter has torch, DEVICE_UNUSABLE if the process ends
    before it tries a path.
    """
    kind: DeviceKind = "cuda" if device.kind == "cuda" else "cpu"
    known_names = {result.name for result in known_results}
    path_names = [name for name in list(names) or paths_of(kind) if name not in known_names]
    attempt = _Attempt(device, path_names, report)
    while attempt.remaining:  # once for each process: one may die before it has tried all paths
        attempt.interrupted_at = ""
        for line in _lines_of_process(home, device, attempt.remaining, path_s, all_gpus):
            attempt.read(line)
    paths = (*attempt.results, *known_results)
    results = DeviceResults(identity=attempt.identity, time=time.time(), paths=paths)
    if not names:
        keep_results(home, results)
    elif (earlier := read_results(home, attempt.identity)) is not None:
        results = earlier.with_paths(results.paths)
        keep_results(home, results)
    return results


@dataclass
class _Attempt:
    """What the processes that try the paths of a device have written so far.

    Attributes:
        names: the paths to try, in their order.
        report: called with each result.
        identity: the device, driver and libraries that the results hold for.
        results: results of the first of the paths.
        interrupted_at: the path that is being tried; "" between two paths.
        doing: the part of that path that is being tried; "" for a path without parts.
    """

    device: Device
    names: Sequence[str]
    report: Callable[[PathResult], None]
    identity: dict[str, str] = field(default_factory=dict)
    results: list[PathResult] = field(default_factory=list)
    interrupted_at: str = ""
    doing: str = ""

    @property
    def remaining(self) -> Sequence[str]:
        """The paths that have no result yet."""
        return self.names[len(self.results) :]

    def read(self, line: Line) -> None:
        """Take in one line of `_lines_of_process`: a path begins, a part of it begins, its result,
        or how the process ended.

        Raises UserError DEVICE_UNUSABLE if the process ended before it tried a path.
        """
        if "identity" in line:
            self.identity = line["identity"]
        elif "began" in line:
            self.interrupted_at, self.doing = line["began"], ""
        elif "doing" in line:
            self.doing = line["doing"]
        elif "result" in line:
            self.interrupted_at = ""
            self._add(PathResult.model_validate(line["result"]))
        elif self.remaining:  # the process has ended, and paths are left
            self._add(_switched_off_by_death(self.interrupted_at, self.doing, line, self.device))

    def _add(self, result: PathResult) -> None:
        """Store the result of a path, and report it."""
        self.results.append(result)
        self.report(result)


def _switched_off_by_death(name: str, doing: str, line: Line, device: Device) -> PathResult:
    """Make the result of the path at which a process ended, while it was `doing` a part of the path
    ("" if the path has no parts). `line` says how the process ended. Raises UserError
    DEVICE_UNUSABLE if it had begun no path."""
    if not name:
        raise UserError(
            "DEVICE_UNUSABLE",
            f"no path could be tried on {device.id} ({device.name}): {line['ended']}; "
            f"its last words: {line['last_words'] or 'none'}",
            hint="Run `honesmith doctor`: it says whether torch and the driver fit.",
        )
    reason = f"the process that tried it {line['ended']}"
    if doing:
        reason += f", asked to {doing}"
    if line["last_words"]:
        reason += f": {line['last_words']}"
    return PathResult(name=name, state="off", reason=reason)


def _lines_of_process(
    home: Home, device: Device, names: Sequence[str], path_s: float, all_gpus: Sequence[Device]
) -> Iterator[Line]:
    """Start a process that tries the fast paths `names` of a device, and yield what it writes: a
    JSON object for each line.

    The last object is added here: `ended` says how the process ended, `last_words` is the end of
    its output on stderr. A process that writes nothing for `path_s` seconds is killed.
    """
    python = launcher.worker_python(home)
    log = home.cache / f"fast-paths-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # The process ends when its stdin (descriptor 0) does, that is when this process ends.
    variables = trainer_variables(home.root, device.id, lifeline=0)
    with open(log, "wb") as stderr:
        process = subprocess.Popen(
            [python, "-P", *programs.command("fast_paths"), *names],
            env=variables | {ALL_GPUS: ",".join(gpu.visible for gpu in all_gpus)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        for text in _lines_in_time(process.stdout.fileno(), START_S, path_s):
            yield json.loads(text)
        yield {"ended": _end_in_words(process, path_s), "last_words": _last_words(log)}
    finally:
        _kill_and_close(process)
        log.unlink(missing_ok=True)


def _lines_in_time(descriptor: int, first_s: float, next_s: float) -> Iterator[bytes]:
    """Yield the lines that are written to a pipe, until it is closed or nothing is written for
    `next_s` seconds. For the first line the limit is `first_s`, if that is longer."""
    unfinished = b""
    limit_s = max(first_s, next_s)
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while selector.select(limit_s):
            limit_s = next_s
            chunk = os.read(descriptor, 65536)
            if not chunk:
                return
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            yield from lines


def _end_in_words(process: subprocess.Popen[bytes], silent_s: float) -> str:
    """Say how a process ended, such as "ended with status 1" or "was killed by SIGSEGV". Its stdout
    must be closed, or have been silent for `silent_s` seconds; in the second case the process is
    killed."""
    try:
        status = process.wait(timeout=EXIT_S)
    except subprocess.TimeoutExpired:
        _kill_and_close(process)
        return f"wrote nothing for {silent_s:.0f} s"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _kill_and_close(process: subprocess.Popen[bytes]) -> None:
    """Kill the process with its children, if it still runs, and close its pipes."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _last_words(log: Path) -> str:
    """Return the last line of a log, at most 200 characters; "" if the log is empty."""
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1][:200] if lines else ""

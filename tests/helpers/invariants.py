"""What has to hold in a home whatever was killed in it, and when.

A `Witness` looks at a home again and again, remembers what it was told, and fails as soon as
something that was once promised is no longer so.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from engine.core.files import read_json, read_lines
from engine.home.rows import HOLDS_DEVICE, TERMINAL, TRANSITIONS
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher

CLOCKS = {
    "time",
    "tokens_per_s",
    "sample_s",
    "reward_s",
    "export_s",
    "train_s",
    "mfu",
    "peak_memory",
}


class Witness:
    """See the module. `acked` are the submits that were answered: request id to run id."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.acked: dict[str, str] = {}
        self.events: dict[str, bytes] = {}
        self.lines: dict[str, dict[int, dict[str, Any]]] = {}
        self.ended: dict[str, tuple[str, int]] = {}
        self.looks = 0

    def look(self, whole: bool = False) -> None:
        """Take everything in; each promise is held against what was seen before. The files of a
        run that was done before are read again only when the `whole` home is asked for."""
        self.looks += 1
        with Store(self.home) as store:
            store.check()
            rows = store.list_runs(limit=100_000)
            histories = {row.run_id: store.history(row.run_id) for row in rows}
            for request, run_id in self.acked.items():
                found = store._read("SELECT run_id FROM requests WHERE request_id = ?", (request,))
                assert [r for (r,) in found] == [run_id], f"{request} led to {found}, not {run_id}"
        ids = [row.run_id for row in rows]
        assert len(ids) == len(set(ids))
        assert set(self.acked.values()) <= set(ids), "a submit that was answered is gone"
        for row in rows:
            known = self.ended.get(row.run_id, ("", 0))[0] == "done"
            self._history(row, histories[row.run_id])
            self._terminal(row)
            run = self.home.run(row.run_id)
            if whole or not known:
                self._events(run)
                self._metrics(run)
        held = [row.device for row in rows if row.state in HOLDS_DEVICE]
        assert len(held) == len(set(held)), f"a device is leased twice: {held}"

    def settled(self, run: RunDir) -> None:
        """Beside that, of a run of which nothing lives: its files, its processes, its lock."""
        self.look()
        with Store(self.home) as store:
            self._quiet(run, store.get_run(run.id))

    def _quiet(self, run: RunDir, row: Any) -> None:
        assert not launcher.is_alive(run)
        verify_newest(run)
        if row.state in TERMINAL:
            assert processes_of(run) == [], f"{run.id} is {row.state}, yet processes of it live"

    def over(self) -> None:
        """When all is quiet: no lease, no lock, no process, nothing half done."""
        self.look(whole=True)
        with Store(self.home) as store:
            rows = store.list_runs(limit=100_000)
        for row in rows:
            assert row.state in TERMINAL, f"{row.run_id} is still {row.state}"
            self._quiet(self.home.run(row.run_id), row)
        assert len(set(self.acked.values())) == len(rows), "a submit made more than one run"

    def _history(self, row: Any, history: list[tuple[float, str, str]]) -> None:
        state = ""
        for _, came_from, went_to in history:
            assert came_from == state, f"{row.run_id}: {came_from} after {state}"
            assert not came_from or went_to in TRANSITIONS[came_from]
            state = went_to
        assert state == row.state

    def _terminal(self, row: Any) -> None:
        before = self.ended.get(row.run_id)
        if before is not None and (row.state, row.attempt) != before:
            assert before[0] != "done", f"{row.run_id} was done and is {row.state}"
            assert row.attempt > before[1], f"{row.run_id} changed from {before} without a resume"
        if row.state in TERMINAL:
            self.ended[row.run_id] = (row.state, row.attempt)
        else:
            self.ended.pop(row.run_id, None)

    def _events(self, run: RunDir) -> None:
        try:
            data = run.events.read_bytes()
        except FileNotFoundError:
            data = b""
        whole = data[: data.rfind(b"\n") + 1]
        before = self.events.get(run.id, b"")
        assert whole.startswith(before), f"{run.id}: events that were read have changed"
        for line in whole[len(before) :].splitlines():
            assert "event" in json.loads(line)
        self.events[run.id] = whole

    def _metrics(self, run: RunDir) -> None:
        kept = run.latest_checkpoint()
        upto = int(kept.name.removeprefix("step_")) if kept else -1
        now = {line["step"]: curve_line(line) for line in read_lines(run.metrics, 0, 10**8)[0]}
        assert sorted(now) == list(range(len(now))), f"{run.id}: steps {sorted(now)}"
        for step, line in self.lines.get(run.id, {}).items():
            if step in now:
                assert same(now[step], line), f"{run.id}: step {step} was {line}, is {now[step]}"
            elif step <= upto:
                raise AssertionError(f"{run.id}: step {step} was read and is gone")
        self.lines[run.id] = self.lines.get(run.id, {}) | now


def curve_line(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics without clocks."""
    return {k: v for k, v in line.items() if k not in CLOCKS and v is not None}


def same(ours: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Equal within the rounding that another split of the same work makes."""
    if ours.keys() != wanted.keys():
        return False
    return all(
        abs(value - wanted[name]) <= 1e-7 + 1e-5 * abs(wanted[name])
        if isinstance(value, int | float)
        else value == wanted[name]
        for name, value in ours.items()
    )


def curve(run: RunDir) -> list[dict[str, Any]]:
    return [curve_line(line) for line in read_lines(run.metrics, 0, 10**8)[0]]


def assert_same_curve(ours: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in ours] == [line["step"] for line in wanted]
    for mine, other in zip(ours, wanted, strict=True):
        assert same(mine, other), f"{mine} is not {other}"


def verify_newest(run: RunDir) -> None:
    """The newest complete checkpoint holds what its manifest says; `best` points at one."""
    folder = run.latest_checkpoint()
    if folder is None:
        return
    manifest = read_json(folder / "MANIFEST.json")
    assert manifest["files"]
    for name, facts in manifest["files"].items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert found == facts["sha256"], f"{folder / name} is damaged"


def processes_of(run: RunDir) -> list[int]:
    """Living processes whose command line names the run's folder."""
    found = []
    needle = str(run.path).encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            said = Path("/proc", name, "cmdline").read_bytes()
            state = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and needle in said.split(b"\0"):
            found.append(int(name))
    return found


def until(holds: Any, what: str, seconds: float = 60.0) -> Any:
    """Poll until `holds()` is true and return that."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s until {what}")
        time.sleep(0.01)
    return found

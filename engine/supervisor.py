"""One per run: `python -P -m engine.supervisor RUN_FOLDER`, detached, without torch.

Holds the run's lock and its device lease, runs the trainer as its child, obeys the row (a cancel
is a state it polls), enforces the caps when no server lives, ends every descendant, writes
`exit.json` and the final row, and starts what waits. The trainer dies with it: it reads a pipe
whose other end is here and, on Linux, gets SIGKILL when this process ends.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import take_lock, write_json
from engine.home.progress import write_status
from engine.home.rows import HOLDS_DEVICE, RunRow
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.processes import launcher, outcome
from engine.processes.deployments import make_room
from envs.isolation import kernel

POLL_S = 0.5  # how soon a cancel is seen
GRACE_S = 20.0  # what a trainer may take to write a checkpoint after SIGTERM
_STATUS_S = 15.0


@dataclass
class Watch:
    """One attempt under supervision. Times are monotonic, so a moved clock ends no run."""

    run: RunDir
    store: Store
    row: RunRow
    lock: int
    wall_limit_s: float | None = None  # of this attempt; none of a training run
    began: float = field(default_factory=time.monotonic)
    child: int = 0
    status: int | None = None  # exit status of the trainer, or minus its signal
    told_to_stop: float | None = None  # when SIGTERM was sent to the trainer
    lifeline: int = -1  # the end this process keeps
    leaving: bool = False  # this process was told to end: the run is to be continued later

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began


def supervise(path: Path) -> int:
    """Run the attempt that the row of this run folder describes. Returns an exit status."""
    run = RunDir(path)
    lock = _inherited_lock() or take_lock(run.lock)
    if lock is None:
        return 1  # somebody else runs it
    with Store(run.home) as store:
        row = store.get_run(run.id)
        if row.state not in ("preparing", "stopping"):
            return 1
        watch = Watch(run, store, row, lock)
        end = _attempt(watch)
        if end is None:
            return 0
        with contextlib.suppress(OSError):  # without room for the record the row still has it
            outcome.record(run, end)
        outcome.apply(store, run, store.get_run(run.id), end)
        _after(watch, end)
    launcher.start_queued(run.home)
    return 0


def _attempt(watch: Watch) -> outcome.Outcome | None:
    """Start, watch and clear away; None when the run is left for another process to continue."""
    run = watch.run
    try:
        kernel.become_subreaper()
        wakeup = _wake_on_signals(watch)
        run.config.stat()  # a run whose folder was deleted has no trainer to start
        for stale in (run.exit_record, run.result, run.failure):
            stale.unlink(missing_ok=True)
        _count(watch)
        if stopped := make_room(run.home, run, watch.row.device or ""):
            said = f"{', '.join(stopped)} stopped: the run needs the memory"
            outcome.note_event(run, "room_made", said, deployments=stopped)
        kills = _memory_kills()
        if not _spent(watch) and watch.row.state == "preparing":
            _spawn(watch)
            watch.wall_limit_s = _wall_limit(watch)
            _follow(watch, wakeup)
    except (OSError, ValueError, UserError) as error:
        _end_descendants(watch)
        return outcome.abandon(
            run,
            watch.row,
            "infra",
            f"the run could not be supervised: {error}",
            outcome.resume_hint(run).after("Mend that first."),
        )
    _end_descendants(watch)
    if watch.leaving and watch.status not in (outcome.EXIT_DONE, outcome.EXIT_FAILED):
        outcome.note_event(run, "supervisor_left", "the supervisor was told to end")
        return None
    status = watch.status if watch.status is not None else outcome.EXIT_STOPPED
    return outcome.decide(
        run,
        watch.store.get_run(run.id),
        status=status,
        elapsed_s=watch.elapsed,
        memory_ran_out=_memory_kills() > kills,
    )


def _spawn(watch: Watch) -> None:
    run, row = watch.run, watch.row
    command = launcher.trainer_command(run.home, row.algorithm)
    lifeline, keep = os.pipe()  # `keep` closes when this process ends, which ends the trainer
    outcome.note_event(
        run, "attempt_started", f"attempt {row.attempt}", attempt=row.attempt, device=row.device
    )
    with open(run.log(row.attempt), "ab") as log:
        process = subprocess.Popen(
            [*command, str(run.path)],
            cwd=run.path,
            env=_environment(watch, lifeline),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
            pass_fds=(watch.lock, lifeline),
            # Bound to the thread that forks: this process has one.
            preexec_fn=kernel.die_with_parent if kernel.LINUX else None,
        )
    os.close(lifeline)
    watch.child, watch.lifeline = process.pid, keep
    process.returncode = 0  # `_collect` waits for it, together with whatever it left behind
    write_json(
        run.started_record,
        {
            "attempt": row.attempt,
            "device": row.device,
            "supervisor_pid": os.getpid(),
            "trainer_pid": process.pid,
            "time": time.time(),
            "boot_id": _boot_id(),
        },
    )
    write_status(run, watch.store.get_run(run.id))


def _follow(watch: Watch, wakeup: int) -> None:
    """Until the trainer has ended: obey the row, enforce the limits, keep the count."""
    next_status = time.monotonic() + _STATUS_S
    while watch.status is None:
        _sleep_until_signal(wakeup, POLL_S)
        _collect(watch)
        if watch.status is not None:
            return
        _count(watch)
        with contextlib.suppress(UserError):  # a full disk now is no reason to stop training
            watch.row = watch.store.get_run(watch.run.id)
            _spent(watch)
        if watch.row.state == "stopping" or watch.leaving:
            _stop(watch)
        if time.monotonic() > next_status:
            write_status(watch.run, watch.row)
            next_status = time.monotonic() + _STATUS_S


def _stop(watch: Watch) -> None:
    """SIGTERM first; SIGKILL to the group when the grace is over."""
    if watch.told_to_stop is None:
        watch.told_to_stop = time.monotonic()
        _signal(watch.child, signal.SIGTERM)
    elif time.monotonic() - watch.told_to_stop > _grace():
        _signal_group(watch.child, signal.SIGKILL)


def _limits(watch: Watch) -> list[tuple[float, str, str]]:
    """Seconds this attempt may take, with the kind and the words of each limit."""
    row, home = watch.row, watch.run.home
    found = []
    if row.max_gpu_hours > 0:
        left = row.max_gpu_hours - (row.spent_hours - row.spent_before)
        said = f"max_gpu_hours={row.max_gpu_hours:g} is spent"
        found.append((left * 3600, "budget", said))
    total = home.user_config().max_gpu_hours_total
    if total is not None:
        left = (total - watch.store.spent_hours()) * 3600 - _others(watch)
        found.append((left, "budget", f"max_gpu_hours_total={total:g} of this home is spent"))
    if wall := watch.wall_limit_s:
        found.append((wall, "timeout", f"the run took longer than {wall / 3600:g} hours"))
    return sorted(found)


def _wall_limit(watch: Watch) -> float | None:
    """Seconds the attempt may take; None of a training run, whose config needs no look."""
    if watch.row.kind == "train":
        return None
    hours = watch.run.read_config().wall_limit_hours
    return 3600 * hours if hours else None


def _others(watch: Watch) -> float:
    """Seconds that attempts on other devices have taken up to now; their rows get them at the end.

    What they count in their lock files is at most a poll old.
    """
    rows = watch.store.list_runs(limit=1000, states=HOLDS_DEVICE)
    folders = [watch.run.home.run(row.run_id) for row in rows if row.run_id != watch.run.id]
    return sum(launcher.elapsed_of_dead(run) for run in folders)


def _spent(watch: Watch) -> bool:
    """Ask the run to stop when its first limit is reached; True when it was."""
    limits = _limits(watch)
    if not limits or watch.elapsed < limits[0][0]:
        return False
    _, kind, said = limits[0]
    asked = watch.store.set_state(
        watch.run.id,
        "stopping",
        only_from={"preparing", "running"},
        reason_kind=kind,
        reason=said,
    )
    if asked:
        watch.row = watch.store.get_run(watch.run.id)
        write_status(watch.run, watch.row)
    return True


def _after(watch: Watch, end: outcome.Outcome) -> None:
    """What a finished run leaves for people and for later estimates."""
    run, row = watch.run, watch.store.get_run(watch.run.id)
    with contextlib.suppress(OSError):
        outcome.note_event(
            run,
            "trainer_exited",
            f"{row.state}: {end.reason}" if end.reason else row.state,
            attempt=end.attempt,
            rc=end.rc,
            signal=end.signal,
        )
    write_status(run, row)
    with contextlib.suppress(OSError, ValueError, UserError):
        # Loaded here: a template engine is no part of watching over a trainer.
        from engine.evidence.report.html_report import write_report  # noqa: PLC0415

        write_report(run.home, run.id)
    if row.state == "done" and row.attempt == 1 and row.estimated_hours > 0:
        features = {"run_id": row.run_id, "device": row.device, "model": row.model}
        with contextlib.suppress(UserError):
            watch.store.record_estimate(
                row.algorithm, features, row.estimated_hours, row.spent_hours
            )


def _environment(watch: Watch, lifeline: int) -> dict[str, str]:
    row, run = watch.row, watch.run
    return {
        **os.environ,
        "HONESMITH_HOME": str(run.home.root),
        "HONESMITH_DEVICE": row.device,
        "HONESMITH_ATTEMPT": str(row.attempt),
        "HONESMITH_LIFELINE_FD": str(lifeline),
        "CUDA_VISIBLE_DEVICES": _visible(row.device),
        "GOMP_SPINCOUNT": "10000",  # spinning OpenMP threads starve each other on few cores
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # a model is a folder by now; nothing else may be fetched
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _visible(device: str) -> str:
    if device == "cpu":
        return ""
    # The driver is asked only for a GPU: a machine without one starts its trainer sooner.
    from engine.core import hardware  # noqa: PLC0415

    for found in hardware.detect().devices:
        if found.id == device:
            return found.visible
    raise ValueError(f"device {device} is gone from this machine")


def _inherited_lock() -> int | None:
    text = os.environ.pop(launcher.LOCK_FD, "")
    if not text.isdigit():
        return None
    lock = int(text)
    try:
        os.set_inheritable(lock, False)
    except OSError:
        return None
    return lock


def _count(watch: Watch) -> None:
    """Keep the seconds spent in the lock file, where they outlive this process."""
    line = json.dumps({"attempt": watch.row.attempt, "elapsed_s": round(watch.elapsed, 2)})
    with contextlib.suppress(OSError):
        os.pwrite(watch.lock, line.ljust(60).encode() + b"\n", 0)


def _wake_on_signals(watch: Watch) -> int:
    """A pipe that becomes readable when a child ends or this process is told to."""

    def leave(*_: object) -> None:
        watch.leaving = True

    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGTERM, leave)
    for ignored in (signal.SIGINT, signal.SIGHUP):  # a handler, unlike SIG_IGN, is not inherited
        signal.signal(ignored, lambda *_: None)
    return reading


def _sleep_until_signal(wakeup: int, seconds: float) -> None:
    if select.select([wakeup], [], [], seconds)[0]:
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)


def _collect(watch: Watch) -> bool:
    """Collect every child that has ended, adopted ones too; True while any are left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid == watch.child:
            watch.status = os.waitstatus_to_exitcode(status)


def _end_descendants(watch: Watch) -> None:
    """Kill whatever the trainer left; as their reaper this process sees all of them."""
    if watch.child and (watch.status is None or not kernel.LINUX):
        _signal_group(watch.child, signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while _collect(watch) and time.monotonic() < deadline:
        for pid in _children():
            _signal(pid, signal.SIGKILL)
        time.sleep(0.005)


def _children() -> list[int]:
    """Direct children; when one is killed its own become ours, so the tree shrinks to nothing."""
    with contextlib.suppress(OSError):
        pid = os.getpid()
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _grace() -> float:
    return float(os.environ.get("HONESMITH_STOP_GRACE_S") or GRACE_S)


def _memory_kills() -> int:
    """How often this kernel has ended a process for lack of memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]).absolute()))

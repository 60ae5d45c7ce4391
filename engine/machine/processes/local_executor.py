"""This machine as a place to run (seam.py): its supervisors are started, asked for, settled.

The row of a run stands for its handle: the attempt is what a launch is elsewhere, and the state
"preparing", written in the transaction that hands out the device, is the intent that is on the disk
before anything is started. Liveness is the run's lock, which is claimed in that same transaction
and inherited by the supervisor, so it is never free between the decision and the start.

The supervisor imports this module, so it imports nothing heavy.
"""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.errors import UserError
from engine.core.files import is_locked, read_object, take_lock
from engine.home.rows import HOLDS_DEVICE, LOCAL, TERMINAL, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.home.user_config import key_of
from engine.machine.pace.progress import write_status
from engine.machine.processes import outcome, programs
from engine.machine.processes.seam import Caps, End, Handle, Life, Owned, Phase, Probe

if TYPE_CHECKING:
    from engine.core.hardware import Hardware

# The environment variable with the descriptor of the run's lock, which the supervisor inherits.
LOCK_FD = "HONESMITH_LOCK_FD"
_CLAIM_S = 0.05  # seconds to wait for a lock; a process that only tests it holds it for less
# The states of a run whose processes should live, or that is to be queued again.
UNSETTLED = ("preparing", "running", "stopping", "interrupted")
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "honesmith")
_WITHOUT_PROCESS = frozenset({"queued", "interrupted"})


class LocalExecutor:
    """This machine as a place to run, for the runs of one home. Not for use by several threads."""

    def __init__(self, home: Home, store: Store) -> None:
        """Begin with no claimed run. `store` is the open database of `home`, which the caller
        closes."""
        self.home, self.store = home, store
        self._claims: dict[str, int] = {}  # run id -> descriptor of its lock

    @property
    def name(self) -> str:
        """The name of this machine in the setting `compute`: "local"."""
        return LOCAL

    def machine(self) -> "Hardware":
        """Measure and return the hardware of this machine, as it is now."""
        # Imported late: asking the driver takes a while, and usually nothing is queued.
        from engine.core import hardware  # noqa: PLC0415

        return hardware.detect(self.home.root)

    def capabilities(self) -> Caps:
        """Return the hardware of this machine and the versions of the packages that train here."""
        return Caps(self.machine(), package_versions())

    def handle(self, row: RunRow) -> Handle:
        """Return the handle of a run's present attempt; here the launch is the attempt."""
        return Handle(
            self.name,
            launch=row.attempt,
            phase=_phase_of(row),
            stop_asked=row.state == "stopping",
        )

    def claim(self, run: RunDir) -> bool:
        """Take the lock of a run that is about to be started; `start` passes it on to the
        supervisor.

        Returns whether the lock was taken: False if an earlier attempt of the run is still ending.
        """
        run.create()  # the lock needs the run's folder, which may have been deleted by hand
        lock = take_lock(run.lock, wait_s=_CLAIM_S)
        if lock is None:
            return False
        # The lock file holds the seconds of an earlier attempt; this attempt starts at none.
        os.truncate(lock, 0)
        self._claims[run.id] = lock
        return True

    def release(self) -> None:
        """Give back the locks of claimed runs that were not started."""
        while self._claims:
            _run_id, lock = self._claims.popitem()
            os.close(lock)

    def start(self, run: RunDir, handle: Handle) -> None:
        """Start the supervisor of the attempt that the handle names.

        Nothing is started if it was started before, if the attempt is no longer the run's present
        one, or if the run was given no device. Raises OSError if the machine cannot start a
        process.
        """
        claimed_lock = self._claims.pop(run.id, None)  # None: `claim` was not called before
        lock = take_lock(run.lock, wait_s=_CLAIM_S) if claimed_lock is None else claimed_lock
        if lock is None:  # a supervisor or trainer of the run lives
            return
        try:
            if claimed_lock is not None or self._is_to_start(run, handle):
                self.spawn(run, lock)
        finally:
            os.close(lock)  # a supervisor that was started has its own copy

    def _is_to_start(self, run: RunDir, handle: Handle) -> bool:
        """Return whether the attempt of the handle is the run's present one, and nobody has started
        it yet. The caller holds the run's lock."""
        row = self.store.find_run(run.id)
        if row is None or row.attempt != handle.launch:
            return False
        if row.state not in ("preparing", "stopping"):  # it was given no device, or runs already
            return False
        records = (run.started_record, run.exit_record)
        return all(read_object(record).get("attempt") != handle.launch for record in records)

    def spawn(self, run: RunDir, lock: int) -> None:
        """Start the supervisor of a run; it inherits the descriptor `lock` of the run's lock.

        Raises OSError if the machine cannot start a process.
        """
        env = {**os.environ, LOCK_FD: str(lock), "HONESMITH_HOME": str(self.home.root)}
        env |= _endpoint_keys(run)
        argv = [sys.executable, "-P", *programs.command("supervisor"), str(run.path)]
        spawn_detached(argv, run.path, run.supervisor_log, env, pass_fds=(lock,))

    def probe(self, run: RunDir, handle: Handle) -> Probe:
        """Return what became of the attempt that the handle names.

        Its life is "gone" if the run has another attempt by now, "unknown" if the home cannot be
        read.
        """
        try:
            row = self.store.find_run(run.id)
            if row is None or row.attempt != handle.launch:
                return Probe("gone")
            is_held = is_alive(run)
            recorded_end = None if is_held else outcome.recorded(run, row.attempt)
        except (OSError, UserError):
            return Probe("unknown")
        end = None
        if row.state in TERMINAL:
            end = _end_of(row)
        elif recorded_end is not None:  # its supervisor died before it could update the row
            end = _end_of(recorded_end)
        life = _life_of(row, is_held=is_held, has_end=end is not None)
        return Probe(life, row.state, row.device, end if life == "exited" else None)

    def stop(self, run: RunDir, handle: Handle) -> None:
        """Ask the attempt of the handle to save a checkpoint and end.

        Its supervisor reads that in the run's row. A run that has no process is cancelled at once.
        """
        row = self.store.find_run(run.id)
        if row is None or row.attempt != handle.launch:
            return
        values = {"reason_kind": "cancelled", "reason": "asked to end"}
        if row.state in _WITHOUT_PROCESS:
            self.store.set_state(
                run.id,
                "cancelled",
                only_from=set(_WITHOUT_PROCESS),
                ended=time.time(),
                hint=outcome.resume_hint(run),
                **values,
            )
        else:
            self.store.set_state(run.id, "stopping", only_from={"preparing", "running"}, **values)

    def reap(self, run: RunDir, handle: Handle) -> None:
        """Settle the run (see `settle`) if it is still in the attempt of the handle and its
        processes are gone; an attempt that lives stays as it is."""
        row = self.store.find_run(run.id)
        if row is not None and row.attempt == handle.launch:
            self.settle(run)

    def settle(self, run: RunDir) -> bool:
        """Bring a run whose supervisor and trainer died to its next state: it is queued again,
        fails, or gets the end that was recorded.

        Returns whether that was done: False if the run lives, if another process has settled it,
        or if the home cannot be written.
        """
        lock = _lock_of_dead(run)
        if lock is None:
            return False
        was_settled = False
        try:
            row = self.store.get_run(run.id)  # another process may have settled it before
            if row.state in UNSETTLED:
                _settle(self.store, run, row)
                was_settled = True
                write_status(run, self.store.get_run(run.id))
        except (OSError, UserError) as error:
            # The caller only wants to read; a later call can settle the run.
            if not cannot_write(error):
                raise
        finally:
            os.close(lock)
        return was_settled

    def list_owned(self) -> Sequence[Owned]:
        """Return every attempt of this home that holds a device, with whether it lives."""
        owned = []
        for row in self.store.list_runs(limit=100_000, states=HOLDS_DEVICE):
            probe = self.probe(self.home.run(row.run_id), self.handle(row))
            owned.append(Owned(row.run_id, row.attempt, probe.life))
        return owned


def _end_of(source: RunRow | outcome.Outcome) -> End:
    """Return how an attempt ended, from the row of its run or from its recorded outcome."""
    return End(source.state, source.reason_kind, source.reason, source.hint, source.verdict)


def _phase_of(row: RunRow) -> Phase:
    """Return how far the present attempt of a run has come, as the phase of a handle."""
    if row.state in TERMINAL:
        return "ended"
    return "started" if row.state in ("running", "stopping") else "starting"


def _life_of(row: RunRow, *, is_held: bool, has_end: bool) -> Life:
    """Return whether an attempt lives. One whose processes still end counts as running.

    Args:
        row: the run's row.
        is_held: whether a process holds the run's lock, as supervisor and trainer do.
        has_end: whether it is known how the attempt ended.
    """
    if is_held:
        return "running"
    if has_end:
        return "exited"
    return "pending" if row.state == "queued" else "gone"


def package_versions() -> Mapping[str, str]:
    """Return package -> installed version, for those of the packages that train which are
    installed."""
    # Imported late: it loads a library for e-mail, and every supervisor would wait for that.
    from importlib import metadata  # noqa: PLC0415

    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def is_alive(run: RunDir) -> bool:
    """Return whether a supervisor or trainer of this run lives.

    The run's lock tells this; a process id could belong to another process by now.
    """
    return is_locked(run.lock)


def spawn_detached(
    argv: Sequence[str],
    cwd: Path,
    log: Path,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> int:
    """Start a process that outlives this one; return its process id.

    The process has a session of its own and no terminal.

    Args:
        argv: the command.
        cwd: the folder it runs in.
        log: the file that its output is appended to.
        env: its environment variables; None for those of this process.
        pass_fds: file descriptors that it inherits.

    Raises OSError if it cannot be started.
    """
    with open(log, "ab") as output:
        process = subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=dict(env) if env is not None else None,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    # The thread waits for the process, which would otherwise stay a zombie until this one ends.
    threading.Thread(target=process.wait, name=f"wait-{process.pid}", daemon=True).start()
    return process.pid


def _endpoint_keys(run: RunDir) -> dict[str, str]:
    """Return name -> value of the keys for the endpoints that a run asks.

    They are read here and passed on as environment variables, because a file `.env` that this
    process finds may not be found from the run's folder.
    """
    from engine.records.run_config import (  # noqa: PLC0415 - it loads pydantic
        EvaluateConfig,
        PromptConfig,
    )

    config = run.find_config()
    if not isinstance(config, EvaluateConfig | PromptConfig):
        return {}
    names = {endpoint.key_env for endpoint in config.endpoints.values()} - {""}
    return {name: key_of(run.home.root, name) for name in names}


def cannot_write(error: OSError | UserError) -> bool:
    """Return whether an error means that the home cannot be written, because it is full or
    read-only."""
    if isinstance(error, OSError):
        return error.errno in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT)
    read_only = "readonly" in str(error.__cause__)  # SQLite's own wording
    return error.code == "DISK_FULL" or read_only


def _lock_of_dead(run: RunDir) -> int | None:
    """Take the lock of a run whose processes are gone, and return its descriptor.

    Returns None if a living process holds the lock, or if the home cannot be written, because then
    no lock can be taken. Raises OSError for other errors.
    """
    try:
        return take_lock(run.lock)
    except FileNotFoundError:  # the run's folder was deleted by hand
        run.create()
        return take_lock(run.lock)
    except OSError as error:
        if cannot_write(error):  # nothing can be settled now
            return None
        raise


def _settle(store: Store, run: RunDir, row: RunRow) -> None:
    """Bring a run whose processes are gone to its next state; the caller holds its lock.

    1. If the end of this attempt was recorded, the run gets that end.
    2. If the run was told to stop, it gets the end that follows from the stop.
    3. Otherwise it was interrupted: it is queued again, or fails (`_continue_interrupted`).
    """
    if row.state == "interrupted":
        # An earlier call began step 3 and did not finish it. Finish it now, whatever the files say.
        _continue_interrupted(store, run, row)
        return
    recorded_end = outcome.recorded(run, row.attempt)
    if recorded_end is not None:
        outcome.apply(store, run, row, recorded_end)
        return
    elapsed_s = seconds_in_lock_file(run)
    if row.state == "stopping":  # it was asked to end, and it has
        # Nobody waited for the exit status; -9 stands for killed by SIGKILL.
        stopped_end = outcome.decide(run, row, status=-9, elapsed_s=elapsed_s)
        outcome.apply(store, run, row, stopped_end)
        return
    _interrupt(store, run, row, elapsed_s)
    _continue_interrupted(store, run, row)


def _interrupt(store: Store, run: RunDir, row: RunRow, elapsed_s: float) -> None:
    """Record that the run's attempt was interrupted after `elapsed_s` seconds, and free its device.

    Does nothing if the run's state has changed since `row` was read.
    """
    store.set_state(
        row.run_id,
        "interrupted",
        only_from={row.state},
        spent_hours=row.spent_hours + row.device_hours(elapsed_s),
        device="",
    )
    outcome.note_event(run, "interrupted", "supervisor and trainer are gone", attempt=row.attempt)


def _continue_interrupted(store: Store, run: RunDir, row: RunRow) -> None:
    """Queue an interrupted run again, or let it fail if that has happened MAX_CONTINUATIONS times
    without a new checkpoint.

    A run that is on another machine never fails here: it goes on there, however often this machine
    is switched off. With such an interruption, and with one after a new checkpoint, the count
    begins anew.
    """
    handle = Handle.read(run) if row.is_elsewhere else None
    is_over_there = handle is not None and handle.phase == "started"
    begins_anew = is_over_there or _saved_in_this_attempt(run, row)
    continuations = 0 if begins_anew else row.continuations
    if continuations >= outcome.MAX_CONTINUATIONS:
        without = " without a new checkpoint" if row.kind == "train" else ""
        store.set_state(
            row.run_id,
            "failed",
            only_from={"interrupted"},
            ended=time.time(),
            reason_kind="interrupted",
            # + 1: the present interruption, after which the run is not continued.
            reason=f"interrupted {continuations + 1} times{without}, and not continued any more",
            hint=outcome.resume_hint(run).after("Find out what ends processes on this machine."),
            verdict="unknown",
        )
        return
    store.set_state(
        row.run_id,
        "queued",
        only_from={"interrupted"},
        attempt=row.attempt + 1,
        continuations=continuations + 1,
    )


def _saved_in_this_attempt(run: RunDir, row: RunRow) -> bool:
    """Tell whether the newest checkpoint was written after the processes of the row's attempt had
    started, by the times of both files."""
    checkpoint = run.latest_checkpoint()
    try:
        record = read_object(run.started_record)
        started_s = run.started_record.stat().st_mtime
        saved_since = checkpoint is not None and checkpoint.stat().st_mtime > started_s
    except (OSError, ValueError):  # no attempt has started a trainer
        return False
    return saved_since and record.get("attempt") == row.attempt


def spent_hours(home: Home, row: RunRow) -> float:
    """Return the device hours that a run has taken so far, including those of its current
    attempt."""
    if row.state not in HOLDS_DEVICE:
        return row.spent_hours
    return row.spent_hours + row.device_hours(seconds_in_lock_file(home.run(row.run_id)))


def seconds_in_lock_file(run: RunDir) -> float:
    """Return the seconds that the run's last attempt has taken; 0 if the lock file holds none.

    The supervisor writes them into the run's lock file at every poll.
    """
    try:
        return max(0.0, float(json.loads(run.lock.read_text())["elapsed_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0

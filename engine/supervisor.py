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
from engine.home.rows import RunRow
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.pace.progress import write_status
from engine.pace.staleness import LEAST_GRACE_S
from engine.processes import launcher, outcome
from engine.processes.deployments import make_room
from engine.processes.limits import Limit, limit_of_home, limit_of_run, nearest_cap
from engine.processes.trainer_variables import trainer_variables
from engine.processes.vigil import Vigil
from envs.isolation import kernel

POLL_S = 0.5  # how soon a cancel is seen
_STATUS_S = 15.0  # how often STATUS.md is renewed
_KILL_PATIENCE_S = 10.0  # how long to wait for killed descendants to be gone


@dataclass
class Watch:
    """One attempt of a run under supervision. Times are monotonic, so that a changed clock ends no
    run."""

    run: RunDir
    store: Store
    row: RunRow
    lock: int  # descriptor that holds the run's lock
    # How long this attempt may go on without writing an answer; a training run has no such limit.
    wall_limit_s: float | None = None
    answer_bytes: int = 0  # written so far
    answered_s: float = 0.0  # of `elapsed`, when the last of them were written
    began: float = field(default_factory=time.monotonic)
    trainer_pid: int = 0  # 0: not started
    status: int | None = None  # exit status of the trainer, or minus its signal
    sigterm_sent_at: float | None = None  # to the trainer
    lifeline: int = -1  # the end of the trainer's pipe that this process keeps open
    vigil: Vigil | None = None  # watches the trainer's signs of life; None before it is started
    was_told_to_end: bool = False  # this process, by SIGTERM: the run is to be continued later

    @property
    def elapsed(self) -> float:
        """Seconds since the attempt began."""
        return time.monotonic() - self.began


def supervise(path: Path) -> int:
    """Supervise the current attempt of the run in the folder `path` until it has ended.

    Returns the exit status of this process:
    - 0: the attempt was carried out, or was left for another supervisor to continue;
    - 1: there is nothing to supervise: another process holds the run's lock, or the run's state is
      neither preparing nor stopping.

    Afterwards the runs that wait for a device are started.
    """
    run = RunDir(path)
    lock = _inherited_lock() or take_lock(run.lock)
    if lock is None:
        return 1  # another process holds it
    with Store(run.home) as store:
        row = store.get_run(run.id)
        if row.state not in ("preparing", "stopping"):  # stopping: cancelled since it was started
            return 1
        watch = Watch(run, store, row, lock)
        result = _run_attempt(watch)
        if result is None:  # another process will continue the run
            return 0
        with contextlib.suppress(OSError):  # on a full disk the row alone says how it ended
            outcome.record(run, result)
        outcome.apply(store, run, store.get_run(run.id), result)
        _write_aftermath(watch, result)
    launcher.start_queued(run.home)
    return 0


def _run_attempt(watch: Watch) -> outcome.Outcome | None:
    """Start the trainer, watch it until it ends, and kill every process that it left behind.

    Returns what became of the attempt. None means that this process was told to end before the
    trainer had a result; another process will then continue the run.
    """
    try:
        wakeup = _prepare_attempt(watch)
        kills_before = _memory_kills()
        # A run whose limit is reached, or that was cancelled meanwhile, is not started any more.
        if not _stop_at_limit(watch) and watch.row.state == "preparing":
            _start_trainer(watch)
            watch.wall_limit_s = _wall_limit(watch)
            watch.vigil = Vigil(watch.run, watch.row)
            _watch_until_end(watch, wakeup)
    # OSError: a file cannot be read or written, or the trainer cannot be started. ValueError: a
    # record is damaged, or the device is gone. UserError: the home cannot be used.
    except (OSError, ValueError, UserError) as error:
        _end_descendants(watch)
        return _not_supervised(watch, error)
    _end_descendants(watch)
    # With any other status, or none yet, the trainer was cut short.
    has_result = watch.status in (outcome.EXIT_DONE, outcome.EXIT_FAILED)
    if watch.was_told_to_end and not has_result:
        outcome.note_event(watch.run, "supervisor_left", "the supervisor was told to end")
        return None
    return _outcome_of_trainer(watch, kills_before)


def _prepare_attempt(watch: Watch) -> int:
    """Make this process and the run's folder ready for the trainer, and free memory for it.

    Returns the read end of the pipe that wakes this process. Raises OSError if the run's folder was
    deleted.
    """
    kernel.become_subreaper()  # descendants whose parent ends become children of this process
    wakeup = _wake_on_signals(watch)
    run = watch.run
    run.config.stat()  # raises OSError where the run's folder was deleted
    for stale in (run.exit_record, run.result, run.failure, run.heartbeat):  # of an earlier attempt
        stale.unlink(missing_ok=True)
    _record_elapsed(watch)
    on_device = watch.row.gpus > 0
    stopped_deployments = make_room(run.home, run, watch.row.device or "") if on_device else []
    if stopped_deployments:
        message = f"{', '.join(stopped_deployments)} stopped: the run needs the memory"
        outcome.note_event(run, "room_made", message, deployments=stopped_deployments)
    return wakeup


def _not_supervised(watch: Watch, error: Exception) -> outcome.Outcome:
    """The outcome of an attempt that could not be supervised, because of `error`."""
    return outcome.abandon(
        watch.run,
        watch.row,
        kind="infra",
        reason=f"the run could not be supervised: {error}",
        hint=outcome.resume_hint(watch.run).after("Mend that first."),
    )


def _outcome_of_trainer(watch: Watch, kills_before: int) -> outcome.Outcome:
    """The outcome of an attempt whose trainer has ended, or was not started.

    `kills_before` is `_memory_kills` from before the trainer was started: if the kernel has killed
    more processes since, memory ran out during the attempt.
    """
    status = watch.status
    if status is None:  # no trainer was started, because the run was to stop already
        status = outcome.EXIT_STOPPED
    return outcome.decide(
        watch.run,
        watch.store.get_run(watch.run.id),
        status=status,
        elapsed_s=watch.elapsed,
        memory_ran_out=_memory_kills() > kills_before,
    )


def _start_trainer(watch: Watch) -> None:
    """Start the trainer, note its process id in `watch` and in started.json, and renew STATUS.md.

    The trainer inherits the run's lock, and the read end of a pipe that closes when this process
    ends.
    """
    run, row = watch.run, watch.row
    command = launcher.trainer_command(run.home, row.algorithm, row.gpus)
    # `write_end` closes when this process ends; the trainer sees that at `read_end` and ends too.
    read_end, write_end = os.pipe()
    outcome.note_event(
        run, "attempt_started", f"attempt {row.attempt}", attempt=row.attempt, device=row.device
    )
    watch.trainer_pid = _spawn_trainer(watch, command, lifeline=read_end)
    watch.lifeline = write_end
    _write_started_record(watch)
    write_status(run, watch.store.get_run(run.id))


def _spawn_trainer(watch: Watch, command: list[str], lifeline: int) -> int:
    """Start the trainer as a child in its own process group; returns its process id. It inherits
    the descriptor `lifeline`, which is closed in this process."""
    run = watch.run
    with open(run.log(watch.row.attempt), "ab") as log:
        process = subprocess.Popen(
            [*command, str(run.path)],
            cwd=run.path,
            env=_trainer_environment(watch, lifeline),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
            pass_fds=(watch.lock, lifeline),
            # The kernel ends the child with the thread that forked it; this process has only one.
            preexec_fn=kernel.die_with_parent if kernel.LINUX else None,
        )
    os.close(lifeline)
    process.returncode = 0  # makes Popen believe that it ended: `_reap_children` waits for it
    return process.pid


def _write_started_record(watch: Watch) -> None:
    """Write started.json, which names the processes of this attempt and when it began."""
    write_json(
        watch.run.started_record,
        {
            "attempt": watch.row.attempt,
            "device": watch.row.device,
            "supervisor_pid": os.getpid(),
            "trainer_pid": watch.trainer_pid,
            "time": time.time(),
            "boot_id": _boot_id(),
        },
    )


def _watch_until_end(watch: Watch, wakeup: int) -> None:
    """Wait until the trainer has ended. Meanwhile record the seconds spent, stop the trainer when
    the row or a limit says so or this process was told to end, and renew STATUS.md.

    Args:
        wakeup: the read end of the pipe that `_wake_on_signals` made.
    """
    next_status_at = time.monotonic() + _STATUS_S
    while watch.status is None:
        _sleep_until_signal(wakeup, POLL_S)
        _reap_children(watch)
        if watch.status is not None:
            return
        _record_elapsed(watch)
        with contextlib.suppress(UserError):  # a full disk now is no reason to stop training
            watch.row = watch.store.get_run(watch.run.id)
            _look_at_heartbeat(watch)
            _stop_at_limit(watch)
        if watch.row.state == "stopping" or watch.was_told_to_end:
            _stop_trainer(watch)
        if time.monotonic() > next_status_at:
            write_status(watch.run, watch.row)
            next_status_at = time.monotonic() + _STATUS_S


def _look_at_heartbeat(watch: Watch) -> None:
    """Read the trainer's last sign of life, and note where the run's end is now expected."""
    vigil = watch.vigil
    if vigil is not None and vigil.look() and watch.row.state == "running":
        with contextlib.suppress(OSError):  # no room for an event
            vigil.note_forecast(nearest_cap(watch.store, watch.run, watch.row), watch.elapsed)


def _stop_trainer(watch: Watch) -> None:
    """Stop the trainer. It is called at every poll: the first call sends SIGTERM, a later one kills
    the trainer's process group once the grace period is over."""
    if watch.sigterm_sent_at is None:
        watch.sigterm_sent_at = time.monotonic()
        if watch.row.reason_kind == "stalled" and watch.vigil and watch.vigil.heartbeat:
            # It has installed its handler by then, which writes where it hangs into its log.
            _signal(watch.trainer_pid, signal.SIGUSR1)
        _signal(watch.trainer_pid, signal.SIGTERM)
    elif time.monotonic() - watch.sigterm_sent_at > _stop_grace_s(watch):
        _signal_group(watch.trainer_pid, signal.SIGKILL)


def _limits(watch: Watch) -> list[Limit]:
    """Every limit of this attempt, the earliest first; [] where there is none."""
    limits = (
        limit_of_run(watch.store, watch.run.home, watch.row),
        limit_of_home(watch.store, watch.run),
        _limit_without_answers(watch),
        watch.vigil.limit(watch.elapsed) if watch.vigil else None,
    )
    return sorted(limit for limit in limits if limit is not None)


def _limit_without_answers(watch: Watch) -> Limit | None:
    """The limit at which the run has gone on for too long without writing an answer; None if it has
    no such limit."""
    wall_s = watch.wall_limit_s
    if not wall_s:
        return None
    _note_answers(watch)
    reason = f"the run wrote no answer for {wall_s / 3600:g} hours"
    return Limit(watch.answered_s + wall_s, kind="timeout", reason=reason)


def _note_answers(watch: Watch) -> None:
    """Note the time if the files with the run's answers have changed in size since the last poll. A
    slow model is not stopped as long as new answers keep coming."""
    answer_bytes = 0
    for file in watch.run.evals_dir.glob("model_*.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # a later attempt begins its files anew
            answer_bytes += file.stat().st_size
    if answer_bytes != watch.answer_bytes:
        watch.answer_bytes, watch.answered_s = answer_bytes, watch.elapsed


def _wall_limit(watch: Watch) -> float | None:
    """The seconds that the attempt may go on without an answer; None where the run's config sets no
    such limit. A training run never has one."""
    if watch.row.kind == "train":  # so its config need not be read
        return None
    hours = watch.run.read_config().wall_limit_hours
    return 3600 * hours if hours else None


def _stop_at_limit(watch: Watch) -> bool:
    """Set the run to "stopping" if its earliest limit is reached. Returns whether a limit is
    reached, also where the run was stopping already."""
    limits = _limits(watch)
    if not limits:
        return False
    earliest = limits[0]  # `_limits` sorts them by their seconds
    if watch.elapsed < earliest.seconds:
        return False
    state_was_set = watch.store.set_state(
        watch.run.id,
        "stopping",
        only_from={"preparing", "running"},
        reason_kind=earliest.kind,
        reason=earliest.reason,
    )
    if state_was_set:  # else it was stopping already, perhaps for another reason
        watch.row = watch.store.get_run(watch.run.id)
        if earliest.kind == "stalled":
            with contextlib.suppress(OSError):
                outcome.note_event(watch.run, "stalled", f"{earliest.reason}: it is ended")
        write_status(watch.run, watch.row)
    return True


def _write_aftermath(watch: Watch, result: outcome.Outcome) -> None:
    """Write what is left to write for an ended run: its last event, STATUS.md, the report, and its
    hours for later estimates. Whatever cannot be written is left out."""
    row = watch.store.get_run(watch.run.id)
    _note_end(watch.run, row, result)
    write_status(watch.run, row)
    _write_report(watch.run)
    # A run that was resumed repeats work, so its hours would spoil the calibration.
    # The estimate of an evaluation says what it takes at most, so it teaches nothing either.
    is_plain = row.kind == "train" and row.attempt == 1
    if row.state == "done" and is_plain and row.estimated_hours > 0:
        features = {"run_id": row.run_id, "device": row.device, "model": row.model}
        with contextlib.suppress(UserError):
            watch.store.record_estimate(
                row.algorithm, features, row.estimated_hours, row.spent_hours
            )


def _note_end(run: RunDir, row: RunRow, result: outcome.Outcome) -> None:
    """Append the event that the trainer has exited to the run's events, if that can be written."""
    message = f"{row.state}: {result.reason}" if result.reason else row.state
    with contextlib.suppress(OSError):
        outcome.note_event(
            run,
            "trainer_exited",
            message,
            attempt=result.attempt,
            rc=result.rc,
            signal=result.signal,
        )


def _write_report(run: RunDir) -> None:
    """Write the report of the run, if that is possible."""
    with contextlib.suppress(OSError, ValueError, UserError):
        # Imported late: it loads a template engine, which no supervisor needs before this.
        from engine.evidence.report.html_report import write_report  # noqa: PLC0415

        write_report(run.home, run.id)


def _trainer_environment(watch: Watch, lifeline: int) -> dict[str, str]:
    """The environment variables of the trainer. `lifeline` is the descriptor of the pipe by which
    the trainer learns that this process has ended."""
    row, run = watch.row, watch.run
    variables = trainer_variables(run.home.root, row.device, lifeline)
    return variables | {"HONESMITH_ATTEMPT": str(row.attempt)}


def _inherited_lock() -> int | None:
    """The descriptor of the run's lock, which the launcher passes to this process; None where none
    was passed, or where the descriptor is not open."""
    text = os.environ.pop(launcher.LOCK_FD, "")
    if not text.isdigit():
        return None
    lock = int(text)
    try:
        # No child inherits it by accident; `_start_trainer` passes it on explicitly.
        os.set_inheritable(lock, False)
    except OSError:
        return None
    return lock


def _record_elapsed(watch: Watch) -> None:
    """Write into the lock file how many seconds the attempt has taken so far, so that they are
    known even if this process is killed."""
    line = json.dumps({"attempt": watch.row.attempt, "elapsed_s": round(watch.elapsed, 2)})
    with contextlib.suppress(OSError):
        # Padded to a fixed length, so that a shorter line overwrites a longer one completely.
        os.pwrite(watch.lock, line.ljust(60).encode() + b"\n", 0)


def _wake_on_signals(watch: Watch) -> int:
    """Install the signal handlers of this process. Returns the read end of a pipe that becomes
    readable when a child has ended or a signal has come.

    SIGTERM also sets `watch.was_told_to_end`. SIGINT and SIGHUP have no other effect.
    """

    def leave(*_: object) -> None:
        watch.was_told_to_end = True

    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is written
    signal.signal(signal.SIGTERM, leave)
    # Handlers that do nothing: unlike SIG_IGN they are not inherited by the trainer.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGHUP, lambda *_: None)
    return read_end


def _sleep_until_signal(wakeup: int, seconds: float) -> None:
    """Wait for a signal, at most `seconds`, and empty the pipe `wakeup`, to which signals write."""
    readable, _, _ = select.select([wakeup], [], [], seconds)
    if readable:
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup, 4096)  # a byte for each signal


def _reap_children(watch: Watch) -> bool:
    """Collect the exit status of every child that has ended, also of processes that this one has
    adopted, and store the trainer's in `watch.status`. Returns whether any child is still
    running."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:  # there are children, but none of them has ended
            return True
        if pid == watch.trainer_pid:
            watch.status = os.waitstatus_to_exitcode(status)


def _end_descendants(watch: Watch) -> None:
    """Kill the trainer, if it still runs, and every process that it left behind. On Linux this
    process has adopted them, so all of them are its children."""
    # On other systems nothing is adopted, and the process group is the only way to reach them.
    if watch.trainer_pid and (watch.status is None or not kernel.LINUX):
        _signal_group(watch.trainer_pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while _reap_children(watch) and time.monotonic() < deadline:
        for pid in _children():
            _signal(pid, signal.SIGKILL)
        time.sleep(0.005)


def _children() -> list[int]:
    """The process ids of the direct children; [] where the system does not list them.

    When one is killed, its own children become direct children of this process. So killing all of
    them again and again ends the whole tree.
    """
    pid = os.getpid()
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # no such file
        return []
    return [int(child) for child in text.split()]


def _signal(pid: int, signal_number: int) -> None:
    """Send a signal to a process. Does nothing where the process has ended or belongs to another
    user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)


def _signal_group(group_id: int, signal_number: int) -> None:
    """Send a signal to a process group. Does nothing where the group has ended or belongs to
    another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group_id, signal_number)


def _stop_grace_s(watch: Watch) -> float:
    """The seconds that the trainer may take to stop after SIGTERM: longer where its steps are slow.
    HONESMITH_STOP_GRACE_S overrides that."""
    given = os.environ.get("HONESMITH_STOP_GRACE_S")
    if given:
        return float(given)
    return watch.vigil.stop_grace_s() if watch.vigil else LEAST_GRACE_S


def _memory_kills() -> int:
    """How often the kernel has killed a process for lack of memory since the machine started; 0
    where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _boot_id() -> str:
    """The id that the kernel gave this start of the machine; "" where there is none.

    It is stored beside process ids, which mean nothing after the next start.
    """
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]).absolute()))

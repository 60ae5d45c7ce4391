"""The supervisor, one process per run, without torch: `python -P -m engine.supervisor RUN_FOLDER`.

It holds the run's lock, runs the trainer as its child, stops the trainer when the run's row says so
(a cancel only changes the row), enforces the caps even if no server lives, kills every descendant
at the end, writes `exit.json` and the final row, and starts queued runs. The trainer dies with it:
it reads a pipe whose other end is here and, on Linux, gets SIGKILL when this process ends.
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
from engine.home.rows import TERMINAL, RunRow
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.machine.pace.progress import write_status
from engine.machine.pace.staleness import LEAST_GRACE_S
from engine.machine.processes import launcher, limits, outcome
from engine.machine.processes.deployments import make_room
from engine.machine.processes.limits import HomeCap, LeaseWatch, Limit
from engine.machine.processes.trainer_variables import trainer_variables
from engine.machine.processes.vigil import Vigil
from envs.isolation import kernel

POLL_S = 0.5  # seconds between two looks at the run's row, and so how soon a cancel is noticed
_STATUS_S = 15.0  # seconds between two updates of STATUS.md
_RESTARTS = 3  # how often the process that looks after a run on another machine is restarted
_TIDY_S = 60.0  # seconds that removing an ended run from another machine may take
_KILL_PATIENCE_S = 10.0  # seconds to wait until killed descendants are gone


@dataclass
class Watch:
    """The state of one supervised attempt of a run.

    Times are monotonic, so that a changed clock ends no run.
    """

    run: RunDir
    store: Store
    row: RunRow
    lock: int  # descriptor that holds the run's lock
    # How long this attempt may go on without writing an answer; None for no limit.
    wall_limit_s: float | None = None
    answer_bytes: int = 0  # bytes of answers written so far
    answered_s: float = 0.0  # the value of `elapsed` when the last answers were written
    began: float = field(default_factory=time.monotonic)
    trainer_pid: int = 0  # 0 before the trainer is started
    status: int | None = None  # exit status of the trainer, or minus its signal; None until it ends
    sigterm_sent_at: float | None = None  # when the trainer got SIGTERM
    lifeline: int = -1  # the end of the trainer's pipe that this process keeps open
    vigil: Vigil | None = None  # watches the trainer's heartbeats; None before it is started
    lease: LeaseWatch | None = None  # set together with `vigil`
    home_cap: HomeCap = field(default_factory=HomeCap)
    restarts: int = 0  # of the process that looks after a run on another machine
    held_s: float | None = None  # of a run elsewhere, see limits.py
    # Whether this process got SIGTERM: another supervisor will then continue the run.
    was_told_to_end: bool = False

    @property
    def elapsed(self) -> float:
        """Seconds that the attempt has taken: since it began, or as another machine counts them."""
        return time.monotonic() - self.began if self.held_s is None else self.held_s


def supervise(path: Path) -> int:
    """Supervise the present attempt of the run in the folder `path`, then start queued runs.

    Returns the exit status of this process: 0 if the attempt was carried out, or was left for
    another supervisor to continue; 1 if there is nothing to supervise, because another process
    holds the run's lock or the run's state is neither preparing nor stopping.
    """
    run = RunDir(path)
    lock = _inherited_lock() or take_lock(run.lock)
    if lock is None:
        return 1  # another process holds it
    with Store(run.home) as store:
        row = store.get_run(run.id)
        # The run is "stopping" if it was cancelled after this process was started.
        if row.state not in ("preparing", "stopping"):
            return 1
        watch = Watch(run, store, row, lock)
        result = _run_attempt(watch)
        if result is None:  # another process will continue the run
            return 0
        with contextlib.suppress(OSError):  # on a full disk only the row says how the run ended
            outcome.record(run, result)
        outcome.apply(store, run, store.get_run(run.id), result)
        _write_aftermath(watch, result)
    launcher.start_queued(run.home)
    if row.is_elsewhere or row.earlier_hours:
        _clean_other_machine(run)
    if result.moves_to:  # it is queued for another place, and can start once its lock is free
        os.close(lock)
        launcher.start_queued(run.home)
    return 0


def _clean_other_machine(run: RunDir) -> None:
    """Remove what the run has left on the other machine that it ran on, if that can be reached
    within `_TIDY_S` seconds. The command's output goes to the supervisor's log."""
    command = launcher.trainer_command(run.home, algorithm="", is_elsewhere=True)
    with open(run.supervisor_log, "ab") as log, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [*command, str(run.path), "--tidy"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=_TIDY_S,
            check=False,
        )


def _run_attempt(watch: Watch) -> outcome.Outcome | None:
    """Start the trainer, watch it until it ends, and kill every process that it left behind.

    Returns the outcome of the attempt, or None if this process was told to end before the trainer
    had a result; another process will then continue the run.
    """
    try:
        wakeup = _prepare_attempt(watch)
        kills_before = _memory_kills()
        # The trainer is not started if a limit is reached already or the run was cancelled.
        if not _stop_at_limit(watch) and watch.row.state == "preparing":
            _start_trainer(watch)
            watch.wall_limit_s = _wall_limit(watch)
            watch.vigil = Vigil(watch.run, watch.row)
            watch.lease = LeaseWatch(watch.run)
            _watch_until_end(watch, wakeup)
    # OSError: a file cannot be read or written, or the trainer cannot be started. ValueError: a
    # record is damaged, or the device is gone. UserError: the home cannot be used.
    except (OSError, ValueError, UserError) as error:
        _end_descendants(watch)
        return _not_supervised(watch, error)
    _end_descendants(watch)
    # With any other status, or none, the trainer was interrupted.
    has_result = watch.status in (outcome.EXIT_DONE, outcome.EXIT_FAILED)
    if watch.was_told_to_end and not has_result:
        outcome.note_event(watch.run, "supervisor_left", "the supervisor was told to end")
        return None
    return _outcome_of_trainer(watch, kills_before)


def _prepare_attempt(watch: Watch) -> int:
    """Prepare this process and the run's folder for the trainer, and free memory for it.

    Returns the read end of the pipe that wakes this process. Raises OSError if the run's folder was
    deleted.
    """
    kernel.become_subreaper()  # descendants whose parent ends become children of this process
    wakeup = _wake_on_signals(watch)
    run = watch.run
    run.config.stat()  # raises OSError where the run's folder was deleted
    # Delete what an earlier attempt has left.
    for stale in (run.exit_record, run.result, run.failure, run.heartbeat):
        stale.unlink(missing_ok=True)
    _record_elapsed(watch)
    uses_device_here = watch.row.gpus > 0 and not watch.row.is_elsewhere
    device = watch.row.device or ""
    stopped_deployments = make_room(run.home, run, device) if uses_device_here else []
    if stopped_deployments:
        message = f"{', '.join(stopped_deployments)} stopped: the run needs the memory"
        outcome.note_event(run, "room_made", message, deployments=stopped_deployments)
    return wakeup


def _not_supervised(watch: Watch, error: Exception) -> outcome.Outcome:
    """Return the outcome of an attempt that could not be supervised because of `error`."""
    return outcome.abandon(
        watch.run,
        watch.row,
        kind="infra",
        reason=f"the run could not be supervised: {error}",
        hint=outcome.resume_hint(watch.run).after("Mend that first."),
    )


def _outcome_of_trainer(watch: Watch, kills_before: int) -> outcome.Outcome:
    """Return the outcome of an attempt whose trainer has ended, or was not started.

    `kills_before` is the result of `_memory_kills` before the trainer was started: if the kernel
    has killed more processes since, memory ran out during the attempt.
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
    """Start the trainer, record its process id in `watch` and started.json, and update STATUS.md.

    The trainer inherits the run's lock, and the read end of a pipe that closes when this process
    ends.
    """
    run, row = watch.run, watch.row
    command = launcher.trainer_command(
        run.home, row.algorithm, row.gpus, is_elsewhere=row.is_elsewhere
    )
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
    """Start the trainer as a child in its own process group; return its process id.

    The trainer inherits the descriptor `lifeline`, which is then closed in this process.
    """
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
    process.returncode = 0  # keeps Popen from waiting for the child: `_reap_children` does that
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
    """Wait until the trainer has ended.

    Meanwhile, record the seconds spent, update STATUS.md, and stop the trainer if the row or a
    limit says so or this process was told to end. `wakeup` is the pipe of `_wake_on_signals`.
    """
    next_status_at = time.monotonic() + _STATUS_S
    while watch.status is None:
        _sleep_until_signal(wakeup, POLL_S)
        _reap_children(watch)
        if watch.status is not None and not _restart_killed_attendant(watch):
            return
        if watch.row.is_elsewhere:
            watch.held_s = limits.held_elsewhere_s(watch.run, watch.row.attempt)
        _record_elapsed(watch)
        with contextlib.suppress(UserError):  # a full disk now is no reason to stop training
            watch.row = watch.store.get_run(watch.run.id)
            _check_heartbeat(watch)
            _stop_at_limit(watch)
        if watch.row.state == "stopping" or watch.was_told_to_end:
            _stop_trainer(watch)
        if time.monotonic() > next_status_at:
            write_status(watch.run, watch.row)
            next_status_at = time.monotonic() + _STATUS_S


def _restart_killed_attendant(watch: Watch) -> bool:
    """Start the attendant (the process that looks after a run on another machine) again if a signal
    killed it, at most `_RESTARTS` times; the run goes on over there. Return whether it was started.
    A trainer on this machine is never started again."""
    is_stopping = watch.row.state == "stopping" or watch.was_told_to_end
    # A negative status is minus the signal that killed the process.
    attendant_was_killed = watch.row.is_elsewhere and (watch.status or 0) < 0
    if not attendant_was_killed or is_stopping or watch.restarts >= _RESTARTS:
        return False
    watch.restarts += 1
    os.close(watch.lifeline)
    message = f"what looks after the run was killed by signal {-(watch.status or 0)}: once more"
    outcome.note_event(watch.run, "attendant_restarted", message)
    watch.status = None
    _start_trainer(watch)
    return True


def _check_heartbeat(watch: Watch) -> None:
    """Read the trainer's heartbeat (its last sign of life, with its progress). If it is new, update
    the alerts about when the run ends."""
    if (vigil := watch.vigil) is None:  # it reads the heartbeats of a trainer that was started
        return
    is_new = vigil.read_heartbeat_if_due()
    if is_new and watch.row.state == "running":
        with contextlib.suppress(OSError):  # no room for an alert's event: the run goes on
            nearest_cap = watch.home_cap.nearest(watch.store, watch.run, watch.row, watch.elapsed)
            vigil.note_forecast(nearest_cap, watch.elapsed)


def _stop_trainer(watch: Watch) -> None:
    """Stop the trainer. Called at every poll once it is to stop: the first call sends SIGTERM, a
    later one kills the trainer's process group when the grace period is over.

    Where this process alone is to end, as when the machine is switched off, a run on another
    machine goes on: what looks after it is killed, because SIGTERM would end the run there.
    """
    if watch.row.is_elsewhere and watch.row.state != "stopping":
        _signal_group(watch.trainer_pid, signal.SIGKILL)
    elif watch.sigterm_sent_at is None:
        watch.sigterm_sent_at = time.monotonic()
        if watch.row.reason_kind == "stalled" and watch.vigil and watch.vigil.heartbeat:
            # A trainer that has sent a heartbeat writes into its log, at SIGUSR1, where it hangs.
            _signal(watch.trainer_pid, signal.SIGUSR1)
        _signal(watch.trainer_pid, signal.SIGTERM)
    elif time.monotonic() - watch.sigterm_sent_at > _stop_grace_s(watch):
        _signal_group(watch.trainer_pid, signal.SIGKILL)


def _limits(watch: Watch) -> list[Limit]:
    """Return every limit of this attempt, the earliest first; [] if it has none."""
    possible_limits = (
        limits.limit_of_run(watch.store, watch.run.home, watch.row),  # the run's own hours
        watch.home_cap.limit(watch.store, watch.run, watch.elapsed),  # the hours of the whole home
        _limit_without_answers(watch),
        watch.vigil.limit(watch.elapsed) if watch.vigil else None,  # a trainer that is stalled
        watch.lease.limit(watch.elapsed) if watch.lease else None,  # no word of who started it here
    )
    return sorted(limit for limit in possible_limits if limit is not None)


def _limit_without_answers(watch: Watch) -> Limit | None:
    """Return the limit at which the run has written no answer for too long, in seconds since the
    attempt began. Return None if the run has no such limit."""
    patience_s = watch.wall_limit_s
    if not patience_s:
        return None
    _note_answers(watch)  # moves `answered_s` if there are new answers
    reason = f"the run wrote no answer for {patience_s / 3600:g} hours"
    return Limit(watch.answered_s + patience_s, kind="timeout", reason=reason)


def _note_answers(watch: Watch) -> None:
    """Note the time if the files with the run's answers have changed in size since the last poll:
    a slow model is not stopped as long as new answers keep coming."""
    answer_bytes = 0
    for file in watch.run.evals_dir.glob("model_*.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # the attempt may delete old answers meanwhile
            answer_bytes += file.stat().st_size
    if answer_bytes != watch.answer_bytes:
        watch.answer_bytes, watch.answered_s = answer_bytes, watch.elapsed


def _wall_limit(watch: Watch) -> float | None:
    """Return the seconds that the attempt may go on without an answer; None if the run's config
    sets no such limit. A training run never has one."""
    if watch.row.kind == "train":  # its config need not be read
        return None
    hours = watch.run.read_config().wall_limit_hours
    return 3600 * hours if hours else None


def _stop_at_limit(watch: Watch) -> bool:
    """Set the run to "stopping" if its earliest limit is reached. Return whether a limit is
    reached, even if the run was stopping already."""
    attempt_limits = _limits(watch)
    if not attempt_limits:
        return False
    earliest = attempt_limits[0]  # `_limits` sorts them by their seconds
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
    """Write the last things about an ended run: its last event, STATUS.md, the report, and its
    hours, from which later estimates learn. Whatever cannot be written is left out."""
    row = watch.store.get_run(watch.run.id)
    _note_end(watch.run, row, result)
    write_status(watch.run, row)
    # The record "launch" exists if another machine started the run here: it writes the report.
    if row.state in TERMINAL and not watch.run.far("launch").exists():
        _write_report(watch.run)
    # Estimates learn only from training runs that were not resumed. A resumed run repeats work, and
    # the estimate of an evaluation is an upper bound, so their hours would distort the estimates.
    teaches_estimates = row.kind == "train" and row.attempt == 1
    if row.state == "done" and teaches_estimates and row.estimated_hours > 0:
        features = {"run_id": row.run_id, "device": row.device, "model": row.model}
        with contextlib.suppress(UserError):
            watch.store.record_estimate(
                row.algorithm, features, row.estimated_hours, row.spent_hours
            )


def _note_end(run: RunDir, row: RunRow, result: outcome.Outcome) -> None:
    """Append an event that the trainer has exited to the run's events, if that can be written.
    `result` is how the attempt ended."""
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
    """Return the environment variables of the trainer. `lifeline` is the descriptor of the pipe by
    which the trainer learns that this process has ended."""
    row, run = watch.row, watch.run
    # A run on another machine uses no device of this one.
    device = "" if row.is_elsewhere else row.device
    variables = trainer_variables(run.home.root, device, lifeline)
    return variables | {"HONESMITH_ATTEMPT": str(row.attempt)}


def _inherited_lock() -> int | None:
    """Return the descriptor of the run's lock that the launcher has passed to this process; None if
    none was passed or the descriptor is not open."""
    text = os.environ.pop(launcher.LOCK_FD, "")
    if not text.isdigit():
        return None
    lock = int(text)
    try:
        # So that no child inherits it by accident; `_spawn_trainer` passes it on explicitly.
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
    """Install the signal handlers of this process; return the read end of a pipe that becomes
    readable with every signal, e.g. when a child has ended.

    SIGTERM also sets `watch.was_told_to_end`. SIGINT and SIGHUP have no other effect.
    """

    def note_sigterm(*_: object) -> None:
        """Note that this process got SIGTERM."""
        watch.was_told_to_end = True

    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal without a handler writes no byte
    signal.signal(signal.SIGTERM, note_sigterm)
    # Handlers that do nothing: unlike SIG_IGN they are not inherited by the trainer.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGHUP, lambda *_: None)
    return read_end


def _sleep_until_signal(wakeup: int, seconds: float) -> None:
    """Wait at most `seconds` for a signal; empty the pipe `wakeup`, which gets a byte of each."""
    readable, _, _ = select.select([wakeup], [], [], seconds)
    if readable:
        with contextlib.suppress(BlockingIOError):  # the pipe is empty after all
            os.read(wakeup, 4096)


def _reap_children(watch: Watch) -> bool:
    """Collect the exit status of every child that has ended, including adopted processes, and store
    the trainer's in `watch.status`. Return whether any child still runs."""
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
    """Kill the trainer, if it still runs, and every process that it left behind.

    On Linux this process has adopted them, so all of them are its children.
    """
    # Other systems do not let a process adopt others; there only the process group reaches them.
    if watch.trainer_pid and (watch.status is None or not kernel.LINUX):
        _signal_group(watch.trainer_pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_PATIENCE_S
    while _reap_children(watch) and time.monotonic() < deadline:
        for pid in _children():
            _signal(pid, signal.SIGKILL)
        time.sleep(0.005)


def _children() -> list[int]:
    """Return the process ids of the direct children; [] if the system does not list them.

    When a child is killed, its own children become direct children of this process. So killing the
    direct children again and again ends the whole tree.
    """
    pid = os.getpid()
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # no such file
        return []
    return [int(child) for child in text.split()]


def _signal(pid: int, signal_number: int) -> None:
    """Send a signal to a process; do nothing if it has ended or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)


def _signal_group(group_id: int, signal_number: int) -> None:
    """Send a signal to a process group; do nothing if it has ended or belongs to another user."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group_id, signal_number)


def _stop_grace_s(watch: Watch) -> float:
    """Return the seconds that the trainer may take to stop after SIGTERM: more if its steps are
    slow, unless the environment variable HONESMITH_STOP_GRACE_S says how many."""
    override = os.environ.get("HONESMITH_STOP_GRACE_S")
    if override:
        return float(override)
    return watch.vigil.stop_grace_s() if watch.vigil else LEAST_GRACE_S


def _memory_kills() -> int:
    """Return how often the kernel has killed a process for lack of memory since the machine
    started; 0 if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _boot_id() -> str:
    """Return the id that the kernel gave to this start of the machine; "" if there is none. It is
    stored with process ids, because these mean nothing after the next start."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]).absolute()))

"""Looks after a run on another machine.

`python -P -m engine.executors.attending.attendant RUN_FOLDER` stands where a trainer stands: the
run's supervisor starts it, tells it to end by SIGTERM, and takes the run's end from its exit
status. It may be killed at any moment: what runs over there goes on, and the next attendant goes on
with it. A connection that is lost is made again, for as long as the run's lease lasts over there.
If the host fails, the run goes on at the host's `failover`, if config.toml names one.
With `--tidy` it removes what is left of ended runs instead.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.core.format import words
from engine.core.hints import Hint
from engine.executors import hosts
from engine.executors.attending import hours
from engine.executors.attending.failover import FAULTS_OF_PLACE, next_place
from engine.executors.attending.places import FarExecutor, connected
from engine.executors.mirror import HostileFiles, Mirror, console_marks
from engine.executors.sky.executor import SkyExecutor
from engine.executors.ssh import FarError, HostLost, HostRefused
from engine.home.rows import LOCAL, TERMINAL, RunRow
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.home.user_config import Host
from engine.machine.processes import outcome
from engine.machine.processes.seam import End, Handle, Probe
from engine.machine.processes.trainer_variables import end_with_supervisor
from engine.models import hub
from engine.records.run_config import TrainConfig

_FIRST_PROBE_S, _PROBE_S = 0.3, 3.0  # seconds between two probes, at first and later
_FIRST_WAIT_S, _WAIT_S = 1.0, 30.0  # before a lost connection is tried again, at first and later
_PATIENCE_S = 3600.0  # beyond the lease: by then the run has ended on the host, one way or another
# The same where the run has another place to go to: first while nothing of it is on the host.
_UNPLACED_S, _MOVING_PATIENCE_S = 600.0, 900.0  # beyond clocks that differ
_EVENT_CHARS = 1000  # the longest message of an event
_SHOWN_FILES, _FILE_CHARS = 3, 80  # how many refused files an event names, how much of each name
# Of this machine: errors that pass, or that somebody mends, while a run over there goes on.
_PASSING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOMEM),
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN),
)


class _StartedAgain(Exception):
    """The launch that was followed has ended without the run having ended: the run was, or is to
    be, started on the host once more, from its last checkpoint."""


@dataclass
class Attendant:
    """Looks after one attempt of a run that goes to another machine, its host.

    An attempt is counted on this machine. Each start of the run on the host is a launch, which a
    `Handle` on the disk names; several attempts may look after one launch, one after the other.

    Attributes:
        stop: set when the run is to end.
        lost_at: since when the host has not been reached, on the monotonic clock; None while it is.
        wait_s: seconds before a lost connection is tried again.
        waits_for: why the run waits on the host, as it was noted last.
    """

    run: RunDir
    config: TrainConfig
    host: Host
    stop: threading.Event = field(default_factory=threading.Event)
    lost_at: float | None = None
    wait_s: float = _FIRST_WAIT_S
    waits_for: str = ""
    is_running: bool = False  # this process has set the run's state
    is_hindered: bool = False  # it was noted that the home cannot be written

    def attend(self) -> int:
        """Look after the run until it has ended. Returns the exit status that says how it ended.

        If the home cannot be written for now, because its disk is full or its database locked, the
        run goes on: it is tried again, until the run's supervisor, which knows the limits, ends it.
        """
        while True:
            if self.stop.is_set() and not self._may_be_on_host():
                return outcome.EXIT_STOPPED
            try:
                hours.begin(self.run, _attempt())
                with connected(self.run.home, self.host) as executor:
                    return self._look_after(executor)
            # What may run on the host goes on whatever this side meets, so then it is tried again.
            except HostRefused as error:
                if not self._may_be_on_host():
                    return self._fail("infra", error.message, Hint(error.hint))
                self._note_lost(f"{error.message}: {error.hint}")
            except HostLost as error:
                self._note_lost(str(error))
            except HostileFiles as error:
                return self._fail("infra", error.message, Hint(str(error.hint)), may_move=False)
            except UserError as error:
                if not self._is_passing(error):
                    is_of_host = error.code in ("HOST_UNUSABLE", "BUDGET")
                    hint = Hint(str(error.hint))
                    return self._fail("infra", error.message, hint, may_move=is_of_host)
                self._note_hindered(error.message)
            except OSError as error:  # of this machine: the connection's own become HostLost
                if error.errno not in _PASSING:
                    hint = outcome.resume_hint(self.run)
                    return self._fail("infra", str(error), hint, may_move=False)
                self._note_hindered(str(error))
            except FarError as error:
                if not self._may_be_on_host():
                    message = f"{self.host.name}: {error.message}"
                    return self._fail("infra", message, Hint(error.hint))
                self._note_lost(error.message)
            if self._is_given_up():
                patience = words(self._patience_s / 3600)
                self._count_unseen_hours()
                return self._fail(
                    "infra",
                    f"{self.host.name} was not reached for {patience}",
                    outcome.resume_hint(self.run).after("When it is reached again, go on with it."),
                )
            self._pause(self.wait_s)
            self.wait_s = min(_WAIT_S, 2 * self.wait_s)

    def _look_after(self, executor: FarExecutor) -> int:
        """Start the run on the host or find it running, and follow it to its end. Returns the exit
        status. A run that ends without having to is started again."""
        while True:
            handle = self._current_launch(executor)
            self._note_reached()
            folder = executor.folder(self.run, handle)
            mirror = Mirror(self.run, executor.link, folder, _print)
            try:
                return self._follow(executor, handle, mirror)
            except _StartedAgain:
                continue
            except HostileFiles:
                executor.stop(self.run, handle)
                raise

    def _current_launch(self, executor: FarExecutor) -> Handle:
        """Return the launch to look after: the one on the host, or a new one if there is none.

        Raises HostLost if the host cannot say whether it has one, UserError HOST_UNUSABLE if it has
        lost the run too often.
        """
        handle = Handle.read(self.run)
        with Store(self.run.home) as store:
            row = store.get_run(self.run.id)
        if handle is None:
            return self._launch(executor, None)
        # An attempt that only continues one that crashed (continuations > 0, see local_executor.py)
        # is no resume: it takes over the end of the same launch.
        is_resumed = row.continuations == 0 and handle.ended_in < row.attempt
        is_of_other_place = handle.executor != executor.name  # the run was moved here from there
        # A user's resume, or another place: the losses count from 0 again.
        if is_of_other_place or (handle.phase == "ended" and is_resumed):
            return self._launch(executor, replace(handle, losses=0, lost_at_step=0))
        probe = executor.probe(self.run, handle)
        if probe.life == "unknown":
            raise HostLost(probe.why or "the connection ended")
        if probe.life == "gone":
            if handle.phase == "starting":  # the start was cut off: the same launch again
                return self._launch(executor, handle, again=True)
            reason = f"{self.host.name} has nothing of the run any more"
            # Noted as ended, so that a user's resume counts the losses from 0 again.
            handle = self._note_end(handle)
            if probe.spent_s != 0:  # else it never held a device: the host let it wait too long
                handle = self._count_loss(handle, reason)
            self._event("host_forgot", reason)
            return self._launch(executor, handle)
        if probe.end is not None and probe.end.state == "cancelled" and not self.stop.is_set():
            # It was told to end when nobody looked after it (`sweep`), and is wanted again.
            handle = handle.changed(self.run, stop_asked=True)
        executor.start(self.run, handle)  # if it runs already, this only sends the secrets again
        if handle.phase == "starting":  # the process that started it died, or lost the connection
            self._event("placed", f"started on {self.host.name}", launch=handle.launch)
            handle = handle.changed(self.run, phase="started")
        return handle

    def _launch(self, executor: FarExecutor, last: Handle | None, *, again: bool = False) -> Handle:
        """Send what the run needs and start it on the host, as a new launch. Returns its handle.

        Args:
            last: the launch before, whose losses are still counted; None for the first.
            again: whether the launch `last` itself is started again, instead of one after it.
        """
        if last is None:
            number, losses, lost_at_step = 1, 0, 0
        else:
            number = last.launch if again else last.launch + 1
            losses, lost_at_step = last.losses, last.lost_at_step
        # Written before anything is on the host, so that a later process finds what was started.
        handle = Handle(
            executor.name, number, "starting", losses=losses, lost_at_step=lost_at_step
        ).write(self.run)
        console_marks(self.run).unlink(missing_ok=True)  # the logs of a new launch begin anew
        hub.ensure_weights(Path(self.config.base.path))
        sent_bytes = executor.send(self.run, self.config, handle)
        executor.start(self.run, handle)
        megabytes = sent_bytes / 1e6
        message = f"started on {self.host.name}, {megabytes:.1f} MB sent"
        self._event("placed", message, launch=number)
        return handle.changed(self.run, phase="started")

    def _follow(self, executor: FarExecutor, handle: Handle, mirror: Mirror) -> int:
        """Probe a launch and bring its files back until it has ended. Returns the exit status.

        If this attempt is told to stop, the launch is told to end. Raises _StartedAgain if the run
        goes on as another launch, HostLost if the host is not reached.
        """
        # An earlier attempt told it to end, and could not wait for that.
        is_leftover = handle.stop_asked and not self.stop.is_set()
        was_told, probe_s = False, _FIRST_PROBE_S
        while True:
            probe = executor.probe(self.run, handle)
            if probe.life == "unknown":
                raise HostLost(probe.why or "the connection ended")
            if probe.life == "gone":
                raise _StartedAgain  # `_current_launch` starts it
            self._note_wait(probe)
            self._note_hours(handle, probe)
            self._take_files(mirror, executor, probe)
            if probe.end is not None:
                return self._end(executor, handle, mirror, probe.end, is_leftover=is_leftover)
            if (self.stop.is_set() or is_leftover) and not was_told:
                handle = handle.changed(self.run, stop_asked=True)
                executor.stop(self.run, handle)
                was_told, probe_s = True, _FIRST_PROBE_S
            self._pause(probe_s)
            probe_s = min(_PROBE_S, 1.3 * probe_s)

    def _take_files(self, mirror: Mirror, executor: FarExecutor, probe: Probe) -> None:
        """Bring back the files that the last `probe` showed as changed, and set the run's state to
        "running" once it runs on the host."""
        refused = mirror.take(executor.look)
        if refused:
            names = ", ".join(repr(name)[:_FILE_CHARS] for name in refused[:_SHOWN_FILES])
            self._event("host_refused", f"files that no run writes were not taken: {names}")
        if probe.state == "running" and not self.is_running:
            self.is_running = True
            with Store(self.run.home) as store:
                store.set_state(
                    self.run.id, "running", only_from={"preparing"}, started=time.time()
                )
        self.wait_s, self.is_hindered = _FIRST_WAIT_S, False  # host and home both work again

    def _end(
        self,
        executor: FarExecutor,
        handle: Handle,
        mirror: Mirror,
        end: End,
        *,
        is_leftover: bool,
    ) -> int:
        """Take over how the run ended on the host. Returns the exit status.

        `is_leftover` says that an earlier attempt had told it to end. Such a run, one whose lease
        ran out, and one that the host has lost are started again: then this raises _StartedAgain.
        """
        mirror.verify()
        if end.state != "done" and (end.reason_kind == "lease" or is_leftover):
            handle = self._note_end(handle)
            self._event("launched_again", f"it had ended on {self.host.name}: {end.reason}")
            self._launch(executor, handle)
            raise _StartedAgain
        if end.is_lost and not self.stop.is_set():
            self._continue_lost(executor, handle, end)
        self._note_end(handle)
        if end.state == "done":
            # Imported late: it loads all that verdicts need, half of this process's start.
            from engine.evidence.verdict.provenance import seal  # noqa: PLC0415

            seal(self.run)  # the seal is over the files on this machine
            return outcome.EXIT_DONE
        if self.stop.is_set() and (end.state == "cancelled" or end.is_lost):
            return outcome.EXIT_STOPPED
        return self._fail(end.reason_kind, end.reason, end.hint)

    def _continue_lost(self, executor: FarExecutor, handle: Handle, end: End) -> NoReturn:
        """Start a run again from its last checkpoint, after its host has lost it: a node failed, or
        a time limit was reached.

        Always raises: _StartedAgain once it is started, or UserError HOST_UNUSABLE if the run was
        lost too often.
        """
        handle = self._count_loss(self._note_end(handle), end.reason)
        self._event("launched_again", f"{end.reason}: it goes on from its last checkpoint")
        self._launch(executor, handle)
        raise _StartedAgain

    def _count_loss(self, handle: Handle, reason: str) -> Handle:
        """Return the handle with one more loss, because its host has lost the launch for `reason`.
        The count begins anew with every new checkpoint. Raises UserError HOST_UNUSABLE if the run
        was lost too often without one."""
        step = max(self.run.checkpoint_steps(), default=0)
        losses = 1 if step > handle.lost_at_step else handle.losses + 1
        if losses > outcome.MAX_CONTINUATIONS:
            raise UserError(
                "HOST_UNUSABLE",
                f"{reason}, as {losses - 1} times before without a new checkpoint",
                hint=outcome.resume_hint(self.run),
            )
        return replace(handle, losses=losses, lost_at_step=step)

    def _note_wait(self, probe: Probe) -> None:
        """Write an event that says why the run waits on the host, whenever the reason changes."""
        why = probe.why if probe.life == "pending" else ""
        reason = why.partition(";")[0]  # what follows is a forecast, which changes all the time
        if reason and reason != self.waits_for:
            self._event("host_waits", f"it waits on {self.host.name}: {why}")
        self.waits_for = reason

    def _note_hours(self, handle: Handle, probe: Probe) -> None:
        """Write to spent.json how long the run has held its devices on the host, and why it waits
        for them. Nothing is written if the host does not count that."""
        if probe.spent_s is not None:
            why = probe.why if probe.life == "pending" else ""
            hours.note(self.run, _attempt(), handle.launch, probe.spent_s, why)

    def _count_unseen_hours(self) -> None:
        """Count the hours that the run may have taken since it was last seen: all of its lease."""
        handle = Handle.read(self.run)
        if handle is None or not self._may_be_on_host() or not self.is_running:
            return
        last_seen_s = hours.of_launch(self.run, handle.launch)
        if last_seen_s is not None:  # else the supervisor's clock has counted them
            unseen_s = 3600 * self.host.lease_hours
            hours.note(self.run, _attempt(), handle.launch, last_seen_s + unseen_s)

    def _note_end(self, handle: Handle) -> Handle:
        """Return the handle, also written to the disk, with the phase "ended": everything of the
        launch is on this machine."""
        with Store(self.run.home) as store:
            attempt = store.get_run(self.run.id).attempt
        return handle.changed(self.run, phase="ended", ended_in=attempt)

    def _fail(self, kind: str, message: str, hint: Hint, *, may_move: bool = True) -> int:
        """Write to failure.json why the run failed and, where the host is to blame, at which place
        it goes on. Returns the exit status for a failure.

        Args:
            kind: a kind of failure such as "infra".
            hint: what a user can do next.
            may_move: whether the host is to blame, if the kind allows that.
        """
        may_move = may_move and kind in FAULTS_OF_PLACE and not self.stop.is_set()
        place = ""
        if may_move:
            with contextlib.suppress(UserError, OSError):  # the home cannot be read: it fails here
                place = self._next_place(is_noted=True)
        handle = Handle.read(self.run)
        if place and handle is not None and handle.phase != "ended":  # what is there is stale now
            self._note_end(handle)
        last_checkpoint = outcome.checkpoint_name(self.run) or None
        failure = outcome.Failure(kind, message, "", hint, last_checkpoint, moves_to=place)
        write_json(self.run.failure, failure.to_json())
        return outcome.EXIT_FAILED

    def _next_place(self, *, is_noted: bool = False) -> str:
        """Return where the run goes on if it cannot go on here; "" for nowhere. With `is_noted`, an
        event says which places cannot take it, and why."""
        with Store(self.run.home) as store:
            row = store.get_run(self.run.id)
        place, reasons = next_place(self.run.home, self.config, row)
        if is_noted and reasons:
            self._event("passed_over", "; ".join(reasons)[:_EVENT_CHARS])
        return place

    def _pause(self, seconds: float) -> None:
        """Wait for so many seconds. If the run is told to stop meanwhile, the wait ends at once, so
        that the host is told soon; later waits are whole again."""
        if self.stop.is_set():
            time.sleep(seconds)  # `wait` would return at once, again and again
        else:
            self.stop.wait(seconds)

    def _may_be_on_host(self) -> bool:
        """Tell whether something of the run may be on the host: it was started and its end was not
        brought here yet."""
        handle = Handle.read(self.run)
        if handle is None or handle.executor != self.host.compute:
            return False
        return handle.phase == "started"

    def _is_passing(self, error: UserError) -> bool:
        """Tell whether to try again after an error of this home: if it may pass by itself, or if a
        person has to mend it and something of the run may be on the host meanwhile."""
        if error.code == "HOME_UNUSABLE":
            return error.retryable or self._may_be_on_host()
        return error.code == "DISK_FULL"

    def _note_hindered(self, why: str) -> None:
        """Write an event that says that this home cannot be written, and why. It is written once,
        however often it is tried, and only if it can be."""
        if not self.is_hindered:
            self.is_hindered = True
            goes_on = "; what runs there goes on" if self._may_be_on_host() else ""
            message = f"{why}: tried again until it can be{goes_on}"
            self._event("home_hindered", message[:_EVENT_CHARS])

    def _note_lost(self, why: str) -> None:
        """Write an event that says that the host is not reached, and why; once, however often it is
        tried. If the run is to stop, that is noted in its handle too."""
        if self.lost_at is None:
            self.lost_at = time.monotonic()
            goes_on = "; what runs there goes on" if self._may_be_on_host() else ""
            message = f"{self.host.name} is not reached{goes_on}: {why}"
            self._event("host_lost", message[:_EVENT_CHARS])
        if self.stop.is_set():  # the process that reaches the host next then tells it to end
            handle = Handle.read(self.run)
            if handle is not None and not handle.stop_asked:
                with contextlib.suppress(OSError):  # the disk is full: the next process tries again
                    handle.changed(self.run, stop_asked=True)

    def _note_reached(self) -> None:
        """Write an event that says that the host is reached again, if it was not before."""
        if self.lost_at is not None:
            lost_s = time.monotonic() - self.lost_at
            self._event("host_reached", f"{self.host.name} is reached again after {lost_s:.0f} s")
            self.lost_at = None

    def _is_given_up(self) -> bool:
        """Tell whether the host has not been reached for so long that its leases have run out, so
        that nothing can run there any more."""
        return self.lost_at is not None and time.monotonic() - self.lost_at > self._patience_s

    @property
    def _patience_s(self) -> float:
        """Seconds after which a host that is not reached is given up: its lease, and an hour. It is
        less where the run has another place to go to."""
        lease_s = 3600 * self.host.lease_hours
        try:
            may_move = bool(self.host.failover and self._next_place())
        except (UserError, OSError):  # the home cannot be read now
            may_move = False
        if not may_move:
            return lease_s + _PATIENCE_S
        handle = Handle.read(self.run)
        if handle is None or handle.executor != self.host.compute or handle.phase == "ended":
            return _UNPLACED_S  # nothing of the run was ever put there
        # A job that waited may be admitted at the end of a lease, and has a whole one from then on.
        return (lease_s if self.is_running else 2 * lease_s) + _MOVING_PATIENCE_S

    def _event(self, name: str, message: str, **values: object) -> None:
        """Append an event to the run's events.jsonl. If the disk does not take it, it is left
        out."""
        with contextlib.suppress(OSError):
            outcome.note_event(self.run, name, message, **values)


def _attempt() -> int:
    """Return the number of the run's attempt that this process looks after, which the supervisor
    gives it in a variable."""
    return int(os.environ.get("HONESMITH_ATTEMPT", "1"))


def _print(data: bytes) -> None:
    """Write to stdout what the trainer on the host printed: so it gets into the log of this
    attempt. Nothing is raised if stdout is closed or its disk is full."""
    with contextlib.suppress(OSError):
        os.write(1, data)


def tidy(run: RunDir, host: Host) -> None:
    """Connect to a host and remove what ended runs of the home of `run` have left there (`sweep`).
    Raises the errors of `connected`."""
    with connected(run.home, host) as executor:
        sweep(executor)


def sweep(executor: FarExecutor) -> list[str]:
    """Remove from a host what is left of runs that have ended on this machine, or have moved to
    another place; those that still run there are told to end. Returns the ids of the runs that were
    removed."""
    home, removed = executor.home, []
    for owned in executor.list_owned():
        run = home.run(owned.run_id)
        with Store(home) as store:  # read now: it may have been resumed since it was listed
            row = store.find_run(owned.run_id)
        handle = Handle.read(run)
        if not _has_moved_on(row, handle, executor.name, owned.launch) and (
            row is None or row.state not in TERMINAL
        ):
            continue
        launch_there = Handle(executor.name, owned.launch, "started")
        # Files that were not brought here yet stay there for a resume.
        is_here = handle is None or handle.phase == "ended" or handle.launch > owned.launch
        if owned.life in ("pending", "running"):
            executor.stop(run, launch_there)
        elif is_here or run.deleted.exists():
            executor.reap(run, launch_there)
            removed.append(owned.run_id)
    if isinstance(executor, SkyExecutor):
        removed += executor.give_back_unwanted()
    return removed


def main(folder: Path, *, only_tidy: bool) -> int:
    """Look after the run in `folder`, or with `only_tidy` remove what ended runs have left on its
    host. Returns the exit status."""
    run = RunDir(folder)
    config = run.read_config()
    assert isinstance(config, TrainConfig)  # nothing else runs on another machine
    with Store(run.home) as store:
        row = store.get_run(run.id)
    if only_tidy:
        return _tidy_all(run, row)
    try:
        host = hosts.host_of(run.home, row.compute)
    except UserError as error:
        failure = outcome.Failure("infra", error.message, "", error.advice)
        write_json(run.failure, failure.to_json())
        return outcome.EXIT_FAILED
    attendant = Attendant(run, config, host)

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        """Let the run save and end."""
        attendant.stop.set()

    signal.signal(signal.SIGTERM, on_term)
    end_with_supervisor()
    return attendant.attend()


def _has_moved_on(row: RunRow | None, handle: Handle | None, place: str, launch: int) -> bool:
    """Return whether a launch at `place` is of a run that has moved to another place since.

    A place may list what is on another one, such as a second partition of the same cluster; the
    numbers of a run's launches go on from place to place.
    """
    if row is None or handle is None or row.compute == place:
        return False
    return handle.executor == place or launch < handle.launch


def _tidy_all(run: RunDir, row: RunRow) -> int:
    """Remove what ended runs have left on every host that a run was on. Hosts that are not reached,
    or that config.toml no longer names, are left out. Returns the exit status."""
    for place in reversed(row.hours_by_place()):  # one that it has left may not answer
        if place != LOCAL:
            with contextlib.suppress(HostLost, HostRefused, FarError, UserError, OSError):
                tidy(run, hosts.host_of(run.home, place))
    return outcome.EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), only_tidy="--tidy" in sys.argv[2:]))

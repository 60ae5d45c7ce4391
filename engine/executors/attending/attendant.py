"""Looks after a run on another machine.

`python -P -m engine.executors.attending.attendant RUN_FOLDER` stands where a trainer stands: the
run's supervisor starts it, tells it to end by SIGTERM, and takes the run's end from its exit
status. It may be killed at any moment: what runs over there goes on, and the next attendant goes on
with it. A connection that is lost is made again, for as long as the run's lease lasts over there.
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
from engine.executors.attending.places import FarExecutor, connected
from engine.executors.mirror import HostileFiles, Mirror, console_marks
from engine.executors.sky.executor import SkyExecutor
from engine.executors.ssh import FarError, HostLost, HostRefused
from engine.home.rows import TERMINAL
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.home.user_config import Host
from engine.machine.processes import outcome
from engine.machine.processes.seam import End, Handle, Probe
from engine.machine.processes.trainer_variables import end_with_supervisor
from engine.models import hub
from engine.records.run_config import TrainConfig

_FIRST_LOOK_S, _LOOK_S = 0.3, 3.0  # between two looks, at first and later
_FIRST_WAIT_S, _WAIT_S = 1.0, 30.0  # before a lost connection is tried again
_PATIENCE_S = 3600.0  # beyond the lease: by then the run has ended over there, one way or another
# Of this machine: errors that pass, or that somebody mends, while a run over there goes on.
_PASSING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOMEM),
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN),
)


class _Again(Exception):
    """The run has to be started over there once more, from its last checkpoint."""


@dataclass
class Attendant:
    """Looks after one attempt of a run.

    Attributes:
        stop: set when the run is to end.
        lost_at: since when the host has not been reached, monotonic; None while it is.
        wait_s: seconds before a lost connection is tried again.
        waits_for: why the run waits over there, as it was noted last.
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
        """Until the run has ended; returns the exit status that says how.

        A home that cannot be written now, because its disk is full or its database locked, ends
        nothing: it is tried again until the run's supervisor, which has the limits, ends the run.
        """
        while True:
            if self.stop.is_set() and not self._is_over_there():
                return outcome.EXIT_STOPPED
            try:
                hours.begin(self.run, _attempt())
                with connected(self.run.home, self.host) as executor:
                    return self._look_after(executor)
            except HostRefused as error:
                if not self._is_over_there():
                    return self._fail("infra", error.message, Hint(error.hint))
                self._lost(f"{error.message}: {error.hint}")
            except HostLost as error:
                self._lost(str(error))
            except HostileFiles as error:
                return self._fail("infra", error.message, Hint(str(error.hint)))
            except UserError as error:
                if not self._is_passing(error):
                    return self._fail("infra", error.message, Hint(str(error.hint)))
                self._hindered(error.message)
            except OSError as error:  # of this machine: the connection's own become HostLost
                if error.errno not in _PASSING:
                    return self._fail("infra", str(error), outcome.resume_hint(self.run))
                self._hindered(str(error))
            except FarError as error:
                if not self._is_over_there():
                    message = f"{self.host.name}: {error.message}"
                    return self._fail("infra", message, Hint(error.hint))
                self._lost(error.message)
            if self._is_given_up():
                patience = words(self._patience_s / 3600)
                return self._fail(
                    "infra",
                    f"{self.host.name} was not reached for {patience}",
                    outcome.resume_hint(self.run).after("When it is reached again, go on with it."),
                )
            self._pause(self.wait_s)
            self.wait_s = min(_WAIT_S, 2 * self.wait_s)

    def _look_after(self, executor: FarExecutor) -> int:
        """Start the run over there or find it running, and follow it to its end."""
        while True:
            handle = self._present(executor)
            self._reached()
            folder = executor.folder(self.run, handle)
            mirror = Mirror(self.run, executor.link, folder, _print)
            try:
                return self._follow(executor, handle, mirror)
            except _Again:
                continue
            except HostileFiles:
                executor.stop(self.run, handle)
                raise

    def _present(self, executor: FarExecutor) -> Handle:
        """The launch to look after; it is started where it is not over there."""
        handle = Handle.read(self.run)
        with Store(self.run.home) as store:
            row = store.get_run(self.run.id)
        # An attempt that only continues one that died without a word takes the same end over again.
        is_resumed = row.continuations == 0 and handle is not None and handle.ended_in < row.attempt
        if handle is None:
            return self._launch(executor, None)
        if handle.phase == "ended" and is_resumed:  # on request: what was lost before is forgotten
            return self._launch(executor, replace(handle, losses=0, lost_at_step=0))
        probe = executor.probe(self.run, handle)
        if probe.life == "unknown":
            raise HostLost(probe.why or "the connection ended")
        if probe.life == "gone":
            if handle.phase == "starting":
                return self._launch(executor, handle, again=True)
            reason = f"{self.host.name} has nothing of the run any more"
            # Ended, so that a resume on request forgets what was lost before.
            handle = self._note_end(handle)
            if probe.spent_s != 0:  # else it never held a device: its place let it wait too long
                handle = self._counted(handle, reason)
            self._event("host_forgot", reason)
            return self._launch(executor, handle)
        if probe.end is not None and probe.end.state == "cancelled" and not self.stop.is_set():
            # It was told to end when nobody looked after it (`sweep`), and is wanted again.
            handle = handle.changed(self.run, stop_asked=True)
        executor.start(self.run, handle)  # of one that is there, brings the secrets over again
        if handle.phase == "starting":  # whoever started it died, or lost the connection
            self._event("placed", f"started on {self.host.name}", launch=handle.launch)
            handle = handle.changed(self.run, phase="started")
        return handle

    def _launch(self, executor: FarExecutor, last: Handle | None, *, again: bool = False) -> Handle:
        """Send what the run needs and start it; with `again` as the launch that `last` names."""
        number = last.launch + (not again) if last else 1
        # On the disk before anything is there: whoever goes on finds what was started.
        handle = Handle(
            executor.name,
            number,
            "starting",
            losses=last.losses if last else 0,
            lost_at_step=last.lost_at_step if last else 0,
        ).write(self.run)
        console_marks(self.run).unlink(missing_ok=True)  # its consoles begin anew
        hub.ensure_weights(Path(self.config.base.path))
        sent = executor.send(self.run, self.config, handle)
        executor.start(self.run, handle)
        mega = sent / 1e6
        self._event("placed", f"started on {self.host.name}, {mega:.1f} MB sent", launch=number)
        return handle.changed(self.run, phase="started")

    def _follow(self, executor: FarExecutor, handle: Handle, mirror: Mirror) -> int:
        """Bring the run's files back until it has ended; returns the exit status.

        Raises _Again where it ended over there for want of a word from here.
        """
        # It was told to end by an earlier attempt, which could not wait for that.
        is_leftover = handle.stop_asked and not self.stop.is_set()
        was_told, look_s = False, _FIRST_LOOK_S
        while True:
            probe = executor.probe(self.run, handle)
            if probe.life == "unknown":
                raise HostLost(probe.why or "the connection ended")
            if probe.life == "gone":
                raise _Again
            self._note_wait(probe)
            self._note_hours(handle, probe)
            self._take(mirror, executor, probe)
            if probe.end is not None:
                return self._end(executor, handle, mirror, probe.end, is_leftover=is_leftover)
            if (self.stop.is_set() or is_leftover) and not was_told:
                handle = handle.changed(self.run, stop_asked=True)
                executor.stop(self.run, handle)
                was_told, look_s = True, _FIRST_LOOK_S
            self._pause(look_s)
            look_s = min(_LOOK_S, 1.3 * look_s)

    def _take(self, mirror: Mirror, executor: FarExecutor, probe: Probe) -> None:
        """Bring back what changed, and say what the run is doing."""
        refused = mirror.take(executor.look)
        if refused:
            names = ", ".join(repr(name)[:80] for name in refused[:3])
            self._event("host_refused", f"files that no run writes were not taken: {names}")
        if probe.state == "running" and not self.is_running:
            self.is_running = True
            with Store(self.run.home) as store:
                store.set_state(
                    self.run.id, "running", only_from={"preparing"}, started=time.time()
                )
        self.wait_s, self.is_hindered = _FIRST_WAIT_S, False

    def _end(
        self,
        executor: FarExecutor,
        handle: Handle,
        mirror: Mirror,
        end: End,
        *,
        is_leftover: bool,
    ) -> int:
        """Take over how the run ended over there; returns the exit status."""
        mirror.verify()
        if end.state != "done" and (end.reason_kind == "lease" or is_leftover):
            handle = self._note_end(handle)
            self._event("launched_again", f"it had ended on {self.host.name}: {end.reason}")
            self._launch(executor, handle)
            raise _Again
        if end.is_lost and not self.stop.is_set():
            self._go_on(executor, handle, end)
        self._note_end(handle)
        if end.state == "done":
            # Imported late: it loads all that verdicts need, half of this process's start.
            from engine.evidence.verdict.provenance import seal  # noqa: PLC0415

            seal(self.run)  # of the files here
            return outcome.EXIT_DONE
        if self.stop.is_set() and (end.state == "cancelled" or end.is_lost):
            return outcome.EXIT_STOPPED
        return self._fail(end.reason_kind, end.reason, end.hint)

    def _go_on(self, executor: FarExecutor, handle: Handle, end: End) -> NoReturn:
        """Start a run again that its place took away, from its last checkpoint.

        Raises _Again once it is started, UserError HOST_UNUSABLE where that has happened too often.
        """
        handle = self._counted(self._note_end(handle), end.reason)
        self._event("launched_again", f"{end.reason}: it goes on from its last checkpoint")
        self._launch(executor, handle)
        raise _Again

    def _counted(self, handle: Handle, reason: str) -> Handle:
        """The handle of a launch that its place took away, counted. Raises UserError HOST_UNUSABLE
        where that has happened too often without a new checkpoint."""
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
        """Note why the run waits over there, whenever the reason changes."""
        why = probe.why if probe.life == "pending" else ""
        reason = why.partition(";")[0]  # what follows is a forecast, which changes all the time
        if reason and reason != self.waits_for:
            self._event("host_waits", f"it waits on {self.host.name}: {why}")
        self.waits_for = reason

    def _note_hours(self, handle: Handle, probe: Probe) -> None:
        """Note how long the run has held its devices over there, and why it waits for them."""
        if probe.spent_s is not None:
            why = probe.why if probe.life == "pending" else ""
            hours.note(self.run, _attempt(), handle.launch, probe.spent_s, why)

    def _note_end(self, handle: Handle) -> Handle:
        """Note on the disk that everything of a launch is here."""
        with Store(self.run.home) as store:
            attempt = store.get_run(self.run.id).attempt
        return handle.changed(self.run, phase="ended", ended_in=attempt)

    def _fail(self, kind: str, message: str, hint: Hint) -> int:
        """Write why the run failed; returns the exit status."""
        last = outcome.checkpoint_name(self.run) or None
        failure = outcome.Failure(kind, message, "", hint, last)
        write_json(self.run.failure, failure.to_json())
        return outcome.EXIT_FAILED

    def _pause(self, seconds: float) -> None:
        """Wait; being told to end cuts it short, once."""
        if self.stop.is_set():
            time.sleep(seconds)
        else:
            self.stop.wait(seconds)

    def _is_over_there(self) -> bool:
        """Whether something of the run may be on the host."""
        handle = Handle.read(self.run)
        return handle is not None and handle.phase == "started"

    def _is_passing(self, error: UserError) -> bool:
        """Whether an error is one of this home that passes; with something over there also one that
        somebody has to mend."""
        if error.code == "HOME_UNUSABLE":
            return error.retryable or self._is_over_there()
        return error.code == "DISK_FULL"

    def _hindered(self, why: str) -> None:
        """Note that this home cannot be written; once, however often it is tried, and only if the
        note itself can be."""
        if not self.is_hindered:
            self.is_hindered = True
            goes_on = "; what runs there goes on" if self._is_over_there() else ""
            self._event("home_hindered", f"{why}: tried again until it can be{goes_on}"[:1000])

    def _lost(self, why: str) -> None:
        """Note that the host is not reached; once, however often it is tried."""
        if self.lost_at is None:
            self.lost_at = time.monotonic()
            goes_on = "; what runs there goes on" if self._is_over_there() else ""
            text = f"{self.host.name} is not reached{goes_on}: {why}"
            self._event("host_lost", text[:1000])
        if self.stop.is_set():  # so that it is told when it is reached again, by whomever
            handle = Handle.read(self.run)
            if handle is not None and not handle.stop_asked:
                with contextlib.suppress(OSError):  # there is no room: whoever goes on tells it
                    handle.changed(self.run, stop_asked=True)

    def _reached(self) -> None:
        """Note that the host is reached again, and knows of its runs."""
        if self.lost_at is not None:
            lost_s = time.monotonic() - self.lost_at
            self._event("host_reached", f"{self.host.name} is reached again after {lost_s:.0f} s")
            self.lost_at = None

    def _is_given_up(self) -> bool:
        """Whether the host has been away for so long that nothing can run there any more."""
        return self.lost_at is not None and time.monotonic() - self.lost_at > self._patience_s

    @property
    def _patience_s(self) -> float:
        return 3600 * self.host.lease_hours + _PATIENCE_S

    def _event(self, name: str, message: str, **values: object) -> None:
        """Append an event to the run's, if that can be written."""
        with contextlib.suppress(OSError):
            outcome.note_event(self.run, name, message, **values)


def _attempt() -> int:
    """The attempt of the run that this process looks after."""
    return int(os.environ.get("HONESMITH_ATTEMPT", "1"))


def _print(data: bytes) -> None:
    """Print what the trainer over there printed: it becomes the console of this attempt."""
    with contextlib.suppress(OSError):
        os.write(1, data)


def tidy(run: RunDir, host: Host) -> None:
    """Remove what is left on a host of runs that have ended here, and tell those to end that should
    have."""
    with connected(run.home, host) as executor:
        sweep(executor)


def sweep(executor: FarExecutor) -> list[str]:
    """Remove over there what has ended here; returns the ids of the runs that were removed."""
    home, removed = executor.home, []
    for owned in executor.list_owned():
        run = home.run(owned.run_id)
        with Store(home) as store:  # now: it may have been resumed since it was listed
            row = store.find_run(owned.run_id)
        if row is None or row.state not in TERMINAL:
            continue
        there = Handle(executor.name, owned.launch, "started")
        handle = Handle.read(run)
        # What was not brought here is kept for a resume.
        is_here = handle is None or handle.phase == "ended" or handle.launch > owned.launch
        if owned.life in ("pending", "running"):
            executor.stop(run, there)
        elif is_here or run.deleted.exists():
            executor.reap(run, there)
            removed.append(owned.run_id)
    if isinstance(executor, SkyExecutor):
        removed += executor.give_back_unwanted()
    return removed


def main(folder: Path, *, only_tidy: bool) -> int:
    """Look after the run in `folder`; returns the exit status."""
    run = RunDir(folder)
    config = run.read_config()
    assert isinstance(config, TrainConfig)  # nothing else runs on another machine
    try:
        host = hosts.host_of(run.home, config.settings.compute)
    except UserError as error:
        if not only_tidy:  # else the run has its end
            failure = outcome.Failure("infra", error.message, "", error.advice)
            write_json(run.failure, failure.to_json())
        return outcome.EXIT_FAILED
    if only_tidy:
        with contextlib.suppress(HostLost, HostRefused, FarError, UserError, OSError):
            tidy(run, host)
        return outcome.EXIT_DONE
    attendant = Attendant(run, config, host)

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        attendant.stop.set()

    signal.signal(signal.SIGTERM, on_term)
    end_with_supervisor()
    return attendant.attend()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), only_tidy="--tidy" in sys.argv[2:]))

"""Signs of life of this process: what it is doing, how far it is, and how long its work takes.

A process does one run, so there is one pulse, which `begin` starts. Without it, as in a server that
answers chats or in a test of one loop, everything here does nothing. The innermost loops call
`beat`: a round of the sampler, a microbatch, a scored answer. So a process that hangs falls silent
soon, even within a long phase. engine/machine/pace/heartbeat.py defines what is written; the
supervisor judges the silence.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

from engine.home.run_dir import RunDir
from engine.machine.pace.heartbeat import Heartbeat, Outlook, Phase, Work, write_heartbeat

WRITE_EVERY_S = 0.5  # within a phase a heartbeat is written so often; its begin and end at once


@dataclass
class _Tally:
    """The work of one phase so far; its fields have the meanings of those in `Work`."""

    planned: int = 0
    done: int = 0
    seconds: float = 0.0
    squares: float = 0.0
    longest_silence_s: float = 0.0


@dataclass
class _OpenPhase:
    """A phase that has begun and not ended; another phase may lie inside it.

    Attributes:
        seconds: spent in this phase so far, without the phases inside it.
        done, of: how many units of the phase are done, and how many there are.
    """

    phase: Phase
    seconds: float = 0.0
    done: int = 0
    of: int = 0


@dataclass
class _Pulse:
    """The pulse of this process. `clock` returns seconds that only grow, `write` writes a
    heartbeat. `lock` guards all fields, because another thread scores."""

    attempt: int
    write: Callable[[Heartbeat], None]
    clock: Callable[[], float] = time.monotonic
    outlook: Outlook = field(default_factory=Outlook)
    tallies: dict[Phase, _Tally] = field(default_factory=dict)
    open_phases: list[_OpenPhase] = field(default_factory=lambda: [_OpenPhase("loading")])
    lock: threading.RLock = field(default_factory=threading.RLock)
    thread: threading.Thread = field(default_factory=threading.current_thread)
    counted_until: float = 0.0  # the time up to which seconds are in the tallies
    last_beat: float = 0.0
    last_write: float = 0.0

    def __post_init__(self) -> None:
        """Start the clocks: no second is counted yet, and there was no silence."""
        self.counted_until = self.last_beat = self.clock()

    def tally(self, phase: Phase) -> _Tally:
        """Return the tally of a phase, which is made at the first call."""
        return self.tallies.setdefault(phase, _Tally())

    def beat(self) -> None:
        """Note that the process is working. Writes a heartbeat if the last one is WRITE_EVERY_S
        old."""
        with self.lock:
            now = self.clock()
            tally = self.tally(self.open_phases[-1].phase)
            tally.longest_silence_s = max(tally.longest_silence_s, now - self.last_beat)
            self.last_beat = now
            if now - self.last_write >= WRITE_EVERY_S:
                self.write_now(now)

    def write_now(self, now: float) -> None:
        """Write a heartbeat: the phase under way and the work of all phases so far. `now` is the
        time on the clock of this object, in seconds."""
        self.count_time(now)
        self.last_write = now
        open_phase = self.open_phases[-1]
        self.write(
            Heartbeat(
                attempt=self.attempt,
                time=time.time(),
                phase=open_phase.phase,
                done=open_phase.done,
                of=open_phase.of,
                outlook=self.outlook,
                work={phase: Work(**vars(tally)) for phase, tally in self.tallies.items()},
            )
        )

    def count_time(self, now: float) -> None:
        """Add the seconds since the last call to the phase under way. `now` is the time on the
        clock of this object."""
        open_phase = self.open_phases[-1]
        self.tally(open_phase.phase).seconds += now - self.counted_until
        open_phase.seconds += now - self.counted_until
        self.counted_until = now

    def advance(self, units: int) -> None:
        """Count `units` of the phase under way as done. Only the thread that began the phase
        counts; another thread, which samples ahead, only shows that the process works."""
        with self.lock:
            if threading.current_thread() is self.thread:
                open_phase = self.open_phases[-1]
                open_phase.done += units
                self.tally(open_phase.phase).done += units
            self.beat()

    def enter(self, phase: Phase, units: int) -> None:
        """Begin a phase of `units` units of work; 0 if its units are not counted."""
        with self.lock:
            self.beat()
            self.count_time(self.clock())
            self.open_phases.append(_OpenPhase(phase, of=units))
            self.write_now(self.clock())

    def leave(self) -> None:
        """End the phase under way, and add its seconds to that phase's tally. A phase whose units
        are not counted counts as one unit."""
        with self.lock:
            self.beat()
            self.count_time(self.clock())
            open_phase = self.open_phases.pop()
            # Sampling is a part of a training step, so its seconds also count to the step's length.
            if open_phase.phase == "sampling":
                self.open_phases[-1].seconds += open_phase.seconds
            tally = self.tally(open_phase.phase)
            if not open_phase.of:
                tally.done += 1
                tally.squares += open_phase.seconds**2  # for the variance of a unit's seconds
            self.write_now(self.clock())


_current: _Pulse | None = None


def begin(run: RunDir) -> None:
    """Start recording the progress of this process, which is in the phase "loading". Heartbeats go
    to the run's file; if that cannot be written, as on a full disk, the run goes on."""
    global _current
    descriptor = os.open(run.heartbeat, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(heartbeat: Heartbeat) -> None:
        """Write a heartbeat to the run's file, if the disk takes it."""
        with suppress(OSError):
            write_heartbeat(descriptor, heartbeat)

    _current = _Pulse(attempt=int(os.environ.get("HONESMITH_ATTEMPT") or 1), write=write)
    _current.beat()


def begin_for(tell: Callable[[], None]) -> None:
    """Start recording the progress of a process that helps another one. `tell` is called each time
    a heartbeat would be written to a file; it gives the other process a sign of life."""
    global _current
    _current = _Pulse(attempt=0, write=lambda _heartbeat: tell())


def beat() -> None:
    """Note that this process is working, which its supervisor takes for a sign of life. It is cheap
    enough for the innermost loops. Does nothing in a process that records no progress."""
    if _current is not None:
        _current.beat()


def advance(units: int = 1) -> None:
    """Note that `units` more units of the phase under way, such as answers, are done."""
    if _current is not None:
        _current.advance(units)


def plan(units: Mapping[Phase, int], outlook: Outlook | None = None) -> None:
    """Record how many units of each phase this process will do in all, and how the run may end
    (`outlook`), so that its remaining time can be forecast."""
    if _current is None:
        return
    for name, count in units.items():
        _current.tally(name).planned = count
    _current.outlook = outlook or Outlook()
    _current.beat()


def expect_end(earliest_end: int | None) -> None:
    """Record the step at which training may end early at the earliest; None if it cannot end
    early."""
    if _current is not None:
        _current.outlook = replace(_current.outlook, earliest_end=earliest_end)


@contextmanager
def phase(name: Phase, of: int = 0) -> Iterator[None]:
    """Context manager that counts its time as the phase `name` of this process.

    The phase has `of` units of work, which `advance` counts; with 0 the whole context is one unit.
    While a phase inside another lasts, the outer one's time stands still.
    """
    if _current is None:
        yield
        return
    _current.enter(name, of)
    try:
        yield
    finally:
        _current.leave()

"""The limits on the hours of a run, and when its current attempt reaches them.

One of them is the lease of a run that another machine started here: without a word from it the run
ends. Whoever looks after the run from afar renews the file `lease.json` of its folder. The run's
supervisor measures the silence on its own clock, and at its end lets the trainer save and stop. A
run without that file, as every run that was started on this machine, has no lease.
"""

import math
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.files import read_object, write_json
from engine.core.format import words
from engine.home.rows import HOLDS_DEVICE, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher

_FORECAST_S = 15.0  # how old the cap of the home may be that a forecast is compared with


class Limit(NamedTuple):
    """A limit of an attempt.

    Attributes:
        seconds: the seconds from the attempt's start at which the limit is reached.
        kind: the failure kind (of engine.core.errors.FAILURE_KINDS).
        reason: the reason in words.
    """

    seconds: float
    kind: str
    reason: str


def limit_of_run(store: Store, home: Home, row: RunRow) -> Limit | None:
    """Return the limit at which the run's GPU-hours are spent; None if the run has no cap.

    The runs of a plan share one cap. The limit counts seconds from the start of this attempt.
    """
    if row.max_gpu_hours <= 0:
        return None
    spent_hours = 0.0
    for plan_row in store.plan_runs(row.plan) if row.plan else [row]:
        # Hours from before the last resume do not count for the cap.
        spent_hours += plan_row.spent_hours - plan_row.spent_before
        if plan_row.state in HOLDS_DEVICE and plan_row.run_id != row.run_id:
            spent_hours += _hours_under_way(home, plan_row)
    of_plan = f" of the plan {row.plan}" if row.plan else ""
    reason = f"max_gpu_hours={row.max_gpu_hours:g}{of_plan} is spent"
    left_s = _seconds_for(row, row.max_gpu_hours - spent_hours)
    return Limit(left_s, kind="budget", reason=reason)


def limit_of_home(store: Store, run: RunDir) -> Limit | None:
    """Return the limit at which the GPU-hours of the whole home are spent; None if it has no such
    cap.

    The hours of all its runs count together.
    """
    total_hours = run.home.user_config().max_gpu_hours_total
    if total_hours is None:
        return None
    # The seconds of this attempt are not subtracted: the caller compares them with the limit.
    left_hours = total_hours - store.spent_hours() - _hours_elsewhere(store, run)
    left_s = _seconds_for(store.get_run(run.id), left_hours)
    reason = f"max_gpu_hours_total={total_hours:g} of this home is spent"
    return Limit(left_s, kind="budget", reason=reason)


@dataclass
class HomeCap:
    """The limit of the whole home, for a supervisor, which asks at every poll.

    An answer needs a file of every run under way, so all supervisors together would read the square
    of their number at every poll. It is therefore kept for as long as twice the devices that are
    held now could not reach the cap: so it is looked again a few times in the life of a run, the
    more often the nearer the cap is.
    """

    until: float = 0.0  # monotonic, when it has to be looked again
    looked_at: float = 0.0  # monotonic, when it was looked last
    known: Limit | None = None
    total_hours: float = 0.0  # the cap that the answer is of
    held: int = 0  # devices that all runs held when it was given

    def limit(
        self, store: Store, run: RunDir, elapsed_s: float, max_age_s: float = math.inf
    ) -> Limit | None:
        """As `limit_of_home`; the attempt has taken `elapsed_s` seconds so far. What was known
        `max_age_s` seconds ago is looked up again."""
        total_hours = run.home.user_config().max_gpu_hours_total
        if total_hours is None:
            return None
        now, held = time.monotonic(), store.held_devices()
        is_due = now >= min(self.until, self.looked_at + max_age_s)
        if is_due or total_hours != self.total_hours or held > 2 * self.held:
            self.known, self.total_hours, self.held = limit_of_home(store, run), total_hours, held
            self.looked_at = now
            self.until = math.inf  # a run without a device reaches no cap
            if self.known is not None and math.isfinite(self.known.seconds):
                left_s = self.known.seconds - elapsed_s  # of this run's devices alone
                share = store.get_run(run.id).device_hours(3600.0) / max(1, held)
                self.until = now + max(0.0, left_s * share / 2)
        return self.known

    def nearest(self, store: Store, run: RunDir, row: RunRow, elapsed_s: float) -> Limit | None:
        """As `nearest_cap`; of the home as it was at most `_FORECAST_S` ago."""
        of_home = self.limit(store, run, elapsed_s, _FORECAST_S)
        return _nearest(limit_of_run(store, run.home, row), of_home)


def held_elsewhere_s(run: RunDir, attempt: int) -> float | None:
    """Return how many seconds a run on another machine has held its devices in an attempt.

    Returns None before whoever looks after the run has begun: until then all time counts.
    """
    record = read_object(run.far("spent"))
    if record.get("attempt") != attempt:
        return None
    seconds = record.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else None


def nearest_cap(store: Store, run: RunDir, row: RunRow) -> Limit | None:
    """Return the cap on hours that the current attempt reaches first; None if it has no cap."""
    return _nearest(limit_of_run(store, run.home, row), limit_of_home(store, run))


def _nearest(*caps: Limit | None) -> Limit | None:
    """Return the cap that is reached first; None if there is none."""
    return min((cap for cap in caps if cap is not None), default=None)


def _seconds_for(row: RunRow, hours: float) -> float:
    """Return the seconds in which a run spends `hours` device hours: fewer the more devices it has,
    infinite if it has none."""
    hours_of_second = row.device_hours(1.0)  # the device hours that the run spends per second
    return hours / hours_of_second if hours_of_second else math.inf


def _hours_under_way(home: Home, row: RunRow) -> float:
    """Return the device hours that the current attempt of a run has taken so far."""
    return row.device_hours(launcher.seconds_in_lock_file(home.run(row.run_id)))


def _hours_elsewhere(store: Store, run: RunDir) -> float:
    """Return the device hours that the current attempts of all other runs have taken so far.

    A run's row gets its hours only when the attempt ends. Until then the seconds are in the run's
    lock file, which its supervisor updates at every poll.
    """
    rows = store.list_runs(limit=1000, states=HOLDS_DEVICE)  # more than any machine has GPUs
    return sum(_hours_under_way(run.home, row) for row in rows if row.run_id != run.id)


def renew_lease(run: RunDir, seconds: float) -> None:
    """Say that somebody still wants the run, for `seconds` from now on."""
    run.path.mkdir(parents=True, exist_ok=True)
    write_json(run.far("lease"), {"seconds": seconds, "time": time.time()})


@dataclass
class LeaseWatch:
    """Measures how long nobody has renewed the lease of a run. Times are monotonic."""

    run: RunDir
    renewed_at: float = field(default_factory=time.monotonic)
    content: object = None

    def limit(self, elapsed_s: float) -> Limit | None:
        """The limit at which the lease ends, `elapsed_s` seconds after the start of the attempt;
        None for a run without a lease."""
        content = read_object(self.run.far("lease"))
        seconds = content.get("seconds")
        if not isinstance(seconds, int | float):
            return None
        now = time.monotonic()
        if content != self.content:
            self.content, self.renewed_at = content, now
        reason = f"the machine that started it gave no word for {words(seconds / 3600)}"
        return Limit(elapsed_s - (now - self.renewed_at) + seconds, "lease", reason)

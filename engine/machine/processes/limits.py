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
    """Return the limit at which the GPU-hours of a run are spent; None if the run has no cap.

    The runs of a plan share one cap, so the hours of all of them count. The limit counts seconds
    from the start of the run's present attempt.
    """
    if row.max_gpu_hours <= 0:
        return None
    spent_hours = 0.0
    rows_under_cap = store.plan_runs(row.plan) if row.plan else [row]
    for plan_row in rows_under_cap:
        # Hours from before the last resume do not count for the cap.
        spent_hours += plan_row.spent_hours - plan_row.spent_before
        if plan_row.state in HOLDS_DEVICE and plan_row.run_id != row.run_id:
            spent_hours += _hours_under_way(home, plan_row)
    of_plan = f" of the plan {row.plan}" if row.plan else ""
    reason = f"max_gpu_hours={row.max_gpu_hours:g}{of_plan} is spent"
    left_s = _seconds_for(row, row.max_gpu_hours - spent_hours)
    return Limit(left_s, kind="budget", reason=reason)


def limit_of_home(store: Store, run: RunDir) -> Limit | None:
    """Return the limit at which the present attempt of `run` uses up the GPU-hours of the whole
    home; None if the home has no such cap.

    The hours of all runs of the home count together.
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

    Computing the limit reads a file of every run under way, so all supervisors together would read
    the square of their number at every poll. The limit is therefore kept for as long as even twice
    the devices that are held now could not reach the cap. So it is computed a few times in the life
    of a run, the more often the nearer the cap is.

    Attributes:
        recompute_at: when the limit has to be computed again, on the monotonic clock.
        computed_at: when it was computed last, on the monotonic clock.
        cached: the limit as it was computed last; None if there was no cap.
        total_hours: the cap of the home when it was computed.
        devices_then: how many devices all runs held when it was computed.
    """

    recompute_at: float = 0.0
    computed_at: float = 0.0
    cached: Limit | None = None
    total_hours: float = 0.0
    devices_then: int = 0

    def limit(
        self, store: Store, run: RunDir, elapsed_s: float, max_age_s: float = math.inf
    ) -> Limit | None:
        """Return the limit of `limit_of_home` for the present attempt of `run`, perhaps as it was
        computed earlier.

        Args:
            store: the open database.
            run: the run.
            elapsed_s: seconds that the attempt has taken so far.
            max_age_s: a limit that was computed longer ago is computed again.
        """
        total_hours = run.home.user_config().max_gpu_hours_total
        if total_hours is None:
            return None
        now, held = time.monotonic(), store.held_devices()
        is_due = now >= min(self.recompute_at, self.computed_at + max_age_s)
        if is_due or total_hours != self.total_hours or held > 2 * self.devices_then:
            self.cached = limit_of_home(store, run)
            self.total_hours, self.devices_then, self.computed_at = total_hours, held, now
            self.recompute_at = math.inf  # a run without a device reaches no cap
            if self.cached is not None and math.isfinite(self.cached.seconds):
                left_s = self.cached.seconds - elapsed_s  # if this run's devices were the only ones
                share = store.get_run(run.id).device_hours(3600.0) / max(1, held)
                # Halved, because up to twice the devices may be held before it is computed again.
                self.recompute_at = now + max(0.0, left_s * share / 2)
        return self.cached

    def nearest(self, store: Store, run: RunDir, row: RunRow, elapsed_s: float) -> Limit | None:
        """Return the cap that the present attempt of `run` reaches first: its own or that of the
        home; None if there is no cap.

        The cap of the home may be as it was `_FORECAST_S` seconds ago. `row` is the run's row,
        `elapsed_s` the seconds that the attempt has taken so far.
        """
        cap_of_home = self.limit(store, run, elapsed_s, _FORECAST_S)
        return _nearest(limit_of_run(store, run.home, row), cap_of_home)


def held_elsewhere_s(run: RunDir, attempt: int) -> float | None:
    """Return how many seconds a run on another machine has held its devices there in an attempt.

    Returns None if nothing is recorded for this attempt yet: until then all of its time counts.
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
    """Return the cap that is reached first, that with the fewest seconds; None if all are None."""
    return min((cap for cap in caps if cap is not None), default=None)


def _seconds_for(row: RunRow, hours: float) -> float:
    """Return the seconds in which a run spends `hours` device hours: fewer the more devices it has,
    infinite if it has none."""
    hours_per_second = row.device_hours(seconds=1.0)  # device hours that the run spends
    return hours / hours_per_second if hours_per_second else math.inf


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
    """Renew the lease of a run that another machine queued here: it may go on for `seconds` more
    without another word from that machine."""
    run.path.mkdir(parents=True, exist_ok=True)
    write_json(run.far("lease"), {"seconds": seconds, "time": time.time()})


@dataclass
class LeaseWatch:
    """Measures how long the other machine has not renewed the lease of a run that it started here.

    Attributes:
        run: the run.
        renewed_at: when `lease.json` was last seen to change, on the monotonic clock.
        content: what the file held then.
    """

    run: RunDir
    renewed_at: float = field(default_factory=time.monotonic)
    content: object = None

    def limit(self, elapsed_s: float) -> Limit | None:
        """Return the limit at which the lease ends; None for a run without a lease.

        The limit counts seconds from the start of the attempt, which was `elapsed_s` seconds ago.
        """
        content = read_object(self.run.far("lease"))
        seconds = content.get("seconds")
        if not isinstance(seconds, int | float):
            return None
        now = time.monotonic()
        if content != self.content:
            self.content, self.renewed_at = content, now
        reason = f"the machine that started it gave no word for {words(seconds / 3600)}"
        silent_s = now - self.renewed_at
        return Limit(elapsed_s - silent_s + seconds, "lease", reason)

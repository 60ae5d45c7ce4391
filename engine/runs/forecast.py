"""Forecasts of an open run: when it ends, what it costs, and whether a cap on hours stops it."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.errors import UserError
from engine.core.format import words
from engine.core.reply import ReplyBase
from engine.home.rows import HOLDS_DEVICE, OPEN, RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.pace.forecast import Band, cap_sentence
from engine.machine.pace.progress import Progress, read_progress
from engine.machine.processes import launcher
from engine.machine.processes.limits import nearest_cap
from engine.records.run_config import TrainConfig

_DIGITS = 5  # hours and money are rounded to this many digits after the point


@dataclass(frozen=True)
class Range(ReplyBase):
    """An estimate of hours or money: the lowest, the most likely and the highest value."""

    low: float
    likely: float
    high: float


@dataclass(frozen=True)
class Forecast(ReplyBase):
    """When an open run or plan is expected to end, and what it will have cost.

    Attributes:
        spent_hours: device hours so far, of all attempts.
        left_hours: device hours still to come. Nine runs in ten end within this range, if the pace
            varies as it has so far.
        total_hours: spent and left hours together.
        basis: "measured" if the present attempt has measured some of its work, "estimate" if the
            forecast rests on the estimate from before the start.
        cap: a sentence that says where a cap on hours will stop the run; None if the run will
            likely end before.
        spent_money, total_money: the hours at the price in config.toml; None if no price is set.
    """

    spent_hours: float
    left_hours: Range
    total_hours: Range
    basis: str
    cap: str | None = None
    spent_money: float | None = None
    total_money: Range | None = None

    @property
    def sentence(self) -> str:
        """The forecast in a few words, such as "12 min to 20 min left"."""
        low, high = words(self.left_hours.low), words(self.left_hours.high)
        time_left = f"{low} left" if low == high else f"{low} to {high} left"
        return f"{time_left}; {self.cap}" if self.cap else time_left


def forecast_of_run(home: Home, store: Store, row: RunRow, progress: Progress) -> Forecast | None:
    """Forecast when a run that holds a device ends, and what it will have cost by then.

    `row` is the run's database row, `progress` how far the run is. Returns None if the run holds no
    device, or if there is neither a measured pace nor an estimate.
    """
    if row.state not in HOLDS_DEVICE:
        return None
    left_hours = _left_hours(home, row, progress)
    if left_hours is None:
        return None
    cap_text = _describe_cap(home, store, row, progress)
    return _forecast(home, [row], left_hours, cap_text, is_measured=_is_measured(progress))


def forecast_of_plan(home: Home, rows: Sequence[RunRow]) -> Forecast | None:
    """Forecast the end of a plan: several runs that were submitted together, here `rows`.

    The forecasts of the runs under way and the estimates of the later runs are added up. Returns
    None if all runs have ended, or if one that has not has neither a pace nor an estimate.
    """
    open_rows = [row for row in rows if row.state in OPEN]
    if not open_rows:
        return None
    left_hours = Band()
    is_measured = False
    for row in open_rows:
        progress = read_progress(home.run(row.run_id), row)
        run_hours = _left_hours(home, row, progress)
        if run_hours is None:
            return None
        left_hours += run_hours
        is_measured = is_measured or _is_measured(progress)
    cap_text = _cap_of_plan(home, rows, left_hours)
    return _forecast(home, rows, left_hours, cap_text, is_measured=is_measured)


def _forecast(
    home: Home, rows: Sequence[RunRow], left_hours: Band, cap_text: str, *, is_measured: bool
) -> Forecast:
    """Make the forecast of these runs together.

    Args:
        rows: the runs: one run, or all runs of a plan.
        left_hours: the device hours that the runs still take: low, likely and high.
        cap_text: a sentence that says where a cap will stop them; "" if they will likely end
            before.
        is_measured: whether `left_hours` rests at least in part on measurements of these runs.
    """
    spent_hours = sum(launcher.spent_hours(home, row) for row in rows)
    total_hours = Band(spent_hours, spent_hours, spent_hours) + left_hours
    hour_price = _hour_price(home, rows)
    return Forecast(
        spent_hours=round(spent_hours, _DIGITS),
        left_hours=_rounded_range(left_hours),
        total_hours=_rounded_range(total_hours),
        basis="measured" if is_measured else "estimate",
        cap=cap_text or None,
        spent_money=round(spent_hours * hour_price, _DIGITS) if hour_price else None,
        total_money=_rounded_range(total_hours.times(hour_price)) if hour_price else None,
    )


def _left_hours(home: Home, row: RunRow, progress: Progress) -> Band | None:
    """Return the device hours that an open run still takes: low, likely and high.

    `progress` is how far the run is. The hours come from the trainer's measured pace if there is
    one. Otherwise they are the estimate of the run minus the hours spent. Returns None if there is
    no estimate either.
    """
    if progress.remaining is not None:
        hours_per_second = row.device_hours(1.0)  # of all devices of the run together
        return progress.remaining.seconds.times(hours_per_second)
    config = home.run(row.run_id).find_config()
    if isinstance(config, TrainConfig):
        hours = config.estimate.gpu_hours
        estimated = Band(hours.low, hours.likely, hours.high)
    elif row.estimated_hours > 0:  # the estimate of an evaluation is an upper bound
        most_hours = row.estimated_hours
        estimated = Band(low=0.0, likely=most_hours / 2, high=most_hours)
    else:
        return None
    return estimated.shortened_by(launcher.spent_hours(home, row))


def _describe_cap(home: Home, store: Store, row: RunRow, progress: Progress) -> str:
    """Write a sentence that says where the nearest cap on hours will stop the run.

    `progress` is how far the run is, with the time that it still takes. Returns "" if the run will
    likely end before, has no cap, or has not planned its work yet.
    """
    run = home.run(row.run_id)
    try:
        cap = nearest_cap(store, run, row)
    except UserError:  # config.toml is damaged, which is reported elsewhere
        return ""
    if cap is None or progress.remaining is None:
        return ""
    left_s = cap.seconds - launcher.seconds_in_lock_file(run)
    return cap_sentence(progress.remaining, progress.step or 0, left_s, cap.reason)


def _cap_of_plan(home: Home, rows: Sequence[RunRow], left_hours: Band) -> str:
    """Say, as a part of a sentence, by how many hours the common cap of a plan's runs is too low.

    `left_hours` are the hours that all runs of the plan still take. Returns "" if the cap is high
    enough, or if the plan has no cap (0).
    """
    cap_hours = rows[0].max_gpu_hours  # every run of a plan has the same cap, for all together
    # The hours from before the last resume do not count for the cap.
    spent_under_cap = sum(launcher.spent_hours(home, row) - row.spent_before for row in rows)
    missing_hours = spent_under_cap + left_hours.likely - cap_hours
    if cap_hours <= 0 or missing_hours <= 0:
        return ""
    return (
        f"at this pace max_gpu_hours={cap_hours:g} of the plan is spent {words(missing_hours)} "
        "before its end"
    )


def _is_measured(progress: Progress) -> bool:
    """Return whether the run's remaining time rests at least in part on measurements of this
    attempt, and not on the estimate from before its start alone."""
    return progress.remaining is not None and progress.remaining.is_measured


def _hour_price(home: Home, rows: Sequence[RunRow]) -> float:
    """Return the price of a GPU-hour where these runs are, of several machines the highest; 0 if
    config.toml sets no price or is damaged."""
    try:
        config = home.user_config()
    except UserError:
        return 0.0
    return max((config.price_of(row.compute) for row in rows), default=config.gpu_hour_price)


def _rounded_range(band: Band) -> Range:
    """Convert low, likely and high hours or money to the rounded `Range` that replies show."""
    return Range(
        low=round(band.low, _DIGITS),
        likely=round(band.likely, _DIGITS),
        high=round(band.high, _DIGITS),
    )

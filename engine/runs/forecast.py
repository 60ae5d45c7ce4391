"""When an open run will end, what it will cost, and whether its cap of hours ends it before."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.errors import UserError
from engine.core.format import words
from engine.core.reply import ReplyBase
from engine.home.rows import HOLDS_DEVICE, OPEN, RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.pace.forecast import Band, cap_sentence
from engine.pace.progress import Progress, read_progress
from engine.processes import launcher
from engine.processes.limits import nearest_cap
from engine.records.run_config import TrainConfig

_DIGITS = 5  # of hours and money, after the point


@dataclass(frozen=True)
class Range(ReplyBase):
    """Hours or money at the least, most likely and at the most."""

    low: float
    likely: float
    high: float


@dataclass(frozen=True)
class Forecast(ReplyBase):
    """The end of an open run or plan, as far as it can be foreseen.

    Attributes:
        spent_hours: so far, of all attempts.
        left_hours: still to come; it holds nine ends in ten if the pace goes on as it was.
        total_hours: of the whole.
        cap: where a cap of hours stops it before its end; None where it likely does not.
        basis: "measured" by this attempt, or "estimate" from before the start.
        spent_money, total_money: at the price of config.toml; None where that sets none.
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
        left = f"{low} left" if low == high else f"{low} to {high} left"
        return f"{left}; {self.cap}" if self.cap else left


def forecast_of_run(home: Home, store: Store, row: RunRow, progress: Progress) -> Forecast | None:
    """The forecast of a run that holds a device; None for any other, and where nothing is known of
    its end."""
    if row.state not in HOLDS_DEVICE:
        return None
    left_hours = _left_hours(home, row, progress)
    if left_hours is None:
        return None
    cap = _cap_in_words(home, store, row, progress)
    return _forecast(home, [row], left_hours, cap, is_measured=_is_measured(progress))


def forecast_of_plan(home: Home, rows: Sequence[RunRow]) -> Forecast | None:
    """The forecast of a plan: that of the runs under way, and the estimates of those to come. None
    where no run of it is open, or where nothing is known of one that is."""
    open_rows = [row for row in rows if row.state in OPEN]
    if not open_rows:
        return None
    left = Band()
    is_measured = False
    for row in open_rows:
        progress = read_progress(home.run(row.run_id), row)
        hours = _left_hours(home, row, progress)
        if hours is None:
            return None
        left += hours
        is_measured = is_measured or _is_measured(progress)
    cap = _cap_of_plan(home, rows, left)
    return _forecast(home, rows, left, cap, is_measured=is_measured)


def _forecast(
    home: Home, rows: Sequence[RunRow], left: Band, cap: str, *, is_measured: bool
) -> Forecast:
    """The forecast of runs that together still take the hours `left`; `cap` says where a cap stops
    them before, "" where none does."""
    spent = sum(launcher.spent_hours(home, row) for row in rows)
    total = Band(spent, spent, spent) + left
    price = _price(home)
    return Forecast(
        spent_hours=round(spent, _DIGITS),
        left_hours=_range(left),
        total_hours=_range(total),
        basis="measured" if is_measured else "estimate",
        cap=cap or None,
        spent_money=round(spent * price, _DIGITS) if price else None,
        total_money=_range(total.times(price)) if price else None,
    )


def _left_hours(home: Home, row: RunRow, progress: Progress) -> Band | None:
    """The hours that an open run still takes: as its trainer's pace says, else as it was estimated,
    without what it has taken already. None where neither is known."""
    if progress.remaining is not None:
        return progress.remaining.seconds.times(1 / 3600)
    config = home.run(row.run_id).find_config()
    if isinstance(config, TrainConfig):
        hours = config.estimate.hours
        estimated = Band(hours.low, hours.likely, hours.high)
    elif row.estimated_hours > 0:  # of an evaluation: what it takes at most
        estimated = Band(0.0, row.estimated_hours / 2, row.estimated_hours)
    else:
        return None
    return estimated.shortened_by(launcher.spent_hours(home, row))


def _cap_in_words(home: Home, store: Store, row: RunRow, progress: Progress) -> str:
    """Where the run's cap of hours stops it; "" where it likely does not, or where nothing is
    measured."""
    run = home.run(row.run_id)
    try:
        cap = nearest_cap(store, run, row)
    except UserError:  # config.toml is damaged, which is reported elsewhere
        return ""
    if cap is None or progress.remaining is None:
        return ""
    left_s = cap.seconds - launcher.seconds_in_lock_file(run)
    return cap_sentence(progress.remaining, progress.step or 0, left_s, cap.reason)


def _cap_of_plan(home: Home, rows: Sequence[RunRow], left: Band) -> str:
    """That the cap which the runs of a plan share will not do; "" where it will. `left` is in
    hours."""
    cap_hours = rows[0].max_gpu_hours
    spent = sum(launcher.spent_hours(home, row) - row.spent_before for row in rows)
    missing = spent + left.likely - cap_hours
    if cap_hours <= 0 or missing <= 0:
        return ""
    return (
        f"at this pace max_gpu_hours={cap_hours:g} of the plan is spent {words(missing)} before "
        "its end"
    )


def _is_measured(progress: Progress) -> bool:
    return progress.remaining is not None and progress.remaining.is_measured


def _price(home: Home) -> float:
    """The price of a GPU-hour; 0 where none is set, or where config.toml is damaged."""
    try:
        return home.user_config().gpu_hour_price
    except UserError:
        return 0.0


def _range(band: Band) -> Range:
    """A band as it is shown."""
    return Range(*(round(each, _DIGITS) for each in (band.low, band.likely, band.high)))

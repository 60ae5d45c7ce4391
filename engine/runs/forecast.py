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
        spent_hours: device hours so far, of all attempts.
        left_hours: device hours still to come; the range holds the end of nine runs in ten, if the
            pace varies as it has so far.
        total_hours: both together.
        basis: "measured" where this attempt has measured some of its work, else "estimate": from
            before the start.
        cap: where a cap of hours will stop it, in words; None where it will likely end before.
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
    """Forecast the end of a run that holds a device.

    Returns None for any other run, and where nothing is known of its end.
    """
    if row.state not in HOLDS_DEVICE:
        return None
    left_hours = _left_hours(home, row, progress)
    if left_hours is None:
        return None
    cap = _cap_in_words(home, store, row, progress)
    return _forecast(home, [row], left_hours, cap, is_measured=_is_measured(progress))


def forecast_of_plan(home: Home, rows: Sequence[RunRow]) -> Forecast | None:
    """Forecast the end of a plan, whose runs are `rows`.

    It adds the forecasts of the runs under way to the estimates of those to come. Returns None
    where no run of it is open, or where nothing is known of one that is.
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
    cap = _cap_of_plan(home, rows, left_hours)
    return _forecast(home, rows, left_hours, cap, is_measured=is_measured)


def _forecast(
    home: Home, rows: Sequence[RunRow], left_hours: Band, cap: str, *, is_measured: bool
) -> Forecast:
    """Make the forecast of these runs together.

    Args:
        left_hours: the hours (not seconds) that they still take.
        cap: where a cap will stop them, in words; "" where they will likely end before.
        is_measured: whether some of it rests on measurements of these runs.
    """
    spent_hours = sum(launcher.spent_hours(home, row) for row in rows)
    total_hours = Band(spent_hours, spent_hours, spent_hours) + left_hours
    hour_price = _price(home)
    return Forecast(
        spent_hours=round(spent_hours, _DIGITS),
        left_hours=_range(left_hours),
        total_hours=_range(total_hours),
        basis="measured" if is_measured else "estimate",
        cap=cap or None,
        spent_money=round(spent_hours * hour_price, _DIGITS) if hour_price else None,
        total_money=_range(total_hours.times(hour_price)) if hour_price else None,
    )


def _left_hours(home: Home, row: RunRow, progress: Progress) -> Band | None:
    """The device hours (not seconds) that an open run still takes: by its trainer's pace, else by
    the estimate of the run minus the hours spent. None where there is neither."""
    if progress.remaining is not None:
        return progress.remaining.seconds.times(row.device_hours(1.0))
    config = home.run(row.run_id).find_config()
    if isinstance(config, TrainConfig):
        hours = config.estimate.gpu_hours
        estimated = Band(hours.low, hours.likely, hours.high)
    elif row.estimated_hours > 0:  # an evaluation, of which only the most is estimated
        most_hours = row.estimated_hours
        estimated = Band(low=0.0, likely=most_hours / 2, high=most_hours)
    else:
        return None
    return estimated.shortened_by(launcher.spent_hours(home, row))


def _cap_in_words(home: Home, store: Store, row: RunRow, progress: Progress) -> str:
    """Say where the cap of hours that a run reaches first will stop it.

    "" where the run will likely end before, has no cap, or has not planned its work yet.
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
    """Say by how many hours the cap that the runs of a plan share is too low.

    "" where it is enough, or where the plan has none (0). `left_hours` are the hours that all runs
    of the plan still take. The text is a part of a sentence.
    """
    cap_hours = rows[0].max_gpu_hours
    spent_under_cap = sum(launcher.spent_hours(home, row) - row.spent_before for row in rows)
    missing_hours = spent_under_cap + left_hours.likely - cap_hours
    if cap_hours <= 0 or missing_hours <= 0:
        return ""
    return (
        f"at this pace max_gpu_hours={cap_hours:g} of the plan is spent {words(missing_hours)} "
        "before its end"
    )


def _is_measured(progress: Progress) -> bool:
    """Whether the run's remaining time rests at least in part on what it has measured."""
    return progress.remaining is not None and progress.remaining.is_measured


def _price(home: Home) -> float:
    """Return the price of a GPU-hour; 0 where none is set, or where config.toml is damaged."""
    try:
        return home.user_config().gpu_hour_price
    except UserError:
        return 0.0


def _range(band: Band) -> Range:
    """A band with its numbers rounded, as replies hold it."""
    return Range(
        low=round(band.low, _DIGITS),
        likely=round(band.likely, _DIGITS),
        high=round(band.high, _DIGITS),
    )

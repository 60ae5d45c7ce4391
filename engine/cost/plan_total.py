"""The estimate of all runs of a plan together: their hours, their money and their disk space."""

from collections.abc import Sequence

from engine.core.errors import UserError
from engine.core.format import size
from engine.cost.estimate import DISK_RESERVE
from engine.records.estimate import Estimate, Range

NO_HOURS = Range(low=0.0, likely=0.0, high=0.0)


def total(figures: Sequence[Estimate], evaluation_hours: Range) -> Estimate:
    """Estimate a whole plan: the hours and the money are summed over all runs.

    All other figures are those of the first run.

    Args:
        figures: the estimates of the plan's training runs, at least one.
        evaluation_hours: the device hours of the evaluation at the plan's end; `NO_HOURS` if it has
            none.
    """
    first = figures[0]
    hours = summed([*(run_figures.hours for run_figures in figures), evaluation_hours])
    gpu_hours = summed([*(run_figures.gpu_hours for run_figures in figures), evaluation_hours])
    return first.model_copy(
        update={
            "hours": hours,
            "gpu_hours": gpu_hours,
            "money": priced(gpu_hours, first.gpu_hour_price),
            "steps": 0,  # a plan has no steps of its own, and no setting to lower
            "lower_this": "",
        }
    )


def summed(ranges: Sequence[Range]) -> Range:
    """Add up several ranges: low, likely and high each on their own."""
    return Range(
        low=round(sum(hours.low for hours in ranges), 4),
        likely=round(sum(hours.likely for hours in ranges), 4),
        high=round(sum(hours.high for hours in ranges), 4),
    )


def priced(gpu_hours: Range, price: float) -> Range:
    """Return the money for device hours at `price` per hour: low, likely and high."""
    return Range(
        low=round(price * gpu_hours.low, 4),
        likely=round(price * gpu_hours.likely, 4),
        high=round(price * gpu_hours.high, 4),
    )


def check_disk(figures: Sequence[Estimate], disk_free: int) -> int:
    """Return the bytes that all runs of a plan write together, from their estimates (`figures`).

    Raises UserError DISK_FULL if less than that, plus a reserve, is free on the disk (`disk_free`).
    """
    needed = sum(run_figures.disk_bytes for run_figures in figures)
    if needed > disk_free - DISK_RESERVE:
        raise UserError(
            "DISK_FULL",
            f"the runs of the plan would write {size(needed)}; {size(disk_free)} are free, of "
            f"which {size(DISK_RESERVE)} stay free",
            hint="Free some space, vary fewer values, or lower keep_checkpoints.",
            retryable=True,
        )
    return needed

"""What was measured at one step: a line of `metrics.jsonl`."""

import math
from pathlib import Path

from pydantic import ConfigDict

from engine.records.lines.line_record import Line, LineRecord


class MetricsLine(LineRecord):
    """A step, its time, and the metrics: ours (engine/core/metrics.py) and the environment's own.

    Attributes:
        step: the optimizer step or batch, 0 before the first one. In an evaluation it is the number
            of the model.
        time: when the line was written, in seconds since the epoch.
    """

    # A measured number may be infinite or NaN; the file then holds null.
    model_config = ConfigDict(extra="allow", allow_inf_nan=True)

    step: int
    time: float

    @property
    def values(self) -> Line:
        """The measured values by the name of the metric; None for a number that was not finite."""
        return self.model_extra or {}

    def value(self, name: str) -> float | None:
        """Return the value of the metric `name`; None if the line has no such metric, or if its
        value is not a finite number."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None


def read_metrics(path: Path) -> list[MetricsLine]:
    """Read all lines of `metrics.jsonl`, in the order in which they were written.

    Returns [] if there is no file. Damaged lines are left out; `MetricsLine.read_file` also counts
    them. A run that was resumed from a checkpoint may have written a step twice. For long files
    `load_metrics` in engine/records/lines/curves.py is faster, because it reads only a sample.
    """
    return MetricsLine.read_all(path)

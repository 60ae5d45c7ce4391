"""What was measured at one step: a line of `metrics.jsonl`."""

import math
from pathlib import Path

from pydantic import ConfigDict

from engine.records.lines.line_record import Line, LineRecord


class MetricsLine(LineRecord):
    """`step`, `time`, and the metrics: ours (engine/core/metrics.py) beside the environment's own.

    Attributes:
        step: optimizer step or batch, 0 before the first; of an evaluation the model's number.
        time: when it was written, seconds since the epoch.
    """

    # A measured number may be infinite or none at all; the file then says null.
    model_config = ConfigDict(extra="allow", allow_inf_nan=True)

    step: int
    time: float

    @property
    def values(self) -> Line:
        """What was measured, by name."""
        return self.model_extra or {}

    def value(self, name: str) -> float | None:
        """The value of the metric `name`; None where the line has no such metric, or where its
        value is not a finite number."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None


def read_metrics(path: Path) -> list[MetricsLine]:
    """Read all lines of `metrics.jsonl` in the order in which they were written; [] where there is
    no file. Damaged lines are left out; `MetricsLine.read_file` also counts them.

    A run that was resumed from a checkpoint may have written a step twice. For long files,
    `load_metrics` in engine/records/lines/curves.py is faster: it reads a sample of the lines.
    """
    return MetricsLine.read_all(path)

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
        """The metric where it is a finite number, else None."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None


def read_metrics(path: Path) -> list[MetricsLine]:
    """All lines of `metrics.jsonl` in the order written; [] where there is no file.

    A run that went on from a checkpoint may have written a step twice. A long file is better read
    through engine/records/lines/curves.py.

    Damaged lines are skipped; `read_file` of the record counts them.
    """
    return MetricsLine.read_all(path)

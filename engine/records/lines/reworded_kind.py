"""What an evaluation asked in other words, by kind: a line of `evals/reworded/kinds.jsonl`."""

from engine.records.lines.line_record import LineRecord
from engine.wording.kinds import Kind


class RewordedKind(LineRecord):
    """One kind of rewording.

    Attributes:
        tasks: how many tasks were asked in other words.
        left_out: how many could not be asked otherwise, or did not fit.
        why: of those left out, and what the environment's own words raised; "" for nothing.
    """

    kind: Kind
    tasks: int
    left_out: int = 0
    why: str = ""

"""What an evaluation asked in other words, by kind: a line of `evals/reworded/kinds.jsonl`."""

from engine.core.wording.kinds import Kind
from engine.records.lines.line_record import LineRecord


class RewordedKind(LineRecord):
    """How an evaluation asked tasks in one kind of other words.

    Attributes:
        tasks: how many tasks were asked in other words.
        left_out: how many tasks could not be reworded, or were too long then.
        why: why tasks were left out, and errors of the environment's own rewording; "" for none.
    """

    kind: Kind
    tasks: int
    left_out: int = 0
    why: str = ""

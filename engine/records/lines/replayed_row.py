"""One row that `keep` replays: a line of `replayed.jsonl`."""

from pathlib import Path

from engine.records.lines.line_record import LineRecord
from envs.json_types import ChatMessage


class ReplayedRow(LineRecord):
    """A conversation that is trained on beside the run's own rows, to keep an earlier skill.

    Attributes:
        source: the battery (set of questions) whose practice question is answered, or the id of the
            environment that has the row.
        task: the id of the question or row in the source.
        family: the skill; "" if the source names none.
        messages: the conversation for people, with the answer as the last message.
        ids: the token ids of prompt and answer.
        loss_mask: for each id 1 if it is trained on, otherwise 0.
    """

    source: str
    task: str
    family: str = ""
    messages: list[ChatMessage]
    ids: list[int]
    loss_mask: list[int]


def read_replayed(path: Path) -> list[ReplayedRow]:
    """Read the replayed rows of a run; [] if there is no file. Damaged lines are left out."""
    return ReplayedRow.read_all(path)

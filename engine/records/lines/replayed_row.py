"""One row that `keep` replays: a line of `replayed.jsonl`."""

from pathlib import Path

from engine.records.lines.line_record import LineRecord
from envs.json_types import ChatMessage


class ReplayedRow(LineRecord):
    """A conversation that is trained beside the run's own rows.

    Attributes:
        source: the battery whose practice question it answers, or the id of an environment.
        task: the question's or the row's id in there.
        family: the skill; "" where the source names none.
        messages: the conversation for people, the answer last.
        ids: every token id, prompt and answer.
        loss_mask: 1 for each id that is trained, else 0.
    """

    source: str
    task: str
    family: str = ""
    messages: list[ChatMessage]
    ids: list[int]
    loss_mask: list[int]


def read_replayed(path: Path) -> list[ReplayedRow]:
    """The replayed rows of a run; [] where there is no file. Damaged lines are left out."""
    return ReplayedRow.read_all(path)

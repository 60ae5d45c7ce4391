"""Something that happened to a run: a line of `events.jsonl`."""

from pathlib import Path

from pydantic import ConfigDict

from engine.records.lines.line_record import Line, LineRecord


class Event(LineRecord):
    """An event: its name, a sentence for people, and fields that its kind of event has.

    Attributes:
        time: when it was written, seconds since the epoch.
        event: its name.
        message: the sentence, "" where there is none.
    """

    # Each kind of event has its own fields; what was measured may be infinite, the file says null.
    model_config = ConfigDict(extra="allow", allow_inf_nan=True)

    time: float
    event: str
    message: str = ""

    @property
    def fields(self) -> Line:
        """The fields of the event other than its time, name and sentence."""
        return self.model_extra or {}

    @property
    def step(self) -> int | None:
        """The training step that the event belongs to; None where it belongs to none."""
        step = self.fields.get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) else None


def read_events(path: Path) -> list[Event]:
    """All events of a run in order; [] where there is no file. Damaged lines are left out;
    `Event.read_file` counts them."""
    return Event.read_all(path)

"""Something that happened to a run: a line of `events.jsonl`."""

from pathlib import Path

from pydantic import ConfigDict

from engine.records.lines.line_record import Line, LineRecord


class Event(LineRecord):
    """An event: its name, a sentence for people, and fields that its kind of event has.

    Attributes:
        time: when the event was written, in seconds since the epoch.
        event: the name of the kind of event.
        message: the sentence for people; "" if there is none.
    """

    # Each kind of event has its own further fields. A number in them may be infinite; the file then
    # holds null.
    model_config = ConfigDict(extra="allow", allow_inf_nan=True)

    time: float
    event: str
    message: str = ""

    @property
    def fields(self) -> Line:
        """The further fields of the event, without time, name and sentence."""
        return self.model_extra or {}

    @property
    def step(self) -> int | None:
        """The training step of the event; None if it belongs to no step."""
        step = self.fields.get("step")
        return step if isinstance(step, int) and not isinstance(step, bool) else None


def read_events(path: Path) -> list[Event]:
    """Read all events of a run, in order; [] if there is no file.

    Damaged lines are left out; `Event.read_file` also counts them.
    """
    return Event.read_all(path)

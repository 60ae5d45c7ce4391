"""How long a run has held its devices at a place that counts that, and why it waits for them.

A wait in a queue costs nothing.

The attendant notes it in `spent.json` of the run's folder; the supervisor counts with it instead of
its clock.
"""

from engine.core.files import read_object, write_json
from engine.home.run_dir import RunDir


def begin(run: RunDir, attempt: int) -> None:
    """Write to spent.json that the attempt with this number has begun and has held its devices for
    0 seconds so far. If the file is of that attempt already, it stays as it is."""
    before = read_object(run.far("spent"))
    if before.get("attempt") != attempt:
        after = {**before, "attempt": attempt, "seconds": 0.0, "why": ""}
        write_json(run.far("spent"), after, fsync=False)


def note(run: RunDir, attempt: int, launch: int, spent_s: float, why: str = "") -> None:
    """Write to spent.json how long a run has held its devices at a host.

    An attempt (of the run, on this machine) may start several launches on the host, and may go on
    with the launch of an earlier attempt. Its "seconds" are those of all its launches, without the
    seconds that an earlier attempt has counted already.

    Args:
        attempt: the number of the current attempt.
        launch: the number of the launch on the host.
        spent_s: seconds for which this launch has held its devices so far, as the host counts.
        why: why the launch still waits for its devices; "" if it does not.
    """
    before = read_object(run.far("spent"))
    known_s = _number(before, "spent_s") if before.get("launch") == launch else 0.0
    counted_s = _number(before, "seconds") if before.get("attempt") == attempt else 0.0
    after = {
        "attempt": attempt,
        "launch": launch,
        "spent_s": max(known_s, spent_s),  # an older answer may come late
        "seconds": counted_s + max(0.0, spent_s - known_s),
        "why": why,
    }
    if after != before:
        write_json(run.far("spent"), after, fsync=False)


def of_launch(run: RunDir, launch: int) -> float | None:
    """Return for how many seconds a launch has held its devices, as was noted last; None if nothing
    is noted of it."""
    record = read_object(run.far("spent"))
    return _number(record, "spent_s") if record.get("launch") == launch else None


def _number(record: dict[str, object], key: str) -> float:
    """Return the number at `key` of a record, or 0 if it has none there."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else 0.0

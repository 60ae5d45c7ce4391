"""How long a run has held its devices at a place that counts that, and why it waits for them.

A wait in a queue costs nothing.

The attendant notes it in `spent.json` of the run's folder; the supervisor counts with it instead of
its clock.
"""

from engine.core.files import read_object, write_json
from engine.home.run_dir import RunDir


def begin(run: RunDir, attempt: int) -> None:
    """Note that an attempt has begun: until its place says more, it has cost nothing."""
    before = read_object(run.far("spent"))
    if before.get("attempt") != attempt:
        now = {**before, "attempt": attempt, "seconds": 0.0, "why": ""}
        write_json(run.far("spent"), now, fsync=False)


def note(run: RunDir, attempt: int, launch: int, spent_s: float, why: str = "") -> None:
    """Note that a launch has held its devices for `spent_s` seconds, as seen in an attempt, and why
    it waits for them; "" where it does not.

    An attempt counts what came since the last look of the one before it, and all of its launches.
    """
    before = read_object(run.far("spent"))
    seen_s = _number(before, "spent_s") if before.get("launch") == launch else 0.0
    counted_s = _number(before, "seconds") if before.get("attempt") == attempt else 0.0
    now = {
        "attempt": attempt,
        "launch": launch,
        "spent_s": max(seen_s, spent_s),
        "seconds": counted_s + max(0.0, spent_s - seen_s),
        "why": why,
    }
    if now != before:
        write_json(run.far("spent"), now, fsync=False)


def _number(record: dict[str, object], key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else 0.0

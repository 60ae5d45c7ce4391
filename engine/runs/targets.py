"""How far a run under way is from its target, and how it is stopped once that is passed."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.format import percent, significant
from engine.evidence.stats.basics.target import target_in
from engine.home.rows import RunRow
from engine.home.run_dir import RunDir
from engine.machine.pace.progress import events_from
from engine.records.lines.line_record import Line


@dataclass(frozen=True)
class TargetProgress:
    """The target of a run beside its best score so far, on the tasks that choose the checkpoint.

    Attributes:
        text: the target and the best score, such as "90 %; best so far 0.85".
        note: that the target is passed and what stopping leaves, as the end of a sentence; "" if
            it is not.
        can_stop: whether the target is passed, stopping loses nothing that was trained for it, and
            nothing else waits for the run to go on.
    """

    text: str
    note: str = ""
    can_stop: bool = False


def target_progress(run: RunDir, row: RunRow) -> TargetProgress | None:
    """Read how far a run is from its target, such as "90 %", which the user set at submit. Returns
    None if it has no target."""
    target = target_in(row.expect)
    if target is None:
        return None
    scored_events = _scored_events(run)
    if not scored_events:
        return TargetProgress(target.in_words)
    best = max(score for score, _ in scored_events)
    text = f"{target.in_words}; best so far {significant(best)}"
    passing_events = [
        (score, event) for score, event in scored_events if target.is_reached_by(score)
    ]
    if not passing_events or row.state != "running":
        return TargetProgress(text)
    score, event = passing_events[0]  # the first evaluation that passed the target
    is_share = event.get("heldout_success") is not None
    score_text = percent(score) if is_share else significant(score)
    note = (
        f"; its target {target.in_words} is passed on the tasks that choose the checkpoint "
        f"({score_text} at step {event.get('step')})"
    )
    if row.plan:  # to stop one step of a plan would end the steps after it too
        return TargetProgress(text, note)
    if run.best.exists():
        note += (
            f": cancel_run stops it and keeps {row.run_id}@best, without a verdict or a check of "
            "kept skills; evaluate that beside its start for a verdict"
        )
        return TargetProgress(text, note, can_stop=True)
    if event.get("step") == 0:  # the model that it starts from passes the target
        return TargetProgress(text, f"{note}: the model it starts from does", can_stop=True)
    return TargetProgress(text, f"{note}, but no checkpoint is there yet")


def passes_target(run: RunDir, row: RunRow, events: Sequence[Line]) -> bool:
    """Tell whether the run's target was passed for the first time by an evaluation among these
    events of it. Returns False if it has no target."""
    target = target_in(row.expect)
    if target is None or not any(event.get("event") == "evaluated" for event in events):
        return False
    passing = (event for score, event in _scored_events(run) if target.is_reached_by(score))
    return next(passing, None) in events


def _scored_events(run: RunDir) -> list[tuple[float, Line]]:
    """Return the run's evaluations that have a score, in their order, as (score, event)."""
    events, _ = events_from(run, cursor=0)
    scored_events = []
    for event in events:
        score = _score_of(event)
        if score is not None:
            scored_events.append((score, event))
    return scored_events


def _score_of(event: Line) -> float | None:
    """Return the held-out success of an evaluation, else its reward. Returns None for any other
    event, and if nothing was scored."""
    if event.get("event") != "evaluated":
        return None
    return event.get("heldout_success", event.get("heldout_reward"))

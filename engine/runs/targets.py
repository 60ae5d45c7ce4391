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
    passing_steps = {event.get("step") for _, event in passing_events}
    if _best_step(run) in passing_steps:
        note += (
            f": cancel_run stops it and keeps {row.run_id}@best, without a verdict or a check of "
            "kept skills; evaluate that beside its start for a verdict"
        )
        return TargetProgress(text, note, can_stop=True)
    if event.get("step") == 0:  # the model that it starts from passes the target
        return TargetProgress(text, f"{note}: the model it starts from does", can_stop=True)
    return TargetProgress(text, f"{note}, but no checkpoint is there yet")


def may_stop_since(run: RunDir, row: RunRow, events: Sequence[Line]) -> bool:
    """Tell whether the run may be stopped at its target since one of these events of it: the
    checkpoint of the first evaluation that passed the target, or that of its start. Returns False
    if it has no target."""
    # A wait asks several times a second, and the events of the whole run are read below.
    if not any(event.get("event") in ("evaluated", "checkpoint") for event in events):
        return False
    progress = target_progress(run, row)
    if progress is None or not progress.can_stop:
        return False
    return _stoppable_since(run, row) in events


def _stoppable_since(run: RunDir, row: RunRow) -> Line | None:
    """Return the event since which a run that passed its target may be stopped; None if there is
    none."""
    target = target_in(row.expect)
    assert target is not None
    passing_steps: set[object] = set()
    for event in events_from(run, cursor=0)[0]:
        score = _score_of(event)
        if score is not None and target.is_reached_by(score):
            passing_steps.add(event.get("step"))
            if event.get("step") == 0:  # the model that the run starts from
                return event
        if event.get("event") == "checkpoint" and event.get("step") in passing_steps:
            return event
    return None


def _best_step(run: RunDir) -> int | None:
    """Return the step of the run's best checkpoint so far; None if there is none."""
    try:
        return int(run.best.readlink().name.removeprefix("step_"))
    except (OSError, ValueError):
        return None


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

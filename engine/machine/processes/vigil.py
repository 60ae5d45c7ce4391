"""Judges a trainer's heartbeats for its supervisor: whether the trainer hangs, and whether its
hours will be enough.

The silence between heartbeats is measured on the supervisor's monotonic clock, which neither a
changed time of day nor a machine that sleeps can distort.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.core.files import read_object
from engine.core.format import words
from engine.home.rows import RunRow
from engine.home.run_dir import RunDir
from engine.machine.pace.forecast import (
    cap_sentence,
    estimated_seconds,
    remaining_after,
)
from engine.machine.pace.heartbeat import Heartbeat, Work, read_heartbeat
from engine.machine.pace.staleness import Patience, patience, stop_grace_s
from engine.machine.processes import outcome
from engine.machine.processes.limits import Limit

LOOK_EVERY_S = 1.0  # seconds between two readings of the heartbeat
_ALERT_AFTER_UNITS = 2  # steps or answers that must be done before a forecast raises an alert
# The alert that a run takes longer than estimated is raised if the forecast exceeds the estimate's
# high end both by this factor and by these seconds. It is cleared only when the forecast is back at
# the high end, because forecasts swing on a busy machine.
_LATER_BY = 1.2
_LATER_BY_S = 300.0
OVER_CAP, OVER_ESTIMATE = "over_cap", "over_estimate"


@dataclass
class Vigil:
    """Watches the heartbeats of one attempt.

    Attributes:
        run, row: the run and its row.
        clock: returns seconds; monotonic.
        began: when the attempt began, by `clock`.
        heard_at: when the heartbeat was last seen to change, by `clock`.
        looked_at: when the heartbeat was last read, by `clock`.
        heartbeat: the last one that was read; None before the first.
        estimated: the run's estimated seconds by part of the work.
        raised: the ids of the alerts that are raised now.
    """

    run: RunDir
    row: RunRow
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)
    heard_at: float = field(init=False)
    looked_at: float = field(init=False)
    heartbeat: Heartbeat | None = None
    estimated: Mapping[str, float] = field(default_factory=dict)
    raised: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Start all times now, and read the run's estimate."""
        self.began = self.heard_at = self.looked_at = self.clock()
        self.estimated = estimated_seconds(self.run)

    def read_heartbeat_if_due(self) -> bool:
        """Read the trainer's heartbeat, unless it was read less than `LOOK_EVERY_S` seconds ago.
        Return whether a new one was read."""
        now = self.clock()
        if now - self.looked_at < LOOK_EVERY_S:
            return False
        self.looked_at = now
        heartbeat = read_heartbeat(self.run)
        if heartbeat is None or heartbeat == self.heartbeat:
            return False
        self.heartbeat, self.heard_at = heartbeat, now
        return True

    def patience(self) -> Patience:
        """Return how long the trainer may be silent at present."""
        stop_minutes = self.run.home.user_config().stop_stalled_minutes
        return patience(self.heartbeat, self.estimated, stop_minutes)

    def stop_grace_s(self) -> float:
        """Return how many seconds the trainer may take to stop; the minimum if it is silent for too
        long."""
        is_silent = self.looked_at - self.heard_at > self.patience().stalled_s
        return stop_grace_s(None if is_silent else self.heartbeat, self.estimated)

    def limit(self, elapsed_s: float) -> Limit | None:
        """Return the limit at which the trainer has been silent for too long.

        Its seconds count from the start of the attempt, which is `elapsed_s` seconds ago. Returns
        None if the owner of the home has switched this off, or for a process that sends no
        heartbeats.
        """
        # No heartbeats: a process without a model ("regrade", or no device), and a run on another
        # machine, for whose heartbeats the supervisor over there listens.
        is_mute = self.row.algorithm == "regrade" or self.row.gpus == 0 or self.row.is_elsewhere
        if is_mute or not self.run.home.user_config().stop_stalled_minutes:
            return None
        patience = self.patience()
        silent_s = self.looked_at - self.heard_at  # up to the last reading
        return Limit(elapsed_s - silent_s + patience.stop_s, "stalled", stalled_reason(patience))

    def note_forecast(self, cap: Limit | None, elapsed_s: float) -> None:
        """Write an event when the forecast of the run's end begins or ceases to exceed a limit.

        The limits are `cap` and the run's time estimate; `elapsed_s` are the seconds since the
        attempt began.
        """
        if self.heartbeat is None or not _has_measured(self.heartbeat):
            return
        since_heartbeat_s = self.clock() - self.heard_at
        remaining = remaining_after(self.heartbeat, self.estimated, since_heartbeat_s)
        over_cap_sentence = ""  # this sentence and the next are "" if the limit is not exceeded
        if cap is not None:
            cap_left_s = cap.seconds - elapsed_s
            over_cap_sentence = cap_sentence(
                remaining, _step_of(self.heartbeat), cap_left_s, cap.reason
            )
        self._set_alert(OVER_CAP, over_cap_sentence, "resume it afterwards with a cap of its own")
        if self.row.attempt == 1 and self.row.kind == "train":  # later attempts repeat work
            total_s = elapsed_s + remaining.seconds.likely
            later_sentence = _later_sentence(
                self.run, total_s, is_raised=OVER_ESTIMATE in self.raised
            )
            self._set_alert(
                OVER_ESTIMATE, later_sentence, "wait, or cancel it and lower eval_rows or steps"
            )

    def _set_alert(self, alert_id: str, message: str, next_move: str) -> None:
        """Raise or clear an alert, with an event if that changes its state.

        An empty `message` clears the alert. `next_move` is what the user can do about it.
        """
        if message and alert_id not in self.raised:
            self.raised.add(alert_id)
            advice = {"edit": next_move}
            outcome.note_event(
                self.run, "alert", f"{message}: {next_move}", id=alert_id, lever=advice
            )
        elif not message and alert_id in self.raised:
            self.raised.discard(alert_id)
            outcome.note_event(self.run, "alert_cleared", f"{alert_id} is over", id=alert_id)


def stalled_reason(patience: Patience) -> str:
    """Say why a trainer was ended that was silent for longer than `patience` allows."""
    usual = f", usually at most {words(patience.usual_s / 3600)}" if patience.usual_s else ""
    return (
        f"the trainer gave no sign of life for {words(patience.stop_s / 3600)} in the phase "
        f"{patience.phase}{usual}"
    )


def _later_sentence(run: RunDir, total_s: float, *, is_raised: bool) -> str:
    """Say that a run will take clearly longer than was estimated at submit; "" if it will not.

    `total_s` is the likely time of the whole run in seconds. If the alert `is_raised` already, any
    time above the estimate's high end counts as longer.
    """
    estimate = read_object(run.config).get("estimate")
    hours = estimate.get("hours") if isinstance(estimate, dict) else None
    most_hours = hours.get("high") if isinstance(hours, dict) else None
    if not isinstance(most_hours, int | float) or most_hours <= 0:
        return ""
    estimated_s = 3600 * most_hours
    clearly_longer_s = max(_LATER_BY * estimated_s, estimated_s + _LATER_BY_S)
    threshold_s = estimated_s if is_raised else clearly_longer_s
    if total_s < threshold_s:
        return ""
    return f"it will take about {words(total_s / 3600)}, estimated were at most {words(most_hours)}"


def _has_measured(heartbeat: Heartbeat) -> bool:
    """Return whether enough steps (or, in an evaluation, answers) are done for a forecast that may
    raise an alert."""
    steps = heartbeat.work.get("training", Work())
    answers = heartbeat.work.get("evaluation", Work())
    measured = steps if steps.planned else answers
    return measured.planned > 0 and measured.done >= _ALERT_AFTER_UNITS


def _step_of(heartbeat: Heartbeat) -> int:
    """Return the number of the run's last finished training step, counted over all attempts."""
    return heartbeat.outlook.steps_before + heartbeat.work.get("training", Work()).done

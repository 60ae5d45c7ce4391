"""Ends a run that cannot learn, or has no more to learn: no differing rewards for long, or too many
scores that failed."""

import math
import statistics
from collections.abc import Sequence

from engine.core.format import whole_percent
from engine.core.hints import Call, Hint
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import LoopState, Result
from engine.worker.core.trajectory import Trajectory
from engine.worker.rollouts.batch_source import RolloutBatch

NO_SIGNAL_STEPS = 10  # the run ends after so many steps in a row without a gradient
ERRORS_JUDGED_FROM = 32  # failed scores end a run only after so many completions
# Rewards that fell by more than this share of what they were, and by more than so many standard
# errors, are a collapse.
_LOST_SHARE, _LOST_ERRORS = 0.1, 2.0


class Guard:
    """Checks every batch, and ends a run that cannot learn, or has no more to learn."""

    def __init__(self, error_limit: float, state: LoopState, run_id: str) -> None:
        """Watch the run `run_id`, in which scoring may fail for at most the share `error_limit` of
        the completions. The counters in `state` start at 0; a resumed run brings its own."""
        self.error_limit = error_limit
        self.run_id = run_id
        self.state = state
        state.setdefault("silent_steps", 0)  # how many latest steps in a row had no advantage
        # Whether an earlier step had one. A run of a version before this number was kept had one
        # if it did more steps than the latest silent ones.
        earlier_steps = state.get("played", 0) > 0 and "had_signal" not in state
        state.setdefault("had_signal", earlier_steps and state["silent_steps"] < NO_SIGNAL_STEPS)
        # Mean rewards of the first steps of the run, and of the latest silent ones.
        state.setdefault("first_means", [])
        state.setdefault("silent_means", [])
        state.setdefault("played", 0)  # completions of the whole run
        state.setdefault("errors", 0)  # those of them that could not be scored

    def check(self, step: int, batch: RolloutBatch) -> None:
        """Count the rollouts of a step (`batch`), and end the run if it cannot learn.

        If all advantages were 0 for `NO_SIGNAL_STEPS` steps in a row, and rewards had differed
        before and are no lower than at the start, there is nothing left to learn: the state gets
        `ends_at`, this step, which makes it the last one.

        Raises:
            WorkerFailure: kind reward, if too many completions could not be scored; kind
                no_signal, if all advantages were 0 for `NO_SIGNAL_STEPS` steps in a row and that is
                how the run began, or the rewards fell.
        """
        members = batch.members
        self._check_scores(step, members)
        scored = [trajectory.reward for trajectory in members if trajectory.error is None]
        if not scored:  # `max_reward_errors` ends such a run
            return
        mean = statistics.fmean(scored)
        if len(self.state["first_means"]) < NO_SIGNAL_STEPS:
            self.state["first_means"] = [*self.state["first_means"], mean]
        if all(trajectory.advantage == 0.0 for trajectory in members):
            self.state["silent_steps"] += 1
            self.state["silent_means"] = [*self.state["silent_means"], mean][-NO_SIGNAL_STEPS:]
        else:
            self.state |= {"silent_steps": 0, "silent_means": [], "had_signal": True}
        if self.state["silent_steps"] < NO_SIGNAL_STEPS:
            return
        if self.state["had_signal"] and not self._has_collapsed():
            self.state["ends_at"] = step
            return
        rewards = {trajectory.reward for trajectory in members}
        raise WorkerFailure(
            "no_signal",
            f"No group had rewards that differ for {NO_SIGNAL_STEPS} steps.",
            evidence=f"step {step}: rewards {sorted(rewards)[:5]}",
            hint="All alike and low: easier tasks, partial credit or SFT first; a lower "
            "learning_rate if they were higher before. All alike and high: the tasks are learnt, "
            "use harder ones. Then submit again.",
        )

    def _has_collapsed(self) -> bool:
        """Tell whether the rewards of the latest silent steps are clearly lower than those of the
        first steps."""
        first_means, silent_means = self.state["first_means"], self.state["silent_means"]
        first, silent = statistics.fmean(first_means), statistics.fmean(silent_means)
        variances = [
            statistics.variance(means) / len(means) if len(means) > 1 else 0.0
            for means in (first_means, silent_means)
        ]
        noise = _LOST_ERRORS * math.sqrt(sum(variances))
        return first - silent > max(_LOST_SHARE * abs(first), noise)

    def _check_scores(self, step: int, members: Sequence[Trajectory]) -> None:
        """Count the completions of a step (`members`) and those that could not be scored.

        Raises:
            WorkerFailure: kind reward, if the run has at least `ERRORS_JUDGED_FROM` completions
                and a larger share of them than the limit could not be scored.
        """
        failed = [trajectory for trajectory in members if trajectory.error is not None]
        self.state["played"] += len(members)
        self.state["errors"] += len(failed)
        self.state["last_errors"] = [len(failed), len(members)]  # both counts, of the last step
        share = self.state["errors"] / self.state["played"]  # of the whole run
        # `failed` is required so that failures of earlier steps alone do not end a resumed run.
        if failed and self.state["played"] >= ERRORS_JUDGED_FROM and share > self.error_limit:
            raise self._scoring_failure(share, f"step {step}: {failed[0].error}")

    def _scoring_failure(self, share: float, evidence: str) -> WorkerFailure:
        """Return the failure of a run in which `share` of the completions could not be scored.
        `evidence` is one of the errors."""
        return WorkerFailure(
            "reward",
            f"{whole_percent(share)} of the completions could not be scored.",
            evidence=evidence,
            hint=Hint(
                "Mend score() and push again, or raise max_reward_errors. The completions, "
                "where a step was done:",
                Call("read_rollouts", {"run_id": self.run_id, "pick": "error"}),
            ),
        )

    def failed_scores(self) -> Result:
        """Return how many completions could not be scored, for the result record. For example
        `{"failed": 3, "of": 640, "last_step": {"failed": 0, "of": 64}}`: 3 of 640 in the whole run,
        none of 64 in its last step."""
        last_errors, last_played = self.state.get("last_errors", (0, 0))
        counts = {"failed": self.state["errors"], "of": self.state["played"]}
        return counts | {"last_step": {"failed": last_errors, "of": last_played}}

    def close(self, steps: int) -> None:
        """At the end of a run of `steps` steps, set `no_gradient` in the state if no step had a
        gradient, so that unchanged weights are not reported as a failure."""
        if self.state["silent_steps"] >= steps:  # all steps were silent: no advantage but 0
            self.state["no_gradient"] = True

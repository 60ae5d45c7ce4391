"""Ends a run that cannot learn: no signal for long, or too many scores that failed."""

from collections.abc import Sequence

from engine.core.format import whole_percent
from engine.core.hints import Call, Hint
from engine.worker.core.failures import WorkerFailure
from engine.worker.core.job import LoopState, Result
from engine.worker.core.trajectory import Trajectory
from engine.worker.rollouts.batch_source import RolloutBatch

NO_SIGNAL_STEPS = 10  # steps in a row without a gradient after which the run ends
ERRORS_JUDGED_FROM = 32  # completions of a run; engine/records/settings.py says so


class Guard:
    """Looks at every batch, and ends a run that cannot learn."""

    def __init__(self, error_limit: float, state: LoopState, run_id: str) -> None:
        """Watch the run `run_id`, in which at most the share `error_limit` of the completions may
        fail to be scored. The counters in `state` start at 0; a resumed run brings its own."""
        self.error_limit = error_limit
        self.run_id = run_id
        self.state = state
        state.setdefault("silent_steps", 0)  # the latest steps in a row without an advantage
        state.setdefault("played", 0)  # completions of the whole run
        state.setdefault("errors", 0)  # those of them that could not be scored

    def check(self, step: int, batch: RolloutBatch) -> None:
        """Count the rollouts of a step, and end the run if it cannot learn.

        Raises:
            WorkerFailure: kind reward, when too many completions could not be scored; kind
                no_signal, when all advantages were 0 for `NO_SIGNAL_STEPS` steps in a row.
        """
        members = batch.members
        self._check_scores(step, members)
        if all(trajectory.advantage == 0.0 for trajectory in members):
            self.state["silent_steps"] += 1
        else:
            self.state["silent_steps"] = 0
        if self.state["silent_steps"] >= NO_SIGNAL_STEPS:
            rewards = {trajectory.reward for trajectory in members}
            raise WorkerFailure(
                "no_signal",
                f"No group had rewards that differ for {NO_SIGNAL_STEPS} steps.",
                evidence=f"step {step}: rewards {sorted(rewards)[:5]}",
                hint="All alike and low: easier tasks, partial credit or SFT first. All alike and "
                "high: the tasks are learnt, use harder ones. Then submit again.",
            )

    def _check_scores(self, step: int, members: Sequence[Trajectory]) -> None:
        """Count the completions of a step and those that could not be scored.

        Raises:
            WorkerFailure: kind reward, when a larger share of the run's completions than the limit
                could not be scored; not before there are `ERRORS_JUDGED_FROM` of them.
        """
        failed = [t for t in members if t.error is not None]
        self.state["played"] += len(members)
        self.state["errors"] += len(failed)
        self.state["last_errors"] = [len(failed), len(members)]  # both counts, of the last step
        share = self.state["errors"] / self.state["played"]  # of the whole run
        # `failed`: a resumed run is not ended by failures of earlier steps alone.
        if failed and self.state["played"] >= ERRORS_JUDGED_FROM and share > self.error_limit:
            raise self._scoring_failure(share, f"step {step}: {failed[0].error}")

    def _scoring_failure(self, share: float, evidence: str) -> WorkerFailure:
        """The failure of a run in which `share` of the completions could not be scored; `evidence`
        is one of the errors."""
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
        """How many completions could not be scored, for the result record. For example
        `{"failed": 3, "of": 640, "last_step": {"failed": 0, "of": 64}}`: 3 of 640 in the whole run,
        none of 64 in its last step."""
        last_errors, last_played = self.state.get("last_errors", (0, 0))
        counts = {"failed": self.state["errors"], "of": self.state["played"]}
        return counts | {"last_step": {"failed": last_errors, "of": last_played}}

    def close(self, steps: int) -> None:
        """At the end of a run of `steps` steps, set `no_gradient` in the state if none of them had
        a gradient, so that unchanged weights are not reported as a failure."""
        if self.state["silent_steps"] >= steps:
            self.state["no_gradient"] = True

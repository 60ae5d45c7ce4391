"""What the finished runs of a home teach the next estimate: phase by phase, and model by model.

A run's config.json holds what it was to compute, its result.json what it
measured. Phases are corrected each by themselves, because they scale with different things: the
start of a run hardly at all, evaluations with the rows, training with the steps. Start,
evaluations and checkpoints are the same work under every algorithm, so all runs teach them.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.cost.flops import Seen, Work
from engine.cost.throughput import Speed
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.estimate import EarlierWorkload
from engine.records.record import DamagedRecord
from engine.records.run_config import TrainConfig
from engine.records.run_result import RunResult

RUNS = 20  # of each algorithm, the newest
CALIBRATE_FROM = 3  # finished runs
ALGORITHMS = ("sft", "grpo")
# Phases of an estimate and the names their measured seconds have; the rest of a run is its start.
MEASURED = {
    "training": "train_s",
    "rollouts": "sample_s",
    "rewards": "reward_s",
    "evaluation": "exam_s",
    "checkpoints": "save_s",
}
SHARED = ("startup", "evaluation", "checkpoints")
# How much the prediction itself counts beside the runs, in runs.
DOUBT = 0.25
MEMORY_DOUBT = 3.0  # memory follows from sizes, not from a machine's mood
LEAST_START_S = 0.5


@dataclass(frozen=True)
class FinishedRun:
    """One finished run.

    Attributes:
        seconds, predicted: by phase, as it was and as it would be predicted now, uncorrected.
        total: seconds of the whole run.
        base: path of its base model.
        said, turns, effective: see `Seen`; None where the run measured none.
        memory, predicted_memory: peak bytes.
    """

    algorithm: str
    seconds: Mapping[str, float]
    predicted: Mapping[str, float]
    total: float
    base: str
    said: float | None
    turns: float | None
    effective: float | None
    memory: float
    predicted_memory: float


@dataclass(frozen=True)
class Experience:
    """The finished runs of a home.

    Attributes:
        past: those that teach something.
        left_out: a sentence for each run with a damaged file, naming run, file and fault.
    """

    past: Sequence[FinishedRun] = ()
    left_out: tuple[str, ...] = ()

    def of(self, algorithm: str) -> list[FinishedRun]:
        return [run for run in self.past if run.algorithm == algorithm]

    def seen(self, base: str) -> Seen:
        """What is known of a base model, by the path of its folder."""
        runs = [run for run in self.past if run.base == base]
        return Seen(
            len(runs),
            _mean([run.said for run in runs if run.said is not None]),
            _mean([run.turns for run in runs if run.turns is not None]),
            _mean([run.effective for run in runs if run.effective is not None]),
        )

    def factors(self, algorithm: str) -> dict[str, float]:
        """What each predicted phase is to be multiplied with; 1 where too little is known."""
        factors = {}
        for phase in ("startup", *MEASURED):
            runs = self.past if phase in SHARED else self.of(algorithm)
            factors[phase] = _factor(
                [
                    (run.seconds[phase], run.predicted[phase])
                    for run in runs
                    if phase in run.seconds and phase in run.predicted
                ]
            )
        return factors

    def memory_factor(self, algorithm: str) -> float:
        """What predicted peak memory is to be multiplied with."""
        runs = self.of(algorithm)
        pairs = [(r.memory, r.predicted_memory) for r in runs if r.memory > 0]
        return _factor(pairs, MEMORY_DOUBT)

    def misses(self, algorithm: str) -> list[float]:
        """Logarithms of actual over corrected time, run by run."""
        factors = self.factors(algorithm)
        misses = []
        for run in self.of(algorithm):
            corrected = sum(
                value * factors.get(phase, 1.0) for phase, value in run.predicted.items()
            )
            if corrected > 0 and run.total > 0:
                misses.append(math.log(run.total / corrected))
        return misses


def experience(home: Home, rate: Speed, kind: str) -> Experience:
    """Read it from the home; runs whose files are gone, damaged or of an earlier version teach
    nothing.

    Args:
        kind: of the device the estimate is for, cpu or cuda; runs of the other kind teach nothing.
        rate: of the machine as it is known now: what a run computed was kept with it, so a
            prediction made before the machine was measured corrects nothing wrongly.
    """
    if not home.db.is_file():
        return Experience()
    runs: list[FinishedRun] = []
    left_out: list[str] = []
    for algorithm in ALGORITHMS:
        with Store(home) as store:
            rows = store.calibration(algorithm, limit=RUNS)
        for row in rows:
            features = row["features"]
            on_cpu = str(features.get("device") or "cpu").startswith("cpu")
            if on_cpu != (kind == "cpu"):
                continue
            run, total = home.run(str(features["run_id"])), 3600 * float(row["actual"])
            try:
                past = _finished_run(run, rate, algorithm, total)
            except DamagedRecord as damage:  # one bad file must not stop every estimate
                left_out.append(f"{run.id} is left out of this estimate: {damage.message}")
                continue
            if past is not None:
                runs.append(past)
    return Experience(tuple(runs), tuple(left_out))


def _finished_run(run: RunDir, rate: Speed, algorithm: str, total: float) -> FinishedRun | None:
    """What a run that took `total` seconds teaches; None where its files were deleted, or where an
    earlier version wrote them. Raises DamagedRecord naming the file and the key at fault."""
    try:
        config, measured = run.read_config(), RunResult.read(run.result).measured
    except FileNotFoundError:
        return None
    if not isinstance(config, TrainConfig) or measured is None:
        return None
    workload = config.estimate.uncalibrated
    if isinstance(workload, EarlierWorkload):
        return None
    works = {name: Work(*values) for name, values in workload.works.items()}
    predicted = replace(rate, score_s=workload.score_s).phases(
        works, workload.layers, workload.weight_bytes, first=workload.first
    )
    seconds = {
        phase: measured.seconds[name]
        for phase, name in MEASURED.items()
        if name in measured.seconds
    }
    seconds["startup"] = max(LEAST_START_S, total - sum(seconds.values()))
    return FinishedRun(
        algorithm,
        seconds,
        predicted,
        total,
        config.base.path,
        measured.said_share,
        measured.turns_mean,
        measured.effective_share,
        measured.peak_memory,
        workload.memory,
    )


def _factor(pairs: Sequence[tuple[float, float]], doubt: float = DOUBT) -> float:
    """Sum of the actual over sum of the predicted: long phases count for more than short ones."""
    actual, predicted = sum(a for a, _ in pairs), sum(p for _, p in pairs)
    if len(pairs) < CALIBRATE_FROM or actual <= 0 or predicted <= 0:
        return 1.0
    held = doubt * predicted / len(pairs)
    return (actual + held) / (predicted + held)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None

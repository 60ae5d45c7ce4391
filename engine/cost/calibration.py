"""What the finished runs of a home teach the next estimate: phase by phase, and model by model.

A run's config.json holds what it was to compute, its result.json what it
measured. Phases are corrected each by themselves, because they scale with different things: the
start of a run hardly at all, evaluations with the rows, training with the steps. Start,
evaluations and checkpoints are the same work under every algorithm, so all runs teach them.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core.files import read_json
from engine.cost.flops import Seen, Work
from engine.cost.throughput import Speed
from engine.home.run_dir import Home
from engine.home.store import Store

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
class Past:
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
    """The finished runs of a home."""

    past: Sequence[Past] = field(default_factory=tuple)

    def of(self, algorithm: str) -> list[Past]:
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
        found = {}
        for phase in ("startup", *MEASURED):
            runs = self.past if phase in SHARED else self.of(algorithm)
            pairs = [(run.seconds[phase], run.predicted[phase]) for run in runs
                     if phase in run.seconds and phase in run.predicted]  # fmt: skip
            found[phase] = _factor(pairs)
        return found

    def memory_factor(self, algorithm: str) -> float:
        """What predicted peak memory is to be multiplied with."""
        runs = self.of(algorithm)
        pairs = [(r.memory, r.predicted_memory) for r in runs if r.memory > 0]
        return _factor(pairs, MEMORY_DOUBT)

    def misses(self, algorithm: str) -> list[float]:
        """Logarithms of actual over corrected time, run by run."""
        factors = self.factors(algorithm)
        found = []
        for run in self.of(algorithm):
            corrected = sum(
                value * factors.get(phase, 1.0) for phase, value in run.predicted.items()
            )
            if corrected > 0 and run.total > 0:
                found.append(math.log(run.total / corrected))
        return found


def experience(home: Home, rate: Speed, kind: str) -> Experience:
    """Read it from the home; runs whose files do not tell are left out.

    Args:
        kind: of the device the estimate is for, cpu or cuda; runs of the other kind teach nothing.
        rate: of the machine as it is known now: what a run computed was kept with it, so a
            prediction made before the machine was measured corrects nothing wrongly.
    """
    if not home.db.is_file():
        return Experience()
    found = []
    for algorithm in ALGORITHMS:
        with Store(home) as store:
            rows = store.calibration(algorithm, limit=RUNS)
        for row in rows:
            on_cpu = str(row["features"].get("device") or "cpu").startswith("cpu")
            past = _past(home, rate, algorithm, row) if on_cpu == (kind == "cpu") else None
            if past is not None:
                found.append(past)
    return Experience(tuple(found))


def _past(home: Home, rate: Speed, algorithm: str, row: Mapping[str, Any]) -> Past | None:
    try:
        run, total = home.run(row["features"]["run_id"]), 3600 * row["actual"]
        config, result = read_json(run.config), read_json(run.result)
        said = config["estimate"]["uncalibrated"]
        works = {name: Work(*values) for name, values in said["works"].items()}
        rate = replace(rate, score_s=float(said["score_s"]))
        predicted = rate.phases(
            works, int(said["layers"]), int(said["weight_bytes"]), first=bool(said["first"])
        )
        measured = result["measured"]
        seconds = {
            phase: float(measured["seconds"][name])
            for phase, name in MEASURED.items()
            if name in measured["seconds"]
        }
        seconds["startup"] = max(LEAST_START_S, total - sum(seconds.values()))
        return Past(
            algorithm,
            seconds,
            predicted,
            total,
            str(config["base"]["path"]),
            _number(measured.get("said_share")),
            _number(measured.get("turns_mean")),
            _number(measured.get("effective_share")),
            float(measured["peak_memory"]),
            float(said["memory"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _factor(pairs: Sequence[tuple[float, float]], doubt: float = DOUBT) -> float:
    """Sum of the actual over sum of the predicted: long phases count for more than short ones."""
    actual, predicted = sum(a for a, _ in pairs), sum(p for _, p in pairs)
    if len(pairs) < CALIBRATE_FROM or actual <= 0 or predicted <= 0:
        return 1.0
    held = doubt * predicted / len(pairs)
    return (actual + held) / (predicted + held)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None

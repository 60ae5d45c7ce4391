"""Corrects estimates by the finished runs of a home: phase by phase, and model by model.

A run's config.json has the work that was estimated, its result.json the time that was measured.
Each phase has its own correction, because phases depend on different things: evaluations on the
rows, training on the steps, the start of a run on hardly anything. Start, evaluations and
checkpoints are the same work under every algorithm, so the runs of all algorithms correct them.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.core.hardware import Hardware
from engine.cost import throughput
from engine.cost.flops import MeasuredMeans, Work
from engine.cost.throughput import Speed
from engine.executors.hosts import KINDS
from engine.home.rows import LOCAL
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.records.estimate import EarlierWorkload, Workload
from engine.records.record import DamagedRecord
from engine.records.run_config import RunConfig, TrainConfig
from engine.records.run_result import RunResult
from engine.records.settings import ALGORITHMS

RUNS = 20  # at most so many runs of each algorithm are used, the newest
CALIBRATE_FROM = 3  # with fewer finished runs nothing is corrected
# Phase of an estimate -> key of its measured seconds.
MEASURED_KEY_OF_PHASE = {
    "training": "train_s",
    "rollouts": "sample_s",
    "rewards": "reward_s",
    "evaluation": "exam_s",
    "checkpoints": "save_s",
}
# The time of the start is not measured: it is the run's time minus that of the other phases.
_PHASES = ("startup", *MEASURED_KEY_OF_PHASE)
_SAME_FOR_ALL_ALGORITHMS = ("startup", "evaluation", "checkpoints")
# The prediction itself has the weight of this many runs that it predicted exactly.
DOUBT = 0.25
MEMORY_DOUBT = 3.0  # larger than for time, because memory follows from sizes and varies less
LEAST_START_S = 0.5  # the least seconds of a start, so that it never counts as nothing


@dataclass(frozen=True)
class FinishedRun:
    """One finished run: what the estimate predicts for it, and what was measured.

    Attributes:
        seconds: measured seconds of each phase.
        predicted: seconds of each phase as the estimate would predict them now, uncorrected.
        total: seconds of the whole run.
        base: path of the run's base model.
        answer_length_share, turns, effective_share: see `MeasuredMeans`; None if the run did not
            measure them.
        memory, predicted_memory: peak bytes, measured and predicted.
    """

    algorithm: str
    seconds: Mapping[str, float]
    predicted: Mapping[str, float]
    total: float
    base: str
    answer_length_share: float | None
    turns: float | None
    effective_share: float | None
    memory: float
    predicted_memory: float


@dataclass(frozen=True)
class Experience:
    """The finished runs of a home.

    Attributes:
        past: the runs that can be used.
        left_out: a sentence for each run with a damaged file; it names the run, the file and the
            fault.
    """

    past: Sequence[FinishedRun] = ()
    left_out: tuple[str, ...] = ()

    def of_algorithm(self, algorithm: str) -> list[FinishedRun]:
        """Return the finished runs of this algorithm."""
        return [run for run in self.past if run.algorithm == algorithm]

    def measured_means(self, base: str) -> MeasuredMeans:
        """Return the mean measurements of the runs of one base model, over all algorithms.

        `base` is the path of the base model's folder. A field is None if no run measured it.
        """
        runs = [run for run in self.past if run.base == base]
        return MeasuredMeans(
            runs=len(runs),
            answer_length_share=_mean(
                [run.answer_length_share for run in runs if run.answer_length_share is not None]
            ),
            turns=_mean([run.turns for run in runs if run.turns is not None]),
            effective_share=_mean(
                [run.effective_share for run in runs if run.effective_share is not None]
            ),
        )

    def factors(self, algorithm: str) -> dict[str, float]:
        """Return phase -> the factor that corrects its predicted seconds.

        The factor is 1 for a phase that too few runs have measured.
        """
        factors = {}
        for phase in _PHASES:
            # Start, evaluations and checkpoints are the same work under every algorithm.
            runs = self.past if phase in _SAME_FOR_ALL_ALGORITHMS else self.of_algorithm(algorithm)
            actual_and_predicted = [
                (run.seconds[phase], run.predicted[phase])
                for run in runs
                if phase in run.seconds and phase in run.predicted
            ]
            factors[phase] = _correction_factor(actual_and_predicted)
        return factors

    def memory_factor(self, algorithm: str) -> float:
        """Return the factor that corrects the predicted peak memory; 1 if too few runs measured
        it."""
        runs = self.of_algorithm(algorithm)
        actual_and_predicted = [
            (run.memory, run.predicted_memory)
            for run in runs
            if run.memory > 0  # 0: the run did not measure it
        ]
        return _correction_factor(actual_and_predicted, doubt=MEMORY_DOUBT)

    def log_time_ratios(self, algorithm: str) -> list[float]:
        """Return log(actual seconds / corrected seconds) for each run of the algorithm.

        The corrected seconds are those predicted for each phase, times the algorithm's `factors`.
        The value is 0 for a run that took exactly as long as predicted. Runs without a time are
        left out.
        """
        factors = self.factors(algorithm)
        log_ratios = []
        for run in self.of_algorithm(algorithm):
            corrected_s = sum(
                seconds * factors.get(phase, 1.0) for phase, seconds in run.predicted.items()
            )
            if corrected_s > 0 and run.total > 0:
                log_ratios.append(math.log(run.total / corrected_s))
        return log_ratios


def experience(home: Home, speed: Speed, kind: str) -> Experience:
    """Collect the finished runs of a home that can correct an estimate.

    Runs whose files are gone, damaged or of an earlier version are left out.

    Args:
        home: the home that holds the runs.
        speed: the machine's speed as it is known now; the times of the runs are predicted again
            with it.
        kind: the kind of device, "cpu" or "cuda", or the other machine that it belongs to, such as
            "ssh:box"; runs on any other are left out.
    """
    if not home.db.is_file():  # a new home; opening the store would create the database
        return Experience()
    runs: list[FinishedRun] = []
    left_out: list[str] = []
    for algorithm in ALGORITHMS:
        for run, total_seconds in _newest_runs(home, algorithm, kind):
            try:
                finished_run = _finished_run(run, speed, algorithm, total_seconds)
            except DamagedRecord as damage:  # one bad file must not stop every estimate
                left_out.append(f"{run.id} is left out of this estimate: {damage.message}")
                continue
            if finished_run is not None:
                runs.append(finished_run)
    return Experience(tuple(runs), tuple(left_out))


def speed_here(
    home: Home, hardware: Hardware, precision: str, compute: str = LOCAL
) -> tuple[Speed, Experience]:
    """Return the speed of a machine, and the finished runs of the home on it, which correct the
    predictions made from that speed.

    Args:
        hardware: the machine.
        precision: "float32" or "bfloat16".
        compute: "local" for this machine, or a host such as "ssh:box". A host is not measured: its
            speed is that of the table, and only its own runs correct it.
    """
    device = hardware.device
    if compute != LOCAL:
        speed = throughput.table(device, hardware.cores, precision)
        return speed, experience(home, speed, compute)
    speed = throughput.load(home, device, hardware.cores, precision)
    return speed, experience(home, speed, device.kind)


def _newest_runs(home: Home, algorithm: str, kind: str) -> list[tuple[RunDir, float]]:
    """Return the newest finished runs of the algorithm on a device of this kind ("cpu" or "cuda"),
    as (run folder, seconds that the run took)."""
    with Store(home) as store:
        rows = store.calibration(algorithm, limit=RUNS)
    return [
        (home.run(str(row["features"]["run_id"])), 3600 * float(row["actual"]))  # stored in hours
        for row in rows
        if _device_kind(row["features"]) == kind
    ]


def _device_kind(features: Mapping[str, object]) -> str:
    """Return the kind of device that a finished run used, "cpu" or "cuda"; of a run on another
    machine that machine, such as "ssh:box".

    `features` is a column of the run's row in the database's table of calibrations.
    """
    device = str(features.get("device") or "cpu")  # such as "cuda:0"
    if device.startswith(KINDS):
        return device
    return "cpu" if device.startswith("cpu") else "cuda"


def _finished_run(run: RunDir, speed: Speed, algorithm: str, total: float) -> FinishedRun | None:
    """Read what a run measured, and predict its time again with the machine's speed as known now.

    Returns None if the run's files were deleted, if it is no training run or measured nothing, or
    if an earlier version wrote its files. Raises DamagedRecord, which names the file and the key,
    if a file is damaged.

    Args:
        run: the folder of the run.
        speed: the machine's speed.
        algorithm: the run's algorithm.
        total: seconds that the whole run took.
    """
    try:
        config = run.read_config()
        result = RunResult.read(run.result)
    except FileNotFoundError:
        return None
    predicted_work = _comparable_work(config)
    measured = result.measured
    if not isinstance(config, TrainConfig) or predicted_work is None or measured is None:
        return None
    planned_steps = config.settings.steps
    return FinishedRun(
        algorithm=algorithm,
        seconds=_seconds_by_phase(measured.seconds, total),
        predicted=_predicted_of_done_steps(
            _predicted_seconds(predicted_work, speed),
            # Older files do not hold how many steps were done.
            done=planned_steps if result.steps is None else result.steps,
            planned=planned_steps,
        ),
        total=total,
        base=config.base.path,
        answer_length_share=measured.said_share,
        turns=measured.turns_mean,
        effective_share=measured.effective_share,
        memory=measured.peak_memory,
        predicted_memory=predicted_work.memory,
    )


def _comparable_work(config: RunConfig) -> Workload | None:
    """Return the work that was predicted for a training run when it was submitted.

    Returns None if it cannot be compared with a run on one device: the run is no training or used
    several devices, or an earlier version counted the work in another way.
    """
    if not isinstance(config, TrainConfig) or config.settings.gpus > 1:
        return None
    predicted = config.estimate.uncalibrated
    return None if isinstance(predicted, EarlierWorkload) else predicted


def _predicted_of_done_steps(
    predicted: Mapping[str, float], done: int, planned: int
) -> dict[str, float]:
    """Scale the `predicted` seconds of each phase to a run that ended after `done` of its `planned`
    steps.

    The start keeps its time, because it does not depend on the number of steps.
    """
    share = min(1.0, done / planned)
    return {
        phase: seconds if phase == "startup" else seconds * share
        for phase, seconds in predicted.items()
    }


def _predicted_seconds(work: Workload, speed: Speed) -> dict[str, float]:
    """Return phase -> seconds that the stored work of a run takes at `speed`."""
    # Each stored list holds the values of the fields of `Work`, in their order.
    works = {name: Work(*values) for name, values in work.works.items()}
    # The time of a score depends on the environment, so the one stored with the run is used.
    speed_of_run = replace(speed, score_s=work.score_s)
    return speed_of_run.phases(works, work.layers, work.weight_bytes, is_first_run=work.first)


def _seconds_by_phase(measured: Mapping[str, float], total: float) -> dict[str, float]:
    """Return phase -> seconds, from the `measured` seconds of a run that took `total` seconds."""
    seconds = {
        phase: measured[key] for phase, key in MEASURED_KEY_OF_PHASE.items() if key in measured
    }
    # The start is not measured: it is the total minus the other phases.
    seconds["startup"] = max(LEAST_START_S, total - sum(seconds.values()))
    return seconds


def _correction_factor(
    actual_and_predicted: Sequence[tuple[float, float]], doubt: float = DOUBT
) -> float:
    """Return the factor by which predictions have to be multiplied.

    The factor is the sum of the actual values divided by the sum of the predicted ones, so long
    runs count for more than short ones. With fewer than three runs the factor is 1.

    Args:
        actual_and_predicted: (actual, predicted) of each run.
        doubt: how many exact predictions of average size are added to both sums, which pulls the
            factor towards 1.
    """
    actual_sum = sum(actual for actual, _ in actual_and_predicted)
    predicted_sum = sum(predicted for _, predicted in actual_and_predicted)
    count = len(actual_and_predicted)
    if count < CALIBRATE_FROM or actual_sum <= 0 or predicted_sum <= 0:
        return 1.0
    exact_sum = doubt * predicted_sum / count  # what the added exact predictions amount to
    return (actual_sum + exact_sum) / (predicted_sum + exact_sum)


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean of the values; None if there are none."""
    return statistics.fmean(values) if values else None

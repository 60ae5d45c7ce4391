"""Estimates what a run will take: hours and money as low, likely and high, memory and disk.

Time is operations (engine/cost/flops.py) divided by the speed of this machine
(engine/cost/throughput.py), corrected phase by phase by finished runs (engine/cost/calibration.py).
With three or more finished runs of the algorithm, low and high are a 90 % prediction interval from
their ratios of actual to corrected time; with fewer, fixed factors. Memory and disk are computed by
engine/cost/memory.py.
"""

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from engine.core import hardware as machine
from engine.core.errors import UserError
from engine.core.format import size, words
from engine.core.hardware import Hardware
from engine.core.hints import Call, Change, Hint
from engine.core.reply import Reply
from engine.cost import flops, lowering, run_work, throughput
from engine.cost import memory as footprint
from engine.cost.calibration import CALIBRATE_FROM, experience
from engine.cost.flops import Battery, Lengths, LoadedModel, Plan, SamplingPlan
from engine.cost.lowering import phases_of
from engine.environments import env_facts, registry
from engine.environments.env_facts import EnvFacts, RowLengths
from engine.home.database import reports_unwritable_disk
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.install import vllm_env
from engine.models import catalog, hub, tokens
from engine.models.model_files import ModelFacts
from engine.records.estimate import Estimate, PeakMemory, Range, TokenCounts, Workload
from engine.records.settings import RowSettings, TrainSettings
from engine.settings import resolution as settings_schema
from engine.settings import teachers
from engine.settings.defaults import SamplingLimits
from engine.settings.teachers import ResolvedTeacher

LEVELS = ("low", "likely", "high")
PROBE_WAIT_S = 20.0  # that an estimate waits for the machine to be measured
# Without finished runs: factors for low and high, with rates from the table or measured ones.
_SPREAD = {"model": (0.35, 2.5), "measured": (0.65, 1.6)}
_CALIBRATION_FLOOR = 0.08  # least standard deviation of the logarithm of a run's time
# The usual standard deviation of that logarithm, which counts as much as so many finished runs.
_USUAL_SPREAD, _USUAL_RUNS = 0.25, 6

_NORMAL_90 = 1.645  # standard deviations on each side of a 90 % interval
_USUAL_RANK = 16  # assumed for an adapter that is evaluated
_DOWNLOAD_RATE = 2e7  # bytes per second
_TRANSFER_S = 1e-4  # that the way to the env process and back adds to a score
DISK_RESERVE = 500_000_000  # bytes that must stay free


@dataclass(frozen=True)
class Forecast:
    """The estimate of a planned run.

    Attributes:
        estimate: the figures, as config.json stores them.
        lower_to: settings with lower values, with which a run that is too large for the memory
            fits; empty if it fits as it is, or if none make it fit.
        left_out: a sentence for each finished run that could not be used because one of its
            files is damaged.
    """

    estimate: Estimate
    lower_to: Mapping[str, object]
    left_out: tuple[str, ...] = ()


@reports_unwritable_disk
def estimate_cost(
    home: Home,
    env_id: str,
    model: str = "pebble",
    algorithm: str = "grpo",
    settings: Mapping[str, Any] | None = None,
) -> Reply:
    """Estimate a run that could be submitted with the same arguments; returns the reply.

    The machine is measured first if it never was. `next` has the call that submits the run, if it
    fits into memory and has rows to train on.

    Raises UserError as a submit would, for the environment, the model and the settings.
    """
    settings = dict(settings or {})
    settings_schema.validate(algorithm, settings)
    record = registry.find_env(home, env_id)
    model_ref = catalog.resolve_model(home, model)
    hardware = machine.detect(home.root)
    thinking = settings_schema.counted_thinking(algorithm, settings)
    facts = env_facts.env_facts(home, record, model_ref.base_path, thinking=thinking)
    resolved = settings_schema.resolve(
        algorithm,
        settings,
        model=model_ref.facts,
        env=facts,
        hardware=hardware,
        inherited=model_ref.adapter_facts,
        vllm=vllm_env.find_python(home) is not None,
    )
    teacher = teachers.resolve_teacher(home, resolved.settings, model_ref)
    throughput.ensure(home, hardware, PROBE_WAIT_S)
    forecast = estimate(
        home,
        resolved,
        model_ref.facts,
        facts,
        hardware,
        teacher=teacher,
        base_path=model_ref.base_path,
    )
    figures = forecast.estimate
    text = summary(figures)
    row_warnings = []
    misfit = none_fit(env_facts.statistics(facts, resolved.settings), resolved.settings)
    if misfit:
        text = f"{text} But {misfit}."
        row_warnings = [f"{misfit}: nothing would be trained. Raise max_length."]
    next_calls = []
    if figures.fits and not misfit:
        arguments: dict[str, object] = {
            "env_id": record.env_id,
            "model": model_ref.ref,
            "algorithm": algorithm,
        }
        if settings:
            arguments["settings"] = settings
        next_calls = [Call("submit_train", arguments).to_json()]
    return shown(figures) | {
        "summary": text,
        "next": next_calls,
        "warnings": [*row_warnings, *resolved.warnings, *_forecast_warnings(forecast)],
    }


def none_fit(statistics: Mapping[str, Any], settings: TrainSettings) -> str:
    """A message if no train row fits into max_length; "" if at least one does.

    `statistics` are those that `env_facts.statistics` returns.
    """
    if statistics["dropped"] < statistics["counted"]:
        return ""
    return f"no row fits into max_length = {settings.max_length}"


def estimate(
    home: Home,
    resolved: settings_schema.Resolved,
    model: ModelFacts,
    env: EnvFacts,
    hardware: Hardware,
    *,
    teacher: ResolvedTeacher | None = None,
    base_path: Path | None = None,
) -> Forecast:
    """Estimate time, money, memory and disk of a run with resolved settings.

    In the result, times are in hours and sizes in bytes; `seconds` has the likely seconds of each
    phase.

    Args:
        teacher: of a distillation.
        base_path: folder of the base model, which tells its finished runs and what of its weights
            is still to be downloaded; None for unknown.
    """
    device = hardware.device
    teacher_model = teacher.model if teacher else None
    folders = [base_path, teacher_model.base_path if teacher_model else None]
    download = sum(hub.missing_bytes(folder) for folder in {*folders} if folder is not None)
    precision = resolved.settings.precision
    speed = throughput.load(home, device, hardware.cores, precision)
    past_runs = experience(home, speed, device.kind)
    plan = Plan(
        resolved.settings,
        model,
        env,
        device,
        seen=past_runs.seen(str(base_path or "")),  # "": no run has that base
        batteries=batteries(home, base_path),
        teacher=teacher_model.facts if teacher_model else None,
        teacher_shares_base=teacher is not None and teacher.shares_base,
    )
    speed = _with_score_time(speed, env)
    phases = _corrected_phases(plan, speed, past_runs.factors(resolved.algorithm), download)
    totals = {level: sum(phases[level].values()) / 3600 for level in LEVELS}
    hours, basis, runs = _hours_by_level(
        past_runs.log_time_ratios(resolved.algorithm), totals, speed.measured
    )
    price = home.user_config().gpu_hour_price
    raw_memory = footprint.memory(plan)
    memory = _corrected_memory(raw_memory, past_runs.memory_factor(resolved.algorithm))
    available = plan.device.memory_total
    disk_bytes = footprint.disk(plan) + download
    memory_fit = lowering.fit_of(memory.total, available)
    # Suggest a setting to lower: for memory if that is too small or tight, else (None) for time.
    bytes_to_save = None if memory_fit == "fits" else memory.total
    figures = Estimate(
        steps=resolved.settings.steps,
        hours=_rounded(hours),
        gpu_hours=_rounded(hours),  # a run takes one device
        money=_rounded({level: price * hours[level] for level in LEVELS}),
        gpu_hour_price=price,
        seconds={name: round(value, 1) for name, value in phases["likely"].items()},
        tokens=_token_counts(plan),
        peak_memory=memory,
        memory_available=available,
        memory_free=plan.device.memory_free,
        device=plan.device.id,
        fits=memory_fit != "too_big",
        fit=memory_fit,
        disk_bytes=disk_bytes,
        disk_fits=disk_bytes + DISK_RESERVE <= hardware.disk_free,
        lower_this=lowering.lowered(plan, speed, bytes_to_save),
        basis=basis,
        calibrated_on_runs=runs,
        uncalibrated=_workload(plan, speed.score_s, raw_memory.total),
    )
    lower_to = lowering.lower_until_it_fits(plan, speed, memory.total / raw_memory.total)
    return Forecast(figures, lower_to, past_runs.left_out)


def _with_score_time(speed: throughput.Speed, env: EnvFacts) -> throughput.Speed:
    """The speed with the time of a score that the environment's audit measured, if it did."""
    return replace(speed, score_s=env.score_s + _TRANSFER_S) if env.score_s else speed


def _corrected_phases(
    plan: Plan, speed: throughput.Speed, factors: Mapping[str, float], download: int
) -> dict[str, dict[str, float]]:
    """Seconds by level ("low", "likely", "high") and phase, corrected by `factors`.

    The download of `download` bytes is a part of the start. A phase without a factor stays as it
    is.
    """
    phases = {level: phases_of(plan, speed, level) for level in LEVELS}
    for seconds_by_phase in phases.values():
        seconds_by_phase["startup"] += download / _DOWNLOAD_RATE
        for name in seconds_by_phase:
            seconds_by_phase[name] *= factors.get(name, 1.0)
    return phases


def _workload(plan: Plan, score_s: float, memory: int) -> Workload:
    """The work and the memory of the run as predicted, before any correction.

    It is stored with the run, so that later estimates can compare it with what was measured.
    """
    return Workload(
        works={name: list(astuple(work)) for name, work in run_work.works(plan, "likely").items()},
        score_s=score_s,
        layers=plan.model.layers,
        weight_bytes=plan.model.weight_bytes,
        first=not plan.seen.runs,
        memory=memory,
    )


def evaluation_hours(
    home: Home,
    limits: SamplingLimits,
    models: Sequence[tuple[ModelFacts, Path]],
    env: EnvFacts,
    hardware: Hardware,
    *,
    rows: int,
    attempts: int,
) -> float:
    """An upper estimate of the device hours of an evaluation, summed over `models`.

    Args:
        rows: number of tasks.
        attempts: number of answers to each task.
        limits: the most tokens and turns of an answer.
        models: the models that answer; of each the facts and the folder of its base model.
    """
    device = hardware.device
    precision = "bfloat16" if device.bf16 else "float32"
    speed = throughput.load(home, device, hardware.cores, precision)
    past_runs = experience(home, speed, device.kind)
    speed = _with_score_time(speed, env)
    seconds = 0.0
    for model_facts, base_path in models:
        seen = past_runs.seen(str(base_path))
        loaded = LoadedModel(
            model_facts,
            precision,
            quantization="none",
            lora_rank=_USUAL_RANK,
            lora_targets=model_facts.targets,
        )
        unknown_prompt = limits.max_length / 4  # a guess, if no prompt was counted
        plan = SamplingPlan(loaded, env, device, limits, seen, unknown_prompt)
        factors = past_runs.factors("grpo")  # the algorithm that samples as an evaluation does
        seconds += _sampling_seconds(plan, speed, factors, rows=rows, answers=rows * attempts)
        seconds += hub.missing_bytes(base_path) / _DOWNLOAD_RATE
        if env.multi_turn:  # step() was not timed; assume a score's time for each turn
            seconds += rows * attempts * plan.turns("high") * env.score_s
    _, high_factor = _SPREAD["measured" if speed.measured else "model"]
    return high_factor * seconds / 3600


def _sampling_seconds(
    plan: SamplingPlan,
    speed: throughput.Speed,
    factors: Mapping[str, float],
    rows: int,
    answers: int,
) -> float:
    """The most seconds that a model takes to load, to sample and to be scored.

    Args:
        factors: corrections of each phase by finished runs; they may only raise the result.
        rows: number of tasks.
        answers: number of answers to all tasks together.
    """
    work = flops.rollouts(plan, rows, answers, plan.episode("high"))
    no_work = flops.Work()
    works = {"training": no_work, "evaluation": work, "saving": no_work}
    model = plan.loaded.model
    phases = speed.phases(works, model.layers, model.weight_bytes, is_first_run=not plan.seen.runs)
    return sum(seconds * max(1.0, factors.get(phase, 1.0)) for phase, seconds in phases.items())


def batteries(home: Home, base_path: Path | None) -> tuple[Battery, ...]:
    """The batteries that a run on this base model is asked. A battery is a set of questions that
    shows what the model forgets.

    The worker chooses the same ones:
    - for pebble our own questions, which are also assumed if `base_path` is None (unknown);
    - for any other base model the questions in English;
    - the user's environment "keep", if there is one. Its lengths need a tokenizer, so it is left
      out if `base_path` is None.
    """
    chosen = []
    if base_path is None or base_path == catalog.BUILTIN["pebble"]:
        chosen.append(flops.PEBBLE_SKILLS)
    else:
        with contextlib.suppress(UserError):  # a tokenizer that cannot be read
            chosen.append(_language_battery(tokens.load(base_path)))
    if base_path is not None and home.db.is_file():
        with contextlib.suppress(UserError):  # usually there is no such environment
            record = registry.find_env(home, flops.KEEP)
            # The look-up also completes prefixes, so this may be another environment.
            if record.name == flops.KEEP and record.scored:
                lengths = env_facts.env_facts(home, record, base_path).lengths
                chosen.append(_keep_battery(lengths))
    return tuple(chosen)


def _keep_battery(rows: Sequence[RowLengths]) -> Battery:
    """The questions of the user's environment "keep", from the lengths of its rows."""
    if rows:
        mean_prompt = statistics.fmean([row.prompt for row in rows])
        mean_reference = statistics.fmean([row.total - row.prompt for row in rows])
    else:  # no rows were counted
        mean_prompt, mean_reference = 32.0, 16.0
    # A model writes more than the reference answer.
    usual_answer = 1.5 * mean_reference
    lengths = Lengths(
        prompt=mean_prompt,
        turn_tokens=max(8.0, usual_answer),
        longest_turn=max(16.0, 2 * usual_answer),
    )
    task_count = max(1, len(rows))
    return Battery(tasks=min(task_count, flops.KEEP_TASKS), answer=lengths)


def _language_battery(tokenizer: tokens.ChatTokenizer) -> Battery:
    """The questions in English, in tokens of one model; one question stands for all.

    A model may write 24 tokens, as the worker allows; a sentence of 12 is taken as usual.
    """
    question = [{"role": "user", "content": flops.LANGUAGE_QUESTION}]
    prompt = len(tokenizer.format().prompt(question))
    lengths = Lengths(prompt=prompt, turn_tokens=12, longest_turn=24)
    return Battery(tasks=flops.LANGUAGE_TASKS, answer=lengths)


def summary(figures: Estimate) -> str:
    """The estimate in words: time, device and memory, and money if an hour has a price.

    Example: "About 2 hours (1 hour to 3 hours) on cuda:0, 20 GB of 80 GB."
    """
    hours = figures.hours
    memory = figures.peak_memory.total
    sentence = f"About {words(hours.likely)} ({words(hours.low)} to {words(hours.high)})"
    sentence += f" on {figures.device}, {size(memory)} of {size(figures.memory_available)}"
    if figures.gpu_hour_price:
        sentence += f", {figures.money.likely:.2f} at {figures.gpu_hour_price:g} an hour"
    return sentence + ("." if figures.fits else ". It does not fit.")


def shown(figures: Estimate) -> Reply:
    """The figures as a reply shows them, without those that only later estimates need."""
    return {name: value for name, value in figures.to_json().items() if name != "uncalibrated"}


def change_of(settings: Mapping[str, object]) -> Change | None:
    """The change of a call that sets `settings`; None if `settings` is empty."""
    return Change(settings=settings) if settings else None


def check_budget(
    home: Home, store: Store, figures: Estimate, cap: float, call: Mapping[str, Any]
) -> list[str]:
    """Refuse a run that likely takes more GPU-hours than it may.

    The limits are `cap` and what is left of the home's max_gpu_hours_total, if that is set.

    Args:
        cap: the run's max_gpu_hours.
        call: arguments of the submit_train call; the hint repeats them with a sufficient cap.

    Returns a warning if the run may reach its cap, else []. Raises UserError BUDGET.
    """
    likely = figures.gpu_hours.likely
    high = figures.gpu_hours.high
    advice = f"lower {figures.lower_this}" if figures.lower_this else ""
    if likely > cap:
        sufficient_cap = math.ceil(10 * high) / 10  # rounded up to a tenth of an hour
        raise UserError(
            "BUDGET",
            f"the run likely takes {likely:.2f} GPU-hours (at most {high:.2f}); "
            f"max_gpu_hours is {cap:g}",
            hint=Hint(
                f"Raise the cap, or {advice}:" if advice else "Raise the cap:",
                Call("submit_train", {**call, "max_gpu_hours": sufficient_cap}),
            ),
            field="max_gpu_hours",
        )
    total_cap = home.user_config().max_gpu_hours_total
    hours_left = math.inf
    if total_cap is not None:
        hours_left = max(0.0, total_cap - store.committed_hours())
    if likely > hours_left:
        raise UserError(
            "BUDGET",
            f"the run likely takes {likely:.2f} GPU-hours; {hours_left:.2f} are left of this "
            f"home's max_gpu_hours_total = {total_cap:g}",
            hint=f"The owner may raise max_gpu_hours_total in {home.config_file}"
            + (f"; or {advice}." if advice else "."),
            field="max_gpu_hours",  # the call has no argument for the total
        )
    if high > cap:
        return [f"at worst the run takes {high:.2f} GPU-hours; it is stopped at {cap:g}"]
    return []


def _hours_by_level(
    log_ratios: Sequence[float], corrected: dict[str, float], measured: bool
) -> tuple[dict[str, float], str, int]:
    """Compute the low, likely and high hours of a run from its corrected hours.

    With three or more finished runs they are a 90 % prediction interval from the runs' ratios of
    actual to corrected time. With fewer, low and high are multiplied by fixed factors.

    Args:
        log_ratios: for each finished run log(actual time / corrected time).
        corrected: hours by level, corrected by finished runs.
        measured: whether the machine's speed was measured.

    Returns the hours by level; the basis, "measured" (finished runs or the machine's speed) or
    "model" (the table of speeds); and the number of finished runs.
    """
    if len(log_ratios) >= CALIBRATE_FROM:
        log_middle, half_width = _prediction_interval(log_ratios)
        likely = corrected["likely"]
        hours = {
            "low": likely * math.exp(log_middle - half_width),
            "likely": likely * math.exp(log_middle),
            "high": likely * math.exp(log_middle + half_width),
        }
        return hours, "measured", len(log_ratios)
    basis = "measured" if measured else "model"
    low_factor, high_factor = _SPREAD[basis]
    hours = {
        "low": corrected["low"] * low_factor,
        "likely": corrected["likely"],
        "high": corrected["high"] * high_factor,
    }
    return hours, basis, len(log_ratios)


def _prediction_interval(log_ratios: Sequence[float]) -> tuple[float, float]:
    """The middle and half the width of a 90 % prediction interval for the next log ratio."""
    count = len(log_ratios)
    # The factor pulls the median towards 0, that is, towards the estimate as it is.
    middle = statistics.median(log_ratios) * count / (count + 1)
    # A few runs show little of the usual variation, so their standard deviation is mixed with
    # `_USUAL_SPREAD`, which counts as much as `_USUAL_RUNS` runs.
    squares = (count - 1) * statistics.variance(log_ratios)
    degrees = count - 1 + _USUAL_RUNS
    spread = math.sqrt((squares + _USUAL_RUNS * _USUAL_SPREAD**2) / degrees)
    # The last factor makes it an interval for a new run, not for the mean of the runs.
    half_width = _NORMAL_90 * max(spread, _CALIBRATION_FLOOR) * math.sqrt(1 + 1 / count)
    return middle, half_width


def _corrected_memory(memory: PeakMemory, factor: float) -> PeakMemory:
    """The memory with its total multiplied by `factor`; the difference goes to the overhead.

    The overhead never gets negative, so the items may add up to more than the total.
    """
    total = int(memory.total * factor)
    overhead = max(0, memory.overhead + total - memory.total)
    return memory.model_copy(update={"overhead": overhead, "total": total})


def _token_counts(plan: Plan) -> TokenCounts:
    """The likely number of tokens that the run trains on, and that it samples.

    The evaluations sample tokens too.
    """
    episode = plan.episode("likely")
    if isinstance(plan.settings, RowSettings):
        trained = plan.settings.steps * plan.step_tokens
        sampled = 0.0
    else:
        episodes = plan.rows * plan.settings.steps  # of the whole run
        trained = episodes * episode.total
        sampled = episodes * episode.turn_tokens * episode.turns
    if plan.env.scored:
        sampled += plan.evaluated_rows * episode.turn_tokens * episode.turns
    return TokenCounts(trained=int(trained), generated=int(sampled))


def _forecast_warnings(forecast: Forecast) -> list[str]:
    """Warnings about damaged files of earlier runs, tight memory and missing disk space."""
    figures = forecast.estimate
    warnings = list(forecast.left_out)
    if figures.fit == "tight":
        warnings.append("memory will be tight; another process on the device may end the run")
    if not figures.disk_fits:
        needed = size(figures.disk_bytes)
        warnings.append(f"the run needs {needed} of disk, which is not free")
    return warnings


def _rounded(values: Mapping[str, float]) -> Range:
    """The values for low, likely and high, rounded to four significant digits."""
    return Range(**{name: float(f"{value:.4g}") for name, value in values.items()})

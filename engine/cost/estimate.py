"""Estimates what a run will take: hours and money as low, likely and high, memory and disk.

Time is operations (engine/cost/flops.py) divided by the speed of this machine
(engine/cost/throughput.py), corrected phase by phase by finished runs (engine/cost/calibration.py,
engine/cost/hours.py). Memory and disk are computed by engine/cost/memory.py.
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.format import size, words
from engine.core.hardware import Device, Hardware
from engine.core.hints import Call, Change, Hint
from engine.core.reply import Reply
from engine.cost import lowering, run_work, throughput
from engine.cost import memory as footprint
from engine.cost.batteries import batteries
from engine.cost.calibration import Experience, speed_here
from engine.cost.flops import Plan
from engine.cost.hours import (
    LEVELS,
    WIDE_NOTE,
    PredictedTime,
    narrowing_call,
    predicted_time,
    unmeasured_warning,
)
from engine.environments import env_facts, registry
from engine.environments.env_facts import EnvFacts
from engine.executors.admission import compute_of, has_vllm, machine_for
from engine.executors.hosts import price_of
from engine.home.database import reports_unwritable_disk
from engine.home.rows import LOCAL
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.fast_paths.results import why_off
from engine.machine.install import vllm_env
from engine.models import hub
from engine.models.catalog import ModelRef
from engine.models.model_files import ModelFacts
from engine.records.estimate import Estimate, PeakMemory, Range, TokenCounts, Workload
from engine.records.settings import GivenSettings, RowSettings, TrainSettings
from engine.settings import gpu_count, run_size, start_models, teachers
from engine.settings import resolution as settings_schema
from engine.settings.teachers import ResolvedTeacher

PROBE_WAIT_S = 35.0  # how long an estimate waits for the machine's speed to be measured
_TRANSFER_S = 1e-4  # seconds to send an answer to the env process and its score back
DISK_RESERVE = 500_000_000  # bytes that must stay free
_PHASES_OF_STEPS = ("training", "rollouts", "rewards")  # their time grows with the steps
_ROOM_BELOW_CAP = 0.9  # a suggested number of steps fills this share of the cap
_FEWEST_STEPS = 0.2  # a run with less than this share of its steps would be another experiment


@dataclass(frozen=True)
class Forecast:
    """The estimate of a planned run.

    Attributes:
        estimate: the figures, as config.json stores them.
        lower_to: lower values of settings with which a run that is too large for the memory would
            fit; empty if the run fits as it is, or if no lower values make it fit.
        left_out: a sentence for each finished run that could not be used because one of its
            files is damaged.
    """

    estimate: Estimate
    lower_to: Mapping[str, object]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Circumstances:
    """What an estimate depends on beside the run and the speed of the machine.

    Attributes:
        download_bytes: bytes of the models that are still to be downloaded.
        gpu_hour_price: the price of one hour on one device; 0 if config.toml sets no price.
        disk_free: free bytes of the disk.
        load: how busy other processes keep the machine (engine/core/hardware.py).
    """

    download_bytes: int
    gpu_hour_price: float
    disk_free: int
    load: float


@dataclass(frozen=True)
class PlannedRun:
    """A run that could be submitted, checked and with its settings resolved."""

    env_id: str
    model: ModelRef
    env_facts: EnvFacts
    hardware: Hardware
    resolved: settings_schema.Resolved


@reports_unwritable_disk
def estimate_cost(
    home: Home,
    env_id: str,
    model: str = "pebble",
    algorithm: str = "grpo",
    settings: Mapping[str, Any] | None = None,
) -> Reply:
    """Estimate time, memory and disk of a training run; return the reply.

    The arguments are those of a submit. If the speed of this machine is not known, it is measured
    first. `next` has the call that submits the run, if the run fits and has rows to train on.

    Raises UserError if a submit would refuse the environment, the model or the settings.
    """
    settings = dict(settings or {})
    run = planned_run(home, env_id, model, algorithm, settings)
    teacher = teachers.resolve_teacher(home, run.resolved.settings, run.model)
    if compute_of(settings) == LOCAL:
        throughput.ensure(home, run.hardware, PROBE_WAIT_S)

    def forecast_of(candidate: settings_schema.Resolved) -> Forecast:
        """Estimate the run with these settings."""
        return _forecast_with(home, run, candidate, teacher)

    resolved, on_gpus = gpu_count.decide(
        home, run.resolved, run.hardware, lambda candidate: forecast_of(candidate).estimate
    )
    run = replace(run, resolved=resolved)
    submit_call = _submit_call(run.env_id, run.model.ref, algorithm, settings)
    reply = _estimate_reply(home, run, forecast_of(resolved), submit_call)
    if on_gpus:
        reply |= {"by_gpus": [option.shown() for option in on_gpus]}
    return reply


def _forecast_with(
    home: Home,
    run: PlannedRun,
    settings: settings_schema.Resolved,
    teacher: ResolvedTeacher | None,
) -> Forecast:
    """Estimate a planned run with `settings` instead of its own settings. `teacher` is the teacher
    of a distillation, None for any other run."""
    model, env, machine = run.model.facts, run.env_facts, run.hardware
    base_path = run.model.base_path
    return estimate(home, settings, model, env, machine, teacher=teacher, base_path=base_path)


def planned_run(
    home: Home, env_id: str, model: str, algorithm: str, settings: GivenSettings
) -> PlannedRun:
    """Resolve the environment, the model and the settings of a run on this machine. Raises
    UserError if a submit would refuse one of them."""
    settings_schema.validate(algorithm, settings)  # first, because counting the rows takes longer
    record = registry.find_env(home, env_id)
    model_ref = start_models.model_to_train(home, model)
    hardware = machine_for(home, settings)
    thinking = settings_schema.counted_thinking(algorithm, settings)
    facts = env_facts.env_facts(home, record, model_ref.base_path, thinking=thinking)
    resolved = settings_schema.resolve(
        algorithm,
        settings,
        model=model_ref.facts,
        env=facts,
        hardware=hardware,
        inherited=model_ref.adapter_facts,
        vllm=has_vllm(settings, is_here=vllm_env.find_python(home) is not None),
        vllm_fault=why_off(home, hardware.device, "vllm"),
    )
    return PlannedRun(record.env_id, model_ref, facts, hardware, resolved)


def _submit_call(env_id: str, model: str, algorithm: str, settings: Mapping[str, object]) -> Call:
    """Make the call that submits the estimated run; `settings` are those that the caller gave."""
    arguments: dict[str, object] = {"env_id": env_id, "model": model, "algorithm": algorithm}
    if settings:
        arguments["settings"] = settings
    return Call("submit_train", arguments)


def _estimate_reply(home: Home, run: PlannedRun, forecast: Forecast, submit_call: Call) -> Reply:
    """Make the reply of an estimate: figures, a summary, warnings, and the role of each GPU.

    Its `next` is [] unless the run can be trained; else it has `submit_call`, after a call that
    measures more if the estimated hours are a wide range.
    """
    figures, settings = forecast.estimate, run.resolved.settings
    # Why no row fits into max_length, in words; "" if some do.
    misfit = none_fit(env_facts.statistics(run.env_facts, settings), settings)
    text, calls = summary(figures), list[Call]()
    warnings = [*run.resolved.warnings, *unmeasured_warning(home, figures)]
    warnings += _forecast_warnings(forecast)
    if misfit:
        text = f"{text} But {misfit}."
        warnings.insert(0, f"{misfit}: nothing would be trained. Raise max_length.")
    elif figures.fits:
        calls = [submit_call]
        narrowing = narrowing_call(home, figures.hours, figures.basis, submit_call.arguments)
        if narrowing is not None:
            text, calls = f"{text} This is {WIDE_NOTE}.", [narrowing, submit_call]
    next_calls = [call.to_json() for call in calls]
    reply = shown(figures) | {"summary": text, "next": next_calls, "warnings": warnings}
    return reply | run_size.roles(settings)


def none_fit(statistics: Mapping[str, Any], settings: TrainSettings) -> str:
    """Write a message if no train row fits into max_length; "" if at least one fits.

    `statistics` is what `env_facts.statistics` returns. If no row was counted, none fits.
    """
    # "dropped" is how many of the "counted" rows are too long.
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
    """Estimate the hours, the money, and the bytes of memory and disk that a run takes.

    Args:
        resolved: the run's settings, with a value for each.
        model: the sizes of the base model.
        env: measured facts about the environment's tasks.
        hardware: the machine on which the run is to run.
        teacher: the teacher, if the run is a distillation.
        base_path: folder of the base model, None if it is not known. It identifies finished runs of
            the same model, and shows how much of the weights is still to be downloaded.
    """
    settings = resolved.settings
    speed, past_runs = speed_here(home, hardware, settings.precision, settings.compute)
    plan = _plan_of_run(home, resolved, model, env, hardware.device, past_runs, teacher, base_path)
    plan = _limited_to_gpu_share(home, plan, past_runs.memory_factor(resolved.algorithm))
    teacher_path = teacher.model.base_path if teacher and teacher.model else None
    circumstances = _Circumstances(
        download_bytes=_download_bytes(base_path, teacher_path),
        gpu_hour_price=price_of(home, settings.compute),
        disk_free=hardware.disk_free,
        load=hardware.load,
    )
    speed = with_score_time(speed, env, resolved.settings.score_workers)
    return _forecast_of_plan(plan, speed, past_runs, resolved.algorithm, circumstances)


def _plan_of_run(
    home: Home,
    resolved: settings_schema.Resolved,
    model: ModelFacts,
    env: EnvFacts,
    device: Device,
    past_runs: Experience,
    teacher: ResolvedTeacher | None,
    base_path: Path | None,
) -> Plan:
    """Collect what the hours and the bytes of a run are computed from. The arguments are those of
    `estimate`, and `past_runs`: the finished runs of the home."""
    teacher_model = teacher.model if teacher else None
    return Plan(
        resolved.settings,
        model,
        env,
        device,
        measured=past_runs.measured_means(str(base_path or "")),  # "": no run has that base
        batteries=batteries(home, base_path, resolved.settings.skill_rows),
        teacher=teacher_model.facts if teacher_model else None,
        teacher_shares_base=teacher is not None and teacher.shares_base,
    )


def _limited_to_gpu_share(home: Home, plan: Plan, factor: float) -> Plan:
    """Limit the plan's device to the share of a GPU that one run gets if several share a GPU. The
    plan is returned unchanged if runs do not share GPUs, or if the run does not fit into a share.
    `factor` corrects the predicted bytes by those of finished runs."""
    runs = int(home.user_config().runs_per_gpu) if plan.device.kind == "cuda" else 1
    if runs <= 1:
        return plan
    share = plan.device.memory_total // runs
    device = replace(
        plan.device, memory_total=share, memory_free=min(plan.device.memory_free, share)
    )
    on_share = replace(plan, device=device)
    least_bytes = int(footprint.least_memory(on_share).total * factor)
    return on_share if lowering.fit_of(least_bytes, share) != "too_big" else plan


def _download_bytes(*folders: Path | None) -> int:
    """Return the bytes of weights that are still to be downloaded into these folders of models. A
    folder that is given twice counts once; None is ignored."""
    return sum(hub.missing_bytes(folder) for folder in {*folders} if folder is not None)


def _forecast_of_plan(
    plan: Plan,
    speed: throughput.Speed,
    past_runs: Experience,
    algorithm: str,
    circumstances: _Circumstances,
) -> Forecast:
    """Estimate a run from its plan and the machine's speed, corrected by the times and the memory
    that finished runs of the same algorithm took."""
    download_bytes = circumstances.download_bytes
    time = predicted_time(
        plan, speed, past_runs, algorithm, download_bytes=download_bytes, load=circumstances.load
    )
    gpus = plan.settings.gpus if plan.device.kind != "cpu" else 1  # devices that the run takes
    raw_memory = footprint.memory(plan)
    memory_factor = past_runs.memory_factor(algorithm)  # measured bytes / predicted ones
    memory = _corrected_memory(raw_memory, memory_factor)
    least_bytes = int(footprint.least_memory(plan).total * memory_factor)
    figures = Estimate.model_validate(
        {
            **_work_figures(plan, speed, raw_memory.total, least_bytes),
            **_judge_figures(plan),
            **_time_figures(time, circumstances.gpu_hour_price, gpus),
            "gpus": gpus,
            **_memory_figures(memory, least_bytes, plan.device),
            **_disk_figures(footprint.disk(plan) + download_bytes, circumstances.disk_free),
        }
    )
    # Setting -> lower value, for all settings that must be lowered; {} if none must be.
    lower_to = lowering.lower_until_it_fits(plan, speed, memory.total / raw_memory.total)
    return Forecast(figures, lower_to, past_runs.left_out)


def _time_figures(time: PredictedTime, gpu_hour_price: float, gpus: int) -> dict[str, object]:
    """Return the fields of an `Estimate` about time and money, for a run on `gpus` devices."""
    gpu_hours = {level: gpus * time.hours[level] for level in LEVELS}
    return {
        "hours": _rounded(time.hours),
        "gpu_hours": _rounded(gpu_hours),
        "money": _rounded({level: gpu_hour_price * gpu_hours[level] for level in LEVELS}),
        "gpu_hour_price": gpu_hour_price,
        "seconds": {phase: round(seconds, 1) for phase, seconds in time.likely_seconds.items()},
        "basis": time.basis,
        "calibrated_on_runs": time.runs,
    }


def _work_figures(
    plan: Plan, speed: throughput.Speed, raw_memory: int, least_bytes: int
) -> dict[str, object]:
    """Return the fields of an `Estimate` about the work: steps, tokens, the setting to lower, and
    the uncorrected predictions, with which later estimates compare what the run measures.

    Args:
        raw_memory: peak bytes before any correction.
        least_bytes: corrected bytes with the fewest rows and the smallest microbatches.
    """
    return {
        "steps": plan.settings.steps,
        "tokens": _token_counts(plan),
        "lower_this": _setting_to_lower(plan, speed, least_bytes),
        "uncalibrated": _workload(plan, speed.score_s, raw_memory),
    }


def _judge_figures(plan: Plan) -> dict[str, object]:
    """Return the fields of an `Estimate` about judges (models that score): calls and cost.

    They are the audit's numbers for one score, times all answers that the run scores. The real
    numbers are lower if judgements come from a cache."""
    works = run_work.works(plan, "likely")
    scores = sum(work.scores for work in works.values())
    judge = plan.env.judge
    return {"judge_calls": round(scores * judge.calls), "judge_cost": round(scores * judge.cost, 4)}


def _memory_figures(peak: PeakMemory, least_bytes: int, device: Device) -> dict[str, object]:
    """Return the fields of an `Estimate` about memory: the `peak`, and whether the run fits.

    The run fits if `least_bytes` do: its bytes with the fewest rows and smallest microbatches."""
    fit = lowering.fit_of(least_bytes, device.memory_total)
    return {
        "peak_memory": peak,
        "least_memory": least_bytes,
        "memory_available": device.memory_total,
        "memory_free": device.memory_free,
        "device": device.id,
        "fits": fit != "too_big",
        "fit": fit,
    }


def _disk_figures(needed: int, free: int) -> dict[str, object]:
    """Return the fields of an `Estimate` about the disk, from the bytes `needed` and `free`."""
    return {"disk_bytes": needed, "disk_fits": needed + DISK_RESERVE <= free}


def _setting_to_lower(plan: Plan, speed: throughput.Speed, memory_bytes: int) -> str:
    """Name the setting to lower, such as "max_length from 512 to 256"; "" if nothing helps.

    If the memory of the device is tight or too small for `memory_bytes`, that is the setting which
    saves most memory. Otherwise it is the setting which saves most time, where settings of the
    evaluations come before those that change the training.
    """
    is_ample = lowering.fit_of(memory_bytes, plan.device.memory_total) == "fits"
    peak_bytes = None if is_ample else memory_bytes
    return lowering.lowering_in_words(plan, speed, peak_bytes)


def with_score_time(speed: throughput.Speed, env: EnvFacts, workers: int) -> throughput.Speed:
    """Return `speed` with the scoring time that the environment's audit measured, if it did,
    divided by the number of processes (`workers`) that score in parallel."""
    return replace(speed, score_s=env.score_s / workers + _TRANSFER_S) if env.score_s else speed


def _workload(plan: Plan, score_s: float, memory: int) -> Workload:
    """Return the work and the memory of the run as predicted, before any correction.

    They are stored with the run, so that later estimates can compare them with measurements.
    """
    return Workload(
        works={name: list(astuple(work)) for name, work in run_work.works(plan, "likely").items()},
        score_s=score_s,
        layers=plan.model.layers,
        weight_bytes=plan.model.weight_bytes,
        first=not plan.measured.runs,
        memory=memory,
    )


def summary(figures: Estimate) -> str:
    """Write the estimate in words: time, device and memory, and money if an hour has a price.

    Example: "About 2.0 h (50 min to 3.0 h) on cuda:0, 20.0 GB of 80.0 GB."
    """
    hours = figures.hours
    memory = figures.peak_memory.total
    sentence = f"About {words(hours.likely)} ({words(hours.low)} to {words(hours.high)})"
    where = figures.device if figures.gpus == 1 else f"{figures.gpus} GPUs, on each"
    sentence += f" on {where}, {size(memory)} of {size(figures.memory_available)}"
    if figures.gpu_hour_price:
        sentence += f", {figures.money.likely:.2f} at {figures.gpu_hour_price:g} an hour"
    if figures.judge_calls:
        sentence += f", {figures.judge_calls:g} judge calls for {figures.judge_cost:.2f}"
    return sentence + ("." if figures.fits else ". It does not fit.")


def shown(figures: Estimate) -> Reply:
    """Return the figures as a reply shows them, without `uncalibrated`, which is for later
    estimates."""
    return {name: value for name, value in figures.to_json().items() if name != "uncalibrated"}


def change_of(settings: Mapping[str, object]) -> Change | None:
    """Make the change of a call that sets `settings`; None if `settings` is empty."""
    return Change(settings=settings) if settings else None


def check_budget(
    home: Home, store: Store, figures: Estimate, cap: float, call: Mapping[str, Any]
) -> list[str]:
    """Refuse a run that likely takes more GPU-hours than it may.

    Args:
        cap: the run's max_gpu_hours.
        call: arguments of the submit_train call; the hint repeats them with a sufficient cap.

    Returns a warning if the run may reach its cap, else []. Raises UserError BUDGET if the likely
    hours exceed `cap`, or what is left of the home's max_gpu_hours_total.
    """
    if figures.gpu_hours.likely > cap:
        raise _over_cap_error(figures, cap, call)
    total_cap = home.user_config().max_gpu_hours_total
    if total_cap is not None:
        hours_left = max(0.0, total_cap - store.committed_hours())
        if figures.gpu_hours.likely > hours_left:
            raise _over_total_error(home, figures, total_cap, hours_left)
    high = figures.gpu_hours.high
    if high > cap:
        return [f"at worst the run takes {high:.2f} GPU-hours; it is stopped at {cap:g}"]
    return []


def _with_steps(settings: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the settings with `steps`, and without `epochs`, which cannot be given beside it."""
    return {name: value for name, value in settings.items() if name != "epochs"} | {"steps": steps}


def _over_cap_error(figures: Estimate, cap: float, call: Mapping[str, Any]) -> UserError:
    """Make the error for a run that likely takes more than `cap` GPU-hours, its max_gpu_hours.
    `call` holds the arguments of the refused submit_train call."""
    likely, high = figures.gpu_hours.likely, figures.gpu_hours.high
    return UserError(
        "BUDGET",
        f"the run likely takes {likely:.2f} GPU-hours (at most {high:.2f}); "
        f"max_gpu_hours is {cap:g}",
        hint=_hint_over_cap(figures, cap, call),
        field="max_gpu_hours",
    )


def _hint_over_cap(figures: Estimate, cap: float, call: Mapping[str, Any]) -> Hint:
    """Make the hint for a run that likely takes more than `cap` GPU-hours: a changed call.

    The call has fewer steps if enough of them fit, because the caller chose the cap; otherwise it
    has a sufficient cap. `call` holds the arguments of the refused submit_train call."""
    sufficient_cap = math.ceil(10 * figures.gpu_hours.high) / 10  # rounded up to a tenth of an hour
    is_plan = bool(call.get("then") or call.get("vary"))  # `steps` would shorten its first run only
    fitting_steps = 0 if is_plan else steps_within(figures, cap)
    if fitting_steps and fitting_steps >= _FEWEST_STEPS * figures.steps:
        settings = _with_steps(call.get("settings") or {}, fitting_steps)
        advice = (
            f"steps = {fitting_steps} instead of {figures.steps} likely fit; for all of them "
            f"max_gpu_hours = {sufficient_cap:g}."
        )
        arguments = {**call, "settings": settings}
    else:
        lower = f", or lower {figures.lower_this}" if figures.lower_this else ""
        advice = f"Raise max_gpu_hours to {sufficient_cap:g}{lower}."
        arguments = {**call, "max_gpu_hours": sufficient_cap}
    return Hint(advice, Call("submit_train", arguments))


def steps_within(figures: Estimate, cap: float) -> int:
    """Return how many steps likely fit into nine tenths of `cap` GPU-hours; 0 if none does.

    Fewer steps shorten only a part of the run: the start, for example, takes as long as before.
    """
    run_s = sum(figures.seconds.values())
    steps_s = sum(figures.seconds.get(phase, 0.0) for phase in _PHASES_OF_STEPS)
    if not steps_s or not run_s:
        return 0
    # The share of the run's time that may stay.
    allowed_share = _ROOM_BELOW_CAP * cap / figures.gpu_hours.likely
    seconds_to_save = (1 - allowed_share) * run_s
    steps = int(figures.steps * (1 - seconds_to_save / steps_s))
    return max(0, steps)


def _over_total_error(
    home: Home, figures: Estimate, total_cap: float, hours_left: float
) -> UserError:
    """Make the error for a run that likely takes more GPU-hours than the home's total leaves."""
    hint = f"The owner may raise max_gpu_hours_total in {home.config_file}"
    if figures.lower_this:
        hint += f"; or lower {figures.lower_this}"
    return UserError(
        "BUDGET",
        f"the run likely takes {figures.gpu_hours.likely:.2f} GPU-hours; {hours_left:.2f} are left "
        f"of this home's max_gpu_hours_total = {total_cap:g}",
        hint=f"{hint}.",
        field="max_gpu_hours",  # the call has no argument for the total
    )


def _corrected_memory(memory: PeakMemory, factor: float) -> PeakMemory:
    """Multiply the total of `memory` by `factor`, and add the difference to the overhead.

    The overhead never gets negative, so the items may add up to more than the total.
    """
    total = int(memory.total * factor)
    overhead = max(0, memory.overhead + total - memory.total)
    return memory.model_copy(update={"overhead": overhead, "total": total})


def _token_counts(plan: Plan) -> TokenCounts:
    """Return how many tokens the run likely trains on, and how many it samples, including those
    of its evaluations."""
    episode = plan.episode("likely")
    if isinstance(plan.settings, RowSettings):  # SFT and DPO
        trained = plan.settings.steps * plan.step_tokens
        sampled = 0.0
    else:
        episodes = plan.rows * plan.settings.steps  # in the whole run
        trained = episodes * episode.total
        sampled = episodes * episode.turn_tokens * episode.turns
    if plan.env.scored:  # without scores an evaluation samples no answers
        sampled += run_work.evaluated_rows(plan) * episode.turn_tokens * episode.turns
    return TokenCounts(trained=int(trained), generated=int(sampled))


def _forecast_warnings(forecast: Forecast) -> list[str]:
    """Return warnings about damaged files of earlier runs, tight memory and missing disk space."""
    figures = forecast.estimate
    warnings = list(forecast.left_out)
    if figures.fit == "tight":
        warnings.append("memory will be tight; another process on the device may end the run")
    if not figures.disk_fits:
        needed = size(figures.disk_bytes)
        warnings.append(f"the run needs {needed} of disk, which is not free")
    return warnings


def _rounded(values: Mapping[str, float]) -> Range:
    """Round the values for low, likely and high to four significant digits."""
    return Range(**{name: float(f"{value:.4g}") for name, value in values.items()})

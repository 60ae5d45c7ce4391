"""What a run will take: hours, money, memory and disk as low, likely and high.

Operations (engine/cost/flops.py) over the speed of this machine (engine/cost/throughput.py), then
corrected by finished runs (engine/cost/calibration.py), phase by phase: with three or more of the
same algorithm the band is a 90 % prediction interval of their ratio of actual to corrected time,
before that a fixed factor. Memory and disk are engine/cost/memory.py's.
"""

import contextlib
import importlib.util
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
from engine.cost import flops, lowering, throughput
from engine.cost import memory as footprint
from engine.cost.calibration import CALIBRATE_FROM, experience
from engine.cost.flops import Battery, Lengths, LoadedModel, Plan, SamplingPlan
from engine.cost.lowering import phases_of
from engine.environments import env_facts, registry
from engine.environments.env_facts import EnvFacts
from engine.home.database import tells_of_the_disk
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.install import vllm_env
from engine.models import catalog, hub, tokens
from engine.models.model_files import ModelFacts
from engine.records.estimate import Estimate, PeakMemory, Range, TokenCounts, Workload
from engine.records.settings import PROJECTIONS, SFTSettings, TrainSettings
from engine.settings import resolution as settings_schema
from engine.settings.defaults import SamplingLimits

LEVELS = ("low", "likely", "high")
PROBE_WAIT_S = 20.0
# Without finished runs: how far off a rate from the table, or a measured one, may be.
_SPREAD = {"model": (0.35, 2.5), "measured": (0.65, 1.6)}
_CALIBRATION_FLOOR = 0.08  # of the logarithm: no two runs are closer than this
# How far apart runs usually are (logarithm), and how many runs that knowledge is worth.
_USUAL_SPREAD, _USUAL_RUNS = 0.25, 6

_USUAL_RANK = 16  # of an adapter that an evaluation asks
_FETCHED = 2e7  # bytes of a download per second
DISK_RESERVE = 500_000_000


@dataclass(frozen=True)
class Forecast:
    """What a planned run will take.

    Attributes:
        estimate: the figures, as config.json keeps them.
        lower_to: settings with which a run that does not fit into memory does; empty where it
            fits, or none do.
        left_out: a sentence for each finished run that could not teach the estimate because a
            file of it is damaged.
    """

    estimate: Estimate
    lower_to: Mapping[str, object]
    left_out: tuple[str, ...] = ()


@tells_of_the_disk
def estimate_cost(
    home: Home,
    env_id: str,
    model: str = "pebble",
    algorithm: str = "grpo",
    settings: Mapping[str, Any] | None = None,
) -> Reply:
    """The estimate of a run that could be submitted with the same arguments.

    Probes the machine first if it never was. Raises UserError as a submit would for the
    environment, the model and the settings.
    """
    settings = dict(settings or {})
    settings_schema.validate(algorithm, settings)
    record = registry.find_env(home, env_id)
    ref = catalog.resolve_model(home, model)
    here = machine.detect(home.root)
    thinking = settings.get("thinking") is True
    facts = env_facts.env_facts(home, record, ref.base_path, thinking=thinking)
    resolved = settings_schema.resolve(
        algorithm,
        settings,
        model=ref.facts,
        env=facts,
        hardware=here,
        inherited=ref.adapter_facts,
        vllm=vllm_env.find_python(home) is not None,
    )
    throughput.ensure(home, here, PROBE_WAIT_S)
    download = hub.missing_bytes(ref.base_path)
    forecast = estimate(
        home, resolved, ref.facts, facts, here, download=download, base_path=ref.base_path
    )
    figures = forecast.estimate
    arguments = {"env_id": record.env_id, "model": ref.ref, "algorithm": algorithm}
    call = Call("submit_train", arguments | ({"settings": settings} if settings else {}))
    unfit = none_fit(env_facts.statistics(facts, resolved.settings), resolved.settings)
    ready = figures.fits and not unfit
    follow = [call.to_json()] if ready else []
    warned = [f"{unfit}: nothing would be trained. Raise max_length."] if unfit else []
    return shown(figures) | {
        "summary": f"{summary(figures)} But {unfit}." if unfit else summary(figures),
        "next": follow,
        "warnings": [*warned, *resolved.warnings, *_warnings(forecast)],
    }


def none_fit(statistics: Mapping[str, Any], settings: TrainSettings) -> str:
    """What to say where no train row fits (`statistics` of env_facts), "" where one does."""
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
    download: int = 0,
    base_path: Path | None = None,
) -> Forecast:
    """Hours, GPU-hours, money, memory, disk and what to lower, for resolved settings.

    Args:
        download: bytes of weights still to be fetched.
        base_path: folder of the base model, by which earlier runs of it are known.

    Times are hours, sizes bytes; `seconds` itemises the likely time.
    """
    device, precision = hardware.device, resolved.settings.precision
    rate = throughput.load(home, device, hardware.cores, precision)
    known = experience(home, rate, device.kind)
    plan = Plan(
        resolved.settings,
        model,
        env,
        device,
        seen=known.seen(str(base_path or "")),
        batteries=batteries(home, base_path),
    )
    if env.score_s:  # as the audit measured it; the rest is the way to the env process and back
        rate = replace(rate, score_s=env.score_s + 1e-4)
    phases = {level: phases_of(plan, rate, level) for level in LEVELS}
    for phase in phases.values():
        phase["startup"] += download / _FETCHED
    factors = known.factors(resolved.algorithm)
    for phase in phases.values():
        for name in phase:
            phase[name] *= factors.get(name, 1.0)
    totals = {level: sum(phases[level].values()) / 3600 for level in LEVELS}
    hours, basis, runs = _band(known.misses(resolved.algorithm), totals, rate.measured)
    price = home.user_config().gpu_hour_price
    raw_memory = footprint.memory(plan)
    memory = _corrected(raw_memory, known.memory_factor(resolved.algorithm))
    available = plan.device.memory_total
    need = footprint.disk(plan) + download
    fit = lowering.fit_of(memory.total, available)
    uncalibrated = Workload(
        works={name: list(astuple(w)) for name, w in flops.works(plan, "likely").items()},
        score_s=rate.score_s,
        layers=model.layers,
        weight_bytes=model.weight_bytes,
        first=not plan.seen.runs,
        memory=raw_memory.total,
    )
    figures = Estimate(
        steps=resolved.settings.steps,
        hours=_rounded(hours),
        gpu_hours=_rounded(hours),  # a run takes one device
        money=_rounded({level: price * hours[level] for level in LEVELS}),
        gpu_hour_price=price,
        seconds={name: round(value, 1) for name, value in phases["likely"].items()},
        tokens=_tokens(plan),
        peak_memory=memory,
        memory_available=available,
        memory_free=plan.device.memory_free,
        device=plan.device.id,
        fits=fit != "too_big",
        fit=fit,
        disk_bytes=need,
        disk_fits=need + DISK_RESERVE <= hardware.disk_free,
        lower_this=lowering.lowered(plan, rate, memory.total if fit != "fits" else None),
        basis=basis,
        calibrated_on_runs=runs,
        uncalibrated=uncalibrated,
    )
    lower_to = lowering.lower_until_it_fits(plan, rate, memory.total / raw_memory.total)
    return Forecast(figures, lower_to, known.left_out)


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
    """Device hours that sampling and scoring `rows` tasks `attempts` times each takes at most.

    Args:
        limits: tokens and turns that answers may take.
        models: facts and folder of the base of every model that answers.
    """
    device = hardware.device
    precision = "bfloat16" if device.bf16 else "float32"
    rate = throughput.load(home, device, hardware.cores, precision)
    known = experience(home, rate, device.kind)
    seconds = 0.0
    for facts, base_path in models:
        seen = known.seen(str(base_path))
        loaded = LoadedModel(facts, precision, "none", _USUAL_RANK, PROJECTIONS)
        plan = SamplingPlan(loaded, env, device, limits, seen, limits.max_length / 4)
        work = flops.rollouts(plan, rows, rows * attempts, plan.episode("high"))
        scored = replace(rate, score_s=env.score_s + 1e-4) if env.score_s else rate
        idle = {"training": flops.Work(), "evaluation": work, "saving": flops.Work()}
        phases = scored.phases(idle, facts.layers, facts.weight_bytes, first=not seen.runs)
        factors = known.factors("grpo")  # what finished runs taught; a cap is never made smaller
        seconds += sum(value * max(1.0, factors.get(name, 1.0)) for name, value in phases.items())
        seconds += hub.missing_bytes(base_path) / _FETCHED
        if env.multi_turn:  # nobody timed its step(): about what a score takes, in every turn
            seconds += rows * attempts * plan.turns("high") * env.score_s
    above = _SPREAD["measured" if rate.measured else "model"][1]
    return above * seconds / 3600


def batteries(home: Home, base_path: Path | None) -> tuple[Battery, ...]:
    """What a run on this base model is asked about kept skills, as the worker chooses it."""
    asked = []
    if base_path is None or base_path == catalog.BUILTIN["pebble"]:
        asked.append(flops.PEBBLE_SKILLS)
    elif importlib.util.find_spec("reasoning_gym") is not None:
        with contextlib.suppress(UserError):
            asked.append(_gym(tokens.load(base_path)))
    if base_path is not None and home.db.is_file():
        with contextlib.suppress(UserError):
            record = registry.find_env(home, flops.KEEP)
            if record.name == flops.KEEP and record.scored:
                lengths = env_facts.env_facts(home, record, base_path).lengths
                prompt = statistics.fmean([row.prompt for row in lengths]) if lengths else 32.0
                answered = 1.5 * statistics.fmean([r.total - r.prompt for r in lengths] or [16.0])
                answer = Lengths(prompt, max(8.0, answered), max(16.0, 2 * answered))
                asked.append(Battery(min(flops.KEEP_TASKS, max(1, len(lengths))), answer))
    return tuple(asked)


def _gym(tokenizer: tokens.ChatTokenizer) -> Battery:
    """The questions of reasoning-gym in a model's tokens; answers as long as the worker allows."""
    question = [{"role": "user", "content": flops.GYM_QUESTION}]
    prompt = len(tokenizer.format().prompt(question))
    longest = 2 * (tokenizer.count(flops.GYM_ANSWER)) + 16
    return Battery(flops.GYM_TASKS, Lengths(prompt, min(12, longest), longest))


def summary(figures: Estimate) -> str:
    """One sentence: time, memory, money where it has a price."""
    hours, memory = figures.hours, figures.peak_memory.total
    sentence = f"About {words(hours.likely)} ({words(hours.low)} to {words(hours.high)})"
    sentence += f" on {figures.device}, {size(memory)} of {size(figures.memory_available)}"
    if figures.gpu_hour_price:
        sentence += f", {figures.money.likely:.2f} at {figures.gpu_hour_price:g} an hour"
    return sentence + (". It does not fit." if not figures.fits else ".")


def shown(figures: Estimate) -> Reply:
    """The figures as a client sees them: without what only later estimates read."""
    return {name: value for name, value in figures.to_json().items() if name != "uncalibrated"}


def change_of(settings: Mapping[str, object]) -> Change | None:
    return Change(settings=settings) if settings else None


def check_budget(
    home: Home, store: Store, figures: Estimate, cap: float, call: Mapping[str, Any]
) -> list[str]:
    """Refuse a run whose likely hours are above `cap` or what is left of the home's total.

    Args:
        call: arguments of the submit_train that is refused; the hint repeats them, corrected.

    Returns warnings. Raises UserError BUDGET with the exact call that would pass.
    """
    likely, high = figures.gpu_hours.likely, figures.gpu_hours.high
    lower = f"lower {figures.lower_this}" if figures.lower_this else ""
    if likely > cap:
        enough = math.ceil(10 * high) / 10
        raise UserError(
            "BUDGET",
            f"the run likely takes {likely:.2f} GPU-hours (at most {high:.2f}); "
            f"max_gpu_hours is {cap:g}",
            hint=Hint(
                f"Raise the cap, or {lower}:" if lower else "Raise the cap:",
                Call("submit_train", {**call, "max_gpu_hours": enough}),
            ),
            field="max_gpu_hours",
        )
    total = home.user_config().max_gpu_hours_total
    left = None if total is None else max(0.0, total - store.committed_hours())
    if left is not None and likely > left:
        raise UserError(
            "BUDGET",
            f"the run likely takes {likely:.2f} GPU-hours; {left:.2f} are left of this home's "
            f"max_gpu_hours_total = {total:g}",
            hint=f"The owner may raise max_gpu_hours_total in {home.config_file}"
            + (f"; or {lower}." if lower else "."),
            field="max_gpu_hours",
        )
    if high > cap:
        return [f"at worst the run takes {high:.2f} GPU-hours; it is stopped at {cap:g}"]
    return []


def _band(
    logs: Sequence[float], raw: dict[str, float], measured: bool
) -> tuple[dict[str, float], str, int]:
    """(hours by level, basis, finished runs used). `logs`: by how much those missed."""
    if len(logs) >= CALIBRATE_FROM:
        middle = statistics.median(logs) * len(logs) / (len(logs) + 1)
        # A few runs say little of how far apart runs are: what is usual counts as some more.
        known = (len(logs) - 1) * statistics.variance(logs)
        degrees = len(logs) - 1 + _USUAL_RUNS
        spread = math.sqrt((known + _USUAL_RUNS * _USUAL_SPREAD**2) / degrees)
        reach = 1.645 * max(spread, _CALIBRATION_FLOOR) * math.sqrt(1 + 1 / len(logs))
        factors = (middle - reach, middle, middle + reach)
        hours = {
            level: raw["likely"] * math.exp(by) for level, by in zip(LEVELS, factors, strict=True)
        }
        return hours, "measured", len(logs)
    basis = "measured" if measured else "model"
    below, above = _SPREAD[basis]
    hours = {"low": raw["low"] * below, "likely": raw["likely"], "high": raw["high"] * above}
    return hours, basis, len(logs)


def _corrected(memory: PeakMemory, factor: float) -> PeakMemory:
    """Memory with what finished runs held more or less put to the overhead."""
    total = int(memory.total * factor)
    overhead = max(0, memory.overhead + total - memory.total)
    return memory.model_copy(update={"overhead": overhead, "total": total})


def _tokens(plan: Plan) -> TokenCounts:
    """Likely tokens: trained on, and generated for training and evaluation."""
    rows = plan.rows * plan.settings.steps
    if isinstance(plan.settings, SFTSettings):
        trained, sampled = rows * plan.sft_row().total, 0.0
    else:
        episode = plan.episode("likely")
        trained = rows * episode.total
        sampled = rows * episode.said * episode.turns
    if plan.env.scored:
        episode = plan.episode("likely")
        sampled += plan.evaluated_rows * episode.said * episode.turns
    return TokenCounts(trained=int(trained), generated=int(sampled))


def _warnings(forecast: Forecast) -> list[str]:
    figures, warnings = forecast.estimate, list(forecast.left_out)
    if figures.fit == "tight":
        warnings.append("memory will be tight; another process on the device may end the run")
    if not figures.disk_fits:
        need = size(figures.disk_bytes)
        warnings.append(f"the run needs {need} of disk, which is not free")
    return warnings


def _rounded(values: Mapping[str, float]) -> Range:
    """Four significant digits: finer would pretend."""
    return Range(**{name: float(f"{value:.4g}") for name, value in values.items()})

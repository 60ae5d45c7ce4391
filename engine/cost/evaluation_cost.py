"""How long it takes to let models answer tasks: an evaluation, or a probe of one model; and what
models behind a URL may take for it: requests, tokens, money."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from engine.core.files import JsonObject
from engine.core.format import counted
from engine.core.hardware import Device, Hardware
from engine.cost import estimate, flops
from engine.cost.flops import SamplingPlan, Seen
from engine.cost.hours import DOWNLOAD_RATE, LEVELS, SPREAD
from engine.cost.throughput import Speed
from engine.endpoints.references import cost_of, is_priced
from engine.environments.env_facts import EnvFacts
from engine.home.run_dir import Home
from engine.models import hub
from engine.models.catalog import ModelRef
from engine.models.model_files import ModelFacts
from engine.records.estimate import Range
from engine.settings.defaults import SamplingLimits
from engine.settings.run_size import longest_sequence
from engine.sizing.layers import LoadedModel
from engine.sizing.plan import Job

_USUAL_RANK = 16  # assumed for an adapter that is evaluated
_BETWEEN_TURNS = 32  # tokens of the environment's reply and of the chat format
_UNKNOWN_PROMPT = 200  # tokens, where no row was counted


@dataclass(frozen=True)
class Asking:
    """What models are asked: `rows` tasks of an environment, `attempts` times each, with answers
    within `limits`, which `score_workers` env processes score."""

    limits: SamplingLimits
    env: EnvFacts
    rows: int
    attempts: int
    score_workers: int = 1


def evaluation_hours(
    home: Home, asking: Asking, models: Sequence[tuple[ModelFacts, Path]], hardware: Hardware
) -> Range:
    """The device hours in which `models` are asked, one after the other: low, likely and high.

    Args:
        models: the facts of each model, and the folder of its base model.
    """
    device = hardware.device
    precision = "bfloat16" if device.bf16 else "float32"
    speed, past_runs = estimate.speed_here(home, hardware, precision)
    speed = estimate.with_score_time(speed, asking.env, asking.score_workers)
    factors = past_runs.factors("grpo")  # the algorithm that samples as an evaluation does
    # Of all models, at the levels low, likely and high.
    seconds: dict[str, float] = dict.fromkeys(LEVELS, 0.0)
    for model_facts, base_path in models:
        loaded = _evaluated_model(model_facts, precision)
        plan = _evaluation_plan(loaded, asking, device, past_runs.seen(str(base_path)))
        download_seconds = hub.missing_bytes(base_path) / DOWNLOAD_RATE
        for level in LEVELS:
            seconds[level] += _sampling_seconds(plan, speed, factors, asking, level)
            seconds[level] += download_seconds
            seconds[level] += _env_step_seconds(plan, asking, level)
    return _hours_of(seconds, hardware, is_measured=speed.measured)


def _hours_of(seconds: Mapping[str, float], hardware: Hardware, *, is_measured: bool) -> Range:
    """The range of hours for the seconds at the levels low, likely and high.

    It is wider where the speed of the machine is taken from a table than where it `is_measured`.
    """
    low_factor, high_factor = SPREAD["measured" if is_measured else "model"]
    # As for a run (engine/cost/hours.py): what others take is in a measured speed, in no table.
    slowed = 1.0 + hardware.load if hardware.device.kind == "cpu" and not is_measured else 1.0
    likely = slowed * seconds["likely"]
    # Finished runs may have measured answers shorter than the shortest, or longer than the longest,
    # that the level assumes; the likely time follows them.
    return Range(
        low=round(low_factor * min(seconds["low"], likely) / 3600, 6),
        likely=round(likely / 3600, 6),
        high=round(high_factor * max(seconds["high"], likely) / 3600, 6),
    )


def _env_step_seconds(plan: SamplingPlan, asking: Asking, level: str) -> float:
    """The seconds that the environment's step() takes for all answers, at a level such as "high";
    0 if it has none.

    No audit has timed step(): each call, one for each turn, is assumed to take as long as a score.
    """
    if not plan.env.multi_turn:
        return 0.0
    steps = asking.rows * asking.attempts * plan.turns(level)
    return steps * plan.env.score_s / asking.score_workers


def _evaluated_model(model: ModelFacts, precision: str) -> LoadedModel:
    """The model as an evaluation loads it, with an adapter of the usual rank."""
    return LoadedModel(
        model,
        precision,
        quantization="none",
        lora_rank=_USUAL_RANK,
        lora_targets=model.targets,
    )


def _evaluation_plan(
    loaded: LoadedModel, asking: Asking, device: Device, seen: Seen
) -> SamplingPlan:
    """How the model answers the tasks of the environment; `seen` is what finished runs of its base
    measured."""
    limits = asking.limits
    longest = min(longest_sequence(limits, asking.env), loaded.model.max_positions)
    job = Job(loaded, device.kind, device.memory_total, longest, trains=False)
    return SamplingPlan(
        loaded,
        asking.env,
        device,
        limits,
        seen,
        guessed_prompt=limits.max_length / 4,
        rows_at_once=job.sampler_rows,
    )


def _sampling_seconds(
    plan: SamplingPlan,
    speed: Speed,
    factors: Mapping[str, float],
    asking: Asking,
    level: str,
) -> float:
    """The seconds that it takes to load a model, to sample its answers and to score them, at a
    level such as "high".

    Args:
        factors: for each phase, the factor by which finished runs correct the prediction. At the
            high level one below 1 counts as 1, so that the result stays an upper estimate.
    """
    answers = asking.rows * asking.attempts
    work = flops.rollouts(plan, asking.rows, answers, plan.episode(level))
    no_work = flops.Work()  # an evaluation neither trains nor saves
    works = {"training": no_work, "evaluation": work, "saving": no_work}
    model = plan.loaded.model
    phases = speed.phases(works, model.layers, model.weight_bytes, is_first_run=not plan.seen.runs)
    least_factor = 1.0 if level == "high" else 0.0
    return sum(
        seconds * max(least_factor, factors.get(phase, 1.0)) for phase, seconds in phases.items()
    )


@dataclass(frozen=True)
class EndpointCost:
    """What all models of an evaluation that are behind a URL may take.

    Attributes:
        calls, money: low, likely and high; money by the prices of config.toml.
        unpriced: the models without a price, whose money is not in it.
    """

    calls: Range
    money: Range
    unpriced: tuple[str, ...] = ()

    def to_json(self) -> JsonObject:
        """For the estimate of a reply."""
        figures = {"calls": self.calls.to_json(), "money": self.money.to_json()}
        return figures | ({"unpriced": list(self.unpriced)} if self.unpriced else {})

    def in_words(self) -> str:
        """Such as "about 100 calls, about 0.12 in money (0.05 to 0.5)"."""
        text = f"about {counted(round(self.calls.likely), 'call')}"
        if self.money.high:
            money = self.money
            text += f", about {money.likely:.3g} in money ({money.low:.3g} to {money.high:.3g})"
        if self.unpriced:
            text += f"; config.toml has no price of {', '.join(self.unpriced)}"
        return text


def endpoint_cost(models: Sequence[ModelRef], asking: Asking) -> EndpointCost | None:
    """What it takes to ask those of `models` that are behind a URL; None where none is.

    Tokens are counted as the built-in model reads them, which for most text is more than others
    need.
    """
    endpoints = [(model.ref, model.endpoint) for model in models if model.endpoint]
    if not endpoints:
        return None
    answers = asking.rows * asking.attempts
    calls: dict[str, float] = {}
    money: dict[str, float] = {}
    for level in ("low", "likely", "high"):
        turns, tokens_in, tokens_out = _of_one_answer(asking, level)
        calls[level] = round(len(endpoints) * answers * turns, 1)
        each = [cost_of(endpoint, tokens_in, tokens_out) for _, endpoint in endpoints]
        money[level] = round(answers * sum(each), 6)
    unpriced = tuple(ref for ref, endpoint in endpoints if not is_priced(endpoint))
    return EndpointCost(Range(**calls), Range(**money), unpriced)


def _of_one_answer(asking: Asking, level: str) -> tuple[float, float, float]:
    """(requests, tokens of their prompts, tokens of their answers) of one answer at a level: each
    further turn sends the conversation so far again."""
    env, limits = asking.env, asking.limits
    prompts = [row.prompt for row in env.lengths] or [_UNKNOWN_PROMPT]
    turn_lengths = [
        row.answer / max(1, row.answer_turns) for row in env.lengths if row.answer_turns
    ]
    longest = float(limits.max_tokens)
    usual_turn = min(fmean(turn_lengths) if turn_lengths else longest / 2, longest)
    out, turns, prompt = {
        "low": (usual_turn / 2, 1.0, fmean(prompts)),
        "likely": (usual_turn, float(limits.max_turns / 2), fmean(prompts)),
        "high": (longest, float(limits.max_turns), float(max(prompts))),
    }[level]
    if not env.multi_turn:
        turns = 1.0
    turns = max(1.0, turns)
    resent = turns * (turns - 1) / 2 * (out + _BETWEEN_TURNS)
    return turns, turns * prompt + resent, turns * out

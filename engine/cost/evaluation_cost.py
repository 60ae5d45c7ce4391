"""The estimated time in which models answer the tasks of an evaluation or a probe, and the
requests and money that models behind a URL may take for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from engine.core.files import JsonObject
from engine.core.format import counted
from engine.core.hardware import Device, Hardware
from engine.cost import estimate, flops
from engine.cost.calibration import speed_here
from engine.cost.flops import MeasuredMeans, SamplingPlan
from engine.cost.hours import DOWNLOAD_RATE, LEVELS, SPREAD
from engine.cost.throughput import Speed
from engine.endpoints.references import cost_of, is_priced
from engine.environments.env_facts import EnvFacts
from engine.home.run_dir import Home
from engine.models import hub
from engine.models.catalog import ModelRef
from engine.models.model_files import ModelFacts
from engine.models.sizing.layers import LoadedModel
from engine.models.sizing.plan import Job
from engine.records.estimate import Range
from engine.settings.defaults import SamplingLimits
from engine.settings.run_size import longest_sequence

_USUAL_RANK = 16  # the assumed rank of an adapter that is evaluated
_BETWEEN_TURNS = 32  # tokens of the environment's reply and of the chat format
_UNKNOWN_PROMPT = 200  # the assumed tokens of a prompt if no row was counted


@dataclass(frozen=True)
class Asking:
    """The amount of work when models answer tasks of an environment.

    Attributes:
        limits: the most tokens and turns of an answer.
        env: measured facts about the environment's tasks.
        rows: how many tasks are asked.
        attempts: how often each task is asked.
        score_workers: how many env processes score answers in parallel.
    """

    limits: SamplingLimits
    env: EnvFacts
    rows: int
    attempts: int
    score_workers: int = 1


def evaluation_hours(
    home: Home, asking: Asking, models: Sequence[tuple[ModelFacts, Path]], hardware: Hardware
) -> Range:
    """Estimate the device hours in which `models` answer, one after the other.

    Args:
        home: the home, whose finished runs correct the estimate.
        asking: how much each model has to answer.
        models: (facts, folder of the base model) of each model.
        hardware: the machine.
    """
    device = hardware.device
    precision = "bfloat16" if device.bf16 else "float32"
    speed, past_runs = speed_here(home, hardware, precision)
    speed = estimate.with_score_time(speed, asking.env, asking.score_workers)
    factors = past_runs.factors("grpo")  # GRPO samples in the same way as an evaluation
    # Level ("low", "likely", "high") -> seconds of all models together.
    seconds: dict[str, float] = dict.fromkeys(LEVELS, 0.0)
    for model_facts, base_path in models:
        loaded = _evaluated_model(model_facts, precision)
        plan = _evaluation_plan(loaded, asking, device, past_runs.measured_means(str(base_path)))
        download_seconds = hub.missing_bytes(base_path) / DOWNLOAD_RATE
        for level in LEVELS:
            seconds[level] += _sampling_seconds(plan, speed, factors, asking, level)
            seconds[level] += download_seconds
            seconds[level] += _env_step_seconds(plan, asking, level)
    return _hours_of(seconds, hardware, is_measured=speed.measured)


def _hours_of(seconds: Mapping[str, float], hardware: Hardware, *, is_measured: bool) -> Range:
    """Convert `seconds` by level to a range of hours.

    The range is wider if the speed of the machine comes from a table, and narrower if it was
    measured (`is_measured`).
    """
    low_factor, high_factor = SPREAD["measured" if is_measured else "model"]
    # A measured speed already includes the share of the CPU that other processes take; the table
    # does not. engine/cost/hours.py does the same for training runs.
    is_slowed = hardware.device.kind == "cpu" and not is_measured
    slowdown = 1.0 + hardware.load if is_slowed else 1.0
    likely = slowdown * seconds["likely"]
    # min and max, because "likely" may lie outside of low and high: it follows finished runs, whose
    # answers may be shorter or longer than these two levels assume.
    return Range(
        low=round(low_factor * min(seconds["low"], likely) / 3600, 6),
        likely=round(likely / 3600, 6),
        high=round(high_factor * max(seconds["high"], likely) / 3600, 6),
    )


def _env_step_seconds(plan: SamplingPlan, asking: Asking, level: str) -> float:
    """Return the seconds that the environment's step() takes for all answers at a level ("low",
    "likely", "high").

    Returns 0 if the environment has a single turn. No audit times step(), so each call, one for
    each turn, is assumed to take as long as a score.
    """
    if not plan.env.multi_turn:
        return 0.0
    steps = asking.rows * asking.attempts * plan.turns(level)
    return steps * plan.env.score_s / asking.score_workers


def _evaluated_model(model: ModelFacts, precision: str) -> LoadedModel:
    """Describe the model as an evaluation loads it, with an adapter of the usual rank."""
    return LoadedModel(
        model,
        precision,
        quantization="none",
        lora_rank=_USUAL_RANK,
        lora_targets=model.targets,
    )


def _evaluation_plan(
    loaded: LoadedModel, asking: Asking, device: Device, measured: MeasuredMeans
) -> SamplingPlan:
    """Plan how the model answers the tasks; `measured` is what finished runs of its base model
    measured."""
    limits = asking.limits
    longest = min(longest_sequence(limits, asking.env), loaded.model.max_positions)
    job = Job(loaded, device.kind, device.memory_total, longest, trains=False)
    return SamplingPlan(
        loaded,
        asking.env,
        device,
        limits,
        measured,
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
    """Return the seconds to load a model, to sample its answers and to score them.

    Args:
        plan: the model and how it answers.
        speed: the speed of the machine.
        factors: phase -> the factor by which finished runs correct the prediction. At the level
            "high" a factor below 1 counts as 1, so that the result stays an upper estimate.
        asking: how much the model has to answer.
        level: how long answers are assumed to be: "low", "likely" or "high".
    """
    answers = asking.rows * asking.attempts
    work = flops.rollouts(plan, asking.rows, answers, plan.episode(level))
    no_work = flops.Work()  # an evaluation neither trains nor saves
    works = {"training": no_work, "evaluation": work, "saving": no_work}
    model = plan.loaded.model
    phases = speed.phases(
        works, model.layers, model.weight_bytes, is_first_run=not plan.measured.runs
    )
    least_factor = 1.0 if level == "high" else 0.0
    return sum(
        seconds * max(least_factor, factors.get(phase, 1.0)) for phase, seconds in phases.items()
    )


@dataclass(frozen=True)
class EndpointCost:
    """The estimated cost of all models of an evaluation that are behind a URL.

    Attributes:
        calls: requests, from low to high.
        money: their price by the prices in config.toml, from low to high.
        unpriced: the models without a price, which `money` leaves out.
    """

    calls: Range
    money: Range
    unpriced: tuple[str, ...] = ()

    def to_json(self) -> JsonObject:
        """Return the fields that a reply's `estimate` shows: calls and money from low to high, and
        "unpriced" if a model has no price."""
        figures: JsonObject = {"calls": self.calls.to_json(), "money": self.money.to_json()}
        if self.unpriced:
            figures["unpriced"] = list(self.unpriced)
        return figures

    def in_words(self) -> str:
        """Write the cost such as "about 100 calls, about 0.12 in money (0.05 to 0.5)"."""
        text = f"about {counted(round(self.calls.likely), 'call')}"
        if self.money.high:
            money = self.money
            text += f", about {money.likely:.3g} in money ({money.low:.3g} to {money.high:.3g})"
        if self.unpriced:
            text += f"; config.toml has no price of {', '.join(self.unpriced)}"
        return text


def endpoint_cost(models: Sequence[ModelRef], asking: Asking) -> EndpointCost | None:
    """Estimate the cost of asking those of `models` that are behind a URL; None if there are none.

    Tokens are counted with the tokenizer of the built-in model, which for most texts needs more
    tokens than others.
    """
    endpoints = [(model.ref, model.endpoint) for model in models if model.endpoint]
    if not endpoints:
        return None
    answers = asking.rows * asking.attempts
    calls: dict[str, float] = {}
    money: dict[str, float] = {}
    for level in ("low", "likely", "high"):
        turns, tokens_in, tokens_out = _requests_and_tokens_of_answer(asking, level)
        calls[level] = round(len(endpoints) * answers * turns, 1)
        costs = [cost_of(endpoint, tokens_in, tokens_out) for _, endpoint in endpoints]
        money[level] = round(answers * sum(costs), 6)
    unpriced = tuple(ref for ref, endpoint in endpoints if not is_priced(endpoint))
    return EndpointCost(Range(**calls), Range(**money), unpriced)


def _requests_and_tokens_of_answer(asking: Asking, level: str) -> tuple[float, float, float]:
    """Return (requests, tokens sent, tokens written) for one answer at a level ("low", "likely",
    "high").

    Each turn is a request, and sends the conversation so far again.
    """
    env, limits = asking.env, asking.limits
    prompts = [row.prompt for row in env.lengths] or [_UNKNOWN_PROMPT]
    turn_lengths = [
        row.answer / max(1, row.answer_turns) for row in env.lengths if row.answer_turns
    ]
    longest = float(limits.max_tokens)
    usual_turn = min(fmean(turn_lengths) if turn_lengths else longest / 2, longest)
    if level == "low":
        turn_tokens, turns, prompt = usual_turn / 2, 1.0, fmean(prompts)
    elif level == "likely":
        turn_tokens, turns, prompt = usual_turn, float(limits.max_turns / 2), fmean(prompts)
    else:
        turn_tokens, turns, prompt = longest, float(limits.max_turns), float(max(prompts))
    if not env.multi_turn:
        turns = 1.0
    turns = max(1.0, turns)
    # Turn n sends the n - 1 turns before it again: 0 + 1 + ... + (turns - 1) of them in total.
    resent = turns * (turns - 1) / 2 * (turn_tokens + _BETWEEN_TURNS)
    return turns, turns * prompt + resent, turns * turn_tokens

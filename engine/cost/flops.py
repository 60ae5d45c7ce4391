"""How much a run has to compute: operations, tokens and bytes read, from the settings alone.

Operations per token, for N parameters in the layers' projections and a frozen base: 2N forward and
2N backward to the activations; the adapter adds 6 per parameter of its own; attention 4 x heads x
head_dim x (tokens before it) x layers forward and twice that backward; the output layer counts
only where a loss or a sample needs it. Recomputation adds a forward. The sources are the formulas
every engine's estimate rests on; what a machine makes of them is engine/cost/throughput.py, what a
run holds engine/cost/memory.py.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

from engine.core.hardware import Device
from engine.environments.env_facts import EnvFacts
from engine.models.model_files import ModelFacts
from engine.records.settings import GRPOSettings, SFTSettings, TrainSettings
from engine.settings.defaults import SamplingLimits, exam_limits

_WIDTH = {"float32": 4, "bfloat16": 2}
_NF4_WIDTH = 0.55  # bytes of a weight in 4 bits, with the scales of its block
# Logits of one chunk of the head: what stays in a CPU's cache; a GPU wants larger products.
HEAD_BYTES = {"cpu": 2**21, "cuda": 2**28}
ATTENTION_KEPT = 640  # rows up to this length keep their attention on a CPU
CONCURRENT = {"cpu": 256, "cuda": 512}  # completions under way at once
MICRO_CEILING = {"cpu": 1536, "cuda": 65536}  # tokens that go through the model at once
MICRO_SHARE = 0.25  # of the device's memory that one microbatch may fill
# Share of the completions in groups whose rewards differ: only these go through the update.
_EFFECTIVE = {"low": 0.4, "likely": 0.75, "high": 1.0}
# Share of the groups that come out uniform and are played again with resample_uniform.
_UNIFORM = {"low": 0.0, "likely": 0.25, "high": 0.6}
BETWEEN_TURNS = 32  # tokens an environment says between two turns, where nothing is known


@dataclass(frozen=True)
class Lengths:
    """Tokens of a typical row: prompt, what is said after it, and the longest of that.

    `turns`: assistant turns of an episode.
    """

    prompt: float
    said: float
    longest: float
    turns: float = 1.0

    @property
    def total(self) -> float:
        """Tokens of prompt and everything said by policy and environment."""
        return self.prompt + self.said * self.turns + BETWEEN_TURNS * max(0.0, self.turns - 1)


@dataclass(frozen=True)
class Seen:
    """What runs of one base model showed of it.

    Attributes:
        runs: how many there were.
        said: mean tokens of an episode in multiples of max_tokens; None where nobody measured it.
        turns: mean turns of an episode.
        effective: mean share of the groups whose rewards differ.
    """

    runs: int = 0
    said: float | None = None
    turns: float | None = None
    effective: float | None = None


UNSEEN = Seen()


@dataclass(frozen=True)
class Battery:
    """Questions about kept skills, asked at step 0 and again at the end
    (engine/worker/evaluation/prior_skills.py)."""

    tasks: int
    answer: Lengths


# pebble's own skills, and the families of reasoning-gym that every other base is asked.
PEBBLE_SKILLS = Battery(48, Lengths(prompt=24, said=8, longest=24))
GYM_TASKS = 40
GYM_QUESTION = (
    "Find the Greatest Common Divisor (GCD) of these numbers: 49, 8. Give only the GCD as your "
    "final answer. Reply with the answer alone."
)
GYM_ANSWER = "kelt"
KEEP, KEEP_TASKS = "keep", 40  # a person's environment of this name, and its tasks at most


@dataclass(frozen=True)
class Work:
    """What one phase computes.

    Attributes:
        train: floating-point operations of forward and backward passes.
        sample: operations of prefill and decoding.
        steps: decoding steps, each a pass through all layers for one token of every row.
        moved: bytes of weights and cache read while decoding.
        updates: passes that end in an optimizer step, or as many microbatches.
        scored: completions the environment scores.
        saves: checkpoints.
    """

    train: float = 0.0
    sample: float = 0.0
    steps: float = 0.0
    moved: float = 0.0
    updates: float = 0.0
    scored: float = 0.0
    saves: float = 0.0

    def times(self, count: float) -> "Work":
        return Work(*(value * count for value in self._values()))

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self._values(), other._values(), strict=True)))

    def _values(self) -> tuple[float, ...]:
        return astuple(self)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its adapter, in the number format it is loaded in.

    `precision`: float32 or bfloat16; `quantization`: none or nf4.
    """

    model: ModelFacts
    precision: str
    quantization: str
    lora_rank: int
    lora_targets: Sequence[str]

    @property
    def width(self) -> int:
        """Bytes of a frozen weight and of an activation."""
        return _WIDTH[self.precision]

    @property
    def weights(self) -> float:
        """Bytes of the frozen weights; in 4 bits where the layers' projections are quantized."""
        if self.quantization == "none":
            return self.model.params * self.width
        linear = self.model.linear_params
        return linear * _NF4_WIDTH + (self.model.params - linear) * self.width

    @property
    def adapter(self) -> int:
        """Parameters of the adapter."""
        return self.model.adapter_params(self.lora_rank, list(self.lora_targets))


@dataclass(frozen=True)
class SamplingPlan:
    """A model that plays the tasks of an environment.

    Attributes:
        limits: tokens and turns that answers may take.
        seen: what finished runs of the same base model showed of it.
        unknown_prompt: tokens of a prompt where none was counted.
    """

    loaded: LoadedModel
    env: EnvFacts
    device: Device
    limits: SamplingLimits
    seen: Seen
    unknown_prompt: float

    def episode(self, level: str) -> Lengths:
        """A typical episode when turns come out short (low), as expected (likely) or long (high).

        An untrained policy stops late, so turns reach max_tokens in `high`, and the longest of a
        batch does in every case but `low`.
        """
        limit = self.limits.max_tokens
        answers = self.env.answers
        turns = self.turns(level)
        if level == "likely" and self.seen.turns is not None:
            turns = max(1.0, min(turns, self.seen.turns))
        usual = _mean(list(answers)) / max(1.0, self.turns("low")) if answers else limit / 2
        tokens_said = {"low": usual, "likely": 1.5 * usual, "high": float(limit)}[level]
        if self.seen.said is not None and level == "likely":
            tokens_said = self.seen.said * limit / turns
        longest = {"low": 1.5 * usual, "likely": float(limit), "high": float(limit)}[level]
        prompt = _mean([row.prompt for row in self.env.lengths]) or self.unknown_prompt
        return Lengths(prompt, min(tokens_said, limit), min(longest, limit), turns)

    def turns(self, level: str) -> float:
        """Assistant turns of an episode: few (low), as expected (likely), as many as may be."""
        if not self.env.multi_turn:
            return 1.0
        most = self.limits.max_turns
        known = _mean([row.answer_turns for row in self.env.lengths if row.answer_turns])
        likely = min(most, known) if known else most / 2
        return {"low": likely, "likely": min(most, 1.5 * likely), "high": float(most)}[level]


@dataclass(frozen=True)
class Plan:
    """One training run as the estimate sees it: resolved settings, model, rows and device.

    Attributes:
        seen: what finished runs of the same base model showed of it.
        batteries: of kept skills.
    """

    settings: TrainSettings
    model: ModelFacts
    env: EnvFacts
    device: Device
    seen: Seen = UNSEEN
    batteries: tuple[Battery, ...] = (PEBBLE_SKILLS,)

    @cached_property
    def loaded(self) -> LoadedModel:
        settings = self.settings
        return LoadedModel(
            self.model,
            settings.precision,
            settings.quantization,
            settings.lora_rank,
            settings.lora_targets,
        )

    @cached_property
    def sampling(self) -> SamplingPlan:
        """How the run's rollouts and evaluations are played."""
        unknown_prompt = self.settings.max_length / 4
        return SamplingPlan(
            self.loaded, self.env, self.device, self._limits, self.seen, unknown_prompt
        )

    @property
    def width(self) -> int:
        """Bytes of a frozen weight and of an activation."""
        return self.loaded.width

    @property
    def weights(self) -> float:
        """Bytes of the frozen weights."""
        return self.loaded.weights

    @property
    def adapter(self) -> int:
        """Parameters of the adapter."""
        return self.loaded.adapter

    @property
    def rows(self) -> int:
        """Sequences that go into one optimizer step."""
        settings = self.settings
        if isinstance(settings, SFTSettings):
            return settings.batch_size
        return settings.prompts_per_step * settings.group_size

    @property
    def packed(self) -> bool:
        """Whether the rows of a step share forward passes; those of GRPO always do."""
        return not isinstance(self.settings, SFTSettings) or self.settings.packing

    @property
    def evaluations(self) -> int:
        """Evaluations between the one at step 0 and the final report."""
        return math.ceil(self.settings.steps / self.settings.eval_every)

    @property
    def evaluated_rows(self) -> float:
        """Rows played in all: all at step 0, half of them each time, the other half at the end."""
        rows = self.settings.eval_rows
        return rows + rows * self.evaluations / 2 + rows / 2

    @property
    def max_tokens(self) -> int:
        """Longest turn: the setting, or for SFT what its evaluations allow."""
        return self._limits.max_tokens

    @property
    def max_length(self) -> int:
        """Longest sequence that may be sampled."""
        return self._limits.max_length

    @cached_property
    def _limits(self) -> SamplingLimits:
        settings = self.settings
        if isinstance(settings, SFTSettings):
            return exam_limits(self.env, self.model.max_positions, settings.max_length)
        return SamplingLimits(settings.max_tokens, settings.max_turns, settings.max_length)

    def episode(self, level: str) -> Lengths:
        """A typical episode; see `SamplingPlan.episode`."""
        return self.sampling.episode(level)

    def turns(self, level: str) -> float:
        """Assistant turns of an episode; see `SamplingPlan.turns`."""
        return self.sampling.turns(level)

    def sft_row(self) -> Lengths:
        """Mean row after the cut at max_length; `said` are the supervised tokens."""
        settings = self.settings
        loss_on = settings.loss_on if isinstance(settings, SFTSettings) else "assistant"
        limit = settings.max_length
        rows = [row for row in self.env.lengths if row.turns]
        if not rows:
            return Lengths(limit / 2, limit / 2, limit / 2)
        supervised = _mean([row.supervised(loss_on, limit) for row in rows])
        total = _mean([min(row.total, limit) for row in rows])
        return Lengths(
            total - min(supervised, total), supervised, max(min(r.total, limit) for r in rows)
        )


def works(plan: Plan, level: str) -> dict[str, Work]:
    """What the run computes by phase of its course: training, evaluation, saving."""
    return {
        "training": train_work(plan, level),
        "evaluation": evaluation_work(plan, level),
        "saving": save_work(plan),
    }


def train_work(plan: Plan, level: str) -> Work:
    """All optimizer steps of the run, rollouts of GRPO included."""
    if isinstance(plan.settings, SFTSettings):
        row = plan.sft_row()
        step = _update(plan, plan.rows, plan.rows * row.total, row.total, row.said)
    else:
        step = _grpo_step(plan, plan.settings, level)
    return step.times(plan.settings.steps)


def _grpo_step(plan: Plan, settings: GRPOSettings, level: str) -> Work:
    """Work of one GRPO step: what is trained on and what is sampled."""
    episode = plan.episode(level)
    # Every round leaves a part of what was uniform before it.
    effective = _EFFECTIVE[level]
    if plan.seen.effective is not None and level == "likely":
        effective = plan.seen.effective
    uniform = (1 - effective) ** (1 + settings.resample_uniform)
    trained = plan.rows * (1 - uniform)
    # The prompt of a group goes through the model once.
    shared = trained * (1 - 1 / settings.group_size) * episode.prompt
    tokens = trained * episode.total - shared
    said = episode.said * episode.turns
    step = _update(plan, trained, tokens, episode.total, said).times(settings.updates_per_batch)
    if settings.kl_coef > 0:
        step += Work(train=_forward(plan, plan.rows, episode.total))
    again = range(1, settings.resample_uniform + 1)
    rounds = 1 + sum(_UNIFORM[level] ** number for number in again)
    prompts, sampled = settings.prompts_per_step * rounds, plan.rows * rounds
    return step + rollouts(plan.sampling, prompts, sampled, episode, batches=math.ceil(rounds))


def evaluation_work(plan: Plan, level: str) -> Work:
    """Held-out evaluations at step 0, every eval_every steps and at the end, and kept skills."""
    rows = plan.evaluated_rows
    if not rows:
        return Work()
    work = Work()
    if isinstance(plan.settings, SFTSettings):
        row = plan.sft_row()
        head = 2 * plan.model.head_params * row.said * rows
        work += Work(train=_forward(plan, rows, row.total) + head)
    if plan.env.scored:
        # Both halves at step 0, one of them each time after.
        episode = plan.episode(level)
        work += rollouts(plan.sampling, rows, rows, episode, batches=plan.evaluations + 3)
    for battery in plan.batteries:
        asked, answer = 2 * battery.tasks, battery.answer
        if plan.seen.said is not None and level == "likely":
            answer = replace(answer, said=min(1.0, plan.seen.said) * answer.longest)
        work += rollouts(plan.sampling, asked, asked, answer, batches=2)
    return work


def save_work(plan: Plan) -> Work:
    """Checkpoints, whose cost is mostly syncing them to disk."""
    count = math.ceil(plan.settings.steps / plan.settings.save_every)
    return Work(saves=max(count, plan.evaluations))


def rollouts(
    plan: SamplingPlan, prompts: float, rows: float, episode: Lengths, batches: int = 1
) -> Work:
    """Playing `rows` episodes of `prompts` distinct tasks, in at least `batches` goes."""
    loaded = plan.loaded
    model = loaded.model
    context = min(episode.total, plan.limits.max_length)
    per_token = 2 * (model.linear_params + model.head_params) + 2 * loaded.adapter
    produced = rows * episode.said * episode.turns
    attention = 4 * model.heads * model.head_dim * context * model.layers
    # Every turn after the first reads the conversation so far again.
    read = prompts * episode.prompt + rows * context * max(0.0, episode.turns - 1)
    goes = max(batches, math.ceil(rows / CONCURRENT[plan.device.kind]))
    steps = goes * episode.longest * episode.turns
    cache = 2 * model.layers * model.kv_heads * model.head_dim * loaded.width
    return Work(
        sample=produced * (per_token + attention) + 2 * model.linear_params * read,
        steps=steps,
        moved=steps * loaded.weights + produced * context * cache,
        scored=rows,
    )


def _update(plan: Plan, rows: float, tokens: float, length: float, supervised: float) -> Work:
    """Forward and backward of `rows` sequences of a `length`, `tokens` in all, with `supervised`
    of each, and one optimizer step."""
    work = update_operations(
        plan.model,
        plan.adapter,
        tokens=tokens,
        pairs=rows * length**2 / 2,
        scored=rows * supervised,
    )
    if plan.settings.gradient_checkpointing:
        work += _forward(plan, tokens / max(1.0, length), length)
    micro = max(1.0, tokens / microbatch_tokens(plan))
    if not plan.packed:
        micro = rows
    return Work(train=work, updates=micro)


def update_operations(
    model: ModelFacts, adapter: float, *, tokens: float, pairs: float, scored: float
) -> float:
    """Operations of a forward and backward pass through frozen layers with an adapter on them.

    Args:
        adapter: parameters of the adapter.
        tokens: that run through the layers.
        pairs: of a token and one it sees, itself included; half the square of a row's length.
        scored: tokens whose log-probability is taken.
    """
    attention = 12 * model.heads * model.head_dim * pairs * model.layers
    layers = tokens * (4 * model.linear_params + 6 * adapter)
    return layers + attention + 4 * model.head_params * scored


def _forward(plan: Plan, rows: float, tokens: float) -> float:
    model = plan.model
    attention = 2 * model.heads * model.head_dim * tokens * model.layers
    return rows * tokens * (2 * model.linear_params + 2 * plan.adapter + attention)


def microbatch_tokens(plan: Plan) -> float:
    """Padded tokens that go through the model at once, as the worker decides it."""
    model = plan.model
    return tokens_at_once(
        hidden=model.hidden,
        intermediate=model.intermediate,
        layers=model.layers,
        vocab=model.vocab,
        checkpointing=plan.settings.gradient_checkpointing,
        kind=plan.device.kind,
        memory=plan.device.memory_total,
    )


def tokens_at_once(
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    vocab: int,
    checkpointing: bool,
    kind: str,
    memory: int,
) -> float:
    """Tokens of a microbatch: what fits into `MICRO_SHARE` of a device's `memory` (bytes), each
    counted at what the widest forward pass keeps of it; 512 to `MICRO_CEILING`."""
    layer = 18 * hidden + 5 * intermediate
    per_token = 4 * ((2 if checkpointing else layers) * layer + 4 * hidden) + 12 * vocab
    return max(512.0, min(MICRO_CEILING[kind], MICRO_SHARE * memory / per_token))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

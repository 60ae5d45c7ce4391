"""How much a run computes: operations, tokens and bytes read, from its settings alone.

Operations per token, for N parameters in the layers' matrices (only the experts that a token uses
count) and a frozen base: 2N forward and 2N backward to the activations. The adapter adds 6 for each
of its own parameters. Attention takes 4 x heads x head_dim x (tokens before) x layers forward, and
twice that backward. The output layer counts only for tokens with a loss or a sample. Recomputation
adds a forward pass. These are the usual formulas of such estimates.
engine/cost/throughput.py turns operations into seconds; engine/cost/memory.py computes memory, by
the rows and tokens of engine/models/sizing/.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

from engine.core.hardware import Device
from engine.cost.batteries import PEBBLE_SKILLS, Battery, Lengths
from engine.environments.env_facts import EnvFacts
from engine.models.model_files import ModelFacts
from engine.models.sizing.layers import LoadedModel
from engine.models.sizing.plan import Job
from engine.records.settings import (
    DPOSettings,
    GRPOSettings,
    RowSettings,
    SFTSettings,
    TrainSettings,
)
from engine.settings.defaults import SamplingLimits, exam_limits
from engine.settings.run_size import loaded_model, longest_sequence, training_job


@dataclass(frozen=True)
class MeasuredMeans:
    """What finished runs of one base model measured. A field is None if no run measured it.

    Attributes:
        runs: number of these runs.
        answer_length_share: mean tokens that the model wrote in an episode, divided by max_tokens.
        turns: mean turns of an episode.
        effective_share: mean share of the groups whose rewards differ.
    """

    runs: int = 0
    answer_length_share: float | None = None
    turns: float | None = None
    effective_share: float | None = None


NOT_MEASURED = MeasuredMeans()


# Assumed share of the practice questions that the starting model answers rightly. Only the right
# answers are replayed.
_RIGHT_SHARE = 0.7


@dataclass(frozen=True)
class Work:
    """The work of one phase. config.json stores the values of these fields in their order.

    Attributes:
        train_operations: floating-point operations of forward and backward passes.
        sample_operations: operations of prefill and decoding.
        decode_steps: decoding steps, each a pass through all layers for one token of every row.
        moved_bytes: bytes of weights and cache read while decoding.
        microbatches: forward and backward passes, one for each microbatch.
        scores: completions that the environment scores.
        saves: checkpoints that are written.
    """

    train_operations: float = 0.0
    sample_operations: float = 0.0
    decode_steps: float = 0.0
    moved_bytes: float = 0.0
    microbatches: float = 0.0
    scores: float = 0.0
    saves: float = 0.0

    def times(self, count: float) -> "Work":
        """Return the work of doing this `count` times."""
        return Work(*(value * count for value in astuple(self)))

    def __add__(self, other: "Work") -> "Work":
        """Return the work of doing both, field by field."""
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class SamplingPlan:
    """A model that answers the tasks of an environment.

    Attributes:
        loaded: the model with its adapter.
        env: measured facts about the tasks.
        device: the device on which the model samples.
        limits: the most tokens and turns of an answer.
        measured: what finished runs of the same base model measured.
        guessed_prompt: the assumed tokens of a prompt if no prompt was counted.
        rows_at_once: completions that are sampled at the same time.
    """

    loaded: LoadedModel
    env: EnvFacts
    device: Device
    limits: SamplingLimits
    measured: MeasuredMeans
    guessed_prompt: float
    rows_at_once: int

    def episode(self, level: str) -> Lengths:
        """Return the lengths of a typical episode, in tokens.

        `level` says whether turns are assumed to be short ("low"), of expected length ("likely") or
        long ("high"). An untrained policy often does not stop by itself. So "high" assumes
        max_tokens for every turn, and "likely" assumes max_tokens for the longest turn of a batch.
        Measurements of finished runs count for "likely" only.
        """
        limit = self.limits.max_tokens
        turns = self.turns(level)
        if level == "likely" and self.measured.turns is not None:
            # The measured turns, but never more than are assumed without a measurement.
            turns = max(1.0, min(turns, self.measured.turns))
        turn_tokens = self._turn_tokens(level, turns)
        # The longest turn of a batch. At "low" 1.5 times the mean is a guess.
        longest_turn = 1.5 * turn_tokens if level == "low" else float(limit)
        mean_prompt = _mean([row.prompt for row in self.env.lengths])
        return Lengths(
            prompt=mean_prompt or self.guessed_prompt,  # 0: no prompt was counted
            turn_tokens=min(turn_tokens, limit),
            longest_turn=min(longest_turn, limit),
            turns=turns,
        )

    def _turn_tokens(self, level: str, turns: float) -> float:
        """Return the mean tokens of a turn at a level ("low", "likely", "high").

        `turns` is how many turns an episode has. The result may exceed max_tokens.
        """
        reference_tokens = self._reference_turn_tokens()
        if level == "low":
            return reference_tokens
        if level == "high":
            return float(self.limits.max_tokens)
        if self.measured.answer_length_share is not None:
            # The share is that of a whole episode, in multiples of max_tokens.
            return self.measured.answer_length_share * self.limits.max_tokens / turns
        return 1.5 * reference_tokens  # a guess, because nothing was measured

    def _reference_turn_tokens(self) -> float:
        """Return the mean tokens of a turn of the reference answers.

        Returns half of max_tokens if there are no reference answers.
        """
        answer_tokens = self.env.answers  # one number per reference answer: all its turns together
        if not answer_tokens:
            return self.limits.max_tokens / 2
        # The level "low" has as many turns as the reference answers.
        return _mean(list(answer_tokens)) / max(1.0, self.turns("low"))

    def turns(self, level: str) -> float:
        """Return the assistant turns of an episode; 1 in a single-turn environment.

        - low: the mean of the reference answers, or half of max_turns if there are none.
        - likely: 1.5 times the turns of "low", but at most max_turns.
        - high: max_turns.
        """
        if not self.env.multi_turn:
            return 1.0
        limit = self.limits.max_turns
        # The mean is 0 if there are no reference answers.
        reference_turns = _mean([row.answer_turns for row in self.env.lengths if row.answer_turns])
        low_turns = min(limit, reference_turns) if reference_turns else limit / 2
        if level == "low":
            return low_turns
        if level == "likely":
            return min(limit, 1.5 * low_turns)
        return float(limit)


@dataclass(frozen=True)
class Plan:
    """One training run as the estimate sees it: resolved settings, model, rows and device.

    Attributes:
        measured: what finished runs of the same base model measured.
        batteries: questions that show what the model forgets.
        teacher: the teacher of a distillation from a local model; None for every other run.
        teacher_shares_base: whether the teacher has the same base model, so that only its adapter
            is loaded.
    """

    settings: TrainSettings
    model: ModelFacts
    env: EnvFacts
    device: Device
    measured: MeasuredMeans = NOT_MEASURED
    batteries: tuple[Battery, ...] = (PEBBLE_SKILLS,)
    teacher: ModelFacts | None = None
    teacher_shares_base: bool = False

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model with its adapter, as the settings load it."""
        return loaded_model(self.settings, self.model)

    @cached_property
    def sampling(self) -> SamplingPlan:
        """How the run samples its rollouts and the answers of its evaluations."""
        return SamplingPlan(
            self.loaded,
            self.env,
            self.device,
            self._limits,
            self.measured,
            guessed_prompt=self.settings.max_length / 4,
            rows_at_once=self.job.sampler_rows,
        )

    @cached_property
    def job(self) -> Job:
        """The parts of the run that have to fit into the device's memory."""
        return training_job(
            self.settings,
            self.loaded,
            kind=self.device.kind,
            memory=self.device.memory_total,
            longest=longest_sequence(self._limits, self.env),
            teacher=self.teacher,
            shares_base=self.teacher_shares_base,
        )

    @property
    def rows(self) -> int:
        """Sequences of one optimizer step."""
        settings = self.settings
        if isinstance(settings, DPOSettings):
            return 2 * settings.batch_size  # a pair is a better and a worse answer
        if isinstance(settings, RowSettings):
            return settings.batch_size
        return settings.prompts_per_step * settings.group_size

    @property
    def step_tokens(self) -> float:
        """Tokens that run through the layers in a step of SFT or DPO."""
        row = self.trained_row()
        tokens = self.rows * max(row.total, 1.0)
        if isinstance(self.settings, DPOSettings):
            tokens -= self.rows / 2 * row.prompt  # a prompt runs once for both answers of a pair
        return tokens

    @property
    def replayed_rows(self) -> int:
        """Rows that a step of SFT or GRPO replays (to keep skills) beside its own; 0 if `keep` is
        off."""
        settings = self.settings
        if not isinstance(settings, SFTSettings | GRPOSettings) or not settings.keep:
            return 0
        # `keep` is the share of the replayed rows among all rows of a step.
        return max(1, round(self.rows * settings.keep / (1 - settings.keep)))

    @property
    def replayed_tokens(self) -> float:
        """Tokens of the rows that a step replays."""
        return self.replayed_rows * self.replayed_row().total

    @property
    def asks_practice(self) -> bool:
        """Whether practice questions are asked before the first step, to replay right answers."""
        settings = self.settings
        return isinstance(settings, SFTSettings | GRPOSettings) and settings.keep > 0

    def practice_questions(self) -> tuple[float, Lengths]:
        """Return (how many practice questions the start model answers before the first step, the
        lengths in tokens of one question with its answer).

        The right answers are replayed in the training steps, so more questions are asked than rows
        are replayed. The number is 0 if the run asks no practice questions. The train tasks of the
        setting `keep_env` count as if they were practice questions.
        """
        rows_to_replay = self.settings.steps * self.replayed_rows
        questions = rows_to_replay / _RIGHT_SHARE  # more, because some are answered wrongly
        for battery in self.batteries:
            if battery.practice and self.asks_practice:
                return min(questions, battery.practice), battery.answer
        return 0.0, self.trained_row()

    def replayed_row(self) -> Lengths:
        """Return the lengths of a replayed row, which is a practice question with its answer."""
        _, row = self.practice_questions()
        return row

    @property
    def packed(self) -> bool:
        """Whether several rows of a step go through the model in one forward pass. In SFT the
        setting `packing` decides; in all other algorithms they do."""
        return not isinstance(self.settings, SFTSettings) or self.settings.packing

    @property
    def evaluations(self) -> int:
        """Number of evaluations, not counting the one at step 0 and the one for the final
        report."""
        return math.ceil(self.settings.steps / self.settings.eval_every)

    @property
    def max_tokens(self) -> int:
        """Most tokens that are sampled in a turn: the setting, or in SFT and DPO the limit of
        evaluations."""
        return self._limits.max_tokens

    @property
    def max_length(self) -> int:
        """Most tokens of a sampled sequence."""
        return self._limits.max_length

    @cached_property
    def _limits(self) -> SamplingLimits:
        """The limits of a sampled answer.

        GRPO and distillation have them as settings. SFT and DPO sample answers only in evaluations,
        so the limits of evaluations are used.
        """
        settings = self.settings
        if isinstance(settings, RowSettings):
            must_think = isinstance(settings, SFTSettings) and settings.thinking == "require"
            return exam_limits(
                self.env, self.model.max_positions, settings.max_length, thinking=must_think
            )
        return SamplingLimits(settings.max_tokens, settings.max_turns, settings.max_length)

    def episode(self, level: str) -> Lengths:
        """Return the lengths in tokens of a typical episode (all turns of one rollout). `level`
        says whether turns are assumed to be "low" (short), "likely" or "high" (long)."""
        return self.sampling.episode(level)

    def turns(self, level: str) -> float:
        """Return how many assistant turns an episode is assumed to have at a level ("low",
        "likely", "high"); 1 in a single-turn environment."""
        return self.sampling.turns(level)

    def trained_row(self) -> Lengths:
        """Return the lengths of the mean row that SFT trains on, or of the mean answer of DPO.

        Rows are cut at max_length. In the result `turn_tokens` are the tokens with loss, `prompt`
        all other tokens, and `longest_turn` is the length of the longest row. If no row was
        counted, each of the three is half of max_length.
        """
        settings = self.settings
        limit = settings.max_length
        if isinstance(settings, DPOSettings):
            totals, supervised = self._pair_lengths()
        else:
            totals, supervised = self._answer_lengths()
        if not totals:
            return Lengths(prompt=limit / 2, turn_tokens=limit / 2, longest_turn=limit / 2)
        cut_lengths = [min(total, limit) for total in totals]
        mean_length = _mean(cut_lengths)
        mean_supervised = _mean(supervised)
        if isinstance(settings, DPOSettings):  # `_pair_lengths` does not cut at max_length
            mean_supervised = min(mean_supervised, mean_length)
        return Lengths(
            prompt=max(0.0, mean_length - mean_supervised),
            turn_tokens=mean_supervised,
            longest_turn=max(cut_lengths),
        )

    def _answer_lengths(self) -> tuple[list[int], list[int]]:
        """Return (tokens in all, tokens with loss): two lists with one item for each counted task
        that has a reference answer. Of each task only the first `max_length` tokens may carry loss.
        """
        settings = self.settings
        # The method is called for SFT only; no other settings have `loss_on`.
        loss_on = settings.loss_on if isinstance(settings, SFTSettings) else "assistant"
        # `env.lengths` has the token counts of each counted task; without an answer no turns.
        answered = [lengths for lengths in self.env.lengths if lengths.turns]
        totals = [lengths.total for lengths in answered]
        supervised = [lengths.supervised(loss_on, settings.max_length) for lengths in answered]
        return totals, supervised

    def _pair_lengths(self) -> tuple[list[int], list[int]]:
        """Return two lists with a number for each answer of all DPO pairs: its tokens with the
        prompt, and its tokens without the prompt."""
        totals: list[int] = []
        answer_lengths: list[int] = []
        for row in self.env.lengths:
            for total in row.pair or ():
                totals.append(total)
                answer_lengths.append(max(0, total - row.prompt))
        return totals, answer_lengths


def rollouts(
    plan: SamplingPlan, prompts: float, rows: float, episode: Lengths, batches: int = 1
) -> Work:
    """Return the work of sampling and scoring `rows` episodes.

    Args:
        plan: the model and the tasks.
        prompts: number of different tasks; each prompt is read once.
        rows: number of episodes.
        episode: the lengths of a typical episode.
        batches: the least number of batches in which the episodes are sampled.
    """
    loaded = plan.loaded
    # An upper bound: every token is assumed to attend to the whole episode.
    context = min(episode.total, plan.limits.max_length)
    tokens_written = rows * episode.turn_tokens * episode.turns
    # For every turn after the first, the model reads the conversation so far again.
    tokens_read = prompts * episode.prompt + rows * context * max(0.0, episode.turns - 1)
    decode_operations = tokens_written * _decode_operations_per_token(loaded, context)
    read_operations = 2 * loaded.model.linear_params * tokens_read
    steps = _decode_steps(plan, rows, episode, batches)
    return Work(
        sample_operations=decode_operations + read_operations,
        decode_steps=steps,
        # Each step reads all weights. Each written token reads the cache of the tokens before it.
        moved_bytes=steps * loaded.weights + _cache_bytes_read(loaded, tokens_written, context),
        scores=rows,
    )


def _decode_steps(plan: SamplingPlan, rows: float, episode: Lengths, batches: int) -> float:
    """Return the number of decoding steps for `rows` episodes in at least `batches` batches.

    For each turn a batch takes as many steps as its longest answer has tokens.
    """
    batch_count = max(batches, math.ceil(rows / plan.rows_at_once))
    return batch_count * episode.longest_turn * episode.turns


def _cache_bytes_read(loaded: LoadedModel, tokens: float, context: float) -> float:
    """Return the bytes of the key-value cache that are read to sample `tokens` tokens, each of
    which attends to `context` tokens."""
    bytes_per_token = loaded.model.cached_numbers * loaded.width
    return tokens * context * bytes_per_token


def _decode_operations_per_token(loaded: LoadedModel, context: float) -> float:
    """Return the operations of sampling one token that attends to `context` tokens."""
    model = loaded.model
    # Two operations for each parameter: a multiplication and an addition.
    layers_and_head = 2 * (model.linear_params + model.head_params) + 2 * loaded.adapter
    # Four operations for each number of the token's queries and each token that it attends to: two
    # for the product with the key, two for the product with the value.
    attention = 4 * model.attention_width * context
    return layers_and_head + attention


def update_work(plan: Plan, rows: float, tokens: float, length: float, supervised: float) -> Work:
    """Return the work of one optimizer step, forward and backward.

    Args:
        plan: the planned run: its model, settings and work in one step.
        rows: number of sequences in the step.
        tokens: tokens of all sequences together; a prompt that several sequences share counts once.
        length: tokens of one typical sequence.
        supervised: how many of these `length` tokens carry loss.
    """
    operations = update_operations(
        plan.model,
        plan.loaded.adapter,
        tokens=tokens,
        # Each token attends to the tokens before it, which are half of the row on average.
        pairs=rows * length**2 / 2,
        scored=rows * supervised,
    )
    if plan.settings.gradient_checkpointing:  # activations are computed a second time
        # So many sequences of `length` have that many tokens; fewer than `rows` if prompts are
        # shared, since a shared prompt is computed once.
        equivalent_rows = tokens / max(1.0, length)
        operations += forward_operations(plan, equivalent_rows, length)
    if plan.packed:
        microbatches = max(1.0, tokens / plan.job.microbatch_tokens)
    else:  # each row is a forward pass of its own
        microbatches = rows
    return Work(train_operations=operations, microbatches=microbatches)


def update_operations(
    model: ModelFacts, adapter: float, *, tokens: float, pairs: float, scored: float
) -> float:
    """Return the operations of a forward and backward pass through frozen layers with an adapter.

    Args:
        model: the model's sizes.
        adapter: number of parameters of the adapter.
        tokens: tokens that run through the layers.
        pairs: number of pairs of a token and a token that it attends to, itself included; about
            half the square of a row's length, summed over the rows.
        scored: tokens whose log-probability is computed.
    """
    # For each number of a token's queries: 4 operations forward, 8 backward.
    attention = 12 * model.attention_width * pairs
    # Per token a frozen parameter takes 2 operations forward and 2 backward. A parameter of the
    # adapter takes 2 and 4, because it also gets a gradient.
    layers = tokens * (4 * model.linear_params + 6 * adapter)
    output_layer = 4 * model.head_params * scored
    return layers + attention + output_layer


def forward_operations(plan: Plan, rows: float, tokens: float) -> float:
    """Return the operations of a forward pass over `rows` rows of `tokens` tokens each, without the
    output layer."""
    model = plan.model
    parameters = 2 * model.linear_params + 2 * plan.loaded.adapter
    # Per token 4 operations for each token before it. On average half of the row is before it,
    # which makes 4 * tokens / 2.
    attention = 2 * model.attention_width * tokens
    operations_per_token = parameters + attention
    return rows * tokens * operations_per_token


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the values; 0 if there are none."""
    return sum(values) / len(values) if values else 0.0

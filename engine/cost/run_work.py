"""The work of a whole run: training by its algorithm, evaluations, checkpoints.

engine/cost/flops.py counts the operations of one update and of one batch of rollouts.
"""

import math
from dataclasses import replace

from engine.cost.flops import (
    Battery,
    Plan,
    Work,
    forward_operations,
    rollouts,
    update_work,
)
from engine.models.model_files import ModelFacts
from engine.records.settings import DistillSettings, DPOSettings, GRPOSettings, RowSettings

# Share of the groups (the completions of one task) whose rewards differ. Only these are trained on.
_EFFECTIVE = {"low": 0.4, "likely": 0.75, "high": 1.0}
# Share of the groups whose rewards are all equal; the setting resample_uniform samples them again.
# At "high" both shares are large, because more training and more sampling take more time.
_UNIFORM = {"low": 0.0, "likely": 0.25, "high": 0.6}


def works(plan: Plan, level: str) -> dict[str, Work]:
    """Return the work of the whole run under the keys "training", "evaluation" and "saving".

    Args:
        level: how long the sampled answers are: "low", "likely" or "high".
    """
    return {
        "training": train_work(plan, level),
        "evaluation": evaluation_work(plan, level),
        "saving": save_work(plan),
    }


def train_work(plan: Plan, level: str) -> Work:
    """Return the work of all optimizer steps.

    GRPO and distillation train on rollouts, so their work includes sampling and scoring. `level`
    says how long rollouts are assumed to be: "low", "likely" or "high".
    """
    if isinstance(plan.settings, GRPOSettings):
        step = _grpo_step_work(plan, plan.settings, level)
    elif isinstance(plan.settings, DistillSettings):
        step = _distill_step_work(plan, plan.settings, level)
    else:
        step = _row_step_work(plan)
    return (step + _replay_work(plan)).times(plan.settings.steps)


def _replay_work(plan: Plan) -> Work:
    """Return the work of the rows that one step of SFT or GRPO replays (trains on again to keep
    skills); none if the setting `keep` is off."""
    if not plan.replayed_rows:
        return Work()
    replayed = plan.replayed_row()
    return update_work(
        plan,
        plan.replayed_rows,
        tokens=plan.replayed_tokens,
        length=replayed.total,
        supervised=replayed.turn_tokens,
    )


def _row_step_work(plan: Plan) -> Work:
    """Return the work of one SFT or DPO step. DPO adds a forward pass of every answer through the
    reference model."""
    row = plan.trained_row()  # `turn_tokens` are the tokens with loss
    step = update_work(
        plan,
        plan.rows,
        tokens=plan.step_tokens,
        length=row.total,
        supervised=row.turn_tokens,
    )
    if isinstance(plan.settings, DPOSettings):
        # Two operations per parameter of the output layer, for each token of an answer.
        output_layer = 2 * plan.model.head_params * row.turn_tokens * plan.rows
        # The tokens of the step, expressed as a number of whole rows. They are fewer than
        # `plan.rows`, because the prompt of a pair is read once for both answers.
        rows_read = plan.step_tokens / max(1.0, row.total)
        layers = forward_operations(plan, rows_read, row.total)
        step += Work(train_operations=layers + output_layer)
    return step


def _grpo_step_work(plan: Plan, settings: GRPOSettings, level: str) -> Work:
    """Return the work of one GRPO step: sampling, scoring and the update.

    Only groups (completions of one task) whose rewards differ are trained on. The others are
    sampled again, up to `resample_uniform` times (a setting). `level` ("low", "likely" or "high")
    says how long episodes are assumed to be.
    """
    episode = plan.episode(level)
    step = _grpo_update_work(plan, settings, level).times(settings.updates_per_batch)
    if settings.kl_coef > 0:  # the reference model reads every completion once
        step += Work(train_operations=forward_operations(plan, plan.rows, episode.total))
    rounds = _sampling_rounds(settings, level)  # in multiples of a batch, e.g. 1.25
    return step + rollouts(
        plan.sampling,
        prompts=settings.prompts_per_step * rounds,
        rows=plan.rows * rounds,
        episode=episode,
        batches=math.ceil(rounds),
    )


def _grpo_update_work(plan: Plan, settings: GRPOSettings, level: str) -> Work:
    """Return the work of one update of GRPO, which trains on groups with different rewards only.

    `level` ("low", "likely" or "high") selects one of three guesses, both of the length of the
    episodes and of the share of the groups that are trained on.
    """
    episode = plan.episode(level)
    trained_rows = plan.rows * _trained_share(plan, settings, level)
    # The rows of a group have the same prompt, which goes through the model only once.
    rows_without_prompt = trained_rows * (1 - 1 / settings.group_size)
    saved_tokens = rows_without_prompt * episode.prompt
    return update_work(
        plan,
        trained_rows,
        tokens=trained_rows * episode.total - saved_tokens,  # of all rows together
        length=episode.total,  # of one row
        supervised=episode.turn_tokens * episode.turns,  # of one row: the tokens of the policy
    )


def _trained_share(plan: Plan, settings: GRPOSettings, level: str) -> float:
    """Return the share of a batch's groups that are trained on, after all rounds of sampling.

    Groups whose rewards are all equal teach nothing and are sampled again. In each round the same
    share of them is assumed to come out equal again. `level` is "low", "likely" or "high".
    """
    effective_share = _EFFECTIVE[level]
    if plan.measured.effective_share is not None and level == "likely":
        effective_share = plan.measured.effective_share
    sampling_rounds = 1 + settings.resample_uniform
    uniform_share = (1 - effective_share) ** sampling_rounds
    return 1 - uniform_share


def _sampling_rounds(settings: GRPOSettings, level: str) -> float:
    """Return how much a GRPO step samples, in multiples of a whole batch, such as 1.25.

    The first round samples a batch. Each of the `resample_uniform` later rounds samples only the
    groups whose rewards are still all equal.
    """
    round_counts = range(1, settings.resample_uniform + 1)
    # The power is the share of the groups whose rewards are all equal after `round_count` rounds.
    return 1 + sum(_UNIFORM[level] ** round_count for round_count in round_counts)


def _distill_step_work(plan: Plan, settings: DistillSettings, level: str) -> Work:
    """Return the work of one step of distillation.

    The step samples and scores completions, lets the teacher read them if it is loaded on this
    device, and trains on all of them.
    """
    episode = plan.episode(level)
    # The prompt of a group goes through the model once, not once for each of its rows.
    prompt_tokens = settings.prompts_per_step * episode.prompt
    tokens = plan.rows * (episode.total - episode.prompt) + prompt_tokens  # of all rows
    supervised = episode.turn_tokens * episode.turns  # of one row
    step = update_work(plan, plan.rows, tokens=tokens, length=episode.total, supervised=supervised)
    if plan.teacher is not None:
        step += _teacher_work(
            plan.teacher, tokens, length=episode.total, supervised=supervised, rows=plan.rows
        )
    return step + rollouts(
        plan.sampling, prompts=settings.prompts_per_step, rows=plan.rows, episode=episode
    )


def _teacher_work(
    teacher: ModelFacts, tokens: float, length: float, supervised: float, rows: float
) -> Work:
    """Return the work of the teacher, which reads tokens and computes log-probabilities.

    Args:
        teacher: the teacher's sizes.
        tokens: tokens that the teacher reads, of all sequences together.
        length: tokens of a typical sequence.
        supervised: tokens of a typical sequence whose log-probabilities are computed.
        rows: number of sequences.
    """
    # Two operations for each parameter, and four for each earlier token. On average half of the
    # sequence is earlier, which makes 4 * length / 2.
    operations_per_token = 2 * teacher.linear_params + 2 * teacher.attention_width * length
    output_layer = 2 * teacher.head_params * supervised * rows
    return Work(train_operations=tokens * operations_per_token + output_layer)


def evaluation_work(plan: Plan, level: str) -> Work:
    """Return the work of all evaluations of the run.

    It includes the batteries (questions that show what the model forgets), and the questions that
    the setting `keep` asks before the first step. Held-out rows are evaluated at step 0, every
    eval_every steps and at the end. SFT also computes the loss of the reference answers, DPO that
    of the held-out pairs. `level` ("low", "likely" or "high") says how long sampled answers are
    assumed to be.
    """
    questions, answer = plan.practice_questions()
    work = rollouts(plan.sampling, questions, questions, answer) if questions else Work()
    rows = evaluated_rows(plan)
    if not rows:  # eval_rows is 0: nothing is evaluated
        return work
    if isinstance(plan.settings, RowSettings):
        work += _heldout_loss_work(plan, rows)
    if plan.env.scored:
        # The rows that choose the checkpoint and the rows that are reported are separate batches:
        # both at step 0, the first ones at each evaluation, the second ones at the end.
        episode = plan.episode(level)
        work += rollouts(
            plan.sampling, prompts=rows, rows=rows, episode=episode, batches=plan.evaluations + 3
        )
    for battery in plan.batteries:
        if battery.tasks:
            work += _battery_work(plan, battery, level)
    return work


def evaluated_rows(plan: Plan) -> float:
    """Return the number of answers in all evaluations of a run together.

    Some rows are answered to choose the best checkpoint, others to report the result. These are the
    dev rows and the held-out rows, or two halves of the held-out rows if there are no dev rows.
    """
    rows = plan.settings.eval_rows
    if plan.env.dev_rows:
        choosing = min(rows, plan.env.dev_rows)
        reported = min(rows, plan.env.heldout_rows)
    else:
        choosing, reported = rows / 2, rows / 2
    at_start = choosing + reported
    later = choosing * plan.evaluations
    at_end = reported
    return at_start + later + at_end


def _heldout_loss_work(plan: Plan, rows: float) -> Work:
    """Return the work of reading `rows` held-out answers to compute their loss."""
    row = plan.trained_row()  # held-out answers are assumed to be as long as the training rows
    layers = forward_operations(plan, rows, row.total)
    # Two operations per parameter of the output layer, for each token of an answer.
    output_layer = 2 * plan.model.head_params * row.turn_tokens * rows
    return Work(train_operations=layers + output_layer)


def _battery_work(plan: Plan, battery: Battery, level: str) -> Work:
    """Return the work of asking a battery's questions (those that show what the model forgets) at
    step 0 and at the end.

    Answers are assumed to have the battery's usual length. At the level "likely" they have the
    length that finished runs measured, if there are such runs.
    """
    questions = 2 * battery.tasks  # all of them are asked twice
    answer = battery.answer
    if plan.measured.answer_length_share is not None and level == "likely":
        share_of_limit = min(1.0, plan.measured.answer_length_share)
        answer = replace(answer, turn_tokens=share_of_limit * answer.longest_turn)
    return rollouts(plan.sampling, prompts=questions, rows=questions, episode=answer, batches=2)


def save_work(plan: Plan) -> Work:
    """Return the work of writing checkpoints, most of which is syncing them to disk.

    A checkpoint is written every save_every steps. At least as many are counted as there are
    evaluations.
    """
    count = math.ceil(plan.settings.steps / plan.settings.save_every)
    return Work(saves=max(count, plan.evaluations))

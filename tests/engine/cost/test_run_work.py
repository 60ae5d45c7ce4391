"""The work of a run of pairs, and of one with a teacher, by hand."""

from dataclasses import replace

import pytest
from machines import CPU
from run_configs import distill_settings, dpo_settings, grpo_settings, sft_settings

from engine.cost import flops, memory, run_work
from engine.cost.batteries import PEBBLE_SKILLS
from engine.environments.env_facts import EnvFacts, RowLengths
from engine.models.model_files import ModelFacts

SMALL = ModelFacts(
    "Qwen3ForCausalLM", 192, 4, 6, 2, 32, 512, 264, True, 1_628_992, 1024, "float32", 6_515_968
)
# Prompts of 60 tokens, better answers of 30, worse of 20; and one row without a pair.
PAIR = RowLengths(60, 90, ((60, 90),), pair=(90, 80))
ENV = EnvFacts(
    "sums@1", "single", True, 41, 0, 41, (*[PAIR] * 40, RowLengths(9, 900)), paired_rows=40
)


def plan(batch_size: int = 8, max_length: int = 512) -> flops.Plan:
    settings = dpo_settings(batch_size=batch_size, max_length=max_length, eval_rows=0)
    return flops.Plan(settings, SMALL, ENV, CPU.device)


def test_a_pair_runs_its_prompt_once_and_both_answers() -> None:
    assert plan().rows == 16
    assert plan().step_tokens == pytest.approx(8 * (60 + 30 + 20))
    row = plan().trained_row()
    assert (row.prompt, row.turn_tokens, row.longest_turn) == pytest.approx((60, 25, 90))
    assert plan(max_length=70).trained_row().longest_turn == 70


def test_the_reference_adds_a_forward_pass_to_every_step() -> None:
    work = run_work.train_work(plan(), "likely")
    update = flops.update_work(plan(), 16, tokens=8 * 110, length=85, supervised=25)
    forward = flops.forward_operations(plan(), 8 * 110 / 85, 85) + 2 * SMALL.head_params * 25 * 16
    assert work.train_operations == pytest.approx(4 * (update.train_operations + forward))
    # A step forward and backward is three times a forward pass; the adapter makes it a little more.
    assert 1.25 < work.train_operations / (4 * update.train_operations) < 1.6


def test_a_pair_takes_the_memory_of_both_answers() -> None:
    pairs = replace(plan(batch_size=1), env=replace(ENV, lengths=(replace(PAIR, pair=(90, 500)),)))
    rows = replace(pairs, settings=sft_settings(batch_size=1, max_length=512, eval_rows=0))
    assert memory.memory(pairs).activations > 3 * memory.memory(rows).activations


def test_replayed_rows_are_trained_beside_the_others_and_their_questions_asked_once() -> None:
    plain = flops.Plan(sft_settings(batch_size=24, max_length=512), SMALL, ENV, CPU.device)
    kept = replace(plain, settings=plain.settings.model_copy(update={"keep": 0.2}))
    skills = PEBBLE_SKILLS.answer
    length = skills.prompt + skills.turn_tokens
    six = flops.update_work(
        plain, 6, tokens=6 * length, length=length, supervised=skills.turn_tokens
    )
    added = run_work.train_work(kept, "likely").train_operations
    added -= run_work.train_work(plain, "likely").train_operations
    assert (kept.replayed_rows, plain.replayed_rows, kept.rows) == (6, 0, 24)
    assert added == pytest.approx(plain.settings.steps * six.train_operations)
    # As many questions as leave enough right answers, at 70 % right.
    questions = plain.settings.steps * 6 / 0.7
    assert kept.practice_questions() == (pytest.approx(questions), skills)
    asked = flops.rollouts(kept.sampling, prompts=questions, rows=questions, episode=skills)
    more = run_work.evaluation_work(kept, "low").decode_steps
    more -= run_work.evaluation_work(plain, "low").decode_steps
    assert more == pytest.approx(asked.decode_steps)
    long = replace(kept, settings=kept.settings.model_copy(update={"steps": 10_000}))
    assert long.practice_questions()[0] == PEBBLE_SKILLS.practice
    assert memory.memory(kept).activations >= memory.memory(plain).activations
    # Rows of an environment come in the place of half of them, and are counted alike.
    named = replace(kept, settings=kept.settings.model_copy(update={"keep_env": "other@1"}))
    assert named.replayed_row() == kept.replayed_row()
    assert run_work.evaluation_work(named, "low") == run_work.evaluation_work(kept, "low")


def test_grpo_trains_replayed_rows_beside_its_completions() -> None:
    settings = grpo_settings(prompts_per_step=4, group_size=8, steps=20, keep=0.2)
    kept = flops.Plan(settings, SMALL, SUMS, CPU.device)
    plain = replace(kept, settings=settings.model_copy(update={"keep": 0.0}))
    assert (kept.replayed_rows, plain.replayed_rows) == (8, 0)  # 8 of 40
    skills = PEBBLE_SKILLS.answer
    length = skills.prompt + skills.turn_tokens
    eight = flops.update_work(
        kept, 8, tokens=8 * length, length=length, supervised=skills.turn_tokens
    )
    added = run_work.train_work(kept, "likely").train_operations
    added -= run_work.train_work(plain, "likely").train_operations
    assert added == pytest.approx(20 * eight.train_operations)
    assert kept.practice_questions() == (pytest.approx(20 * 8 / 0.7), skills)


SUMS = replace(ENV, lengths=(RowLengths(60, 90, ((60, 90),)),) * 40)
LARGE = replace(SMALL, params=10 * SMALL.params, hidden=384, layers=8)


def distillation(teacher: ModelFacts | None, *, shares_base: bool = False) -> flops.Plan:
    settings = distill_settings(max_tokens=64, max_length=512)
    return flops.Plan(
        settings, SMALL, SUMS, CPU.device, teacher=teacher, teacher_shares_base=shares_base
    )


def test_a_teacher_here_reads_every_completion_once_and_one_elsewhere_costs_nothing() -> None:
    here = distillation(LARGE)
    alone = run_work.train_work(distillation(None), "likely")
    episode = here.episode("likely")
    written = episode.turn_tokens * episode.turns
    # 4 prompts, read once each, and 2 completions of each.
    tokens = 4 * episode.prompt + 8 * written
    per_token = 2 * LARGE.linear_params + 2 * LARGE.attention_width * episode.total
    expected = tokens * per_token + 8 * written * 2 * LARGE.head_params
    work = run_work.train_work(here, "likely")
    assert work.train_operations - alone.train_operations == pytest.approx(4 * expected)
    assert work.sample_operations == alone.sample_operations > 0
    # Every completion is trained on, while of GRPO's some are alike.
    grpo = replace(here, settings=grpo_settings(max_tokens=64, max_length=512, group_size=2))
    assert alone.train_operations > run_work.train_work(grpo, "likely").train_operations


def test_a_teacher_of_another_base_is_held_beside_the_policy() -> None:
    alone = memory.memory(distillation(None))
    shared = memory.memory(distillation(SMALL, shares_base=True))
    apart = memory.memory(distillation(LARGE))
    assert shared.weights == alone.weights
    assert shared.adapter_and_optimizer == pytest.approx(1.25 * alone.adapter_and_optimizer)
    assert apart.weights - alone.weights == 4 * LARGE.params  # float32
    assert apart.total > shared.total > alone.total


def test_a_run_that_samples_takes_the_memory_of_it_without_heldout_rows_too() -> None:
    """Of SFT only evaluations sample; of GRPO each step does."""
    sampled = replace(plan(), env=SUMS, settings=grpo_settings(max_length=512, eval_rows=0))
    assert memory.memory(sampled).kv_cache > 0
    trained = replace(sampled, settings=sft_settings(batch_size=1, max_length=512, eval_rows=0))
    assert memory.memory(trained).kv_cache == 0

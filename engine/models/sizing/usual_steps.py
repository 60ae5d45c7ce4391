"""How long training goes on by default, and at which rate: batch, updates, epochs, learning rate.

The numbers were measured (benchmarks/RESULTS.md), or come from "LoRA without regret"
(thinkingmachines.ai/blog/lora): small batches, and about ten times the rate of full fine-tuning.
"""

import math

UNKNOWN_ROWS = 1000  # assumed train rows if there is no environment
# SFT makes as many updates as a small model needs to learn a new form of answer, but no fewer than
# three passes over its rows and no more than twenty; measured in benchmarks/RESULTS.md.
_SFT_UPDATES, _SFT_UPDATES_OF_LARGE = 450, 60  # for _SMALL_MODEL parameters; the least for more
_SMALL_MODEL = 2_000_000
_SFT_EPOCHS, _MOST_SFT_EPOCHS = 3, 20
# GRPO makes as many steps for a small model as bring its tasks near their end, fewer for a larger
# one; measured in benchmarks/RESULTS.md. Distillation rates every token and needs few.
_GRPO_STEPS, _FEWEST_STEPS = 300, 60  # for _SMALL_MODEL parameters; the fewest of any model
_STEPS_AT_FULL_RATE = 100  # a longer GRPO run gets a smaller rate
_STEPS_BETWEEN_EXAMS = 40  # of GRPO and distillation; more where there would be too many exams
_FEWEST_EXAMS, _MOST_EXAMS = 3, 12


def learning_rate(algorithm: str, hidden: int, steps: int = 0) -> float:
    """Return the default peak learning rate of a LoRA, from 1e-5 to 4e-3, with two digits.

    Distillation has the rate of GRPO: their updates are alike.

    Args:
        hidden: the width of the model.
        steps: optimizer steps of the run. The rate of a GRPO or distillation run of more than
            `_STEPS_AT_FULL_RATE` falls with the root of their number.
    """
    if algorithm == "sft":
        # At width 2000 ten times the 5e-5 of full fine-tuning. Below, the rate rises with the
        # exponent that "LoRA Without Regret" (2025) fits to Llama models: 8.4e-4 at 1024, 3.1e-3 at
        # 192. At 192 this is better than the 1.6e-3 of a square root on all tasks that choose in
        # benchmarks/default_settings.py. Above 2000 the rate falls slower: 3.5e-4 at 4096.
        exponent = 0.781 if hidden < 2000 else 0.5
        unbounded_rate = 5e-4 * (2000 / hidden) ** exponent
    elif algorithm == "dpo":
        # A fifth of GRPO's rate: 1e-5 at width 4096, ten times the 1e-6 of the DPO paper.
        unbounded_rate = 0.04 / hidden
    else:
        # In short runs 1e-3 at width 192, 5e-5 at width 4096. In long ones that rate makes a policy
        # sure of itself too soon on some tasks, and half of it reaches as much on the others.
        in_long_run = math.sqrt(_STEPS_AT_FULL_RATE / max(steps, _STEPS_AT_FULL_RATE))
        unbounded_rate = 0.2 / hidden * in_long_run
    rate = min(max(unbounded_rate, 1e-5), 4e-3)
    return float(f"{rate:.1e}")


def rollout_steps(algorithm: str, params: int) -> int:
    """Return how many steps GRPO or distillation makes for a model of `params` parameters. For
    GRPO: 300 at 2 million parameters, 60 from 50 million on, where more was not measured."""
    if algorithm == "distill":
        return _FEWEST_STEPS
    return _fewer_for_larger(_GRPO_STEPS, params, least=_FEWEST_STEPS, exponent=0.5)


def exams_of_rollouts(steps: int) -> int:
    """Return how often a GRPO or distillation run of so many steps evaluates: every
    `_STEPS_BETWEEN_EXAMS` steps, from three times to twelve."""
    return min(_MOST_EXAMS, max(_FEWEST_EXAMS, math.ceil(steps / _STEPS_BETWEEN_EXAMS)))


def sft_updates(params: int) -> int:
    """Return how many optimizer steps SFT needs for a model of `params` parameters.

    A larger model needs fewer updates to learn a new form of answer: 450 at 2 million parameters,
    111 at 135 million, never below 60.
    """
    return _fewer_for_larger(_SFT_UPDATES, params, least=_SFT_UPDATES_OF_LARGE, exponent=1 / 3)


def _fewer_for_larger(count: int, params: int, least: int, exponent: float) -> int:
    """Return how many updates a model of `params` parameters gets where one of `_SMALL_MODEL` gets
    `count`: the number falls with the power `exponent` of the parameters, but not below
    `least`."""
    return max(least, round(count * (_SMALL_MODEL / max(params, _SMALL_MODEL)) ** exponent))


def sft_batch_size(rows: int | None, updates: int) -> int:
    """Return the batch size with which three passes over the rows make `updates` steps.

    The result is from 8 to 32, but at most an eighth of the rows; 32 if `rows` is None (unknown).
    """
    if rows is None:
        return 32
    batch_size = round(_SFT_EPOCHS * rows / updates)
    return max(1, min(32, max(8, batch_size), rows // 8))


def sft_epochs(rows: int | None, updates: int, batch_size: int) -> int:
    """Return how many passes over the rows make `updates` steps: from 3 to 20."""
    steps_per_epoch = math.ceil((rows or UNKNOWN_ROWS) / batch_size)
    return min(_MOST_SFT_EPOCHS, max(_SFT_EPOCHS, math.ceil(updates / steps_per_epoch)))

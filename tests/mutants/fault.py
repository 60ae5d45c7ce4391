"""A fault to plant, and the names of the tests that many faults must fail."""

from dataclasses import dataclass

WORKER = "engine/worker/"
TESTS = "tests/engine/worker/"


@dataclass(frozen=True)
class Fault:
    """`tests` are pytest ids below tests/engine/worker/."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def path(self) -> str:
        """From the root; `file` is below engine/worker/ unless it names the engine itself."""
        return self.file if self.file.startswith("engine/") else WORKER + self.file

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(TESTS + test for test in self.tests)


def gradient(loss: str, advantage: str = "group_norm", kl: float = 0.3) -> str:
    name = "test_both_updates_have_the_gradient_of_the_formula"
    return f"test_grpo_gradients.py::{name}[{loss}-{advantage}-{kl}]"


HAND = "ops/test_packing.py::test_hand_worked_group_of_two"
SEEN = "ops/test_packing.py::test_a_token_is_predicted_from_its_own_row_up_to_the_one_before"
ALONE = "network/test_network.py::test_packed_is_one_by_one_is_padded"
SHARED = "network/test_network.py::test_a_shared_prompt_changes_no_number"
GROUPS = "network/test_network.py::test_many_groups_of_all_lengths_share_buckets_and_nothing_else"
PEFT = (
    "network/test_network.py::test_values_and_gradients_of_every_target_are_pefts[all-linear-True]"
)
SFT = "test_sft_gradients.py::test_loss_and_gradient_are_the_formulas[all-linear-qwen3]"
STEPS = "test_sft_gradients.py::test_steps_follow_adamw_with_decay_clipping_warmup_and_schedule"
MICRO = "test_grpo_gradients.py::test_the_size_of_microbatches_does_not_change_the_update"
TURNS = (
    "rollouts/test_renderer_templates.py"
    "::test_both_turns_are_trained_and_what_stands_between_is_not"
)
FORMULAS = "network/test_decoder.py::test_logits_are_those_of_the_formulas_in_float64"
NUCLEUS = "test_on_policy.py::test_with_top_p_the_logprobs_are_those_of_the_nucleus[own]"
ON_POLICY = "test_on_policy.py::test_logprobs_at_step_0_are_the_sampled_ones"
STOPPED = "test_on_policy.py::test_every_stop_id_ends_a_completion_is_kept_and_has_its_logprob[own]"
FACTORS = (
    "ops/test_kernels.py::test_a_frozen_layer_with_its_adapter_has_the_gradients_of_the_factors"
)
STARTED = (
    "test_grpo_gradients.py::test_the_reference_of_a_continued_run_is_the_adapter_it_started_from"
)
RESUMED = (
    "test_sft_gradients.py"
    "::test_grpo_with_dropout_and_kl_to_a_start_adapter_resumes_to_the_same_bits"
)

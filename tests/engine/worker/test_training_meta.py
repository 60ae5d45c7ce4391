"""A whole optimizer step of SFT and GRPO at real sizes, as it runs on a GPU: through the
variable-length kernel and the fused functions, on the meta device. What is counted: the kernels
that would be started, how often the host would wait, and what is kept for the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from meta_device import ALL_LINEAR, Kept, Kernels, fused, network_of, owned_by
from typed_settings import grpo_settings, sft_settings

from engine.dry_run.gpu_plans import MODELS
from engine.models.sizing import layers
from engine.worker import grpo, sft
from engine.worker.core.batch import Row
from engine.worker.core.trajectory import Completion, Group, Trajectory
from engine.worker.network.policy import Base, Policy
from engine.worker.ops.fused_ops import AS_WRITTEN, Choice
from engine.worker.rollouts.advantages import assign
from engine.worker.training import Training
from engine.worker.update.schedule import make_optimizer

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

PROMPT, ANSWER = 512, 1024
BUDGET = 100_000  # everything in one microbatch
MOST_FORWARD, MOST_BACKWARD = 60, 90  # kernels per layer


class Step:
    """One optimizer step of an algorithm on a model of this size, and what was counted.

    Attributes:
        kernels: by phase, forward and backward; its `waits` are those of the whole step.
        kept: bytes for the backward pass; tokens: that ran through the model.
    """

    def __init__(self, algorithm: str, size: str, choice: Choice) -> None:
        network, adapter = network_of(size, choice)
        given = {"lora_rank": ALL_LINEAR.rank, "lora_dropout": 0.0, "max_tokens": ANSWER}
        settings = {"sft": sft_settings, "grpo": grpo_settings}[algorithm](
            {name: value for name, value in given.items() if algorithm == "grpo" or "lora" in name}
        )
        self.policy = Policy.__new__(Policy)  # its adapter is on the device already
        self.policy.base = Base(network, None, [0], None)  # pyright: ignore[reportArgumentType]
        self.policy.checkpointing, self.policy.adapter, self.policy.reference = False, adapter, None
        self.layers = network.shape.layers
        self.kernels, self.kept, self.tokens = Kernels(), Kept(owned_by(network, adapter)), 0
        training = _bare_training(self.policy, settings)
        with self.kernels, self._phases():
            if algorithm == "sft":
                self.measured = sft.update(training, settings, _rows(), 1, BUDGET)
            else:
                self.measured = grpo.update(training, settings, _groups(), 1, BUDGET)

    def per_layer(self, phase: str) -> float:
        return self.kernels.by_phase[phase].total() / self.layers

    @contextmanager
    def _phases(self) -> Iterator[None]:
        """Counts what runs in the layers' forward pass and in the backward pass apart."""
        network: Any = self.policy.base.network
        backward = torch.Tensor.backward

        def in_phase(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **options: Any) -> Any:
                self.kernels.phase = phase
                try:
                    return call(*args, **options)
                finally:
                    self.kernels.phase = ""

            return counted

        # The layers; the head beside them works through its tokens in large chunks.
        network.decoder.hidden = in_phase("forward", network.decoder.hidden)
        logprobs = network.logprobs

        def kept(batch: Any, *args: Any, **options: Any) -> Any:
            self.tokens += batch.ids.numel()
            with self.kept:
                return logprobs(batch, *args, **options)

        network.logprobs = kept
        torch.Tensor.backward = in_phase("backward", backward)
        try:
            yield
        finally:
            torch.Tensor.backward = backward


def _bare_training(policy: Policy, settings: Any) -> Training:
    """A run reduced to what an update needs."""
    training = Training.__new__(Training)
    training.policy, training.settings, training.ranks = policy, settings, None
    training.optimizer = make_optimizer(policy.parameters(), settings)
    training.done, training.total, training.state, training.evaluation = 0, 10, {}, None
    nothing: Any = SimpleNamespace(count_microbatch=lambda _: None, count_batch=lambda _: None)
    training.meter = nothing
    return training


def _rows() -> list[Row]:
    """Rows of SFT, each as long as a prompt with its answer."""
    mask = [0] * PROMPT + [1] * ANSWER
    return [Row([1 + number] * len(mask), mask) for number in range(4)]


def _groups() -> list[Group]:
    """Two groups of eight completions of one prompt each, of different rewards and lengths."""
    groups = []
    for number in range(2):
        members = []
        for member in range(8):
            trajectory = Trajectory(f"task-{number}", [], [1 + number] * PROMPT)
            ids = [2] * (ANSWER - member)
            trajectory.add_completion(Completion(ids, [-1.0] * len(ids), True))
            trajectory.reward = float(member % 2)
            members.append(trajectory)
        groups.append(Group(f"task-{number}", members))
    assign(groups, "group_norm")
    return groups


@pytest.mark.parametrize("size", ["4B", "8B"])
@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_step_starts_few_kernels_waits_once_and_keeps_what_is_planned(algorithm: str, size: str):
    step = Step(algorithm, size, fused())
    assert step.measured["microbatches"] == 1
    assert step.kernels.by_phase["forward"]["_varlen_attn"] == step.layers
    assert step.per_layer("forward") <= MOST_FORWARD
    assert step.per_layer("backward") <= MOST_BACKWARD
    assert step.kernels.waits.total() == 1, step.kernels.waits
    planned = layers.kept_numbers_per_layer(MODELS[f"Qwen3-{size}"], "cuda", PROMPT + ANSWER)
    assert step.kept.bytes / step.tokens == pytest.approx(2 * step.layers * planned, rel=0.1)


def test_without_fused_functions_a_step_stays_below_the_same_numbers():
    step = Step("sft", "4B", AS_WRITTEN)
    assert step.per_layer("forward") <= MOST_FORWARD
    assert step.per_layer("backward") <= MOST_BACKWARD

"""Learning rates step by step."""

import math
import subprocess
import sys

import pytest
import torch
from typed_settings import grpo_settings

from engine.records.settings import GRPOSettings
from engine.worker.core.failures import WorkerFailure
from engine.worker.update.optimizer import AdamW
from engine.worker.update.schedule import apply_step, make_optimizer, rate


def plan(schedule: str, warmup: float = 0.0) -> GRPOSettings:
    return grpo_settings({"learning_rate": 1.0, "lr_schedule": schedule, "warmup_ratio": warmup})


def test_constant_stays_at_the_peak() -> None:
    assert [rate(s, 4, plan("constant")) for s in (1, 2, 4)] == [1.0, 1.0, 1.0]


def test_linear_falls_evenly_and_never_wastes_the_last_step() -> None:
    assert [rate(s, 4, plan("linear")) for s in (1, 2, 3, 4)] == [1.0, 0.75, 0.5, 0.25]


def test_cosine_is_half_a_wave() -> None:
    assert rate(3, 4, plan("cosine")) == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))


def test_warmup_rises_linearly_over_its_share_of_the_steps() -> None:
    assert [rate(s, 10, plan("constant", 0.4)) for s in (1, 2, 4, 5)] == [0.25, 0.5, 1.0, 1.0]


def optimiser(parameter: torch.nn.Parameter, decay: float = 0.0) -> AdamW:
    return make_optimizer([parameter], grpo_settings({"learning_rate": 0.1, "weight_decay": decay}))


class Weights:
    """What `apply_step` needs of an adapter."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self._parameters = parameters

    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    def clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def test_clipping_scales_the_step_and_reports_the_norm_before() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert apply_step(optimiser(parameter), Weights([parameter]), 0.1, 1.0) == pytest.approx(5.0)
    assert parameter.grad is None


def test_weight_decay_pulls_towards_zero_without_any_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    apply_step(optimiser(parameter, decay=0.5), Weights([parameter]), 0.1, 0.0)
    assert parameter.tolist() == pytest.approx([0.95, 0.95])


def test_many_steps_are_those_of_torchs_own_adamw() -> None:
    chance = torch.Generator().manual_seed(3)
    start = [torch.randn(5, 3, generator=chance), torch.randn(4, generator=chance)]
    ours = [torch.nn.Parameter(t.clone()) for t in start]
    theirs = [torch.nn.Parameter(t.clone()) for t in start]
    optimizer = AdamW(ours, 0.01, 0.1)
    reference = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for step in range(20):
        for mine, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn(other.shape, generator=chance)
            mine.grad = None if step == 7 else other.grad.clone()
            other.grad = None if step == 7 else other.grad
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def test_training_does_not_bring_the_compiler_into_the_process() -> None:
    script = (
        "import sys, torch; from engine.worker.update.optimizer import AdamW\n"
        "p = torch.nn.Parameter(torch.ones(2)); p.grad = torch.ones(2)\n"
        "AdamW([p], 0.1, 0.0).step(); assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_the_run_and_changes_nothing(bad: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([bad, 1.0])
    with pytest.raises(WorkerFailure) as caught:
        apply_step(optimiser(parameter), Weights([parameter]), 0.1, 1.0)
    assert caught.value.kind == "nonfinite"
    assert parameter.tolist() == [1.0, 1.0]

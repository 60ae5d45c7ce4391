"""How long training goes on by default, and at which rate, by the size of a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.sizing import usual_steps
from engine.records.settings import ALGORITHMS


@pytest.mark.parametrize(
    ("hidden", "sft", "grpo"),
    [(192, 3.1e-3, 1e-3), (1024, 8.4e-4, 2e-4), (2560, 4.4e-4, 7.8e-5), (8192, 2.5e-4, 2.4e-5)],
)
def test_the_learning_rate_follows_the_size_of_the_model(hidden: int, sft: float, grpo: float):
    assert usual_steps.learning_rate("sft", hidden) == pytest.approx(sft, rel=0.03)
    assert usual_steps.learning_rate("grpo", hidden, 60) == pytest.approx(grpo, rel=0.03)


def test_a_long_grpo_run_has_a_smaller_rate_and_a_larger_model_fewer_steps():
    short, usual, long = (usual_steps.learning_rate("grpo", 192, n) for n in (100, 300, 400))
    assert (short, usual, long) == (1e-3, 6e-4, 5.2e-4)
    assert usual_steps.learning_rate("sft", 192, 400) == usual_steps.learning_rate("sft", 192)
    counts = [usual_steps.rollout_steps("grpo", params) for params in (2_000_000, 135_000_000)]
    assert counts == [300, 60] and usual_steps.rollout_steps("grpo", 8_000_000_000) == 60
    assert usual_steps.rollout_steps("distill", 2_000_000) == 60


@given(st.integers(16, 65536), st.integers(1, 65536))
def test_a_wider_model_never_gets_a_higher_learning_rate(hidden: int, more: int):
    for algorithm in ALGORITHMS:
        rate = usual_steps.learning_rate(algorithm, hidden)
        assert 1e-7 <= usual_steps.learning_rate(algorithm, hidden + more) <= rate <= 1e-1

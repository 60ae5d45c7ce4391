"""What norms keep for their gradients: on a CPU no tensor of their own."""

import pytest
import torch

from engine.worker.ops import norms
from engine.worker.ops.compiled import Eps
from engine.worker.ops.fused_ops import TORCH

EPS = 1e-5
WEIGHTS = {
    "usual": [1.5, -0.5, 0.25, 2.0],
    "one very small": [1.5, 1e-6, 0.25, -2.0],
    "one is zero": [1.5, 0.0, 0.25, -2.0],
}


@pytest.mark.parametrize("values", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_gradients_are_those_of_the_formula_whatever_the_weights(values: list[float]) -> None:
    torch.manual_seed(0)
    weight, (x, delta, dtotal, dy) = torch.tensor(values), torch.randn(4, 5, 4)
    total, y, saved = norms.add_norm(x, delta, weight, EPS)
    exact = (x + delta).double().requires_grad_()
    formula = exact / torch.sqrt((exact * exact).mean(-1, keepdim=True) + EPS) * weight.double()
    torch.autograd.backward([exact, formula], [dtotal.double(), dy.double()])
    assert exact.grad is not None
    assert torch.equal(total, x + delta)
    assert torch.allclose(y.double(), formula, rtol=1e-6, atol=0)
    gradient = norms.add_norm_gradient(saved, weight, dtotal, dy)
    assert (gradient - exact.grad).norm() < 1e-6 * exact.grad.norm()
    y, saved = norms.norm(total, weight, EPS)
    gradient = norms.norm_gradient(saved, weight, dy) + dtotal
    assert (gradient - exact.grad).norm() < 1e-6 * exact.grad.norm()


def test_the_result_itself_is_kept_where_it_can_be_divided_again() -> None:
    x = torch.randn(5, 4)
    y, saved = norms.norm(x, torch.tensor(WEIGHTS["one very small"]), EPS)
    assert saved[0].data_ptr() == y.data_ptr()
    y, saved = norms.norm(x, torch.tensor(WEIGHTS["one is zero"]), EPS)
    assert saved[0].data_ptr() != y.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_sampled_is_rounded_as_what_is_trained(dtype: torch.dtype) -> None:
    """In 16 bits the norm of the sampler and that of training agree to the last bit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).to(dtype)
    weight = torch.rand(256, generator=generator).to(dtype) + 0.5
    trained, _ = norms.norm(x, weight, 1e-6)
    sampled = TORCH.plain_norm(x, weight, Eps(1e-6, torch.tensor([1e-6])))
    assert torch.equal(trained, sampled)

"""An adapter in the number format of the layers, as a GPU computes with it: one product per layer,
made anew with every change of the adapter and never between."""

import pytest
import torch
from tiny_decoders import own, spec, stir, tiny

from engine.worker.core.batch import Row
from engine.worker.network.adapter import FlatAdapter
from engine.worker.network.network import DecoderNetwork
from engine.worker.update.optimizer import AdamW

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

ROWS = [Row([5, 9, 2, 44, 17, 3], [0, 0, 1, 1, 1, 1]), Row([7, 7, 23, 40], [0, 1, 1, 1])]
TARGETS = [("all-linear",), ("q_proj", "v_proj"), ("o_proj", "down_proj")]


def network_and_adapter(dtype: torch.dtype, *targets: str) -> tuple[DecoderNetwork, FlatAdapter]:
    network = own(tiny("qwen3").to(dtype)).network
    assert isinstance(network, DecoderNetwork)
    return network, stir(network.new_adapter(spec(*targets), seed=1))


def passed(network: DecoderNetwork, adapter: FlatAdapter) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and the gradient of the adapter."""
    adapter.clear_gradients()
    logprobs, _ = network.logprobs(network.collate(ROWS), adapter, training=True)
    logprobs.sum().backward()
    assert adapter.flat.grad is not None
    return logprobs.detach(), adapter.flat.grad.clone()


@pytest.mark.parametrize("targets", TARGETS)
def test_bfloat16_has_the_numbers_of_float32_within_rounding(targets: tuple[str, ...]) -> None:
    low = passed(*network_and_adapter(torch.bfloat16, *targets))
    full = passed(*network_and_adapter(torch.float32, *targets))
    for rounded, exact in zip(low, full, strict=True):
        assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_the_cast_adapter_follows_every_change_and_is_made_once_between() -> None:
    network, adapter = network_and_adapter(torch.bfloat16, "all-linear")
    optimizer = AdamW(adapter.parameters(), learning_rate=0.05, weight_decay=0.0)
    first, _ = passed(network, adapter)
    weights = network.decoder.weights(adapter)
    joint = weights.layer(0)[0].joint
    assert joint is not None
    made = joint.b._version
    again, _ = passed(network, adapter)
    assert torch.equal(again, first) and joint.b._version == made
    optimizer.step()
    moved, gradient = passed(network, adapter)
    assert not torch.equal(moved, first) and joint.b._version > made
    _, fresh = network_and_adapter(torch.bfloat16, "all-linear")
    fresh.load(adapter.state())
    expected, expected_gradient = passed(network, fresh)
    assert torch.equal(moved, expected) and torch.equal(gradient, expected_gradient)


def test_what_does_not_belong_to_a_part_stays_zero() -> None:
    network, adapter = network_and_adapter(torch.bfloat16, "q_proj", "v_proj")
    qkv = network.decoder.weights(adapter).layer(0)[0]
    assert qkv.joint is not None and qkv.factors is not None
    rank, (query, value) = adapter.spec.rank, qkv.factors.spans
    left = qkv.joint.b.clone()
    left[query[0] : query[1], :rank] = 0
    left[value[0] : value[1], rank:] = 0
    assert not left.any() and qkv.joint.b.any()

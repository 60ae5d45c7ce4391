"""The variable-length kernel is called as each torch of the allowed versions takes it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import varlen_loop

from engine.worker.ops import attention
from engine.worker.ops.attention import Attention
from engine.worker.ops.packing import Layout

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]


def of_torch_2_11(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """torch 2.11: fewer key heads are taken without being asked for."""
    assert return_aux is None and scale is None
    return varlen_loop.varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
        window_size=window_size, enable_gqa=True,
    )  # fmt: skip


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Puts a kernel in the place of torch's."""

    def use(function: Any) -> None:
        attention._varlen_kernel.cache_clear()
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)

    yield use
    attention._varlen_kernel.cache_clear()


@pytest.mark.parametrize("function", [of_torch_2_11, varlen_loop.varlen_attn])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_lowest_and_the_highest_torch_give_the_attention_of_buckets(
    kernel: Callable[[Any], None], function: Any, kv_heads: int
):
    kernel(function)
    layout = Layout(prefix_lengths=(3, 5), suffix_lengths=(2, 4), owners=(0, 1))
    qkv = torch.randn(14, (2 + 2 * kv_heads) * 8, generator=torch.Generator().manual_seed(1))
    found, wanted = (
        Attention(layout, 2, kv_heads, qkv.device, qkv.dtype, varlen=varlen)(qkv)
        for varlen in (True, False)
    )
    torch.testing.assert_close(found, wanted)

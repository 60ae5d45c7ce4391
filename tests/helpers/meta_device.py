"""Models of real sizes on torch's meta device: shapes and kernels without numbers, memory or GPU.

A forward and backward pass of our own forward takes seconds there, through the variable-length
kernel that a GPU uses. What it keeps for the backward pass is counted by torch's hooks.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config

from engine.worker.core.batch import Row
from engine.worker.network.adapter import Adapter, LoraSpec
from engine.worker.network.decoder import Decoder, Rope
from engine.worker.network.network import DecoderNetwork

META = torch.device("meta")
ALL_LINEAR = LoraSpec(rank=16, alpha=32, dropout=0.0, targets=("all-linear",))
# (hidden, layers, heads, intermediate) of Qwen3; 8 key heads of 128 numbers in each.
QWEN3 = {"0.6B": (1024, 28, 16, 3072), "4B": (2560, 36, 32, 9728), "8B": (4096, 36, 32, 12288)}
# Views of tensors, and what only asks for sizes: no kernel runs for them.
NO_KERNEL = (
    "view", "_unsafe_view", "t", "transpose", "slice", "split", "split_with_sizes", "unsqueeze",
    "squeeze", "expand", "detach", "alias", "select", "unbind", "as_strided", "permute", "empty",
    "new_empty", "empty_like", "reshape", "_reshape_alias", "chunk", "new_empty_strided",
)  # fmt: skip


def config_of(size: str) -> Qwen3Config:
    """The configuration of Qwen3 of this size, such as "4B"."""
    hidden, layers, heads, intermediate = QWEN3[size]
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=size != "8B",
    )


def decoder_of(size: str) -> Decoder:
    """Our own forward of Qwen3 of this size, in bfloat16 on the meta device."""
    config = config_of(size)
    shapes = _weight_shapes(config)

    def take(name: str) -> torch.Tensor | None:
        shape = shapes.get(name)
        return None if shape is None else torch.empty(shape, dtype=torch.bfloat16, device=META)

    pairs = config.head_dim // 2
    rope = Rope(tuple(1e6 ** (-i / pairs) for i in range(pairs)), 1.0)
    return Decoder(config, take, rope)


def _weight_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a Qwen3, by name."""
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    of_layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (config.intermediate_size, hidden),
        "mlp.up_proj": (config.intermediate_size, hidden),
        "mlp.down_proj": (hidden, config.intermediate_size),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for number in range(config.num_hidden_layers):
        for name, shape in of_layer.items():
            shapes[f"model.layers.{number}.{name}.weight"] = shape
    return shapes


def network_of(size: str) -> tuple[DecoderNetwork, Adapter]:
    """Our own forward of Qwen3 of this size with an adapter of rank 16 on all its projections."""
    network = DecoderNetwork(decoder_of(size), vocab=151669)
    return network, network.new_adapter(ALL_LINEAR, seed=0)


def batch_of(network: DecoderNetwork, rows: Sequence[Row]) -> Any:
    """The rows as a packed microbatch on the meta device."""
    return network.collate(rows).to(META)


def rows_of(prompt: int, answer: int, groups: int, members: int) -> list[Row]:
    """Groups of rows that share a prompt of their group."""
    return [
        Row(
            ids=[1 + group] * prompt + [2] * answer,
            loss_mask=[0] * prompt + [1] * answer,
            prefix_len=prompt if members > 1 else 0,
        )
        for group in range(groups)
        for _ in range(members)
    ]


def kept_bytes(forward: Callable[[], torch.Tensor], owned: Sequence[torch.Tensor]) -> int:
    """Bytes of the tensors that a forward pass keeps for the backward pass, each memory once;
    without `owned`, the weights and other tensors that live on anyway. Goes backward too."""
    weights = {tensor.untyped_storage()._cdata for tensor in owned}
    kept: dict[int, torch.Tensor] = {}  # the tensors are held, so that no memory is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()._cdata
        if memory not in weights and tensor.device == META:
            kept.setdefault(memory, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    result.sum().backward()
    return total


class Kernels(TorchDispatchMode):
    """Counts the kernels that a GPU would run, by name, and how often the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "_unique2", "is_nonzero"):
            self.waits += 1
        elif name not in NO_KERNEL:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return self.calls.total()

"""Models of real sizes on torch's meta device: shapes and kernels without numbers, memory or GPU.

A forward and backward pass of our own forward takes seconds there, through the variable-length
kernel that a GPU uses. What it keeps for the backward pass is counted by torch's hooks.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config

from engine.worker.core.batch import Row
from engine.worker.network.adapter import Adapter, LoraSpec
from engine.worker.network.decoder import Decoder, Rope
from engine.worker.network.network import DecoderNetwork
from engine.worker.ops.fused_ops import AS_WRITTEN, Choice, liger_functions
from engine.worker.ops.liger import Liger

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


def network_of(size: str, choice: Choice = AS_WRITTEN) -> tuple[DecoderNetwork, Adapter]:
    """Our own forward of Qwen3 of this size with an adapter of rank 16 on all its projections, with
    torch's functions between the products or with others."""
    network = DecoderNetwork(decoder_of(size), vocab=151669, kernel_choice=choice)
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


def owned_by(network: DecoderNetwork, adapter: Any) -> list[torch.Tensor]:
    """The tensors of a network and its adapter that live on after a step."""
    decoder = network.decoder
    owned = [decoder.head, decoder.norm, *adapter.parameters()]
    weights = decoder.weights(adapter)
    for number, layer in enumerate(decoder.layers):
        norms = (layer.norm_in, layer.norm_mid, layer.q_norm, layer.k_norm)
        owned += [norm for norm in norms if norm is not None]
        for adapted in weights.layer(number):
            owned += [adapted.weight, *(adapted.joint or ())]
    return owned


class Kept:
    """A context that counts the bytes of what is kept for a backward pass, each memory once,
    without what is `owned` anyway."""

    def __init__(self, owned: Sequence[torch.Tensor]) -> None:
        self._owned = {tensor.untyped_storage()._cdata for tensor in owned}
        # The tensors are held, so that no memory is used twice.
        self._kept: dict[int, torch.Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "Kept":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()._cdata
        if memory not in self._owned and tensor.device == META:
            self._kept.setdefault(memory, tensor)
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


class Kernels(TorchDispatchMode):
    """Counts the kernels that a GPU would run, by name, and how often the host waits for it: for a
    number, for a copy to the host, or for a copy from it that is not queued. What is read from the
    device is zero.

    Attributes:
        phase: kernels are counted under it; any text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = ""
        self.by_phase: dict[str, Counter[str]] = {}
        self.waits: Counter[str] = Counter()

    @property
    def calls(self) -> Counter[str]:
        """The kernels of the phase under way."""
        return self.by_phase.setdefault(self.phase, Counter())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        sources = {each.device.type for each in tree_leaves((args, kwargs)) if is_tensor(each)}
        if name == "_to_copy" and "device" in kwargs:
            target = kwargs["device"].type
            if sources == {"meta"} and target == "cpu":
                self.waits["to the host"] += 1
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if sources == {"cpu"} and target == "meta" and not kwargs.get("non_blocking"):
                self.waits["from the host"] += 1
        result = func(*args, **kwargs)
        if "meta" in sources or getattr(result, "device", None) == META:
            counter = self.waits if name in WAITS else self.calls
            counter[name] += name not in NO_KERNEL
            self.waits["from the host"] += name == "copy_" and "cpu" in sources
        return result

    @property
    def total(self) -> int:
        return self.calls.total()


WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "is_nonzero", "masked_select", "equal")


def fused() -> Choice:
    """Liger's set of functions, in which each launch of its kernels is one kernel here too and
    gives tensors of the right shape; the meta device has no Triton."""
    kernels = Liger.__new__(Liger)  # without its package
    kernels.version = "on the meta device"
    kernels._rms_norm = SimpleNamespace(
        rms_norm_forward=lambda x, *_: (x.clone(), x, _one_per_row(x)),
        rms_norm_backward=lambda dy, *_, **__: (dy.clone(),),
    )
    kernels._sum_and_norm = SimpleNamespace(
        fused_add_rms_norm_forward=lambda x, delta, *_: (x.clone(), _like(x), _one_per_row(x)),
        fused_add_rms_norm_backward=lambda dy, *_, **__: (dy.clone(),),
    )
    kernels._gate = lambda gate_up: (gate_up, gate_up.chunk(2, -1)[0].clone())
    kernels._gate_gradient = lambda gate_up, dy, **_: gate_up.clone()
    kernels._rope = _Rope()
    kernels._launch_settings = lambda width: (width, 4)
    kernels._next_power_of_2 = lambda number: 1 << (number - 1).bit_length()
    return Choice(liger_functions(kernels))


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _one_per_row(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.float32)


class _Rope:
    """Liger's rotation: launched on a grid, in place."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda heads, *_, **__: heads.mul_(1)

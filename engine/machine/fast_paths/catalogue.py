"""The fast paths (faster ways to compute) of the engine, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class FastPath:
    """A faster way to compute what a plain way computes too.

    Attributes:
        title: what it is, in a few words.
        devices: the kinds of device that have it.
        without: what a worker does if it is switched off.
        timed: whether it is switched off for being slower; False for a path that saves memory.
        once: whether one trial holds for all devices with the same name, because the trial takes
            long or needs them all.
    """

    title: str
    devices: tuple[DeviceKind, ...]
    without: str
    timed: bool = True
    once: bool = False


FAST_PATHS: Mapping[str, FastPath] = {
    "bfloat16": FastPath(
        "products of bfloat16 matrices",
        ("cuda",),
        "precision auto takes float32",
    ),
    "varlen_attention": FastPath(
        "attention of packed sequences in one kernel",
        ("cuda",),
        "sequences of similar length are padded and go through scaled_dot_product_attention",
    ),
    "flash_attention": FastPath(
        "fused scaled_dot_product_attention",
        ("cuda",),
        "torch's unfused attention, which holds all scores in memory",
    ),
    "flash_attention_3": FastPath(
        "FlashAttention 3 in place of 2, on Hopper (flash-attn-3)",
        ("cuda",),
        "FlashAttention 2, which torch brings along",
    ),
    "fused_kernels": FastPath(
        "norms, rotary positions and gates as Triton kernels (liger-kernel)",
        ("cuda",),
        "torch's own functions",
    ),
    "decode_graph": FastPath(
        "decoding steps captured as CUDA graphs",
        ("cuda",),
        "each operation of a step is launched by itself",
    ),
    "transformers_graph": FastPath(
        "decoding steps of transformers captured as CUDA graphs",
        ("cuda",),
        "each operation of a step is launched by itself",
    ),
    "float32_head": FastPath(
        "logits in float32 out of products of 16 bits",
        ("cuda",),
        "logits are rounded to 16 bits before the softmax",
        timed=False,
    ),
    "shared_prompt": FastPath(
        "the prompt of a group once per microbatch",
        ("cpu", "cuda"),
        "the prompt is repeated for each completion",
    ),
    "onednn_products": FastPath(
        "float32 products through oneDNN",
        ("cpu",),
        "torch's default library",
    ),
    "block_attention": FastPath(
        "attention of short sequences by blocks of queries",
        ("cpu",),
        "sequences of similar length are padded and go through scaled_dot_product_attention",
    ),
    "four_bits": FastPath(
        "weights of 4 bits (bitsandbytes, nf4)",
        ("cuda",),
        'quantization = "nf4" is refused',
        timed=False,
    ),
    "training": FastPath(
        "twenty optimizer steps, beside the same in float32 on the CPU",
        ("cuda",),
        "runs go on, and each says that its device computes other numbers",
        timed=False,
    ),
    "vllm": FastPath(
        "sampling through vLLM: start, two adapters in turn, sleep and wake",
        ("cuda",),
        "our own sampler samples, also for a run that asks for vLLM",
        once=True,
    ),
    "collectives": FastPath(
        "sums over the GPUs of this machine through NCCL",
        ("cuda",),
        "the ranks of a run add their gradients up through the machine's memory (gloo)",
        once=True,
    ),
}


def paths_of(kind: DeviceKind) -> list[str]:
    """Return the names of the fast paths (faster ways to compute) that a kind of device has, in the
    order in which they are tried."""
    return [name for name, path in FAST_PATHS.items() if kind in path.devices]

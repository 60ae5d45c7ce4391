"""FlashAttention 3 in place of torch's own attention kernels (FlashAttention 2). Its paper (arXiv
2407.08608) reports a forward pass 1.5 to 2 times as fast on GPUs of compute capability 9.0.

It is a package of its own. torch has a switch for the whole process, which acts on the
variable-length kernel and on scaled_dot_product_attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

MODULE = "flash_attn_interface"  # of the package flash-attn-3
NAME = "FA3"  # in torch's list of implementations
CAPABILITY = (9, 0)  # of Hopper GPUs, the only ones that its kernels run on


def why_not(device: torch.device) -> str:
    """Return the reason why FlashAttention 3 cannot be used on the device; "" if it can be
    tried."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return "FlashAttention 3 is for GPUs of compute capability 9.0 (Hopper)"
    if find_spec(MODULE) is None:
        return f"the module {MODULE} is not installed"
    if not hasattr(_torch_attention(), "activate_flash_attention_impl"):
        return f"torch {torch.__version__} has no switch for it"
    return ""


def activate() -> None:
    """Use FlashAttention 3 in this process from now on, instead of torch's own attention kernels.
    Whatever its package raises is passed on."""
    _torch_attention().activate_flash_attention_impl(NAME)


@contextmanager
def in_use(*, wanted: bool) -> Iterator[None]:
    """Use FlashAttention 3 (if `wanted`) or torch's own attention kernels inside the context, in
    the whole process; restore the former choice on exit."""
    torch_attention = _torch_attention()
    before = torch_attention.current_flash_attention_impl()
    _activate(torch_attention, NAME if wanted else None)
    try:
        yield
    finally:
        _activate(torch_attention, before)


def _activate(torch_attention: Any, name: str | None) -> None:
    """Make torch use the attention kernels that are registered with it under `name`, such as "FA3",
    in this process from now on; None stands for torch's own. `torch_attention` is the module
    torch.nn.attention; its type is Any, because older versions of torch lack these functions."""
    if name == torch_attention.current_flash_attention_impl():
        return
    if name is None:
        torch_attention.restore_flash_attention_impl()
    else:
        torch_attention.activate_flash_attention_impl(name)


def _torch_attention() -> Any:
    """Return torch's module with the functions that switch between implementations of attention.
    Its older versions lack some of them."""
    return import_module("torch.nn.attention")

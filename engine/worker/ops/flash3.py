"""FlashAttention 3 in place of the kernels that torch brings along (FlashAttention 2): 1.5 to 2
times as fast forward on GPUs of compute capability 9.0, by its paper (arXiv 2407.08608). It is a
package of its own; torch has a switch for the whole process, which acts on the variable-length
kernel and on scaled_dot_product_attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

MODULE = "flash_attn_interface"  # of the package flash-attn-3
NAME = "FA3"  # in torch's list of implementations
CAPABILITY = (9, 0)  # of Hopper; its kernels run on no other


def why_not(device: torch.device) -> str:
    """Why it cannot be used on the device, in words; "" if it can be tried."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        return "FlashAttention 3 is for GPUs of compute capability 9.0 (Hopper)"
    if find_spec(MODULE) is None:
        return f"the module {MODULE} is not installed"
    if not hasattr(_switches(), "activate_flash_attention_impl"):
        return f"torch {torch.__version__} has no switch for it"
    return ""


def activate() -> None:
    """Use it in this process from now on. Raises whatever its package does where it fails."""
    _switches().activate_flash_attention_impl(NAME)


@contextmanager
def in_use(*, wanted: bool) -> Iterator[None]:
    """A context with it, or without it; afterwards it is as it was before."""
    switches = _switches()
    before = switches.current_flash_attention_impl()
    _switch(switches, NAME if wanted else None)
    try:
        yield
    finally:
        _switch(switches, before)


def _switch(switches: Any, name: str | None) -> None:
    """Use the implementation of this name; None is torch's own."""
    if name == switches.current_flash_attention_impl():
        return
    if name is None:
        switches.restore_flash_attention_impl()
    else:
        switches.activate_flash_attention_impl(name)


def _switches() -> Any:
    """torch's module with the switches; some are missing in older versions."""
    return import_module("torch.nn.attention")

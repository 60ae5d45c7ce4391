"""Copies from the host to a device, without waiting for the device."""

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device. A copy to a GPU is queued like any other work there: the
    host goes on at once, and later computations on the GPU wait until the copy is done. Such a copy
    needs pinned memory, which the driver does not move."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


def floats_on(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """Make a float32 tensor [n] of the values on the device."""
    return to_device(torch.tensor(values, dtype=torch.float32), device)

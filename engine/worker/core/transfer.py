"""From the host to a device without waiting for it."""

from collections.abc import Sequence

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device. A copy to a GPU is queued there like any other work and read from
    memory that the driver does not move, so the host goes on at once; what is computed with the
    copy waits for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


def floats_on(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """The values as a float32 tensor [n] on the device."""
    return to_device(torch.tensor(values, dtype=torch.float32), device)

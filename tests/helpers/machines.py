"""Two machines to resolve settings and estimate runs for."""

from engine.core.hardware import Device, Hardware

GB = 1 << 30
CPU = Hardware((Device("cpu", "CPU", "cpu", 16 * GB, 8 * GB),), 2, 16 * GB, 8 * GB, 99 * GB)
GPU = Hardware(
    (Device("cuda:0", "NVIDIA H200", "cuda", 140 * GB, 139 * GB, "GPU-1", True),),
    16,
    128 * GB,
    99 * GB,
    999 * GB,
)

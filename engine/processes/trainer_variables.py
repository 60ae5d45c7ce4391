"""The environment variables that a process with torch starts with."""

import os
from pathlib import Path


def trainer_variables(home_root: Path, device: str, lifeline: int) -> dict[str, str]:
    """The variables of a process that trains on `device`, such as "cpu", "cuda:0" or, for a run
    on several, "cuda:0,cuda:2"; "" for a run on none.

    Args:
        home_root: folder of the home.
        device: id of the device.
        lifeline: descriptor of the pipe by which it learns that its parent has ended.

    Raises ValueError when this machine no longer has the device.
    """
    return {
        **os.environ,
        "HONESMITH_HOME": str(home_root),
        "HONESMITH_DEVICE": device,
        "HONESMITH_LIFELINE_FD": str(lifeline),
        "CUDA_VISIBLE_DEVICES": visible_devices(device),
        "GOMP_SPINCOUNT": "10000",  # spinning OpenMP threads starve each other on few cores
        "TOKENIZERS_PARALLELISM": "false",  # without its warnings after a fork
        "HF_HUB_OFFLINE": "1",  # a model is a folder by now; nothing else may be fetched
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def visible_devices(device: str) -> str:
    """The value of CUDA_VISIBLE_DEVICES with which a process sees only `device`, or only those that
    it names with commas between them; "" for the CPU and for no device, which hides all GPUs.

    Raises ValueError when this machine no longer has a device.
    """
    if device in ("cpu", ""):
        return ""
    # Imported late: a trainer on the CPU starts sooner without it.
    from engine.core import hardware  # noqa: PLC0415

    name_of_id = {gpu.id: gpu.visible for gpu in hardware.detect().devices}  # as CUDA takes it
    names = []
    for device_id in device.split(","):
        if device_id not in name_of_id:
            raise ValueError(f"device {device_id} is gone from this machine")
        names.append(name_of_id[device_id])
    return ",".join(names)

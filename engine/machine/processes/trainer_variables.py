"""The environment variables that a process with torch starts with, and the end that one of them
brings: a process ends as soon as its supervisor has ended.
"""

import contextlib
import os
import threading
from pathlib import Path


def trainer_variables(home_root: Path, device: str, lifeline: int) -> dict[str, str]:
    """Return the environment variables of a process that trains on `device`.

    Args:
        home_root: folder of the home.
        device: the id of the device, e.g. "cpu" or "cuda:0"; several as "cuda:0,cuda:2"; "" for a
            run without a device.
        lifeline: descriptor of the pipe by which the process learns that its parent has ended.

    Raises ValueError if this machine no longer has the device.
    """
    return {
        **os.environ,
        "HONESMITH_HOME": str(home_root),
        "HONESMITH_DEVICE": device,
        "HONESMITH_LIFELINE_FD": str(lifeline),
        "CUDA_VISIBLE_DEVICES": visible_devices(device),
        "GOMP_SPINCOUNT": "10000",  # spinning OpenMP threads starve each other on few cores
        "TOKENIZERS_PARALLELISM": "false",  # avoids warnings after a fork
        "HF_HUB_OFFLINE": "1",  # the model is a local folder by now; nothing may be downloaded
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def visible_devices(device: str) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES with which a process sees only `device`.

    `device` may name several devices, separated by commas. For "cpu" and "" the value is "", which
    hides all GPUs. Raises ValueError if this machine no longer has a device.
    """
    if device in ("cpu", ""):
        return ""
    # Imported late: a trainer on the CPU starts sooner without it.
    from engine.core import hardware  # noqa: PLC0415

    # Device id -> its name for CUDA_VISIBLE_DEVICES.
    name_of_id = {gpu.id: gpu.visible for gpu in hardware.detect().devices}
    cuda_names = []
    for device_id in device.split(","):
        if device_id not in name_of_id:
            raise ValueError(f"device {device_id} is gone from this machine")
        cuda_names.append(name_of_id[device_id])
    return ",".join(cuda_names)


def end_with_supervisor() -> None:
    """Make this process end as soon as its supervisor ends; do nothing if it has no supervisor."""
    # The descriptor of a pipe whose other end closes when the supervisor ends.
    lifeline = os.environ.get("HONESMITH_LIFELINE_FD")
    if lifeline:
        threading.Thread(target=_exit_with_parent, args=(int(lifeline),), daemon=True).start()


def _exit_with_parent(descriptor: int) -> None:
    """Wait until the supervisor has ended, then end this process at once.

    The supervisor holds the other end of the pipe `descriptor`, which closes when the supervisor
    ends.
    """
    with contextlib.suppress(OSError):
        while os.read(descriptor, 1):  # nothing is ever written; at the end read returns b""
            pass
    os._exit(9)  # without cleaning up; nobody is left to read the status

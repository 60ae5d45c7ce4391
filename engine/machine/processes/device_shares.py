"""Several runs on one GPU, if its owner allows that (`runs_per_gpu` of config.toml).

Each run is promised the bytes that it was planned with, and no more runs hold a GPU than fit with
these promises. A run is planned with an equal share of the GPU, or with all of it if it does not
fit into a share (engine/cost/estimate.py). The promise counts from the moment the run gets the
device, long before the driver shows the memory as used.

The supervisor imports this module, so it imports nothing heavy.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.home.rows import HOLDS_DEVICE
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store

if TYPE_CHECKING:
    from engine.core.hardware import Device, Hardware


def runs_per_device(home: Home, machine: "Hardware") -> int:
    """Return how many runs may hold a device of this machine at once; a CPU may have only one."""
    if machine.device.kind == "cpu":
        return 1
    return max(1, int(home.user_config().runs_per_gpu))


def promised_bytes(home: Home, store: Store, machine: "Hardware") -> Counter[str]:
    """Return device id -> the bytes that the runs on the device were planned with.

    A run that was planned without a number counts with the whole memory of the device.
    """
    totals = {device.id: device.memory_total for device in machine.devices}
    promised: Counter[str] = Counter()
    for row in store.list_runs(limit=1000, states=HOLDS_DEVICE):
        for device in row.devices:
            if device in totals:
                promised[device] += planned_bytes(home.run(row.run_id), totals[device])
    return promised


def planned_bytes(run: RunDir, memory_total: int) -> int:
    """Return how many bytes of a device with `memory_total` bytes a run was planned with; all of
    them if its config says nothing."""
    config = run.find_config()
    planned = config.planned_memory if config is not None else 0
    return min(planned or memory_total, memory_total)


def with_room(run: RunDir, devices: "Sequence[Device]", promised: Counter[str]) -> "list[Device]":
    """Return those of the `devices` on which the run may start: those without a run, and those with
    enough room.

    Enough room means that the bytes planned for the run are both free now and not promised to other
    runs. `promised` maps device id -> the bytes that the runs on it were planned with.
    """
    roomy_devices = []
    for device in devices:
        needed_bytes = planned_bytes(run, device.memory_total)
        available_bytes = min(device.memory_free, device.memory_total - promised[device.id])
        holds_no_run = not promised[device.id]
        if holds_no_run or needed_bytes <= available_bytes:
            roomy_devices.append(device)
    return roomy_devices

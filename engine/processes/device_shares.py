"""Several runs on one GPU, where its owner allows it (`runs_per_gpu` of config.toml): each has the
bytes that it was planned with, and no more runs hold a GPU than these fit on.

A run is planned with an equal share of the GPU, or with all of it where it does not fit into a
share (engine/cost/estimate.py). What a run was promised counts as taken from its lease on, long
before the driver shows it.

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
    """How many runs may hold a device of this machine at once; a CPU is one device for one run."""
    if machine.device.kind == "cpu":
        return 1
    return max(1, int(home.user_config().runs_per_gpu))


def promised_bytes(home: Home, store: Store, machine: "Hardware") -> Counter[str]:
    """The bytes of each device that the runs which hold it were planned with; all of a device for a
    run that was planned without a number."""
    totals = {device.id: device.memory_total for device in machine.devices}
    promised: Counter[str] = Counter()
    for row in store.list_runs(limit=1000, states=HOLDS_DEVICE):
        for device in row.devices:
            if device in totals:
                promised[device] += planned_bytes(home.run(row.run_id), totals[device])
    return promised


def planned_bytes(run: RunDir, memory_total: int) -> int:
    """The bytes of a device with `memory_total` that a run was planned with."""
    config = run.find_config()
    planned = config.planned_memory if config is not None else 0
    return min(planned or memory_total, memory_total)


def with_room(run: RunDir, devices: "Sequence[Device]", promised: Counter[str]) -> "list[Device]":
    """Those of the devices that nobody holds, and those that have room for the run beside the runs
    that hold them, in whose memory others of the machine count too."""
    return [
        device
        for device in devices
        if not promised[device.id]
        or planned_bytes(run, device.memory_total)
        <= min(device.memory_free, device.memory_total - promised[device.id])
    ]

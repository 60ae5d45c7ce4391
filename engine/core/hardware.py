"""What this machine has: GPUs through NVML, else its CPU; memory and cores as cgroups allow.

`devices` is never empty: a machine without GPU is one device named "cpu", taken whole by one run
at a time like any other. Nothing here imports torch; the driver library is loaded only when there.
"""

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_PROC_CGROUP = Path("/proc/self/cgroup")
# Kernels report "no limit" as a page-rounded 2**63; anything above this is no real limit.
_UNLIMITED = 1 << 60
_MOST_LOAD = 4.0  # processes per core; more would tell no more of the next hours


@dataclass(frozen=True)
class Device:
    """One thing a run takes whole.

    Attributes:
        id: "cpu", or "cuda:0" counted in the order of the PCI bus.
        name: the product name ("NVIDIA H200"), or the processor's.
        kind: "cuda" or "cpu".
        memory_total, memory_free: bytes; of a CPU the memory this process may use.
        visible: the value of CUDA_VISIBLE_DEVICES that shows exactly this device: its UUID, which
            unlike an index means the same whatever order CUDA counts in. "" for a CPU.
        bf16: whether bfloat16 arithmetic is native.
    """

    id: str
    name: str
    kind: str
    memory_total: int
    memory_free: int
    visible: str = ""
    bf16: bool = False


@dataclass(frozen=True)
class Hardware:
    """The machine. All sizes in bytes; `disk_free` is of the volume that holds the home, `load` as
    `_load` measures it."""

    devices: tuple[Device, ...]
    cores: int
    ram_total: int
    ram_free: int
    disk_free: int
    load: float = 0.0

    @property
    def device(self) -> Device:
        """The device with the most memory: a single run is planned for it."""
        return max(self.devices, key=lambda device: device.memory_total)


def detect(disk: Path | None = None) -> Hardware:
    """Measure the machine as it is now. Its devices are the GPUs that this process may use; without
    any, the CPU is the only device.

    Args:
        disk: a folder on the disk whose free space is measured; None means the current folder.
    """
    ram_total, ram_free = _memory()
    all_devices = _gpus()
    if not all_devices:
        cpu = Device(
            id="cpu",
            name=_processor_name(),
            kind="cpu",
            memory_total=ram_total,
            memory_free=ram_free,
        )
        all_devices = (cpu,)
    disk_free = _disk_free(disk or Path.cwd())
    return Hardware(
        devices=all_devices,
        cores=_cores(),
        ram_total=ram_total,
        ram_free=ram_free,
        disk_free=disk_free,
        load=_load(),
    )


def _load() -> float:
    """How many processes wanted each core over the last minute, in halves, from 0 to `_MOST_LOAD`;
    0 where that is not known."""
    try:
        wanting = os.getloadavg()[0]
    except OSError:
        return 0.0
    return min(_MOST_LOAD, math.floor(2 * wanting / (os.cpu_count() or 1)) / 2)


def devices() -> list[str]:
    """The ids of the devices that runs may lease; at least one."""
    return [device.id for device in detect().devices]


def _gpus() -> tuple[Device, ...]:
    """Return the GPUs that this process may use.

    () where there is no NVIDIA driver, or where it does not answer.
    """
    nvml = _load_nvml()
    if nvml is None:
        return ()
    try:
        gpus = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:  # nobody can train on a GPU whose driver does not answer
        return ()
    finally:
        nvml.nvmlShutdown()
    return _visible_gpus([gpu for gpu in gpus if gpu is not None])


def _load_nvml() -> Any | None:
    """The initialised module `pynvml`, the binding of NVIDIA's management library. None where the
    package or the driver is missing."""
    try:
        import pynvml  # noqa: PLC0415  opens the driver library: only where devices are asked for
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def driver() -> str:
    """The version of the NVIDIA driver and of the newest CUDA that it serves, such as "driver
    570.86, CUDA 12.8"; "no NVIDIA driver" where none answers."""
    nvml = _load_nvml()
    if nvml is None:
        return "no NVIDIA driver"
    try:
        version = _text(nvml.nvmlSystemGetDriverVersion())
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())  # 12080 for 12.8
    except nvml.NVMLError:
        return "an NVIDIA driver that does not answer"
    finally:
        nvml.nvmlShutdown()
    return f"driver {version}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"


def driver_version() -> str:
    """The version of the NVIDIA driver, such as "580.65.06"; "" where there is none, or where it
    does not answer."""
    nvml = _load_nvml()
    if nvml is None:
        return ""
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return ""
    finally:
        nvml.nvmlShutdown()


@dataclass(frozen=True)
class Gauges:
    """What a GPU's own sensors say now; None for one that it does not have.

    Attributes:
        utilization: share of the last moment in which a kernel ran, in 0..1.
        temperature: degrees Celsius.
        power: watts.
    """

    utilization: float | None
    temperature: float | None
    power: float | None


def read_gauges(visible: str) -> Gauges | None:
    """Read the sensors of a GPU, named by its UUID as `Device.visible` has it. None where it is not
    there, or the driver does not answer."""
    nvml = _load_nvml()
    if nvml is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(visible)
    except nvml.NVMLError:
        nvml.nvmlShutdown()
        return None

    def sensor(read: Callable[[], float]) -> float | None:
        try:
            return read()
        except nvml.NVMLError:  # many cards lack one
            return None

    try:
        return Gauges(
            utilization=sensor(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            temperature=sensor(lambda: float(nvml.nvmlDeviceGetTemperature(handle, 0))),
            power=sensor(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        )
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Device | None:
    """The GPU with this NVML index; None where it does not answer, for example after a fault."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        major, _ = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError:  # lost or reset while we look
        return None
    return Device(
        id=f"cuda:{index}",
        name=_text(nvml.nvmlDeviceGetName(handle)),
        kind="cuda",
        memory_total=int(memory.total),
        memory_free=int(memory.free),
        visible=_text(nvml.nvmlDeviceGetUUID(handle)),
        bf16=major >= 8,  # compute capability 8: Ampere, the first with bfloat16
    )


def _visible_gpus(gpus: list[Device]) -> tuple[Device, ...]:
    """Return the GPUs that this process's CUDA_VISIBLE_DEVICES names, in the order it names them.

    All GPUs when the variable is not set.
    """
    visible_names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_names is None:
        return tuple(gpus)
    chosen: list[Device] = []
    for gpu_name in visible_names.split(","):
        matches = [gpu for gpu in gpus if _names_gpu(gpu_name.strip(), gpu)]
        if not matches:  # CUDA itself ignores everything from the first unknown entry on
            break
        first_match = matches[0]  # a name that fits several GPUs means the first of them
        if first_match not in chosen:  # a GPU that is named twice counts once
            chosen.append(first_match)
    return tuple(chosen)


def _names_gpu(name: str, gpu: Device) -> bool:
    """Whether `name`, an entry of CUDA_VISIBLE_DEVICES, means this GPU: by its index or by the
    beginning of its UUID."""
    if name.isdigit():  # an index, which `id` ends with
        return gpu.id == f"cuda:{int(name)}"
    # Like CUDA, take any beginning of a UUID; but "GPU-" alone begins every UUID and names none.
    return len(name) > 4 and gpu.visible.startswith(name)


def _text(value: str | bytes) -> str:
    """`value` as text: some versions of the binding give bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _processor_name() -> str:
    """The name of the processor; "CPU" where the system does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"


def _cores() -> int:
    """How many cores this process may keep busy: those of its affinity mask, or fewer where a
    cgroup sets a quota; at least 1."""
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cpu_quota()
    if quota:
        cores = min(cores, int(quota))
    return max(1, cores)


def _cpu_quota() -> float | None:
    """How many cores the smallest CPU quota of this process's cgroups allows, such as 1.5; None
    where none of them has a quota."""
    quotas = [_cpu_quota_of_version_2(folder) for folder in _cgroup_folders(controller="")]
    quotas += [_cpu_quota_of_version_1(folder) for folder in _cgroup_folders(controller="cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _cpu_quota_of_version_2(folder: Path) -> float | None:
    """How many cores a cgroup of version 2 allows; None if it sets no quota."""
    parts = _read_text(folder / "cpu.max").split()  # "QUOTA PERIOD", or "max PERIOD" for no quota
    if len(parts) != 2:
        return None
    quota, period = parts
    if quota.isdigit() and period.isdigit() and int(period):
        return int(quota) / int(period)
    return None


def _cpu_quota_of_version_1(folder: Path) -> float | None:
    """How many cores a cgroup of version 1 allows; None if it sets no quota."""
    quota = _read_number(folder / "cpu.cfs_quota_us")  # -1: no quota
    period = _read_number(folder / "cpu.cfs_period_us")
    if quota is None or quota <= 0 or not period:
        return None
    return quota / period


def _memory() -> tuple[int, int]:
    """The memory that this process may use, as (total bytes, free bytes): that of the machine, or
    less where a cgroup sets a limit."""
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    for limit, used in _memory_limits():
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return total, free


def _memory_limits() -> list[tuple[int, int]]:
    """The memory limits of this process's cgroups: (limit, used) in bytes, for each group that has
    a limit. File cache does not count as used where the kernel can drop it at any time."""
    limits = []
    # Of each version of cgroups: controller, files with the limit and the use, key of the cache.
    version_2 = ("", "memory.max", "memory.current", "inactive_file")
    version_1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for controller, limit_name, used_name, cache_key in (version_2, version_1):
        for folder in _cgroup_folders(controller):
            limit = _read_number(folder / limit_name)
            # "max" in version 2 is no number; version 1 has a huge one for "no limit".
            if limit is None or limit > _UNLIMITED:
                continue
            used = _read_number(folder / used_name) or 0
            cache = _stat_value(folder / "memory.stat", cache_key)
            limits.append((limit, max(0, used - cache)))
    return limits


def _cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of the groups above it, the root first.

    Only folders that exist are returned. Inside a container, /proc often names the path of the
    group on the host, which does not exist here. Then only the mount's root is returned, which is
    the container's own group.

    Args:
        controller: "" for cgroups of version 2, else the controller of version 1, such as "cpu".
    """
    folders = [_CGROUP / controller if controller else _CGROUP]
    for name in Path(_cgroup_path(controller)).parts:
        folders.append(folders[-1] / name)
    return [folder for folder in folders if folder.is_dir()]


def _cgroup_path(controller: str) -> str:
    """Return the path of this process's cgroup below the root, as /proc names it.

    It is "" for the root itself.

    Args:
        controller: "" for cgroups of version 2, else the controller of version 1, such as "cpu".
    """
    group_path = ""
    for line in _read_text(_PROC_CGROUP).splitlines():
        # A line is `hierarchy:controllers:path`; of a damaged line the missing parts are "".
        hierarchy, _, after_hierarchy = line.partition(":")
        controllers, _, path = after_hierarchy.partition(":")
        if controller:
            is_in_hierarchy = controller in controllers.split(",")
        else:
            is_in_hierarchy = hierarchy == "0"  # that of version 2, which names no controllers
        if is_in_hierarchy:
            group_path = path.strip("/")
    return group_path


def _read_text(path: Path) -> str:
    """The text of a file; "" when it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _read_number(path: Path) -> int | None:
    """The whole number that a file holds; None when it holds anything else."""
    text = _read_text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _stat_value(path: Path, key: str) -> int:
    """The number after `key` in a file with a `key value` pair on each line, such as memory.stat; 0
    where the file or the key is missing."""
    for line in _read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0


def _disk_free(folder: Path) -> int:
    """Free bytes on the disk that holds `folder`. If the folder does not exist yet, the nearest
    folder above it counts. 0 where nothing can be measured."""
    for candidate in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(candidate).free
        except OSError:
            continue
    return 0

"""The hardware of this machine: GPUs (through NVML) or its CPU, memory, and cores.

Memory and cores are those that cgroups allow. `devices` is never empty: a machine without a GPU is
one device named "cpu". Nothing here imports torch; the driver library is loaded only if it exists.
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
# Kernels report "no limit" as about 2**63, so a number above this is no real limit.
_UNLIMITED = 1 << 60
# The highest load, in processes per core, that is reported. A load above it says no more about the
# next hours.
_MOST_LOAD = 4.0


@dataclass(frozen=True)
class Device:
    """A GPU, or the machine's CPU as a whole.

    Attributes:
        id: "cpu", or "cuda:0" and so on in the order of the PCI bus.
        name: the product name, such as "NVIDIA H200", or the name of the processor.
        kind: "cuda" or "cpu".
        memory_total, memory_free: bytes; for a CPU, of the memory that this process may use.
        visible: the value of CUDA_VISIBLE_DEVICES that shows exactly this device; "" for a CPU. It
            is the UUID, because the meaning of an index depends on the order in which CUDA counts.
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
    """The machine. Sizes are in bytes.

    Attributes:
        disk_free: free bytes on the disk that holds the home.
        load: processes that wanted each core over the last minute, see `_load_per_core`.
    """

    devices: tuple[Device, ...]
    cores: int
    ram_total: int
    ram_free: int
    disk_free: int
    load: float = 0.0

    @property
    def device(self) -> Device:
        """The device with the most memory, for which a run is planned."""
        return max(self.devices, key=lambda device: device.memory_total)


def detect(disk: Path | None = None) -> Hardware:
    """Measure the machine as it is now.

    Its devices are the GPUs that this process may use. If there are none, the CPU is the only
    device.

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
        load=_load_per_core(),
    )


def _load_per_core() -> float:
    """Return how many processes wanted each core over the last minute, on average.

    The number is rounded down to a multiple of 0.5 and is at most `_MOST_LOAD`. Returns 0 if it is
    not known.
    """
    try:
        wanting_processes = os.getloadavg()[0]
    except OSError:
        return 0.0
    return min(_MOST_LOAD, math.floor(2 * wanting_processes / (os.cpu_count() or 1)) / 2)


def devices() -> list[str]:
    """Return the ids of the devices that runs may use; there is at least one."""
    return [device.id for device in detect().devices]


def _gpus() -> tuple[Device, ...]:
    """Return the GPUs that this process may use.

    Returns () if there is no NVIDIA driver, or if it does not answer.
    """
    nvml = _load_nvml()
    if nvml is None:
        return ()
    try:
        gpus = [_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:  # the driver does not answer, so nothing can train on its GPUs
        return ()
    finally:
        nvml.nvmlShutdown()
    return _visible_gpus([gpu for gpu in gpus if gpu is not None])


def _load_nvml() -> Any | None:
    """Load and initialise `pynvml`, the binding of NVIDIA's management library.

    Returns the module, or None if the package or the driver is missing.
    """
    try:
        import pynvml  # noqa: PLC0415  late, because it opens the driver library
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def driver() -> str:
    """Name the NVIDIA driver and the newest CUDA that it supports: "driver 570.86, CUDA 12.8".

    The text is "no NVIDIA driver" if there is none, "an NVIDIA driver that does not answer" if it
    fails.
    """
    nvml = _load_nvml()
    if nvml is None:
        return "no NVIDIA driver"
    try:
        version = _text(nvml.nvmlSystemGetDriverVersion())
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())  # e.g. 12080 for 12.8
    except nvml.NVMLError:
        return "an NVIDIA driver that does not answer"
    finally:
        nvml.nvmlShutdown()
    return f"driver {version}, CUDA {cuda // 1000}.{cuda % 1000 // 10}"


def driver_version() -> str:
    """Return the version of the NVIDIA driver, such as "580.65.06".

    Returns "" if there is no driver, or if it does not answer.
    """
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
    """The present values of a GPU's sensors; None for a sensor that the GPU does not have.

    Attributes:
        utilization: share of the last moment in which a kernel ran, in 0..1.
        temperature: degrees Celsius.
        power: watts.
    """

    utilization: float | None
    temperature: float | None
    power: float | None


def read_gauges(visible: str) -> Gauges | None:
    """Read the sensors of the GPU whose UUID is `visible` (see `Device.visible`).

    Returns None if there is no such GPU, or if the driver does not answer.
    """
    nvml = _load_nvml()
    if nvml is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(visible)
    except nvml.NVMLError:
        nvml.nvmlShutdown()
        return None

    def read_sensor(read: Callable[[], float]) -> float | None:
        """Call `read`; return None if the GPU does not have this sensor."""
        try:
            return read()
        except nvml.NVMLError:
            return None

    try:
        return Gauges(
            utilization=read_sensor(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
            temperature=read_sensor(lambda: float(nvml.nvmlDeviceGetTemperature(handle, 0))),
            power=read_sensor(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        )
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Device | None:
    """Describe the GPU with this NVML index; None if it does not answer, for example after a
    fault."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        major, _ = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    except nvml.NVMLError:  # the GPU was lost or reset meanwhile
        return None
    return Device(
        id=f"cuda:{index}",
        name=_text(nvml.nvmlDeviceGetName(handle)),
        kind="cuda",
        memory_total=int(memory.total),
        memory_free=int(memory.free),
        visible=_text(nvml.nvmlDeviceGetUUID(handle)),
        bf16=major >= 8,  # compute capability 8 is Ampere, the first generation with bfloat16
    )


def _visible_gpus(gpus: list[Device]) -> tuple[Device, ...]:
    """Return the GPUs that the variable CUDA_VISIBLE_DEVICES names, in its order.

    Returns all GPUs if the variable is not set.
    """
    visible_names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_names is None:
        return tuple(gpus)
    chosen: list[Device] = []
    for gpu_name in visible_names.split(","):
        matches = [gpu for gpu in gpus if _is_named(gpu, gpu_name.strip())]
        if not matches:  # CUDA too ignores everything from the first unknown entry on
            break
        first_match = matches[0]  # an entry that fits several GPUs means the first of them
        if first_match not in chosen:  # a GPU that is named twice counts once
            chosen.append(first_match)
    return tuple(chosen)


def _is_named(gpu: Device, name: str) -> bool:
    """Return whether `name`, an entry of CUDA_VISIBLE_DEVICES, means this GPU.

    `name` is the GPU's index or the beginning of its UUID.
    """
    if name.isdigit():
        return gpu.id == f"cuda:{int(name)}"
    # Like CUDA, accept any beginning of a UUID (`visible`). Every UUID begins with "GPU-", so these
    # characters alone name no GPU.
    return len(name) > len("GPU-") and gpu.visible.startswith(name)


def _text(value: str | bytes) -> str:
    """Return `value` as text: some versions of pynvml, NVIDIA's binding, return texts as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _processor_name() -> str:
    """Return the name of the processor; "CPU" if the system does not tell it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"


def _cores() -> int:
    """Return how many cores this process may keep busy; at least 1.

    These are the cores of its affinity mask, or fewer if a cgroup sets a quota.
    """
    if hasattr(os, "sched_getaffinity"):  # macOS does not have this function
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cpu_quota()
    if quota:
        cores = min(cores, int(quota))
    return max(1, cores)


def _cpu_quota() -> float | None:
    """Return how many cores the smallest CPU quota of this process's cgroups allows, such as 1.5.

    Returns None if no cgroup has a quota.
    """
    quotas = [_cpu_quota_of_version_2(folder) for folder in _cgroup_folders(controller="")]
    quotas += [_cpu_quota_of_version_1(folder) for folder in _cgroup_folders(controller="cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _cpu_quota_of_version_2(folder: Path) -> float | None:
    """Return how many cores a cgroup of version 2 allows; None if it sets no quota."""
    parts = _read_text(folder / "cpu.max").split()  # "QUOTA PERIOD", or "max PERIOD" for no quota
    if len(parts) != 2:
        return None
    quota, period = parts
    if quota.isdigit() and period.isdigit() and int(period):
        return int(quota) / int(period)
    return None


def _cpu_quota_of_version_1(folder: Path) -> float | None:
    """Return how many cores a cgroup of version 1 allows; None if it sets no quota."""
    quota = _read_number(folder / "cpu.cfs_quota_us")  # -1 means no quota
    period = _read_number(folder / "cpu.cfs_period_us")
    if quota is None or quota <= 0 or not period:
        return None
    return quota / period


def _memory() -> tuple[int, int]:
    """Return the memory that this process may use, as (total bytes, free bytes).

    It is the memory of the machine, or less if a cgroup sets a limit.
    """
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    for limit, used in _memory_limits():
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return total, free


def _memory_limits() -> list[tuple[int, int]]:
    """Return (limit, used) in bytes for each cgroup of this process that limits the memory.

    File cache that the kernel can drop at any time does not count as used.
    """
    limits = []
    # For each version of cgroups: controller, file with the limit, file with the use, and the key
    # of the file cache in memory.stat.
    version_2 = ("", "memory.max", "memory.current", "inactive_file")
    version_1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for controller, limit_name, used_name, cache_key in (version_2, version_1):
        for folder in _cgroup_folders(controller):
            limit = _read_number(folder / limit_name)
            # "No limit" is the word "max" in version 2, and a huge number in version 1.
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
        # A line is `hierarchy:controllers:path`, e.g. `4:cpu,cpuacct:/docker/1f0a`. Parts that a
        # damaged line lacks are "".
        hierarchy, _, after_hierarchy = line.partition(":")
        controllers, _, path = after_hierarchy.partition(":")
        if controller:
            is_in_hierarchy = controller in controllers.split(",")
        else:
            is_in_hierarchy = hierarchy == "0"  # version 2 has number 0 and names no controllers
        if is_in_hierarchy:
            group_path = path.strip("/")
    return group_path


def _read_text(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _read_number(path: Path) -> int | None:
    """Return the whole number that a file holds; None if it holds anything else."""
    text = _read_text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _stat_value(path: Path, key: str) -> int:
    """Return the number after `key` in a file of lines `key value`, such as memory.stat.

    Returns 0 if the file or the key is missing.
    """
    for line in _read_text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdigit():
            return int(value)
    return 0


def _disk_free(folder: Path) -> int:
    """Return the free bytes on the disk that holds `folder`, or the nearest existing folder above.

    Returns 0 if nothing can be measured.
    """
    for candidate in (folder, *folder.absolute().parents):
        try:
            return shutil.disk_usage(candidate).free
        except OSError:
            continue
    return 0

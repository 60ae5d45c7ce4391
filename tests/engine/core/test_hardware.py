"""What the machine is said to have: GPUs, else one CPU; limits of the cgroup respected."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.core import hardware

GB = 1 << 30


class FakeNvml:
    """The few calls of the NVML binding that are used, over made-up GPUs."""

    class NVMLError(Exception):
        pass

    def __init__(self, *memories: int, broken: bool = False) -> None:
        self.memories, self.broken, self.open = memories, broken, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        if self.broken:
            raise self.NVMLError("driver is gone")
        return len(self.memories)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.10"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        total = self.memories[handle]
        return SimpleNamespace(total=total, free=total // 2)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"NVIDIA Test {handle}"

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{handle}f00d-1111".encode()

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (9, 0) if handle == 0 else (7, 5)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if not uuid.startswith("GPU-") or int(uuid[4]) >= len(self.memories):
            raise self.NVMLError("not found")
        return int(uuid[4])

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise self.NVMLError("not supported")
        return 512_300  # milliwatts


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(80 * GB, 24 * GB)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_load_nvml", lambda: None)


def test_a_machine_without_driver_is_one_device_named_cpu(monkeypatch: pytest.MonkeyPatch):
    no_gpu(monkeypatch)
    machine = hardware.detect()
    assert [device.id for device in machine.devices] == ["cpu"] == hardware.devices()
    assert machine.device.memory_total == machine.ram_total > 0
    assert 0 < machine.ram_free <= machine.ram_total
    assert machine.cores >= 1 and machine.disk_free > 0


def test_gpus_are_listed_with_the_name_that_shows_only_them(gpus: FakeNvml):
    first, second = hardware.detect().devices
    assert (first.id, first.visible, first.memory_total) == ("cuda:0", "GPU-0f00d-1111", 80 * GB)
    assert (first.bf16, second.bf16) == (True, False)
    assert hardware.detect().device == first  # the one with the most memory
    assert gpus.open == 0  # the driver is let go


def test_the_sensors_of_a_gpu_are_read_as_far_as_it_has_them(gpus: FakeNvml):
    read = [hardware.read_gauges(device.visible) for device in hardware.detect().devices]
    assert read == [hardware.Gauges(0.87, 61.0, 512.3), hardware.Gauges(0.87, 61.0, None)]
    assert hardware.read_gauges("GPU-7-gone") is None and gpus.open == 0


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        ("1", ["cuda:1"]),
        ("1,0", ["cuda:1", "cuda:0"]),
        ("GPU-1f00", ["cuda:1"]),
        ("", ["cpu"]),
        ("-1", ["cpu"]),
        ("0,7,1", ["cuda:0"]),  # CUDA stops at the first it does not know
    ],
)
def test_only_gpus_this_process_may_see_are_devices(
    gpus: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, ids: list[str]
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert hardware.devices() == ids


def test_the_driver_is_named_with_the_cuda_that_it_serves(
    gpus: FakeNvml, monkeypatch: pytest.MonkeyPatch
):
    assert hardware.driver() == "driver 570.86.10, CUDA 12.8"
    assert gpus.open == 0
    no_gpu(monkeypatch)
    assert hardware.driver() == "no NVIDIA driver"


def test_a_driver_that_fails_leaves_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(GB, broken=True))
    assert hardware.devices() == ["cpu"]


def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, files: dict[str, str]):
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "self").write_text(line)
    monkeypatch.setattr(hardware, "_CGROUP", root)
    monkeypatch.setattr(hardware, "_PROC_CGROUP", tmp_path / "self")
    no_gpu(monkeypatch)


def test_a_container_has_the_memory_and_cores_its_cgroup_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = {
        "memory.max": "max",
        "box/memory.max": str(64 << 20),
        "box/memory.current": str(48 << 20),
        "box/memory.stat": f"anon 1\ninactive_file {16 << 20}\n",
        "box/cpu.max": "100000 100000",
    }
    cgroup(tmp_path, monkeypatch, "0::/box\n", files)
    machine = hardware.detect()
    assert machine.ram_total == 64 << 20
    assert machine.ram_free == 32 << 20  # file cache can be dropped, so it counts as free
    assert machine.cores == 1


def test_the_older_cgroup_layout_limits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = {
        "memory/box/memory.limit_in_bytes": str(32 << 20),
        "memory/box/memory.usage_in_bytes": str(8 << 20),
        "cpu/box/cpu.cfs_quota_us": "150000",
        "cpu/box/cpu.cfs_period_us": "100000",
    }
    cgroup(tmp_path, monkeypatch, "4:memory:/box\n2:cpu,cpuacct:/box\n", files)
    machine = hardware.detect()
    assert (machine.ram_total, machine.ram_free) == (32 << 20, 24 << 20)
    assert machine.cores == 1


def test_a_cgroup_without_limits_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    no_gpu(monkeypatch)
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path / "none")
    plain = hardware.detect()
    unlimited = str((1 << 63) - 4096)
    files = {"memory/memory.limit_in_bytes": unlimited, "cpu/cpu.cfs_quota_us": "-1"}
    cgroup(tmp_path, monkeypatch, "4:memory:/gone/in/here\n", files)
    machine = hardware.detect()
    assert (machine.ram_total, machine.cores) == (plain.ram_total, plain.cores)


def test_the_disk_of_a_home_that_does_not_exist_yet_is_measured(tmp_path: Path):
    assert hardware.detect(tmp_path / "not" / "yet").disk_free > 0


@pytest.mark.parametrize(
    ("wanting", "cores", "load"),
    [(0.9, 2, 0.0), (1.0, 2, 0.5), (2.9, 2, 1.0), (9.0, 2, 4.0), (90.0, 2, 4.0), (3.0, 64, 0.0)],
)
def test_a_machine_is_as_busy_as_processes_want_each_core(
    monkeypatch: pytest.MonkeyPatch, wanting: float, cores: int, load: float
):
    no_gpu(monkeypatch)
    monkeypatch.setattr(hardware.os, "getloadavg", lambda: (wanting, 0.0, 0.0))
    monkeypatch.setattr(hardware.os, "cpu_count", lambda: cores)
    assert hardware.detect().load == load


def test_a_machine_that_does_not_tell_its_load_counts_as_idle(monkeypatch: pytest.MonkeyPatch):
    def unknown() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(hardware.os, "getloadavg", unknown)
    assert hardware.detect().load == 0.0

"""The speed of a machine: seconds for operations and bytes, from a table or as measured.

`cache/speed.json` of a home is one flat object, written by the probe
(`python -P -m engine.worker.probe_speed OUT.json`): `device`, the kind that was measured (cpu or
cuda), and the keys that `_speed_fields` reads. Missing values come from the table. The table is
slow on purpose: it has sustained shares of the peaks in vendors' data sheets (a fifth for training,
less for sampling without compiled kernels).
"""

import contextlib
import math
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import is_locked, read_json, take_lock
from engine.core.hardware import Device, Hardware
from engine.cost.flops import Work
from engine.home.rows import HOLDS_DEVICE
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import launcher, programs

# Known GPUs: part of the name, peak bf16 operations per second, memory bytes per second. The first
# match counts.
_GPUS = (
    ("B300", 2.2e15, 7.5e12),
    ("GH200", 9.0e14, 3.8e12),
    ("H200", 9.0e14, 4.6e12),
    ("H100", 9.0e14, 3.2e12),
    ("B200", 1.8e15, 7.5e12),
    ("H20", 1.4e14, 3.8e12),
    ("A100", 3.1e14, 1.8e12),
    ("L40", 3.0e14, 8.6e11),
    ("RTX 6000 Ada", 3.0e14, 9.6e11),
    ("RTX PRO 6000", 4.5e14, 1.7e12),
    ("5090", 2.1e14, 1.7e12),
    ("5080", 1.1e14, 9.0e11),
    ("4090", 1.6e14, 1.0e12),
    ("4080", 9.7e13, 7.0e11),
    ("3090", 7.0e13, 9.0e11),
    ("A6000", 1.5e14, 7.6e11),
    ("A40", 1.5e14, 7.0e11),
    ("A10", 1.2e14, 6.0e11),
    ("L4", 1.2e14, 3.0e11),
    # Without native bfloat16: trained in float32, which is eight times slower than these.
    ("V100", 1.1e14, 8.5e11),
    ("T4", 5.0e13, 2.8e11),
)
_UNKNOWN_GPU = (3.0e13, 3.0e11)  # the rates of a GPU that is not in the table, guessed low
_POLL_S = 0.05  # how often `ensure` looks whether the probe has ended
_PATIENCE_S = 20.0  # how long a call waits for a probe that another call started
# The first run of a model takes this share of startup_s longer to start, because it also loads the
# model through transformers.
_COMPARISON_SHARE = 0.6
# The CPU seconds after which a probe is killed. It normally takes a few; one that hangs must end.
_PROBE_CPU_S = 120


@dataclass(frozen=True)
class Speed:
    """Rates and fixed times of one device.

    Attributes:
        train_flops_per_s, sample_flops_per_s: sustained operations per second in training and in
            sampling.
        moved_bytes_per_s: bytes read per second while decoding.
        layer_decode_s: fixed seconds per layer of a decoding step, the same for any batch.
        layer_update_s: fixed seconds per microbatch and layer, forward and backward.
        score_s: seconds in which an environment scores a completion.
        save_s: seconds per checkpoint.
        startup_s: seconds from the start of a run to its first evaluation, without loading weights.
        loaded_bytes_per_s: bytes of weights loaded per second.
        measured: whether a probe measured the rates on this device.
    """

    train_flops_per_s: float
    sample_flops_per_s: float
    moved_bytes_per_s: float
    layer_decode_s: float
    layer_update_s: float
    score_s: float
    save_s: float
    startup_s: float
    loaded_bytes_per_s: float
    measured: bool = False

    def seconds(self, work: Work, layers: int) -> dict[str, float]:
        """Return the seconds that the work takes, under "training", "rollouts", "rewards" and
        "checkpoints".

        Args:
            work: the operations, bytes and counts.
            layers: number of layers of the model.
        """
        sampling_s = work.sample_operations / self.sample_flops_per_s
        moving_s = work.moved_bytes / self.moved_bytes_per_s
        training_s = work.train_operations / self.train_flops_per_s
        return {
            "training": training_s + work.microbatches * layers * self.layer_update_s,
            "rollouts": sampling_s + moving_s + work.decode_steps * layers * self.layer_decode_s,
            "rewards": work.scores * self.score_s,
            "checkpoints": work.saves * self.save_s,
        }

    def phases(
        self, works: Mapping[str, Work], layers: int, weight_bytes: int, *, is_first_run: bool
    ) -> dict[str, float]:
        """Return phase -> seconds of a run.

        Args:
            works: the work under "training", "evaluation" and "saving".
            layers: number of layers of the model.
            weight_bytes: bytes of the model's weights, which are loaded at the start.
            is_first_run: whether the home has no finished run of the model yet.
        """
        training = self.seconds(works["training"], layers)
        # The first run also compares our forward pass with that of transformers.
        comparison = _COMPARISON_SHARE * self.startup_s if is_first_run else 0.0
        return {
            "startup": self.startup_s + comparison + weight_bytes / self.loaded_bytes_per_s,
            "training": training["training"],
            "rollouts": training["rollouts"],
            "rewards": training["rewards"],
            "evaluation": sum(self.seconds(works["evaluation"], layers).values()),
            "checkpoints": self.seconds(works["saving"], layers)["checkpoints"],
        }


def _gpu_rates(name: str) -> tuple[float, float]:
    """Return the peak rates of the GPU called `name`: (bfloat16 operations per second, bytes moved
    per second)."""
    for part_of_name, flops_per_s, bytes_per_s in _GPUS:
        if part_of_name in name:
            return flops_per_s, bytes_per_s
    return _UNKNOWN_GPU


def table(device: Device, cores: int, precision: str) -> Speed:
    """Return the speed of a device by the table, without any measurement.

    Args:
        device: the device.
        cores: number of cores of the machine; it counts only if the device is a CPU.
        precision: "float32" or "bfloat16"; it counts only if the device is a GPU.
    """
    return _cpu_speed(cores) if device.kind == "cpu" else _gpu_speed(device.name, precision)


def _cpu_speed(cores: int) -> Speed:
    """Return the usual speed of a CPU with `cores` cores. The numbers are low guesses."""
    # Cores share one memory, so more of them help less, and beyond 16 not at all.
    effective_cores = min(cores, 16) ** 0.85
    return Speed(
        train_flops_per_s=2.2e10 * effective_cores,
        sample_flops_per_s=1.5e10 * effective_cores,
        moved_bytes_per_s=1.0e10,
        layer_decode_s=1.2e-3,
        layer_update_s=6e-3,
        score_s=5e-4,
        save_s=0.2,
        startup_s=14.0,
        loaded_bytes_per_s=4e8,
    )


def _gpu_speed(name: str, precision: str) -> Speed:
    """Return the usual speed of the GPU called `name`.

    A run reaches only a share of the peak rates in `_GPUS`: the factors below.
    """
    peak_flops_per_s, moved_bytes_per_s = _gpu_rates(name)
    if precision == "float32":  # about eight times slower than bfloat16
        peak_flops_per_s /= 8
    return Speed(
        train_flops_per_s=0.2 * peak_flops_per_s,
        sample_flops_per_s=0.1 * peak_flops_per_s,
        moved_bytes_per_s=0.4 * moved_bytes_per_s,
        layer_decode_s=3.0e-4,  # captured as graphs; an H200 beside other work took 2.2e-4
        layer_update_s=5.0e-3,  # an H200 with one more process on it took 5.8e-3
        score_s=5e-4,
        save_s=0.5,
        startup_s=25.0,
        loaded_bytes_per_s=8e8,
    )


def load(home: Home, device: Device, cores: int, precision: str) -> Speed:
    """Return the speed of a device: measured rates, completed by those of the table.

    The table alone is used if there is no measurement, if the measurement is of another device, or
    if it lacks one of the most important rates.
    """
    by_table = table(device, cores, precision)
    try:
        stored = read_json(home.speed)
    except (OSError, ValueError):
        return by_table
    if not isinstance(stored, dict) or not _is_measurement_of(stored, device):
        return by_table
    rates = _speed_fields({name: value for name, value in stored.items() if _is_rate(value)})
    most_important = {"train_flops_per_s", "sample_flops_per_s", "layer_decode_s", "layer_update_s"}
    if not most_important <= rates.keys():  # an earlier version measured: it is measured again
        return by_table
    return replace(by_table, **rates, measured=True)


def _is_measurement_of(stored: Mapping[str, Any], device: Device) -> bool:
    """Tell whether a stored measurement is of this kind of device, and of the same GPU model."""
    if stored.get("device") != device.kind:
        return False
    return device.kind == "cpu" or stored.get("name") == device.name


def _speed_fields(probe: dict[str, float]) -> dict[str, float]:
    """Return the fields of `Speed`, by name, that can be computed from a probe's figures.

    Args:
        probe: any of train_flops and sample_flops (operations per second), decode_step_s and
            update_s (fixed seconds of a decoding step and of a microbatch, all layers together),
            layers (their number), and startup_s.
    """
    speed = {}
    if "train_flops" in probe:
        speed["train_flops_per_s"] = probe["train_flops"]
    if "sample_flops" in probe:
        speed["sample_flops_per_s"] = probe["sample_flops"]
    if {"decode_step_s", "update_s", "layers"} <= probe.keys():
        speed["layer_decode_s"] = probe["decode_step_s"] / probe["layers"]
        speed["layer_update_s"] = probe["update_s"] / probe["layers"]
    # A run is assumed to start as fast as the probe: the run imports less, but also starts an
    # environment.
    if "startup_s" in probe:
        speed["startup_s"] = probe["startup_s"]
    return speed


def _is_rate(value: Any) -> bool:
    """Tell whether `value` is a positive finite number; True and False do not count as numbers."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def ensure(home: Home, hardware: Hardware, wait_s: float) -> bool:
    """Measure the speed of this machine unless it is known, and wait at most `wait_s` seconds.
    Returns whether there is a measurement now.

    A probe (a short measurement by a worker process) is started and waited for. If it takes longer
    than `wait_s`, it continues and serves later calls. No probe is started while a run holds the
    device (a busy device would be measured), if no interpreter has torch, or if the disk cannot be
    written.
    """
    if is_measured(home, hardware.device):
        return True
    if is_locked(_probe_lock_file(home)):
        # A probe runs already, and the call that started it has waited. On a busy machine a probe
        # takes minutes, so this call waits less.
        wait_s = min(wait_s, _PATIENCE_S)
    else:
        try:
            started = _start_probe(home, hardware.device)
        except OSError:  # the disk cannot be written; use the table
            started = False
        if not started:
            return False
    deadline = time.monotonic() + wait_s
    while is_locked(_probe_lock_file(home)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return is_measured(home, hardware.device)


def is_being_measured(home: Home) -> bool:
    """Tell whether a probe (a short measurement of this machine's speed) is running."""
    return is_locked(_probe_lock_file(home))


def is_measured(home: Home, device: Device) -> bool:
    """Tell whether the home holds a measurement of this device's speed."""
    # Any values of `cores` and `precision` do: they only change the rates of the table.
    return load(home, device, cores=1, precision="float32").measured


def _probe_lock_file(home: Home) -> Path:
    """Return the path of the lock file that a probe holds while it runs."""
    return home.speed.with_name("speed.lock")


def _start_probe(home: Home, device: Device) -> bool:
    """Start the probe of a device in the background; the probe holds the lock file while it runs.

    Returns True if a probe is running now, which another call may have started. Returns False if no
    probe can be started. Raises OSError if the disk cannot be written.
    """
    if programs.trainer_is_replaced():  # only in tests that replace trainers by scripts
        return False
    with Store(home.whole) as store:
        if store.list_runs(limit=1, states=HOLDS_DEVICE):  # a busy device would be measured
            return False
    try:
        python = launcher.worker_python(home)
    except UserError:  # no interpreter has torch
        return False
    lock = take_lock(_probe_lock_file(home))
    if lock is None:  # another call has just started one
        return True
    try:
        _spawn_probe(home, device, python, lock)
    finally:
        os.close(lock)
    return True


def _spawn_probe(home: Home, device: Device, python: str, lock: int) -> None:
    """Spawn the probe, which measures the speed of `device`, as a process that sees only that
    device and has limited CPU time.

    The process inherits the file descriptor `lock`, so the lock is held until the process ends.
    """
    variables = {
        "HONESMITH_DEVICE": device.id,
        "HONESMITH_DEVICE_NAME": device.name,
        "CUDA_VISIBLE_DEVICES": device.visible,
        "GOMP_SPINCOUNT": "10000",  # spinning OpenMP threads starve each other on few cores
        "TOKENIZERS_PARALLELISM": "false",
    }
    pid = launcher.spawn_detached(
        [python, "-P", *programs.command("speed_probe"), str(home.speed)],
        cwd=home.cache,
        log=home.speed.with_name("speed.log"),
        env=os.environ | variables,
        pass_fds=(lock,),
    )
    if hasattr(resource, "prlimit"):
        with contextlib.suppress(OSError):  # the process may have ended already
            resource.prlimit(pid, resource.RLIMIT_CPU, (_PROBE_CPU_S, _PROBE_CPU_S))

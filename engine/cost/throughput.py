"""What a machine makes of operations and bytes: seconds, from a table until it was measured.

`cache/speed.json` of a home is one flat object, written by the probe
(`python -P -m engine.worker.probe_speed OUT.json`): `device`, the kind measured (cpu or cuda), and
what `_measured` reads of it. What it lacks comes from the table. The table is on purpose slow:
sustained shares of the peaks in vendors' data sheets (a fifth for training, less for sampling
without compiled kernels).
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
from engine.processes import launcher, programs

# Peak bf16 operations per second and memory bytes per second of known GPUs, first match wins.
_GPUS = (
    ("H200", 9.0e14, 4.6e12),
    ("H100", 9.0e14, 3.2e12),
    ("B200", 1.8e15, 7.5e12),
    ("A100", 3.1e14, 1.8e12),
    ("L40", 3.0e14, 8.6e11),
    ("RTX 6000 Ada", 3.0e14, 9.6e11),
    ("5090", 2.1e14, 1.7e12),
    ("4090", 1.6e14, 1.0e12),
    ("3090", 7.0e13, 9.0e11),
    ("A6000", 1.5e14, 7.6e11),
    ("A40", 1.5e14, 7.0e11),
    ("A10", 1.2e14, 6.0e11),
    ("L4", 1.2e14, 3.0e11),
)
_UNKNOWN_GPU = (3.0e13, 3.0e11)
_PATIENCE_S = 3.0  # how long a call waits for a probe that another call started
_COMPARED = 0.6  # of a start: loading a model through transformers as well
_PROBE_CPU_S = 120  # a probe takes seconds; one that hangs ends by itself


@dataclass(frozen=True)
class Speed:
    """Seconds and rates of one device.

    Attributes:
        train_flops, sample_flops: sustained operations per second of the two phases.
        moved_bytes: bytes per second read while decoding.
        layer_s: fixed seconds per layer of a decoding step, whatever the batch.
        update_s: fixed seconds per microbatch and layer, forward and backward.
        score_s: seconds an environment takes per completion.
        save_s: seconds per checkpoint.
        start_s: seconds from the start of a run to its first evaluation, loading left out.
        load_bytes: bytes of weights loaded per second.
        measured: whether a probe of this device stands behind the rates.
    """

    train_flops: float
    sample_flops: float
    moved_bytes: float
    layer_s: float
    update_s: float
    score_s: float
    save_s: float
    start_s: float
    load_bytes: float
    measured: bool = False

    def seconds(self, work: Work, layers: int) -> dict[str, float]:
        """Seconds of a piece of work by kind; `layers` of the model that does it."""
        rollouts = work.sample / self.sample_flops + work.moved / self.moved_bytes
        return {
            "training": work.train / self.train_flops + work.updates * layers * self.update_s,
            "rollouts": rollouts + work.steps * layers * self.layer_s,
            "rewards": work.scored * self.score_s,
            "checkpoints": work.saves * self.save_s,
        }

    def phases(
        self, works: Mapping[str, Work], layers: int, weight_bytes: int, *, first: bool
    ) -> dict[str, float]:
        """Seconds of each phase of a run that does `works` (workload.works).

        Args:
            first: whether the home has no run of the model yet, and compares its forward pass.
        """
        steps = self.seconds(works["training"], layers)
        compared = _COMPARED * self.start_s if first else 0.0
        return {
            "startup": self.start_s + compared + weight_bytes / self.load_bytes,
            "training": steps["training"],
            "rollouts": steps["rollouts"],
            "rewards": steps["rewards"],
            "evaluation": sum(self.seconds(works["evaluation"], layers).values()),
            "checkpoints": self.seconds(works["saving"], layers)["checkpoints"],
        }


def table(device: Device, cores: int, precision: str) -> Speed:
    """Speed by the table alone: known GPUs by name, a CPU by its cores."""
    if device.kind == "cpu":
        threads = min(cores, 16) ** 0.85  # the cores share one memory
        return Speed(
            train_flops=2.2e10 * threads,
            sample_flops=1.5e10 * threads,
            moved_bytes=1.0e10,
            layer_s=1.2e-3,
            update_s=6e-3,
            score_s=5e-4,
            save_s=0.2,
            start_s=14.0,
            load_bytes=4e8,
        )
    peak, moved = next((facts[1:] for facts in _GPUS if facts[0] in device.name), _UNKNOWN_GPU)
    if precision == "float32":
        peak /= 8
    return Speed(
        train_flops=0.2 * peak,
        sample_flops=0.1 * peak,
        moved_bytes=0.4 * moved,
        layer_s=1.0e-3,
        update_s=2.5e-3,
        score_s=5e-4,
        save_s=0.5,
        start_s=25.0,
        load_bytes=8e8,
    )


def load(home: Home, device: Device, cores: int, precision: str) -> Speed:
    """Speed of a device: what was measured of it, the table for the rest."""
    guess = table(device, cores, precision)
    try:
        kept = read_json(home.speed)
    except (OSError, ValueError):
        return guess
    if not isinstance(kept, dict) or kept.get("device") != device.kind:
        return guess
    known = _measured({name: value for name, value in kept.items() if _is_rate(value)})
    # A probe of an earlier version lacks some of these: the machine is measured again.
    whole = {"train_flops", "sample_flops", "layer_s", "update_s"} <= known.keys()
    return replace(guess, **known, measured=True) if whole else guess


def _measured(probe: dict[str, float]) -> dict[str, float]:
    """The fields of Speed that a probe's figures give."""
    speed = {}
    if "train_flops" in probe:
        speed["train_flops"] = probe["train_flops"]
    if "sample_flops" in probe:
        speed["sample_flops"] = probe["sample_flops"]
    if {"decode_step_s", "update_s", "layers"} <= probe.keys():
        speed["layer_s"] = probe["decode_step_s"] / probe["layers"]
        speed["update_s"] = probe["update_s"] / probe["layers"]
    if "startup_s" in probe:  # a run imports less, loads a model and starts an environment
        speed["start_s"] = probe["startup_s"]
    return speed


def _is_rate(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


def ensure(home: Home, hardware: Hardware, wait_s: float) -> bool:
    """Have this machine probed if it never was; waits at most `wait_s` for the result.

    Returns whether a measurement is there. A probe that takes longer goes on by itself and serves
    the next call. None is started while a run holds the device, where it would measure that run,
    nor without an interpreter that has torch.
    """
    if is_measured(home, hardware.device):
        return True
    if is_locked(_lock(home)):
        # Somebody has waited for it already: on a busy machine a probe takes minutes.
        wait_s = min(wait_s, _PATIENCE_S)
    else:
        try:
            started = _start_probe(home)
        except OSError:  # a disk that cannot be written: the table has to do
            started = False
        if not started:
            return False
    deadline = time.monotonic() + wait_s
    while is_locked(_lock(home)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_measured(home, hardware.device)


def is_measured(home: Home, device: Device) -> bool:
    """Whether the home holds a measurement of this device."""
    return load(home, device, 1, "float32").measured


def _lock(home: Home) -> Path:
    return home.speed.with_name("speed.lock")


def _start_probe(home: Home) -> bool:
    """Start the probe; it holds the lock while it runs. False where it cannot be started."""
    if programs.trains_without_torch():
        return False
    with Store(home) as store:
        if store.list_runs(1, states=HOLDS_DEVICE):
            return False
    try:
        python = launcher.worker_python(home)
    except UserError:
        return False
    lock = take_lock(_lock(home))
    if lock is None:
        return True
    try:
        pid = launcher.spawn_detached(
            [python, "-P", *programs.command("speed_probe"), str(home.speed)],
            cwd=home.cache,
            log=home.speed.with_name("speed.log"),
            env=os.environ | {"GOMP_SPINCOUNT": "10000", "TOKENIZERS_PARALLELISM": "false"},
            pass_fds=(lock,),
        )
        if hasattr(resource, "prlimit"):
            with contextlib.suppress(OSError):  # it may be over already
                resource.prlimit(pid, resource.RLIMIT_CPU, (_PROBE_CPU_S, _PROBE_CPU_S))
    finally:
        os.close(lock)
    return True

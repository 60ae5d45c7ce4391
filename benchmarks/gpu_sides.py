"""How each side of a case of `gpu.py` is measured, within a time limit. No torch."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import bench, cases, flops, ours, peer
from benchmarks.cases import SHAPES, Case, Job
from benchmarks.peer import BENCH, ROOT, Peer
from engine.core import hardware
from engine.core.hardware import Device
from engine.home.run_dir import Home
from engine.machine.install import vllm_env

OURS, OURS_VLLM, TRL_VLLM = "ours", "ours + vllm", "TRL + vllm"
LOOK_S = 0.05  # between two looks at the device's memory


class Skipped(Exception):
    """A side that cannot be measured here; the message says why."""


class Late(Exception):
    """A side took longer than it was given."""


def sides_of(case: Case) -> list[str]:
    """The sides of a case, the most telling first."""
    if case.algorithm == "decode":
        return [OURS, OURS_VLLM]
    trl = [f"TRL {variant}" for variant in case.variants]
    return [OURS, *trl] if case.algorithm == "sft" else [OURS, OURS_VLLM, *trl, TRL_VLLM]


@dataclass
class Bench:
    """What measuring needs: the device, the home of our runs, TRL's processes.

    Attributes:
        peer_python: an interpreter that has TRL; None: this one, or an environment built for it.
        wheels: folder to build that environment from; None takes the index of pip.
    """

    device: Device
    home: Home
    peer_python: Path | None = None
    wheels: Path | None = None
    _peers: dict[str, Peer] = field(default_factory=dict)
    _why_no_peer: dict[str, str] = field(default_factory=dict)
    _stack: list[Any] = field(default_factory=list)

    def measure(self, case: Case, side: str, limit_s: float) -> dict[str, Any]:
        """Numbers of one side: `rate` (tokens/s; GRPO: of completions), `step_s`, `memory_gb` and
        others. Raises Skipped, Late, and whatever a side fails with."""
        self._require_room(case)
        deadline = time.monotonic() + limit_s
        made = _inputs(case, limit_s)
        left_s = deadline - time.monotonic()
        with device_memory(self.device) as peak:
            if case.algorithm == "decode":
                entry = self._decode(case, side, made, left_s)
            elif side in (OURS, OURS_VLLM):
                entry = self._ours(case, side, made, left_s)
            else:
                entry = self._trl(case, side, made, left_s)
        if self.device.kind == "cuda":
            entry["memory_gb"] = max(peak) / 1e9
        return entry

    def close(self) -> None:
        """End TRL's processes."""
        for name in list(self._peers):
            self._end_peer(name)

    def _require_room(self, case: Case) -> None:
        """Raise Skipped where the weights alone do not fit beside what training holds."""
        width = 2 if self.device.kind == "cuda" else 4
        needed = 1.2 * width * flops.model_weights(SHAPES[case.shape])
        if needed > self.device.memory_total:
            raise Skipped(
                f"its weights take {needed / 1e9:.0f} GB, the device has "
                f"{self.device.memory_total / 1e9:.0f}"
            )

    def _require_vllm(self) -> None:
        if vllm_env.find_python(self.home) is None:
            raise Skipped(
                f"vLLM is not set up: honesmith setup --vllm --home {self.home.root}, or name an "
                f"interpreter in {vllm_env.OVERRIDE}"
            )

    def _ours(self, case: Case, side: str, made: Path, limit_s: float) -> dict[str, Any]:
        """A run of the shipped worker."""
        more: dict[str, Any] = {}
        if case.algorithm == "grpo":
            more = {"sampler": "vllm" if side == OURS_VLLM else "torch"}
        if side == OURS_VLLM:
            self._require_vllm()
        facts = _facts(case, made)
        cores = sorted(os.sched_getaffinity(0))
        deadline = time.monotonic() + limit_s
        try:
            entry = bench.run_ours(
                self.home, Job(case, 0), made, facts, cores, limit_s=limit_s, **more
            )
        except ours.RunFailed as error:
            if time.monotonic() >= deadline:  # it was ended for that
                raise Late from error
            raise
        return _numbers(case, entry)

    def _decode(self, case: Case, side: str, made: Path, limit_s: float) -> dict[str, Any]:
        """Sampling alone, in a process of its own."""
        if side == OURS_VLLM:
            self._require_vllm()
        asked = {
            "model": str(made / "models" / case.shape),
            "device": self.device.id,
            "sampler": "vllm" if side == OURS_VLLM else "torch",
            "prompts": case.prompts,
            "group": case.group,
            "prompt_tokens": case.words,
            "new_tokens": case.new_tokens,
        }
        argv = [sys.executable, "-m", "benchmarks.decode_side", json.dumps(asked)]
        said = run_in_time(argv, limit_s, {"HONESMITH_HOME": str(self.home.root)})
        numbers = json.loads(said)
        entry = {
            "rate": numbers["tokens"] / numbers["seconds"],
            "step_s": numbers["seconds"],
            "memory_gb": numbers["peak_bytes"] / 1e9,
        }
        if numbers["bytes_per_s"]:
            entry["times_floor"] = numbers["seconds"] / decode_floor(case, numbers["bytes_per_s"])
        return entry

    def _trl(self, case: Case, side: str, made: Path, limit_s: float) -> dict[str, Any]:
        """A run of TRL, with ever less memory until it fits."""
        deadline = time.monotonic() + limit_s
        with_vllm = side == TRL_VLLM
        other = self._peer("vllm" if with_vllm else "trl", limit_s)
        variant = "vllm" if with_vllm else side.removeprefix("TRL ")
        cores = sorted(os.sched_getaffinity(0))
        steps = ({}, {"checkpointing": True}, {"checkpointing": True, "accumulate": 8})
        for number, less_memory in enumerate(steps, 1):
            more = {"device": self.device.kind, **less_memory}
            try:
                with self._killed_at(deadline, "vllm" if with_vllm else "trl"):
                    entry = bench.run_peer(
                        other,
                        Job(case, 0),
                        variant,
                        made,
                        _facts(case, made),
                        cores,
                        None,
                        0,
                        **more,
                    )
                return _numbers(case, entry) | {"with": less_memory}
            except peer.PeerFailed as error:
                if time.monotonic() >= deadline:
                    raise Late from error
                if "OutOfMemoryError" not in str(error) or number == len(steps):
                    raise
        raise AssertionError("unreachable")

    def _peer(self, name: str, limit_s: float) -> Peer:
        """TRL's process, started where it does not run. Raises Skipped where TRL cannot be had."""
        if name in self._why_no_peer:
            raise Skipped(self._why_no_peer[name])
        if name not in self._peers:
            try:
                python = self._python_with_trl(limit_s, with_vllm=name == "vllm")
                context = peer.running(python, BENCH / f"{name}.log", own_path())
                self._peers[name] = context.__enter__()
                self._stack.append((name, context))
            except (OSError, peer.NoPeer, peer.PeerFailed) as error:
                words = str(error).strip().splitlines() or [type(error).__name__]
                self._why_no_peer[name] = f"TRL cannot be had here: {words[-1][:200]}"
                raise Skipped(self._why_no_peer[name]) from error
        if name == "vllm" and not self._peers[name].versions.get("vllm"):
            raise Skipped("TRL's environment has no vLLM")
        return self._peers[name]

    def _python_with_trl(self, limit_s: float, *, with_vllm: bool) -> Path:
        """An interpreter that has TRL. Raises NoPeer where none can be made in time."""
        if self.peer_python is not None:
            return self.peer_python
        wanted = ("trl", "vllm") if with_vllm else ("trl",)
        if all(importlib.util.find_spec(name) is not None for name in wanted):
            return Path(sys.executable)
        folder = BENCH / ("venv-vllm" if with_vllm else "venv")
        return peer.ensure_venv(folder, self.wheels, with_vllm=with_vllm, limit_s=limit_s)

    @contextmanager
    def _killed_at(self, deadline: float, name: str) -> Iterator[None]:
        """A context: at the deadline TRL's process is killed, which ends what waits for it."""
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._end_peer, (name, True))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end_peer(self, name: str, kill: bool = False) -> None:
        """End one of TRL's processes; the next use starts it again."""
        running = self._peers.pop(name, None)
        contexts = [context for known, context in self._stack if known == name]
        self._stack = [(known, context) for known, context in self._stack if known != name]
        if running is not None and kill:
            running.kill()
        for context in contexts:
            context.__exit__(None, None, None)


def decode_floor(case: Case, bytes_per_s: float) -> float:
    """Least seconds for a decode case: weights and cache are read once per token."""
    context = case.words + case.new_tokens / 2
    rows = case.prompts * case.group
    return case.new_tokens * flops.decode_floor_s(SHAPES[case.shape], rows, context, bytes_per_s)


def _inputs(case: Case, limit_s: float) -> Path:
    """The folder with the case's model and rows. Raises Late."""
    every = cases.SELF_TEST if case.name in cases.SELF_TEST else cases.GPU_CASES
    try:
        return bench.ensure_inputs(tuple(every.values()), case.name, limit_s=limit_s)
    except subprocess.TimeoutExpired as error:
        raise Late from error


def _facts(case: Case, made: Path) -> dict[str, Any]:
    return json.loads((made / "cases" / case.name / "facts.json").read_text())


def _numbers(case: Case, entry: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of a run: tokens per second, of completions in GRPO; seconds of a step."""
    step_s = entry["seconds"] / entry["steps"]
    tokens = entry["tokens"] if case.algorithm == "sft" else case.step_tokens * entry["steps"]
    numbers = {
        "rate": tokens / entry["seconds"],
        "step_s": step_s,
        "memory_gb": entry["rss_mb"] * 2**20 / 1e9,
    }
    for name in ("sample_s", "train_s", "gflops", "mfu"):
        if name in entry:
            numbers[name] = entry[name]
    return numbers


def run_in_time(argv: Sequence[str], limit_s: float, more: Mapping[str, str]) -> str:
    """The output of a program, which is killed with its children at the limit. Raises Late, and
    RuntimeError with its last words where it fails."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), own_path()]))}
    process = subprocess.Popen(
        list(argv),
        cwd=ROOT,
        env=env | dict(more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise Late from error
    if process.returncode:
        raise RuntimeError((errors.strip().splitlines() or ["it said nothing"])[-1])
    return out


def own_path() -> str:
    """PYTHONPATH of this process: packages that are unpacked, not installed, are found there."""
    return os.environ.get("PYTHONPATH", "")


@contextmanager
def device_memory(device: Device) -> Iterator[list[int]]:
    """Bytes of the GPU's memory taken above what was taken before, a look every `LOOK_S` seconds;
    of a CPU nothing is looked at."""
    samples, over = [0], threading.Event()
    before = _used(device)

    def look() -> None:
        while not over.wait(LOOK_S):
            samples.append(max(0, _used(device) - before))

    watcher = threading.Thread(target=look, daemon=True)
    if device.kind == "cuda":
        watcher.start()
    try:
        yield samples
    finally:
        over.set()
        if watcher.is_alive():
            watcher.join()


def _used(device: Device) -> int:
    """Bytes taken of the device now."""
    now = {each.id: each for each in hardware.detect().devices}.get(device.id, device)
    return now.memory_total - now.memory_free

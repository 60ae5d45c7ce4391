"""The benchmark that travels: a row or a reason for every case, within its time limit."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_sides, peer
from benchmarks.cases import GPU_CASES, SELF_TEST, SHAPES, Case
from benchmarks.gpu_sides import Bench, Late, Skipped, sides_of
from engine.core.hardware import Device
from engine.home.run_dir import Home

CPU = Device("cpu", "a processor", "cpu", 64 << 30, 64 << 30)
EVERY = [(case.name, side) for case in GPU_CASES.values() for side in sides_of(case)]


class Faults:
    """Measures in the place of `Bench`, on a clock of its own: some sides hang until their limit,
    fail or cannot be had."""

    def __init__(self) -> None:
        self.now = 0.0

    def measure(self, case: Case, side: str, limit_s: float) -> dict[str, Any]:
        if side == "TRL packed":
            self.now += limit_s
            raise Late
        self.now += 30.0
        if side == "ours + vllm":
            raise Skipped("vLLM is not set up")
        if case.shape == "1.7b":
            raise RuntimeError("CUDA error: out of\nmemory")
        return {"rate": 1000.0, "step_s": 1.0, "memory_gb": 2.0}


@pytest.mark.parametrize("minutes", [0.5, 10.0, 60.0])
def test_every_side_of_every_case_has_numbers_or_a_reason_and_the_limit_holds(minutes: float):
    measuring = Faults()
    limits = gpu.Limits(0.0, 60 * minutes, clock=lambda: measuring.now)
    rows = gpu.measure_all(list(GPU_CASES.values()), gpu.sides(""), measuring, limits, {})
    assert [(row["case"], row["side"]) for row in rows] == EVERY
    assert measuring.now <= 60 * minutes
    assert all(row["state"] == "measured" or row["why"] for row in rows)
    assert json.loads(json.dumps(rows)) == rows
    if minutes == 60.0:
        whys = {(row["case"], row["side"]): row.get("why", "") for row in rows}
        assert whys["sft-0.6b", "TRL packed"] == "not done after 480 s, within the limit of 60 min"
        assert whys["grpo-4b-64x8", "ours + vllm"] == "vLLM is not set up"
        assert whys["sft-1.7b", "ours"] == "RuntimeError: CUDA error: out of memory"
    if minutes == 0.5:
        assert {row["why"] for row in rows} == {"the limit of 0.5 min is reached"}


def test_a_second_call_goes_on_with_what_was_not_measured():
    measuring = Faults()
    limits = gpu.Limits(0.0, 600.0, clock=lambda: measuring.now)
    (case,) = [GPU_CASES["sft-0.6b"]]
    first = gpu.measure_all([case], gpu.sides("ours"), measuring, limits, {})
    assert [row["state"] for row in first] == ["measured", *["skipped"] * 3]
    spent, kept = measuring.now, {row["key"]: row for row in first if row["state"] == "measured"}
    second = gpu.measure_all([case], gpu.sides(""), measuring, limits, kept)
    assert second[0] == first[0] and second[1]["state"] == "measured"
    assert measuring.now - spent < 600.0


def test_the_table_holds_ours_against_each_side_and_says_what_is_missing():
    row = {"case": "sft-4b", "state": "measured", "rate": 2000.0, "step_s": 1.0, "memory_gb": 9.0}
    rows = [
        row | {"side": "ours"},
        row | {"side": "TRL padded", "rate": 500.0, "with": {"checkpointing": True}},
        {"case": "sft-4b", "side": "TRL packed", "state": "failed", "why": "A | B"},
    ]
    lines = gpu.table(rows).splitlines()[2:]
    assert "| 2,000 |" in lines[0] and "| 4.00 |" in lines[1] and "checkpointing" in lines[1]
    assert lines[2].endswith("| failed: A / B |")


def test_goals_are_told_of_what_was_measured():
    row = {"case": "grpo-4b-64x8", "state": "measured", "rate": 9000.0, "step_s": 58.0}
    rows = [
        row | {"side": "ours", "rate": 5000.0, "step_s": 105.0},
        row | {"side": "ours + vllm"},
        row | {"side": "TRL + vllm", "rate": 4000.0},
        {"case": "sft-4b", "side": "ours", "state": "skipped", "why": "no time"},
    ]
    step, ratio = gpu.goals(rows)
    assert step.endswith("pass") and "58" in step
    assert ratio.endswith("times TRL + vllm: MISS") and "2.25" in ratio


def test_shapes_and_the_full_step_are_among_the_cases():
    trained = {case.shape for case in GPU_CASES.values()}
    assert trained == {"0.6b", "1.7b", "4b", "8b"}
    full = GPU_CASES["grpo-4b-64x8"]
    assert (full.prompts, full.group, full.new_tokens) == (64, 8, 1024)
    assert sides_of(full) == ["ours", "ours + vllm", "TRL dynamic", "TRL + vllm"]
    assert 8.1e9 < gpu_sides.flops.model_weights(SHAPES["8b"]) < 8.3e9


def test_decoding_is_held_against_the_bandwidth_floor():
    # 4.02 G weights of 2 bytes; 512 rows of 512 + 512 tokens, 2 x 36 x 8 x 128 x 2 bytes each
    once = (2 * 4.0225e9 + 512 * 1024 * 147_456) / 1e12
    floor = gpu_sides.decode_floor(GPU_CASES["decode-4b"], 1e12)
    assert floor == pytest.approx(1024 * once, rel=1e-3)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "chosen_device", lambda kind: None)
    asked = argparse.Namespace(device="cuda")
    monkeypatch.setattr(gpu, "arguments", lambda: asked)
    assert gpu.main() == 2
    assert "no CUDA device was found" in capsys.readouterr().err


def test_only_the_measured_gpu_is_visible_to_every_side(monkeypatch):
    cards = [
        Device(f"cuda:{i}", "GPU", "cuda", 80, free, f"GPU-{i}") for i, free in enumerate((9, 70))
    ]
    machine = gpu.hardware.Hardware(tuple(cards), 2, 1, 1, 1)
    monkeypatch.setattr(gpu.hardware, "detect", lambda: machine)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpu.chosen_device("cuda") == cards[1]
    assert gpu.os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-1"


def test_a_program_that_hangs_is_ended_at_its_limit():
    hanging = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with pytest.raises(Late):
        gpu_sides.run_in_time(hanging, 0.2, {})
    failing = [sys.executable, "-S", "-c", "import sys; sys.exit('no kernel image')"]
    with pytest.raises(RuntimeError, match="no kernel image"):
        gpu_sides.run_in_time(failing, 20.0, {})


def test_what_cannot_be_had_is_a_reason(home: Home, tmp_path: Path, monkeypatch):
    def no_index(*_: Any, **__: Any) -> Path:
        raise peer.NoPeer("ERROR: No matching distribution found for trl")

    monkeypatch.delenv("HONESMITH_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(gpu_sides.peer, "ensure_venv", no_index)
    monkeypatch.setattr(gpu_sides, "_inputs", lambda case, limit_s: tmp_path)
    measuring = Bench(CPU, home)
    missing = "TRL cannot be had here: ERROR: No matching distribution found for trl"
    for side, why in (
        ("ours + vllm", "vLLM is not set up"),
        ("TRL dynamic", missing),
        ("TRL + vllm", missing),
    ):
        with pytest.raises(Skipped, match=why):
            measuring.measure(SELF_TEST["grpo-try"], side, 60.0)
    small = Device("cpu", "a processor", "cpu", 1 << 30, 1 << 30)
    with pytest.raises(Skipped, match="its weights take"):
        Bench(small, home).measure(GPU_CASES["sft-8b"], "ours", 60.0)


def test_trl_from_wheels_shares_what_python_has_and_a_missing_wheel_is_named(
    tmp_path: Path, monkeypatch
):
    """A folder of wheels may hold a torch for a CPU; the machine has its own."""
    commands: list[list[str]] = []
    answers = {"errors": ""}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        failed = "pip" in command and bool(answers["errors"])
        errors = answers["errors"] if failed else ""
        return subprocess.CompletedProcess(command, int(failed), "", errors)

    monkeypatch.setattr(peer.subprocess, "run", run)
    wheels = tmp_path / "wheels"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    peer.ensure_venv(tmp_path / "a", wheels)
    venv, pip = commands
    assert {"--clear", "--system-site-packages"} <= {*venv}
    assert pip[pip.index("--no-index") :][:3] == ["--no-index", "--find-links", str(wheels)]
    assert f"trl=={peer.TRL}" in pip
    commands.clear()
    peer.ensure_venv(tmp_path / "b", with_vllm=True)
    assert "--system-site-packages" not in commands[0] and "--no-index" not in commands[1]
    assert f"trl[vllm]=={peer.TRL}" in commands[1]
    answers["errors"] = "looking\nERROR: No matching distribution found for vllm\n\nnotice: pip\n"
    with pytest.raises(peer.NoPeer, match=r"^ERROR: No matching distribution found for vllm$"):
        peer.ensure_venv(tmp_path / "c", wheels, with_vllm=True)


class OutOfMemory:
    """TRL's process on a device whose memory suffices once activations are recomputed."""

    def __init__(self) -> None:
        self.versions = {"vllm": ""}
        self.asked: list[dict[str, Any]] = []

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        if not request.get("checkpointing"):
            raise peer.PeerFailed("torch.OutOfMemoryError: CUDA out of memory")
        return {"steps": 2, "seconds": 4.0, "cpu_s": 3.0, "rss_mb": 1000.0, "sample_s": 1.0}


def test_trl_gets_less_to_hold_where_memory_does_not_suffice_and_is_skipped_without_vllm(
    home: Home, tmp_path: Path, monkeypatch
):
    case = SELF_TEST["grpo-try"]
    (tmp_path / "cases" / case.name).mkdir(parents=True)
    rows = [{"tokens": 9, "prompt_tokens": 9}] * 40
    (tmp_path / "cases" / case.name / "facts.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(gpu_sides, "_inputs", lambda case, limit_s: tmp_path)
    other, measuring = OutOfMemory(), Bench(CPU, home)
    measuring._peers |= {"trl": other, "vllm": other}  # pyright: ignore - it stands in for one
    row = measuring.measure(case, "TRL dynamic", 60.0)
    assert row["with"] == {"checkpointing": True} and row["step_s"] == 2.0
    assert row["memory_gb"] == pytest.approx(1.048576)
    assert row["rate"] == case.step_tokens * 2 / 4.0
    assert [request["variant"] for request in other.asked] == ["dynamic", "dynamic"]
    assert other.asked[0]["device"] == "cpu"
    with pytest.raises(Skipped, match="TRL's environment has no vLLM"):
        measuring.measure(case, "TRL + vllm", 60.0)


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_the_self_test_measures_our_sides_on_the_cpu():
    argv = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--sides", "ours"]
    done = subprocess.run([*argv, "--minutes", "8"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(gpu.RESULTS.read_text())["rows"]
    assert [row["side"] for row in rows if row["state"] == "measured"] == ["ours"] * 3, rows

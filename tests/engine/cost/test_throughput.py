"""Measuring the machine: once, by one process, and never in a run's way."""

import json
import threading
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.core.files import is_locked, write_json
from engine.core.hardware import Device, Hardware
from engine.cost import throughput
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import launcher

GB = 1 << 30
CPU = Device("cpu", "CPU", "cpu", GB, GB)
MACHINE = Hardware((CPU,), 2, GB, GB, GB)


def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """An interpreter whose module run writes what a probe would; $4 is the file to write."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\necho once >> {tmp_path}/started\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(launcher, "worker_python", lambda _: str(script))


PROBED = {
    "device": "cpu",
    "train_flops": 7e10,
    "sample_flops": 6e10,
    "update_s": 0.01,
    "decode_step_s": 0.002,
    "layers": 4,
    "startup_s": 2.0,
}
WRITE = f"echo '{json.dumps(PROBED)}' > \"$4\""


def test_a_machine_is_probed_once(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_python(tmp_path, monkeypatch, WRITE)
    assert not throughput.is_measured(home, CPU)
    assert throughput.ensure(home, MACHINE, 4) and throughput.ensure(home, MACHINE, 4)
    assert (tmp_path / "started").read_text().count("once") == 1
    found = throughput.load(home, CPU, 2, "float32")
    assert (found.train_flops_per_s, found.startup_s, found.measured) == (7e10, 2.0, True)
    assert (found.sample_flops_per_s, found.layer_update_s, found.layer_decode_s) == (
        6e10,
        0.0025,
        0.0005,
    )
    assert found.save_s == throughput.table(CPU, 2, "float32").save_s


def test_what_an_earlier_version_measured_is_measured_again(home: Home):
    old = {"device": "cpu", "train_flops": 7e10, "prefill_flops": 7e10, "startup_s": 2.0}
    write_json(home.speed, old)
    assert not throughput.is_measured(home, CPU)
    assert throughput.load(home, CPU, 2, "float32") == throughput.table(CPU, 2, "float32")


def test_a_slow_probe_serves_a_later_call(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake_python(
        tmp_path, monkeypatch, f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done\n{WRITE}"
    )
    assert not throughput.ensure(home, MACHINE, 0.1)
    assert throughput.is_being_measured(home)
    later: list[bool] = []
    waiting = threading.Thread(target=lambda: later.append(throughput.ensure(home, MACHINE, 4)))
    waiting.start()
    (tmp_path / "go").touch()
    waiting.join()
    assert later == [True]
    assert (tmp_path / "started").read_text().count("once") == 1
    assert not throughput.is_being_measured(home)


def test_a_probe_that_fails_leaves_the_table(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake_python(tmp_path, monkeypatch, "echo broken >&2; exit 1")
    assert not throughput.ensure(home, MACHINE, 4)
    assert throughput.load(home, CPU, 2, "float32") == throughput.table(CPU, 2, "float32")
    assert "broken" in (home.cache / "speed.log").read_text()
    assert not is_locked(home.cache / "speed.lock")


def test_no_probe_is_started_beside_a_run(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fake_python(tmp_path, monkeypatch, WRITE)
    with Store(home) as store:
        store.insert_run(NewRun("sums", "train", "sft", "e@1", "pebble"), lambda _: None)
        store.lease_next(["cpu"])
    assert not throughput.ensure(home, MACHINE, 4)
    assert not (tmp_path / "started").exists()


def test_without_an_interpreter_there_is_nothing_to_measure(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    def none(_: Home) -> str:
        raise UserError("NO_TORCH", "no torch", hint="install it")

    monkeypatch.setattr(launcher, "worker_python", none)
    assert not throughput.ensure(home, MACHINE, 4)


def test_a_gpu_is_measured_itself_and_its_measurement_counts_for_it(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The probe is told the GPU, sees it alone, and no later estimate starts another one."""
    gpu = Device("cuda:1", "NVIDIA H200", "cuda", 140 * GB, 140 * GB, visible="GPU-2", bf16=True)
    machine = Hardware((gpu,), 16, GB, GB, GB)
    of_gpu = json.dumps(PROBED | {"device": "cuda", "name": "NVIDIA H200"})
    told = f"echo $HONESMITH_DEVICE $CUDA_VISIBLE_DEVICES > {tmp_path}/told"
    fake_python(tmp_path, monkeypatch, f"{told}\necho '{of_gpu}' > \"$4\"")
    assert throughput.ensure(home, machine, 4) and throughput.ensure(home, machine, 4)
    assert (tmp_path / "told").read_text().split() == ["cuda:1", "GPU-2"]
    assert (tmp_path / "started").read_text().count("once") == 1
    assert throughput.load(home, gpu, 16, "bfloat16").train_flops_per_s == 7e10
    other = Device("cuda:0", "NVIDIA L4", "cuda", 24 * GB, 24 * GB)
    assert not throughput.is_measured(home, other)  # a GPU of another model is as the table says


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("NVIDIA B300", "B300"),
        ("NVIDIA H20", "H20"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2", "V100"),
    ],
)
def test_every_usual_gpu_is_in_the_table(name: str, like: str):
    gpu, unknown = (Device("cuda:0", each, "cuda", GB, GB) for each in (name, "Some Card"))
    assert throughput.table(gpu, 4, "bfloat16") != throughput.table(unknown, 4, "bfloat16")

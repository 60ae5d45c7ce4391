"""What doctor finds, and that it only looks."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from engine import doctor
from engine.core.errors import UserError
from engine.core.hardware import Device, Hardware
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.fast_paths.results import DeviceResults, PathResult, keep_results
from engine.machine.pace.progress import write_status

LOCAL = "/dev/sda1 / ext4 rw 0 0\n"


@pytest.fixture(autouse=True)
def training_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading torch takes seconds; what it says is tested on its own."""
    done = subprocess.CompletedProcess([], 0, "2.13.0 5.23.0\n", "")
    monkeypatch.setattr(doctor.launcher, "worker_python", lambda home: "python")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: done)


def examined(home: Home, tmp_path: Path, mounts: str = LOCAL) -> dict[str, dict]:
    file = tmp_path / "mounts"
    file.write_text(mounts)
    checks = doctor.examine(home, file)["checks"]
    return {check["name"]: check for check in checks}


def test_a_sound_machine_has_no_failing_check(home: Home, tmp_path: Path):
    found = examined(home, tmp_path)
    assert {"python", "mcp", "home", "database", "devices", "training", "runs"} <= set(found)
    assert [check for check in found.values() if check["status"] == "fail"] == []


def test_each_check_is_told_as_it_is_made(home: Home, tmp_path: Path):
    told: list[dict] = []
    reply = doctor.examine(home, tmp_path / "mounts", told.append)
    assert told == reply["checks"] and len(told) > 5


def test_every_finding_that_is_no_pass_says_what_to_do(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    for check in examined(home, tmp_path).values():
        assert check["status"] == "pass" or check["fix"], check
        assert check["detail"]


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "lustre", "fuse.sshfs", "9p"])
def test_a_home_on_a_network_disk_fails(home: Home, tmp_path: Path, kind: str):
    found = examined(home, tmp_path, LOCAL + f"server:/x {home.root} {kind} rw 0 0\n")
    assert found["filesystem"]["status"] == "fail"
    assert "HONESMITH_HOME" in found["filesystem"]["fix"]


def test_the_mount_nearest_to_the_home_counts(home: Home, tmp_path: Path):
    mounts = LOCAL + f"s:/x /mnt nfs4 rw 0 0\n/dev/sdb {home.root.parent} xfs rw 0 0\n"
    assert examined(home, tmp_path, mounts)["filesystem"]["detail"] == "xfs"


def test_a_damaged_database_is_mended_and_said_so(home: Home, tmp_path: Path):
    with Store(home) as store:
        store.insert_run(NewRun("a", "train", "sft", "a@1", "pebble"))
    home.db.write_bytes(b"not a database" * 500)
    found = examined(home, tmp_path)
    assert found["database"]["status"] == "warn" and found["database"]["fix"]
    assert home.damaged_databases()[0].name in found["database"]["detail"]


def test_a_damaged_database_in_use_fails_with_its_remedy(home: Home, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("engine.home.database._MEND_S", 0.05)
    with Store(home) as store:
        store.checkpoint()
        home.db.write_bytes(b"not a database" * 500)
        found = examined(home, tmp_path)
    assert found["database"]["status"] == "fail" and found["database"]["fix"]


def test_a_configuration_that_cannot_be_read_fails(home: Home, tmp_path: Path):
    home.config_file.write_text("idle_stop = 3\n")
    found = examined(home, tmp_path)["configuration"]
    assert found["status"] == "fail" and "idle_stop" in found["detail"]


def test_a_trainer_that_cannot_load_its_packages_fails_with_its_last_line(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    broken = subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: no peft\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: broken)
    found = examined(home, tmp_path)["training"]
    assert (found["status"], found["detail"]) == ("fail", "ImportError: no peft")
    assert "honesmith setup" in found["fix"]


def test_a_run_nobody_carries_on_is_named(home: Home, tmp_path: Path):
    with Store(home) as store:
        row = store.insert_run(NewRun("a", "train", "sft", "a@1", "pebble"))
        home.run(row.run_id).create()
        store.set_state(row.run_id, "preparing", only_from={"queued"}, device="cpu")
    found = examined(home, tmp_path)["runs"]
    assert found["status"] == "warn" and row.run_id in found["detail"]
    with Store(home) as store:
        assert store.get_run(row.run_id).state == "preparing", "doctor only looks"


def test_the_last_failures_come_with_their_hints(home: Home, tmp_path: Path):
    with Store(home) as store:
        row = store.insert_run(NewRun("a", "train", "sft", "a@1", "pebble"))
        store.set_state(row.run_id, "preparing", only_from={"queued"}, device="cpu")
        store.set_state(
            row.run_id,
            "failed",
            only_from={"preparing"},
            reason_kind="oom",
            reason="memory ran out",
            hint="lower batch_size",
        )
    found = examined(home, tmp_path)["last failures"]
    assert "oom" in found["detail"] and found["fix"] == "lower batch_size"


def test_a_full_disk_fails(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = type("Usage", (), {"free": 10_000_000})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert examined(home, tmp_path)["home"]["status"] == "fail"


def test_gpus_are_named(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gpu = Device("0", "NVIDIA H200", "cuda", 1 << 37, 1 << 37)
    machine = Hardware((gpu,), 16, 1 << 37, 1 << 36, 1 << 36)
    monkeypatch.setattr(doctor.hardware, "detect", lambda disk: machine)
    found = examined(home, tmp_path)["devices"]
    assert found["status"] == "pass" and "H200" in found["detail"]


def test_what_stands_between_the_products_is_named(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(doctor.KERNELS, raising=False)
    assert examined(home, tmp_path)["kernels"]["detail"] == "torch"
    gpu = Device("cuda:0", "a GPU", "cuda", 1 << 36, 1 << 36)
    machine = Hardware((gpu,), 16, 1 << 37, 1 << 36, 1 << 36)
    monkeypatch.setattr(doctor.hardware, "detect", lambda *_: machine)
    assert "the extra gpu brings" in examined(home, tmp_path)["kernels"]["detail"]
    done = subprocess.CompletedProcess([], 0, "2.13.0 5.23.0 0.8.5\n", "")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: done)
    assert examined(home, tmp_path)["kernels"]["detail"].startswith("liger 0.8.5, where")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "apt-get install gcc" in examined(home, tmp_path)["compiler"]["fix"]
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    assert "compiler" not in examined(home, tmp_path)
    monkeypatch.setenv(doctor.KERNELS, "torch")
    assert examined(home, tmp_path)["kernels"]["detail"] == "torch"


def test_runs_whose_config_cannot_be_read_are_named_also_after_the_database_was_made_again(
    home: Home, tmp_path: Path, bench
):
    run, whole = bench.queue(), bench.queue()
    for one in (run, whole):
        write_status(one, bench.row(one))
    assert examined(home, tmp_path)["run files"]["status"] == "pass"
    run.config.write_text('{"kind": "train"')
    for path in home.root.glob("honesmith.db*"):
        path.unlink()
    with Store(home) as store:
        assert [row.run_id for row in store.list_runs(9)] == [whole.id]
    check = examined(home, tmp_path)["run files"]
    assert check["status"] == "warn" and check["fix"]
    assert str(run.config) in check["detail"] and "is damaged" in check["detail"]
    assert str(whole.config) not in check["detail"]


def tried(device: str, time: float, **reasons: str) -> DeviceResults:
    paths = [PathResult(name=name, state="off", reason=why) for name, why in reasons.items()]
    on = PathResult(name="shared_prompt", state="on", difference=0.0, allowed=1e-3)
    return DeviceResults(identity={"device": device, "x": str(time)}, time=time, paths=(*paths, on))


def test_what_does_not_work_on_a_device_is_told_from_its_newest_trial(home: Home, tmp_path: Path):
    assert "fast paths" not in examined(home, tmp_path)
    keep_results(home, tried("NVIDIA H200", 2.0, varlen_attention="differs by 3e-01"))
    keep_results(home, tried("NVIDIA H200", 1.0, decode_graph="an older trial"))
    check = examined(home, tmp_path)["fast paths"]
    assert check["status"] == "warn" and "varlen_attention: differs by 3e-01" in check["detail"]
    assert "NVIDIA H200" in check["detail"] and "doctor --gpu" in check["fix"]
    keep_results(home, tried("NVIDIA H200", 3.0))
    assert examined(home, tmp_path)["fast paths"]["status"] == "pass"


def test_fast_paths_are_tried_for_each_device_with_what_is_done_without_them(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, int, int]] = []

    def tries(
        home: Home,
        device: Device,
        report: Callable[[PathResult], None],
        all_gpus: Sequence[Device],
        known_results: Sequence[PathResult],
    ) -> DeviceResults:
        asked.append((device.id, len(all_gpus), len(known_results)))
        results = tried(device.name, 1.0, decode_graph="slower: 3 ms")
        for result in results.paths:
            report(result)
        vllm = PathResult(name="vllm", state="off", reason="it does not start")
        return results.with_paths([vllm])

    cards = tuple(Device(f"cuda:{i}", "a card", "cuda", 1, 1) for i in range(2))
    machine = Hardware(cards, 2, 1, 1, 1)
    monkeypatch.setattr(doctor.hardware, "detect", lambda disk: machine)
    monkeypatch.setattr(doctor, "examine_device", tries)
    reply = doctor.examine_fast_paths(home)
    assert [check["status"] for check in reply["checks"]] == ["warn", "pass"] * 2
    assert "each operation of a step is launched by itself" in reply["checks"][0]["fix"]
    assert reply["summary"] == "2 of 4 fast paths switched off; runs do without."
    assert asked == [("cuda:0", 2, 0), ("cuda:1", 2, 1)]  # vLLM is tried on one of them


def test_nothing_is_timed_beside_a_run(home: Home):
    with Store(home) as store:
        row = store.insert_run(NewRun("a", "train", "sft", "a@1", "pebble"))
        store.set_state(row.run_id, "preparing", only_from={"queued"}, device="cpu")
    with pytest.raises(UserError, match=row.run_id) as raised:
        doctor.examine_fast_paths(home)
    assert raised.value.code == "DEVICE_BUSY" and raised.value.retryable

"""Starting: once, by whoever, with what it needs."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from run_configs import train_config

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.core.hardware import Device, Hardware
from engine.home.rows import NewRun
from engine.home.store import Store
from engine.machine.processes import launcher
from tests.helpers.env_versions import write_version

# Each of these takes about a second; the limit is for a machine that is busy with other things.
pytestmark = pytest.mark.timeout(60)

START = (
    "import sys; from engine.home.run_dir import Home; "
    "from engine.machine.processes.launcher import start_queued\n"
    "sys.stdin.readline(); print(*start_queued(Home.locate(sys.argv[1])))"
)
REAP = START.replace("start_queued", "reap")


def race(home, code: str, count: int) -> list[str]:
    """Run `code` in `count` processes at once; what each printed."""
    argv = [sys.executable, "-P", "-c", code, str(home.root)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        for _ in range(count)
    ]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate() for process in processes]
    assert not any(err for _, err in said), said
    return [name for out, _ in said for name in out.split()]


def test_processes_that_start_the_queue_at_once_start_a_run_once(bench):
    first = bench.queue(steps=2, hold_at=2)
    second = bench.queue(steps=1)
    assert race(bench.home, START, 4) == [first.id]
    assert bench.row(second).state == "queued"
    with Store(bench.home) as store:
        assert store.queue_position(second.id) == 1
    bench.go(first)
    bench.until_state(second, "done")
    started = [line for line in first.events.read_text().splitlines() if "attempt_started" in line]
    assert len(started) == 1
    assert bench.row(first).state == "done"


def test_processes_that_find_a_dead_run_at_once_continue_it_once(bench):
    run = bench.start(steps=5, hold_at=4)
    bench.kill(*bench.pids(run))
    bench.until(lambda: not launcher.is_alive(run), "the lock is free")
    bench.go(run)
    assert race(bench.home, REAP, 4) == [run.id]
    row = bench.until_state(run, "done")
    assert (row.attempt, row.continuations) == (2, 1)


def test_a_run_is_never_seen_preparing_with_a_free_lock(bench):
    run = bench.queue(steps=1)
    code = (
        "import sys; from engine.home.run_dir import Home\n"
        "from engine.machine.processes import launcher\n"
        "home = Home.locate(sys.argv[1]); run = home.run(sys.argv[2]); print('', flush=True)\n"
        "from engine.home.store import Store\n"
        "store = Store(home); bad = 0\n"
        "while (state := store.get_run(run.id).state) != 'done':\n"
        "    if state != 'queued' and not launcher.is_alive(run):\n"
        "        bad += store.get_run(run.id).state not in ('queued', 'done')\n"
        "print(bad)"
    )
    argv = [sys.executable, "-P", "-c", code, str(bench.home.root), run.id]
    watcher = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    watcher.stdout.readline()
    launcher.start_queued(bench.home)
    bench.until_state(run, "done")
    assert watcher.communicate()[0].split() == ["0"]


def test_a_living_run_is_not_reaped(bench):
    run = bench.start(steps=5, hold_at=4)
    bench.until_step(run, 3)
    assert launcher.reap(bench.home) == []
    assert bench.row(run).state == "running"
    bench.go(run)
    bench.until_state(run, "done")


def test_a_cancel_that_nobody_is_left_to_obey_is_settled_by_the_next_process(bench):
    run = bench.start(steps=5, hold_at=4)
    bench.until_step(run, 3)
    bench.kill(*bench.pids(run))
    bench.until(lambda: not launcher.is_alive(run), "the lock is free")
    with Store(bench.home) as store:
        store.set_state(
            run.id, "stopping", only_from={"running"}, reason_kind="cancelled", reason="enough"
        )
    assert launcher.reap(bench.home) == [run.id]
    assert (bench.row(run).state, bench.row(run).reason_kind) == ("cancelled", "cancelled")


def test_time_spent_before_a_kill_is_counted(bench):
    run = bench.start(steps=5, hold_at=4)
    bench.until_step(run, 3)
    bench.until(lambda: launcher.seconds_in_lock_file(run) > 0.3, "half a second is counted")
    bench.kill(*bench.pids(run))
    bench.until(lambda: not launcher.is_alive(run), "the lock is free")
    bench.go(run)
    launcher.reap(bench.home)
    assert bench.row(run).spent_hours > 0.3 / 3600
    bench.until_state(run, "done")


def test_the_key_of_a_teacher_is_a_secret_of_its_run(home, monkeypatch):
    run = home.run("sums-distill-1")
    run.create()
    teacher = {"kind": "endpoint", "url": "http://h/v1", "model": "m", "key_env": "TEACHER_KEY"}
    write_json(run.config, train_config(run.id, algorithm="distill", teacher=teacher))
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    assert launcher.missing_secrets(run) == ["TEACHER_KEY"]
    monkeypatch.setenv("TEACHER_KEY", "canary-4711")
    assert launcher.missing_secrets(run) == []


def test_the_key_of_a_judge_by_name_is_a_secret_of_its_run(home, monkeypatch, tmp_path):
    write_version(tmp_path / "env.json")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "rubric.toml").write_text('judge = "openai:big"\n')
    run = home.run("sums-grpo-1")
    run.create()
    write_json(run.config, train_config(run.id, env_dir=str(tmp_path)))
    assert launcher.missing_secrets(run) == [], "the trainer says that there is no such endpoint"
    home.config_file.write_text(
        '[endpoints.big]\nurl = "http://127.0.0.1:9/v1"\nmodel = "m"\nkey_env = "BIG_KEY"\n'
    )
    monkeypatch.delenv("BIG_KEY", raising=False)
    assert launcher.missing_secrets(run) == ["BIG_KEY"]
    (home.root / ".env").write_text("BIG_KEY=sk-1\n")
    assert launcher.missing_secrets(run) == []


def test_a_run_waits_for_a_process_that_has_its_secrets(bench, monkeypatch, tmp_path):
    write_version(tmp_path / "env.json", secrets=("JUDGE_KEY",))
    run = bench.queue(steps=1, env_dir=tmp_path)
    other = bench.queue(steps=1)
    assert launcher.missing_secrets(run) == ["JUDGE_KEY"]
    assert launcher.start_queued(bench.home) == [other.id]
    bench.until_state(other, "done")
    assert bench.row(run).state == "queued"
    monkeypatch.setenv("JUDGE_KEY", "canary-4711")
    assert launcher.start_queued(bench.home) == [run.id]
    bench.until_state(run, "done")
    bench.until(lambda: not launcher.is_alive(run), "the supervisor is gone")
    everything = b"".join(
        path.read_bytes() for path in bench.home.root.rglob("*") if path.is_file()
    )
    assert b"canary-4711" not in everything


def test_a_supervisor_that_cannot_start_fails_the_run(bench, monkeypatch):
    run = bench.queue(steps=1)
    monkeypatch.setattr(launcher.sys, "executable", "/nonexistent/python")
    assert launcher.start_queued(bench.home) == []
    row = bench.row(run)
    assert (row.state, row.reason_kind) == ("failed", "infra")
    assert not launcher.is_alive(run)


def test_a_run_whose_folder_was_deleted_fails_in_words(bench):
    import shutil

    run = bench.queue(steps=1)
    shutil.rmtree(run.path)
    launcher.start_queued(bench.home)
    row = bench.until_state(run, "failed")
    assert row.reason_kind == "infra" and "config.json" in row.reason


def test_the_starter_may_die_and_the_run_goes_on(bench):
    run = bench.queue(steps=3, hold_at=2)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", START + "\nimport time; time.sleep(60)", bench.home.root],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    bench.until_step(run, 1)
    os.killpg(process.pid, 9)
    process.wait()
    bench.go(run)
    assert bench.until_state(run, "done").attempt == 1


def test_without_torch_the_home_s_own_interpreter_is_used(home, monkeypatch):
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        launcher.worker_python(home)
    assert caught.value.code == "NO_TORCH" and "honesmith setup" in caught.value.hint
    home.train_python.parent.mkdir(parents=True)
    home.train_python.touch()
    assert launcher.worker_python(home) == str(home.train_python)


GIB = 1 << 30


def machine_of(*sizes: tuple[int, int]) -> Hardware:
    """GPUs of (memory, free memory) in GiB."""
    gpus = tuple(
        Device(f"cuda:{i}", "GPU", "cuda", total * GIB, free * GIB)
        for i, (total, free) in enumerate(sizes)
    )
    return Hardware(gpus, 16, 64 * GIB, 64 * GIB, 99 * GIB)


def needing(home, gib: int):
    """A run that needs so much memory at least."""
    config = train_config("sft")
    config["estimate"]["least_memory"] = gib * GIB
    run = home.run("needy")
    run.create()
    write_json(run.config, config)
    return run


def test_a_run_gets_the_gpu_with_most_memory_free_and_not_the_first(home):
    run = needing(home, 30)
    unequal = machine_of((24, 23), (80, 79))
    assert launcher.devices_for(run, unequal, ["cuda:0", "cuda:1"]) == "cuda:1"
    taken = machine_of((80, 10), (80, 60))  # other people hold most of the first
    assert launcher.devices_for(run, taken, ["cuda:0", "cuda:1"]) == "cuda:1"


def test_a_run_waits_for_memory_that_others_hold_and_says_so(home, monkeypatch):
    run = needing(home, 30)
    full = machine_of((80, 10))
    assert launcher.devices_for(run, full, ["cuda:0"]) == ""
    monkeypatch.setattr("engine.core.hardware.detect", lambda disk=None: full)
    assert "waits for memory: it needs 32.2 GB" in launcher.awaited_memory(run)
    assert launcher.devices_for(run, machine_of((24, 23)), ["cuda:0"]) == "cuda:0"  # never fits
    assert launcher.devices_for(needing(home, 0), full, ["cuda:0"]) == "cuda:0"  # needs unknown


def planned_with(home, name: str, gib: int, state: str = "queued"):
    """A run in the queue that was planned with so much memory of a GPU."""
    config = train_config("sft")
    config["estimate"] |= {"least_memory": 4 * GIB, "memory_available": gib * GIB}

    def create(run_id: str) -> None:
        home.run(run_id).create()
        write_json(home.run(run_id).config, config)

    with Store(home) as store:
        return store.insert_run(NewRun(name, "train", "sft", "e@1", "pebble"), create).run_id


def started_on(home, machine: Hardware, monkeypatch) -> dict[str, str]:
    """Start what may start on this machine: the device of each run that was started."""
    monkeypatch.setattr("engine.core.hardware.detect", lambda disk=None: machine)
    monkeypatch.setattr(launcher, "_start", lambda *arguments: True)
    started = launcher.start_queued(home)
    with Store(home) as store:
        return {run_id: store.get_run(run_id).device for run_id in started}


def test_runs_share_a_gpu_as_long_as_their_bytes_fit_where_its_owner_says_so(home, monkeypatch):
    """The driver shows nothing of a run that has just been started: its plan counts."""
    runs = [planned_with(home, f"half-{i}", 40) for i in range(3)]
    machine = machine_of((80, 80))
    assert started_on(home, machine, monkeypatch) == {runs[0]: "cuda:0"}  # one run as a rule
    home.config_file.write_text("runs_per_gpu = 3\n")
    assert started_on(home, machine, monkeypatch) == {runs[1]: "cuda:0"}
    assert started_on(home, machine, monkeypatch) == {}  # a third of 40 GiB has no room
    reason = launcher.awaited_memory(home.run(runs[2]))
    assert "it needs 42.9 GB at least, and other processes leave 0.0 GB" in reason


def test_a_run_that_needs_a_whole_gpu_shares_none(home, monkeypatch):
    home.config_file.parent.mkdir(parents=True, exist_ok=True)
    home.config_file.write_text("runs_per_gpu = 2\n")
    small, whole, other = (planned_with(home, str(gib), gib) for gib in (40, 80, 40))
    two = machine_of((80, 80), (80, 30))  # other people hold most of the second
    assert started_on(home, two, monkeypatch) == {small: "cuda:0", whole: "cuda:1", other: "cuda:0"}


def test_several_gpus_for_a_run_are_of_one_model_where_there_are_enough(home):
    run = needing(home, 30)
    mixed = machine_of((80, 79), (80, 78), (24, 23), (80, 10))
    last = replace(mixed.devices[3], name="other GPU")
    mixed = replace(mixed, devices=(*mixed.devices[:3], last))
    every = [device.id for device in mixed.devices]
    assert launcher.devices_for(run, mixed, every, gpus=2) == "cuda:0,cuda:1"
    assert launcher.devices_for(run, mixed, every, gpus=3) == ""  # the third has no room now
    small = needing(home, 5)
    assert launcher.devices_for(small, mixed, every, gpus=3) == "cuda:0,cuda:1,cuda:2"
    assert launcher.devices_for(small, mixed, every, gpus=4).count(",") == 3


def test_a_run_that_waits_for_several_gpus_says_so(home, monkeypatch):
    machine = machine_of((80, 79), (80, 79))
    monkeypatch.setattr("engine.core.hardware.detect", lambda disk=None: machine)
    with Store(home) as store:
        store.insert_run(NewRun("small", "train", "sft", "e@1", "pebble"), lambda _: None)
        assert store.lease_next(["cuda:0", "cuda:1"]) is not None
        new = NewRun("large", "train", "sft", "e@1", "pebble", gpus=2)
        waiting = store.insert_run(new, lambda _: None)
    reason = launcher.awaited_memory(home.run(waiting.run_id))
    assert reason == "it waits for 2 devices: 1 are free, and kept for it"


def test_a_run_without_a_device_with_room_stays_queued_and_the_next_is_tried(home):
    with Store(home) as store:
        first, second = (
            store.insert_run(NewRun(name, "train", "sft", "e@1", "pebble"), lambda _: None)
            for name in ("large", "small")
        )
        leased = store.lease_next(
            ["cuda:0"], choose=lambda row, free: "" if row.run_id == first.run_id else free[0]
        )
        assert leased is not None and leased.run_id == second.run_id
        assert store.get_run(first.run_id).state == "queued"

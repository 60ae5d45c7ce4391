"""F23, F26: many runs, and a server that is used for long, take no more than they should.

HONESMITH_SOAK_S is how long the server is used; a day is 86400.
"""

import os
import time

import psutil
import pytest
from raw_server import Server
from run_configs import train_config

from engine.core.files import write_json
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs import lifecycle

SOAK_S = float(os.environ.get("HONESMITH_SOAK_S") or 60)
LIST_S = 1.0  # with a cold cache and on a busy machine; measured 0.1 s
GROWTH = 20_000_000  # bytes of memory that a warm server may still take


def test_f23_the_newest_of_a_thousand_runs_are_listed_at_once(home: Home):
    def prepare(run_id: str) -> None:
        home.run(run_id).create()
        write_json(home.run(run_id).config, train_config(run_id), fsync=False)

    with Store(home) as store:
        for _ in range(1000):
            run_id = store.insert_run(NewRun("a", "train", "grpo", "e@1", "pebble"), prepare).run_id
            store.set_state(run_id, "cancelled", only_from={"queued"}, ended=time.time())
    took = []
    for _ in range(5):
        began = time.monotonic()
        found = lifecycle.overview(home, "runs")
        took.append(time.monotonic() - began)
    assert len(found["runs"]) == 20 and found["runs"][0]["run_id"] == "a-1000"
    assert min(took) < LIST_S, took


@pytest.mark.timeout(SOAK_S + 240)
def test_f26_a_server_in_long_use_keeps_its_memory_files_and_threads(home, steady, record_property):
    server = Server(home)
    process = psutil.Process(server.process.pid)
    asked = {"env_id": steady, "algorithm": "grpo", "settings": {"steps": 3, "save_every": 1}}
    began, calls, samples = time.monotonic(), 0, []
    while time.monotonic() - began < SOAK_S or calls < 60:
        run_id = server.ask("submit_train", **asked)["run_id"]
        server.ask("get_status", scope="runs")
        if calls % 3:
            server.ask("cancel_run", run_id=run_id)
        else:
            server.ask("wait_run", run_id=run_id, timeout_s=20)
        server.ask("read_logs", run_id=run_id)
        calls += 1
        with process.oneshot():
            samples.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
        wal = home.db.with_name(f"{home.db.name}-wal")
        assert not wal.exists() or wal.stat().st_size < 8_000_000
    warm = samples[len(samples) // 3 :]
    memory, files, threads = zip(*warm, strict=True)
    third = len(warm) // 3
    assert min(memory[-third:]) - min(memory[:third]) < GROWTH, (memory[0], memory[-1])
    assert min(files[-third:]) <= max(files[:third]) + 2
    assert min(threads[-third:]) <= max(threads[:third]) + 2
    server.answers(30)
    with Store(home) as store:
        for row in store.list_runs(limit=10_000):
            lifecycle.cancel(home, row.run_id)
    deadline = time.monotonic() + 60
    while any(map(_alive, _folders(home))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    record_property(
        "said",
        f"soak: {calls} runs in {time.monotonic() - began:.0f} s, memory "
        f"{min(memory[:third]) / 1e6:.1f} to {min(memory[-third:]) / 1e6:.1f} MB, "
        f"{files[-1]} descriptors, {threads[-1]} threads",
    )


def _folders(home: Home) -> list:
    with Store(home) as store:
        return [home.run(row.run_id) for row in store.list_runs(limit=10_000)]


def _alive(run) -> bool:
    from engine.machine.processes import launcher

    return launcher.is_alive(run)

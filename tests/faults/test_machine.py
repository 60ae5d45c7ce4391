"""F2, F5 to F10, F18, F20: signals, reboots, reused pids, zombies, stopped processes, clocks."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time

import httpx2
import psutil
import pytest
from http_server import client_of, serving
from invariants import Witness, assert_same_curve, curve, until
from jumping_clock import JumpingClock
from mcp import MCPError
from raw_server import Server
from steady_trainer import expected

from engine.core.files import read_json, read_lines, write_json
from engine.core.hints import Hint
from engine.home.rows import TERMINAL, NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import launcher, outcome
from engine.machine.processes.local_executor import LocalExecutor
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest
from engine.supervisor import Watch
from mcp_server.access.bearer import load_token

DAY_S = 86_400.0
STEADY = {"steps": 10, "save_every": 3}


def drained(home: Home, witness: Witness, seconds: float = 200) -> None:
    """Until every run has ended and nothing of any lives."""

    def quiet() -> bool:
        launcher.reap(home)
        with Store(home) as store:
            rows = store.list_runs(limit=1000)
        alive = any(launcher.is_alive(home.run(row.run_id)) for row in rows)
        return not alive and all(row.state in TERMINAL for row in rows)

    until(quiet, "every run has ended", seconds)
    witness.over()


@pytest.mark.parametrize("how", ["SIGTERM", "end of input"])
def test_f2_a_server_that_is_told_to_end_is_gone_in_five_seconds_and_runs_go_on(home, steady, how):
    witness, chance = Witness(home), random.Random(7)
    asked = {"env_id": steady, "algorithm": "grpo", "settings": STEADY}
    for number in range(10):
        server = Server(home)
        server.call(1, "submit_train", request_id=f"r-{number}", **asked)
        time.sleep(chance.uniform(0, 2.5))
        began = time.monotonic()
        if how == "SIGTERM":
            server.process.send_signal(signal.SIGTERM)
        said = server.answers(10)  # closes its input
        assert time.monotonic() - began < 5.0 + 3.0  # the second for a machine that is busy
        again = lifecycle.submit(home, TrainRequest(request_id=f"r-{number}", **asked))["run_id"]
        if 1 in said:
            assert said[1]["structuredContent"]["run_id"] == again
        witness.acked[f"r-{number}"] = again
        witness.look()
    drained(home, witness)
    for run_id in witness.acked.values():
        assert_same_curve(curve(home.run(run_id)), expected(STEADY["steps"]))


async def test_f2_an_http_server_told_to_end_under_load_is_gone_and_runs_go_on(
    home, steady, record_property
):
    witness, chance, took, codes = Witness(home), random.Random(11), [], set()
    looks = submits = 0
    asked = {"env_id": steady, "algorithm": "grpo", "settings": STEADY}
    token = load_token(home)

    async def load(url: str, tool: str, arguments: dict, said: list, again: bool) -> None:
        with contextlib.suppress(BaseExceptionGroup, httpx2.HTTPError, MCPError):
            async with client_of(url, token, mode="2026-07-28") as client:
                while True:
                    said.append(await client.call_tool(tool, arguments))
                    if not again:
                        return

    for number in range(20):
        request, heard = f"r-{number}", {"submit": [], "look": [], "wait": []}
        async with serving(home) as (process, url), asyncio.TaskGroup() as group:
            calls = [
                load(url, "submit_train", asked | {"request_id": request}, heard["submit"], False),
                *(load(url, "get_status", {}, heard["look"], True) for _ in range(3)),
            ]
            if number:
                waited = {
                    "run_id": witness.acked[f"r-{number - 1}"],
                    "until": "alert",
                    "timeout_s": 45,
                }
                calls.append(load(url, "wait_run", waited, heard["wait"], False))
            tasks = [group.create_task(call) for call in calls]
            await asyncio.sleep(chance.uniform(0, 2.5))
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            codes.add(await asyncio.wait_for(process.wait(), 30))
            took.append(time.monotonic() - began)
            for task in tasks:
                task.cancel()
        assert took[-1] < 5.0 + 3.0  # the second for a machine that is busy
        again = lifecycle.submit(home, TrainRequest(request_id=request, **asked))["run_id"]
        for result in heard["submit"]:
            assert result.is_error or result.structured_content["run_id"] == again
        witness.acked[request] = again
        witness.look()
        looks, submits = looks + len(heard["look"]), submits + len(heard["submit"])
    assert codes <= {0, -signal.SIGTERM}, codes
    assert looks and 0 < submits < 20, "some were told to end before they answered, some after"
    drained(home, witness)
    for run_id in witness.acked.values():
        assert_same_curve(curve(home.run(run_id)), expected(STEADY["steps"]))
    record_property(
        "said",
        f"20 HTTP servers told to end, exit status {codes}, gone within {max(took):.1f} s; "
        f"{looks} looks and {submits} of 20 submits were answered",
    )


def test_f6_eight_servers_on_one_home_take_64_submits_while_three_are_killed(home, steady):
    witness = Witness(home)
    asked = {"env_id": steady, "algorithm": "grpo", "settings": {"steps": 1, "save_every": 1}}
    servers = [Server(home) for _ in range(8)]
    for number in range(64):
        server = servers[number % 8]
        server.call(number, "submit_train", request_id=f"r-{number}", **asked)
        if number in (20, 36, 52):
            server.process.kill()
    said: dict[int, str] = {}
    living = [server for server in servers if server.process.returncode is None]
    for server in servers:  # end of input: what was asked is answered first, or never was
        for number, result in server.answers(120).items():
            if number >= 0:
                said[number] = result["structuredContent"]["run_id"]
    for number in range(64):
        again = lifecycle.submit(home, TrainRequest(request_id=f"r-{number}", **asked))["run_id"]
        assert said.get(number, again) == again
        witness.acked[f"r-{number}"] = again
    assert len(set(witness.acked.values())) == 64 and len(living) >= 5 and said
    drained(home, witness, 250)
    with Store(home) as store:
        rows = store.list_runs(limit=100)
    assert [(row.state, row.attempt) for row in rows] == [("done", 1)] * 64


def test_f5_after_a_reboot_what_ran_is_continued_and_what_waited_starts(bench):
    first = bench.start(steps=5, hold_at=4)
    second = bench.queue(steps=2)
    bench.until_step(first, 3)
    bench.kill_all_of(first)
    record = read_json(first.started_record)
    write_json(first.started_record, record | {"boot_id": "of the boot before"})
    bench.go(first)
    assert launcher.reap(bench.home) == [first.id]
    assert bench.until_state(first, "done").continuations == 1
    assert bench.until_state(second, "done").attempt == 1


def test_f7_a_pid_that_now_belongs_to_a_stranger_is_never_signalled(bench):
    run = bench.start(steps=5, hold_at=4)
    bench.until_step(run, 3)
    bench.kill_all_of(run)
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    record = read_json(run.started_record)
    write_json(
        run.started_record,
        record | {"supervisor_pid": stranger.pid, "trainer_pid": stranger.pid},
    )
    lifecycle.cancel(bench.home, run.id)
    assert bench.until_state(run, "cancelled")
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_f8_a_zombie_is_no_living_trainer(bench):
    run = bench.start(steps=5, hold_at=4)
    bench.until_step(run, 3)
    supervisor, trainer = bench.pids(run)
    os.kill(supervisor, signal.SIGSTOP)
    bench.kill(trainer)
    zombie = psutil.Process(trainer)
    bench.until(lambda: zombie.status() == psutil.STATUS_ZOMBIE, "nobody collects the trainer")
    bench.kill(supervisor)
    bench.until(lambda: not launcher.is_alive(run), "the lock is free")
    bench.go(run)
    assert launcher.reap(bench.home) == [run.id]
    assert bench.until_state(run, "done").attempt == 2


def test_f9_a_trainer_that_stands_still_is_seen_and_can_be_cancelled(bench):
    run = bench.start(steps=5, hold_at=4)
    bench.until_step(run, 3)
    _, trainer = bench.pids(run)
    os.kill(trainer, signal.SIGSTOP)
    long_ago = time.time() - 600
    for path in (run.metrics, run.events, run.log(1)):
        os.utime(path, (long_ago, long_ago))
    said = lifecycle.status(bench.home, run.id)
    assert said["quiet_s"] >= 600 and "nothing was written for 6" in said["warnings"][0]
    assert said["state"] == "running"  # it is not ended by anyone who was not asked to
    lifecycle.cancel(bench.home, run.id)
    row = bench.until_state(run, "cancelled")
    assert "SIGKILL" in row.reason  # a stopped process does not hear SIGTERM
    assert not psutil.pid_exists(trainer)


def test_f18_a_clock_that_jumps_ends_no_run_and_keeps_the_order_of_the_queue(home, monkeypatch):
    real, offset = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    names = []
    with Store(home) as store:
        for jump in (0.0, 3 * 86400.0, -3600.0, 2 * 86400.0, -86400.0):
            offset[0] = jump
            names.append(store.insert_run(NewRun("a", "train", "grpo", "e@1", "pebble")).run_id)
        assert [row.run_id for row in store.queue()] == names
        row = store.lease_next(["cpu"])
        assert row is not None and row.run_id == names[0]
        offset[0] = 3 * 86400.0
        watch = Watch(home.run(row.run_id), store, row, lock=-1)
        offset[0] = -3600.0
        assert 0 <= watch.elapsed < 60
        end = outcome.abandon(watch.run, row, "infra", "gone", Hint("look"))
        outcome.apply(store, watch.run, row, end)
        found = store.get_run(row.run_id)
        assert found.state == "failed" and found.spent_hours >= 0 and store.spent_hours() >= 0
        again = store.resume_run(row.run_id, max_gpu_hours=1, request_id="", body={})
        assert store.queue()[-1].run_id == again.run_id


@pytest.mark.parametrize("jumps", [(3 * DAY_S,), (-3600.0,), (3 * DAY_S, -3600.0)], ids=str)
def test_f18_a_supervisor_under_a_jumping_clock_ends_no_run(bench, jumps):
    clock = JumpingClock(bench.home.root / "clock")
    with clock.followed():
        run = bench.start(steps=8, hold_at=4, wall_limit_hours=0.1, max_gpu_hours=0.1)
    bench.until_step(run, 3)
    for jump in jumps:
        counted = launcher.seconds_in_lock_file(run)
        clock.jump(jump)
        bench.until(lambda: launcher.seconds_in_lock_file(run) > counted + 1, "it counts on")  # noqa: B023
        assert bench.row(run).state == "running"
        assert_no_time_is_negative(lifecycle.status(bench.home, run.id))
    bench.go(run)
    row = bench.until_state(run, "done")
    moved = read_lines(run.metrics)[0][-1]["time"] - time.time()
    assert abs(moved - jumps[-1]) < 60, "the trainer's clock was moved"
    assert (row.attempt, row.continuations) == (1, 0) and 0 < row.spent_hours < 0.05
    assert_no_time_is_negative(lifecycle.status(bench.home, run.id))
    assert not re.search(r"-\d+(\.\d+)? (s|min|h)\b", run.status_md.read_text())
    assert run.report.is_file()


def assert_no_time_is_negative(said: dict) -> None:
    times = {name: said.get(name) for name in ("eta_s", "quiet_s", "spent_hours")}
    assert all(value is None or value >= 0 for value in times.values()), times


def test_f18_progress_after_a_jump_back_has_no_negative_time(bench):
    run = bench.start(steps=8, hold_at=6)
    bench.until_step(run, 5)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines[3:]:
        line["time"] -= 3600
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = lifecycle.status(bench.home, run.id)
    assert said["eta_s"] is None or said["eta_s"] >= 0
    assert said["spent_hours"] >= 0 and "quiet_s" not in said
    bench.go(run)
    bench.until_state(run, "done")


def test_f20_a_device_that_is_gone_fails_the_run_in_words_and_gives_the_lease_back(bench):
    run = bench.queue(steps=2)
    with Store(bench.home) as store:
        row = store.lease_next(["cuda:7"], lambda row: True)
        assert row is not None
        place = LocalExecutor(bench.home, store)
        assert place.claim(run)
        assert launcher._start(place, store, row)
    found = bench.until_state(run, "failed")
    assert found.reason_kind == "infra" and "cuda:7 is gone" in found.reason
    assert f'resume="{run.id}"' in str(found.hint)
    lifecycle.submit(bench.home, TrainRequest(resume=run.id))
    assert bench.until_state(run, "done").device == "cpu"

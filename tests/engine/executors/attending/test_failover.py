"""A run whose place fails goes on at the next one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from run_configs import train_config

from engine.core.errors import UserError
from engine.core.files import read_json, read_lines, write_json
from engine.core.hints import Hint
from engine.executors import hosts
from engine.executors.attending import host_setup, hours
from engine.executors.attending.attendant import Attendant, sweep
from engine.executors.attending.failover import next_place
from engine.home.rows import NewRun, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.pace.progress import write_status
from engine.machine.processes import launcher, outcome
from engine.machine.processes.seam import Handle, Owned
from engine.records.run_config import TrainConfig
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.training import submit

BAD = ".honesmith-host"  # the folder of the host "box" over there


def write_hosts(home: Home, **failover_of_host: str) -> None:
    """Name hosts in config.toml, each with its failover; "" for none."""
    lines = [
        f'[hosts.{name}]\nfailover = "{place}"' if place else f"[hosts.{name}]"
        for name, place in failover_of_host.items()
    ]
    home.config_file.write_text("\n".join(lines) + "\n")


def set_up_without_connection(
    home: Home, *names: str, devices: int = 1, gigabytes: int = 140
) -> None:
    """Store what a check of these hosts would have learnt."""
    gpu = {"name": "NVIDIA H200", "kind": "cuda", "bf16": True}
    gpu |= {"memory_total": gigabytes << 30, "memory_free": gigabytes << 30}
    sizes = {"cores": 16, "ram_total": 1 << 37, "ram_free": 1 << 37, "disk_free": 1 << 40}
    gpus = [gpu | {"id": f"cuda:{index}"} for index in range(devices)]
    for name in names:
        described = {"hardware": sizes | {"devices": gpus}, "packages": {"torch": "2.13.0"}}
        hosts.note_facts(home, hosts.host_of(home, name), "/there/bin/python", described)


def queued(home: Home, env: str, compute: str, **settings: Any) -> tuple[RunDir, TrainConfig]:
    """Queue a run on a GPU for a place; returns its folder and its config."""

    def prepare(run_id: str) -> None:
        home.run(run_id).create()
        config = train_config(run_id, settings={"compute": compute, **settings})
        folder = home.envs / env.replace("@", "/")
        config |= {"env_id": env, "env_dir": str(folder), "device": "cuda:0"}
        config["estimate"] |= {"least_memory": 60 << 30}
        write_json(home.run(run_id).config, config)

    with Store(home) as store:
        new = NewRun("away", "train", "grpo", env, "pebble", compute=compute)
        run = home.run(store.insert_run(new, prepare).run_id)
    config = run.read_config()
    assert isinstance(config, TrainConfig)
    return run, config


def row_of(home: Home, run: RunDir) -> RunRow:
    with Store(home) as store:
        return store.get_run(run.id)


def failed_outcome(row: RunRow, moves_to: str) -> outcome.Outcome:
    """The end of an attempt whose place has failed after half an hour."""
    return outcome.Outcome(
        attempt=row.attempt,
        rc=outcome.EXIT_FAILED,
        signal=None,
        state="failed",
        reason_kind="infra",
        reason="box was not reached for 25 hours",
        hint=Hint(),
        verdict="unknown",
        last_checkpoint="step_000002",
        elapsed_s=1800.0,
        time=1.0,
        moves_to=moves_to,
    )


@pytest.mark.timeout(120)
def test_a_run_whose_host_fails_goes_on_here_from_its_last_checkpoint(box):
    text = box.home.config_file.read_text()
    box.home.config_file.write_text(text + 'failover = "local"\n')
    run = box.start(bad_place=BAD)
    row = box.until_ended(run)
    assert (row.state, row.compute, row.attempt) == ("done", "local", 2)
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]
    assert list(row.hours_by_place()) == ["ssh:box", "local"]
    (moved,) = [line for line in read_lines(run.events)[0] if line["event"] == "moved"]
    assert "the device fell off the bus" in moved["message"]
    assert moved["message"].endswith("it goes on at local, from step_000002")
    assert not box.far_run(run).path.exists()  # nothing of it stays at the host


@pytest.mark.timeout(120)
def test_a_run_whose_host_fails_goes_on_at_the_next_host(box, fake_python: Path):
    hosts.add_host(
        box.home,
        "spare",
        {"ssh": "box", "folder": ".honesmith-spare", "python": str(fake_python)},
    )
    host_setup.set_up(box.home, "spare")
    text = box.home.config_file.read_text()
    box.home.config_file.write_text(
        text.replace("[hosts.box]", '[hosts.box]\nfailover = "ssh:spare"')
    )
    run = box.start(bad_place=BAD)
    row = box.until_ended(run)
    assert (row.state, row.compute) == ("done", "ssh:spare")
    handle = box.handle(run)
    assert (handle.executor, handle.launch, handle.phase) == ("ssh:spare", 2, "ended")
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]
    assert not box.far_run(run).path.exists()


@pytest.mark.timeout(120)
def test_without_another_place_the_run_fails_with_the_reason(box):
    row = box.until_ended(box.start(bad_place=BAD))
    assert (row.state, row.reason_kind) == ("failed", "infra")
    assert "the device fell off the bus" in row.reason


def test_no_place_is_tried_twice(home: Home, env: str):
    write_hosts(home, a="ssh:b", b="ssh:a")
    set_up_without_connection(home, "a", "b")
    run, config = queued(home, env, "ssh:a")
    row = row_of(home, run)
    assert next_place(home, config, row) == ("ssh:b", [])
    with Store(home) as store:
        store.set_state(run.id, "preparing", only_from={"queued"})
        outcome.apply(store, run, store.get_run(run.id), failed_outcome(row, "ssh:b"))
    row = row_of(home, run)
    assert (row.state, row.compute, row.attempt) == ("queued", "ssh:b", 2)
    assert next_place(home, config, row) == ("", [])


def test_a_place_that_cannot_take_the_run_is_passed_over_with_the_reason(home: Home, env: str):
    write_hosts(home, a="ssh:b", b="ssh:c", c="ssh:d", d="ssh:e", e="local")
    set_up_without_connection(home, "a", "e", devices=2)
    set_up_without_connection(home, "c", devices=1)
    set_up_without_connection(home, "d", devices=2, gigabytes=24)
    run, config = queued(home, env, "ssh:a", gpus=2)
    place, reasons = next_place(home, config, row_of(home, run))
    assert place == "ssh:e"
    assert reasons == [
        "ssh:b cannot take it: the host b is not set up",
        "ssh:c cannot take it: it has 1 of 2 cuda devices with 64.4 GB of memory",
        "ssh:d cannot take it: it has 0 of 2 cuda devices with 64.4 GB of memory",
    ]
    end = replace(row_of(home, run), compute="ssh:e")
    place, reasons = next_place(home, config, end)
    assert place == ""  # a CPU would take weeks
    assert "local cannot take it: it has 0 of 2 cuda devices" in reasons[0]


class Listing:
    """An executor that lists launches, and notes what it is told of them."""

    def __init__(self, home: Home, name: str, *launches: Owned) -> None:
        self.home, self.name, self.told = home, name, list[tuple[str, str, int]]()
        self.list_owned = lambda: launches

    def stop(self, run: RunDir, handle: Handle) -> None:
        self.told.append(("stop", run.id, handle.launch))

    def reap(self, run: RunDir, handle: Handle) -> None:
        self.told.append(("reap", run.id, handle.launch))


def test_a_host_ends_what_was_left_there_and_nothing_of_another_host_on_the_same_machine(
    home: Home, env: str
):
    write_hosts(home, a="", b="")
    moved, _ = queued(home, env, "ssh:b")  # it was at a as launch 1
    Handle("ssh:b", 2, "started").write(moved)
    left, _ = queued(home, env, "ssh:b")  # it has left a, and is not at b yet
    Handle("ssh:a", 1, "ended", ended_in=1).write(left)
    other, _ = queued(home, env, "ssh:b")  # it was never at a
    Handle("ssh:b", 1, "started").write(other)
    launches = [
        Owned(moved.id, 1, "running"),
        Owned(moved.id, 2, "running"),
        Owned(left.id, 1, "exited"),
        Owned(other.id, 1, "running"),
    ]
    executor: Any = Listing(home, "ssh:a", *launches)
    sweep(executor)
    assert executor.told == [("stop", moved.id, 1), ("reap", left.id, 1)]


def attendant_of(run: RunDir, config: TrainConfig) -> Attendant:
    host = hosts.host_of(run.home, config.settings.compute)
    return Attendant(run, config, host)


@pytest.mark.parametrize(
    ("handle", "is_running", "patience_hours"),
    [
        (None, False, 1 / 6),
        (Handle("ssh:z", 1, "ended"), False, 1 / 6),
        (Handle("ssh:a", 1, "starting"), False, 2 * 24 + 0.25),
        (Handle("ssh:a", 1, "started"), False, 2 * 24 + 0.25),
        (Handle("ssh:a", 1, "started"), True, 24 + 0.25),
    ],
)
def test_a_host_is_given_up_once_nothing_of_the_run_can_go_on_there(
    home: Home, env: str, handle: Handle | None, is_running: bool, patience_hours: float
):
    write_hosts(home, a="ssh:b", b="")
    set_up_without_connection(home, "b")
    run, config = queued(home, env, "ssh:a")
    if handle is not None:
        handle.write(run)
    attendant = attendant_of(run, config)
    attendant.is_running = is_running
    assert attendant._patience_s == pytest.approx(3600 * patience_hours)


def test_a_home_that_cannot_be_read_gives_no_host_up(
    home: Home, env: str, monkeypatch: pytest.MonkeyPatch
):
    write_hosts(home, a="ssh:b", b="")
    run, config = queued(home, env, "ssh:a")
    attendant = attendant_of(run, config)
    locked = UserError("HOME_UNUSABLE", "the database is locked", hint="")
    monkeypatch.setattr(Attendant, "_next_place", Mock(side_effect=locked))
    assert attendant._patience_s == pytest.approx(3600 * 25)
    assert attendant._fail("infra", "box is gone", Hint()) == outcome.EXIT_FAILED
    assert read_json(run.failure)["moves_to"] == ""


@pytest.mark.parametrize("kind", ["oom", "reward", "killed", "endpoint", "cancelled"])
def test_what_is_no_fault_of_the_place_moves_nothing(home: Home, env: str, kind: str):
    write_hosts(home, a="ssh:b", b="")
    set_up_without_connection(home, "b")
    run, config = queued(home, env, "ssh:a")
    attendant_of(run, config)._fail(kind, "it went wrong", Hint())
    assert read_json(run.failure)["moves_to"] == ""
    attendant_of(run, config)._fail("infra", "the device fell off the bus", Hint())
    assert read_json(run.failure)["moves_to"] == "ssh:b"


def test_a_trainer_here_cannot_send_its_run_away(home: Home, env: str):
    run, _config = queued(home, env, "local")
    write_json(run.failure, {"kind": "infra", "message": "x", "moves_to": "sky:dear"})
    end = outcome.decide(run, row_of(home, run), status=outcome.EXIT_FAILED, elapsed_s=1)
    assert (end.state, end.moves_to) == ("failed", "")


def test_hours_that_nobody_saw_at_a_host_that_was_given_up_are_counted(home: Home, env: str):
    write_hosts(home, a="ssh:b", b="")
    run, config = queued(home, env, "ssh:a")
    Handle("ssh:a", 3, "started").write(run)
    hours.begin(run, 1)
    hours.note(run, 1, 3, 600.0)
    attendant = attendant_of(run, config)
    attendant.is_running = True
    attendant._count_unseen_hours()
    assert hours.of_launch(run, 3) == 600 + 24 * 3600


def test_a_run_that_was_cancelled_meanwhile_does_not_move(home: Home, env: str):
    write_hosts(home, a="ssh:b", b="")
    run, _config = queued(home, env, "ssh:a")
    with Store(home) as store:
        store.set_state(run.id, "preparing", only_from={"queued"})
        store.set_state(run.id, "stopping", only_from={"preparing"}, reason_kind="cancelled")
        row = store.get_run(run.id)
        assert outcome.apply(store, run, row, failed_outcome(row, "ssh:b"))
    row = row_of(home, run)
    assert (row.state, row.compute) == ("failed", "ssh:a")


def test_the_hours_are_paid_where_they_were_taken(home: Home, env: str):
    home.config_file.write_text(
        "gpu_hour_price = 1.0\n[hosts.a]\ngpu_hour_price = 3.0\n[hosts.b]\ngpu_hour_price = 10.0\n"
    )
    run, _config = queued(home, env, "ssh:a")
    with Store(home) as store:
        store.set_state(run.id, "preparing", only_from={"queued"})
        row = store.get_run(run.id)
        outcome.apply(store, run, row, failed_outcome(row, "ssh:b"))
        store.update_run(run.id, only_in={"queued"}, spent_hours=0.75)
    row = row_of(home, run)
    assert row.hours_by_place() == {"ssh:a": 0.5, "ssh:b": 0.25}
    assert home.user_config().money_of([row]) == pytest.approx(0.5 * 3 + 0.25 * 10)


def test_a_rebuilt_database_knows_where_a_moved_run_is(home: Home, env: str):
    write_hosts(home, a="ssh:b", b="")
    run, _config = queued(home, env, "ssh:a")
    write_status(run, row_of(home, run))
    with Store(home) as store:
        store.set_state(run.id, "preparing", only_from={"queued"})
        row = store.get_run(run.id)
        end = failed_outcome(row, "ssh:b")
        outcome.record(run, end)
        outcome.apply(store, run, row, end)
    before = row_of(home, run)
    for file in home.root.glob("honesmith.db*"):
        file.unlink()
    after = row_of(home, run)  # opening the home rebuilds its database
    assert (after.compute, after.earlier_hours) == ("ssh:b", before.earlier_hours)
    assert json.loads(after.earlier_hours) == {"ssh:a": 0.5}
    assert after.state in ("interrupted", "queued")


@pytest.mark.timeout(30)
def test_a_run_is_put_at_the_failover_of_a_host_that_is_not_set_up(
    home: Home, env: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launcher, "start_queued", lambda _home, _run=None: None)
    write_hosts(home, a="local", b="ssh:c", c="")
    reply = submit(home, TrainRequest(env, "pebble", "sft", {"compute": "ssh:a", "steps": 4}))
    run = home.run(reply["run_id"])
    assert row_of(home, run).compute == "local"
    assert read_json(run.config)["settings"]["compute"] == "local"
    passed = "ssh:a cannot take it (the host a is not set up): it goes to local"
    assert passed in reply["warnings"]
    (event,) = [line for line in read_lines(run.events)[0] if line["event"] == "passed_over"]
    assert event["message"] == passed
    with pytest.raises(UserError, match="the host b is not set up"):  # nor is the next one
        submit(home, TrainRequest(env, "pebble", "sft", {"compute": "ssh:b", "steps": 4}))


@pytest.mark.parametrize("place", ["box", "ssh:", "local:box", 3, "sky:a b", "ssh:a"])
def test_a_failover_that_is_no_place_is_refused(home: Home, place: object):
    value = json.dumps(place)
    home.config_file.write_text(f"[hosts.a]\nfailover = {value}\n")
    with pytest.raises(UserError, match=r"hosts\.a\.failover"):
        home.user_config()

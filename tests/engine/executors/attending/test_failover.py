"""A run whose place fails goes on at the next one."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_configs import train_config

from engine.core.errors import UserError
from engine.core.files import read_json, read_lines, write_json
from engine.core.hints import Hint
from engine.executors import hosts
from engine.executors.attending import host_setup
from engine.executors.attending.failover import next_place
from engine.home.rows import NewRun, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.pace.progress import write_status
from engine.machine.processes import launcher, outcome
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


def set_up_without_connection(home: Home, *names: str, devices: int = 1) -> None:
    """Store what a check of these hosts would have learnt."""
    gpu = {"name": "NVIDIA H200", "kind": "cuda", "bf16": True}
    gpu |= {"memory_total": 140 << 30, "memory_free": 140 << 30}
    sizes = {"cores": 16, "ram_total": 1 << 37, "ram_free": 1 << 37, "disk_free": 1 << 40}
    gpus = [gpu | {"id": f"cuda:{index}"} for index in range(devices)]
    for name in names:
        described = {"hardware": sizes | {"devices": gpus}, "packages": {"torch": "2.13.0"}}
        hosts.note_facts(home, hosts.host_of(home, name), "/there/bin/python", described)


def queued(home: Home, env: str, compute: str, **settings: Any) -> tuple[RunDir, TrainConfig]:
    """Queue a run for a place; returns its folder and its config."""

    def prepare(run_id: str) -> None:
        home.run(run_id).create()
        config = train_config(run_id, settings={"compute": compute, **settings})
        folder = home.envs / env.replace("@", "/")
        write_json(home.run(run_id).config, config | {"env_id": env, "env_dir": str(folder)})

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
    write_hosts(home, a="ssh:b", b="ssh:c", c="ssh:d", d="")
    set_up_without_connection(home, "a", "d", devices=2)
    set_up_without_connection(home, "c", devices=1)
    run, config = queued(home, env, "ssh:a", gpus=2)
    place, reasons = next_place(home, config, row_of(home, run))
    assert place == "ssh:d"
    assert reasons == [
        "ssh:b cannot take it: the host b is not set up",
        "ssh:c cannot take it: it has 1 devices, and the run is on 2",
    ]


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
    assert "ssh:a cannot take it (the host a is not set up): to local" in reply["warnings"]
    with pytest.raises(UserError, match="the host b is not set up"):  # nor is the next one
        submit(home, TrainRequest(env, "pebble", "sft", {"compute": "ssh:b", "steps": 4}))


@pytest.mark.parametrize("place", ["box", "ssh:", "local:box", 3, "sky:a b"])
def test_a_failover_that_is_no_place_is_refused(home: Home, place: object):
    value = json.dumps(place)
    home.config_file.write_text(f"[hosts.a]\nfailover = {value}\n")
    with pytest.raises(UserError, match=r"hosts\.a\.failover"):
        home.user_config()

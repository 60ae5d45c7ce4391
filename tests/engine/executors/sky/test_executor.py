"""A run on a machine that is rented for it: there, back, and the machine given back."""

import json
import time
from dataclasses import replace

import pytest
from fake_sky import kill_job

from engine.core.errors import UserError
from engine.core.files import read_json, read_lines, write_json
from engine.executors import hosts, rented
from engine.executors.attending import host_setup
from engine.executors.attending.attendant import sweep
from engine.executors.attending.places import connected
from engine.executors.attending.starts import when_it_starts
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.machine.processes.seam import Handle
from engine.runs.lifecycle import cancel

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]


def given_back(machines) -> None:
    """Until nothing is rented, here and there."""

    def is_empty() -> bool:
        return not machines.sky.clusters and not rented.all_rented(machines.home)

    machines.bench.until(is_empty, "everything is given back", 60)


def test_a_machine_is_rented_for_a_run_and_given_back_when_all_of_it_is_here(rented_machines):
    run = rented_machines.start(hold_at=2)
    far = rented_machines.until_held(run)
    assert hosts.shown(rented_machines.home, hosts.host_of(rented_machines.home, "rented"))[
        "costs_per_hour"
    ] == pytest.approx(2.49)
    (task,) = [
        json.loads(body["task"]) for path, body in rented_machines.sky.bodies if path == "/launch"
    ]
    assert task["api_server_access"] is False and task["resources"]["max_hourly_cost"] == 3.0
    assert task["resources"]["autostop"] == {"idle_minutes": 5, "down": True, "wait_for": "jobs"}
    (far.path / "go").touch()
    row = rented_machines.until_ended(run)
    assert (row.state, row.reason, row.verdict) == ("done", "", "better")
    assert row.device == "sky:rented"
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]
    assert run.checkpoint_steps() == [1, 2, 3]
    assert read_json(run.result)["verdict"] == "better"
    given_back(rented_machines)
    assert rented_machines.sky.ever == [rented_machines.name(run)]
    assert json.loads(run.far("placement").read_text())["phase"] == "ended"
    trainer = read_json(run.started_record)
    assert trainer


def test_a_machine_that_cannot_be_had_fails_the_run_with_what_to_do(rented_machines):
    rented_machines.sky.refusal = "Failed to acquire resources in all zones in US."
    run = rented_machines.start()
    row = rented_machines.until_ended(run)
    assert (row.state, row.reason_kind) == ("failed", "infra")
    assert "Failed to acquire resources" in row.reason
    assert "infra in [hosts.rented]" in str(row.hint)
    assert rented_machines.sky.ever == []
    given_back(rented_machines)


def test_a_machine_that_has_become_too_dear_is_not_rented(rented_machines):
    rented_machines.sky.offers[0][7] = 9.0
    run = rented_machines.start()
    row = rented_machines.until_ended(run)
    assert row.state == "failed" and "9.00 an hour, and max_price is 3" in row.reason
    assert not [path for path, _ in rented_machines.sky.bodies if path == "/launch"]


def test_a_cancel_takes_back_what_is_still_looked_for(rented_machines):
    rented_machines.sky.gate.clear()
    run = rented_machines.start()
    rented_machines.bench.until(lambda: "host_waits" in rented_machines.events(run), "it waits", 60)
    cancel(rented_machines.home, run.id)
    row = rented_machines.until_ended(run)
    assert row.state == "cancelled"
    rented_machines.sky.gate.set()
    given_back(rented_machines)
    assert rented_machines.sky.ever == []


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_machine_that_is_taken_away_is_followed_by_another_from_the_last_checkpoint(
    rented_machines, monkeypatch, is_noticed: bool
):
    monkeypatch.setenv("HONESMITH_SKY_SILENT_S", "1")
    run = rented_machines.start(hold_at=3)
    rented_machines.until_held(run)
    rented_machines.bench.until(lambda: run.checkpoint_steps() == [1, 2], "they are here", 60)
    rented_machines.sky.take_away(rented_machines.name(run, 1), is_noticed=is_noticed)
    rented_machines.bench.until(
        lambda: rented_machines.handle(run).launch == 2, "it is launched again", 100
    )
    far = rented_machines.until_held(run)
    assert far.checkpoint_steps() == [1, 2]
    (far.path / "go").touch()
    assert rented_machines.until_ended(run).state == "done"
    assert rented_machines.handle(run).losses == 1
    given_back(rented_machines)


def test_what_nobody_looks_after_is_given_back_by_the_machine_itself(rented_machines):
    run = rented_machines.queue(hold_at=2)
    launcher.start_queued(rented_machines.home)
    rented_machines.until_held(run)
    sky = rented_machines.sky
    pid = read_json(run.started_record)["supervisor_pid"]
    rented_machines.bench.kill(pid, read_json(run.started_record)["trainer_pid"])
    kill_job(sky.clusters[rented_machines.name(run)])  # as its lease ends it
    rented_machines.bench.until(lambda: not sky.clusters, "autostop gives it back", 60)
    with Store(rented_machines.home) as store:
        store.set_state(run.id, "failed", only_from={"preparing", "running"}, ended=time.time())
    with connected(rented_machines.home, hosts.host_of(rented_machines.home, "rented")) as executor:
        sweep(executor)
    given_back(rented_machines)


def test_a_server_is_asked_for_what_is_looked_for_ever_more_seldom(rented_machines):
    run, sky = rented_machines.queue(), rented_machines.sky
    sky.gate.clear()
    handle = Handle("sky:rented", 1, "starting").write(run)
    with connected(rented_machines.home, hosts.host_of(rented_machines.home, "rented")) as executor:
        executor.send(run, run.read_config(), handle)
        sky.bodies.clear()
        assert {executor.probe(run, handle).life for _ in range(20)} == {"pending"}
        assert [path for path, _ in sky.bodies] == ["/status"]
        executor.stop(run, handle)
        assert executor.probe(run, replace(handle, stop_asked=True)).life == "exited"


def test_machines_of_another_host_at_the_same_server_are_left_alone(rented_machines):
    home, sky = rented_machines.home, rented_machines.sky
    values = {"kind": "sky", "address": sky.address, "token_env": "SKY_TOKEN"}
    hosts.add_host(home, "other", values)
    run = rented_machines.start(hold_at=2)
    far = rented_machines.until_held(run)
    with connected(home, hosts.host_of(home, "other")) as executor:
        assert list(executor.list_owned()) == []
    host_setup.wipe(home, "other")
    assert list(sky.clusters) == [rented_machines.name(run)]
    (far.path / "go").touch()
    assert rented_machines.until_ended(run).state == "done"


def test_what_no_run_owns_is_given_back_and_what_is_unknown_is_told(rented_machines):
    home, sky = rented_machines.home, rented_machines.sky
    run = rented_machines.queue()
    host = hosts.host_of(home, "rented")
    prefix = rented_machines.name(run, 1).removesuffix(f"{run.id}-1")
    with connected(home, host) as executor:
        for name in (f"{prefix}lost-1", f"{prefix}strange-1"):
            executor.api.launch(name, executor._task(name))  # pyright: ignore
        rented_machines.bench.until(lambda: len(sky.clusters) == 2, "they are up", 60)
        rented.note(home, "rented", f"{prefix}lost-1", "lost", 1, 2.49)
        assert sweep(executor) == ["lost"]
        assert list(sky.clusters) == [f"{prefix}strange-1"]
    (warning,) = host_setup.check(home, "rented")["warnings"]
    assert f"{prefix}strange-1" in warning and "--wipe" in warning
    host_setup.wipe(home, "rented")
    given_back(rented_machines)


def test_a_machine_that_answers_in_the_place_of_the_rented_one_is_refused(rented_machines):
    run = rented_machines.start(hold_at=2)
    rented_machines.until_held(run)
    home = rented_machines.home
    name = rented_machines.name(run)
    cluster = rented_machines.sky.clusters[name]
    log = cluster.folder / "job-1.log"
    (key,) = [line for line in log.read_text().splitlines() if " key " in line]
    log.write_text(log.read_text().replace(key.split()[-1], key.split()[-1][:-8] + "AAAAAAAA"))
    with connected(home, hosts.host_of(home, "rented")) as executor:
        probe = executor.probe(run, rented_machines.handle(run))
    assert probe.life == "unknown" and "host key" in probe.why
    (rented_machines.far_run(run).path / "go").touch()
    assert rented_machines.until_ended(run).state == "done"


def test_a_dry_run_says_what_would_be_rented_and_a_check_what_is_wrong(rented_machines):
    home, sky = rented_machines.home, rented_machines.sky
    assert when_it_starts(home, "sky:rented", 1).startswith(
        "SkyPilot would rent 1x_H100 at RunPod US for 2.49 an hour"
    )
    assert sky.ever == []
    sky.offers[0][7] = 5.0
    with pytest.raises(UserError, match="max_price is 3"):
        when_it_starts(home, "sky:rented", 1)
    sky.offers[0][7] = 2.49
    assert host_setup.check(home, "rented")["price_per_hour"] == 2.49
    sky.token = "another"
    with pytest.raises(UserError) as error:
        host_setup.check(home, "rented")
    assert "SKY_TOKEN" in str(error.value.hint)
    sky.token = ""
    assert "without a token" in host_setup.check(home, "rented")["warnings"][0]
    rented.note(home, "rented", "hs-x-1", "x", 1, 2.49)
    write_json(home.hosts / "rented" / "broken.json", {"cluster": 1})
    assert [each.cluster for each in rented.all_rented(home)] == ["hs-x-1"]

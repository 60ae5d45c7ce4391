"""Whether a run may go to another machine, asked without a connection."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.cost.estimate import estimate_cost
from engine.dry_run.dry_run import dry_run
from engine.executors import admission, hosts
from engine.executors import rented as rented_now
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs.overview import overview
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.training import submit

pytestmark = pytest.mark.timeout(30)
SETTINGS = {"compute": "ssh:box", "steps": 4}


@pytest.fixture
def box(home: Home, bench) -> Home:
    """A home with a host that was checked: a GPU, at a price."""
    host = hosts.add_host(home, "box", {"gpu_hour_price": 2.0})
    gpu = {"id": "cuda:0", "name": "NVIDIA H200", "kind": "cuda", "bf16": True}
    facts: dict[str, Any] = {
        "devices": [gpu | {"memory_total": 140 << 30, "memory_free": 140 << 30}],
        "cores": 16,
        "ram_total": 1 << 37,
        "ram_free": 1 << 37,
        "disk_free": 1 << 40,
    }
    described = {"hardware": facts, "packages": {"torch": "2.13.0"}}
    hosts.note_facts(home, host, "/there/bin/python", described)
    return home


def code_of(call: Any) -> tuple[str, str]:
    with pytest.raises(UserError) as error:
        call()
    return error.value.code, f"{error.value.message} {error.value.hint}"


def test_a_run_is_planned_for_the_machine_that_it_goes_to(box: Home, env: str):
    here = admission.machine_for(box, {})
    assert here.device.name == hardware.detect(box.root).device.name
    there = estimate_cost(box, env, "pebble", "sft", SETTINGS)
    assert (there["device"], there["basis"], there["gpu_hour_price"]) == ("cuda:0", "model", 2.0)
    report = dry_run(box, env, "pebble", "sft", SETTINGS)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["interpreter"]["detail"] == "it runs on box with /there/bin/python"
    assert not [name for name, check in checks.items() if check["status"] == "fail"]


def test_a_run_is_queued_for_it_and_is_no_run_of_a_device_here(box: Home, env: str, monkeypatch):
    monkeypatch.setattr("engine.machine.processes.launcher.start_queued", lambda *_: [])
    reply = submit(box, TrainRequest(env_id=env, algorithm="sft", settings=SETTINGS))
    with Store(box) as store:
        row = store.get_run(str(reply["run_id"]))
        assert (row.compute, row.gpus, row.is_elsewhere) == ("ssh:box", 1, True)
        assert store.lease_next(["cpu"]) is None  # no device of this machine is for it
        leased = store.lease_next([], elsewhere={"ssh:box": 1})
        assert leased is not None and (leased.run_id, leased.device) == (row.run_id, "ssh:box")
    monkeypatch.setattr("engine.machine.processes.launcher.reap", lambda home: [])  # nobody runs it
    (shown,) = overview(box, "hardware")["hardware"]["hosts"]
    assert (shown["host"], shown["runs"], shown["ready"]) == ("box", [row.run_id], True)
    assert config_compute(box, row.run_id) == "ssh:box"


def config_compute(home: Home, run_id: str) -> str:
    return read_json(home.run(run_id).config)["settings"]["compute"]


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"compute": "ssh:bix"}, "HOST_NOT_FOUND", "box"),
        ({"compute": "box"}, "SETTING_INVALID", "local, or ssh:"),
        ({"compute": "ssh:-o"}, "HOST_NOT_FOUND", "box"),
        ({"compute": "ssh:box\nx"}, "HOST_NOT_FOUND", "box"),
        ({"compute": "ssh:box", "quantization": "nf4"}, "SETTING_INVALID", "hosts setup box"),
    ],
)
def test_what_cannot_go_there_is_refused_with_the_next_move(box, env, settings, code, words):
    request = TrainRequest(env_id=env, algorithm="sft", settings=settings)
    got, text = code_of(lambda: submit(box, request))
    assert got == code and words in text


def test_an_environment_with_packages_of_its_own_stays_here(box: Home, env: str):
    facts = box.envs / env.replace("@", "/") / "env.json"
    write_json(facts, read_json(facts) | {"python": sys.executable})
    request = TrainRequest(env_id=env, algorithm="sft", settings=SETTINGS)
    got, text = code_of(lambda: submit(box, request))
    assert got == "ENV_DEPS" and "Leave compute out" in text


def test_nothing_is_tried_here_of_what_goes_there(box: Home, env: str):
    got, text = code_of(lambda: dry_run(box, env, "pebble", "sft", SETTINGS, samples=4))
    assert got == "BAD_ARGUMENT" and "samples" in text


@pytest.fixture(name="rented")
def rented_host(home: Home, bench) -> Home:
    """A home that rents H100s, at the price of its last check."""
    values: dict[str, Any] = {"kind": "sky", "address": "https://sky.example"}
    values |= {"accelerators": "H100:1", "max_price": 3.0, "max_hours": 2.0}
    host = hosts.add_host(home, "rented", values)
    hosts.note_facts(home, host, "python", {**offered(2.5), "packages": {"torch": "2.13.0"}})
    return home


def offered(price: float) -> dict[str, Any]:
    gpu = {"id": "cuda:0", "name": "H100", "kind": "cuda", "bf16": True}
    facts: dict[str, Any] = {
        "devices": [gpu | {"memory_total": 80 << 30, "memory_free": 80 << 30}],
        "cores": 16,
        "ram_total": 1 << 37,
        "ram_free": 1 << 37,
        "disk_free": 1 << 38,
    }
    return {"hardware": facts, "price": price}


def test_what_is_rented_has_the_price_that_it_was_offered_for(rented, env):
    reply = estimate_cost(rented, env, "pebble", "sft", {"compute": "sky:rented", "steps": 4})
    assert reply["gpu_hour_price"] == 2.5
    (host,) = overview(rented)["hardware"]["hosts"]
    assert (host["compute"], host["price_per_hour"]) == ("sky:rented", 2.5)
    rented_now.note(rented, "rented", "hs-x-run-1", "run", 1, 2.5)
    (host,) = overview(rented)["hardware"]["hosts"]
    assert (host["rented"], host["costs_per_hour"]) == (1, 2.5)


def test_a_run_that_is_too_dear_or_too_long_is_refused_before_anything_is_rented(rented, env):
    settings: Any = SimpleNamespace(compute="sky:rented")
    admission.check_rented(rented, settings, 1.9)
    with pytest.raises(UserError) as error:
        admission.check_rented(rented, settings, 2.5)
    assert (error.value.code, "takes 2.5 h" in error.value.message) == ("BUDGET", True)
    assert "raise max_hours in [hosts.rented]" in str(error.value.hint)
    host = hosts.host_of(rented, "rented")
    hosts.note_facts(rented, host, "python", {**offered(3.5), "packages": {"torch": "2.13.0"}})
    with pytest.raises(UserError) as error:
        wanted = {"compute": "sky:rented", "steps": 4}
        submit(rented, TrainRequest(env_id=env, algorithm="sft", settings=wanted))
    assert error.value.message == (
        "an hour of rented was 3.50 at its last check, and max_price is 3"
    )

"""Whether a run may go to another machine, asked without a connection."""

import sys
from typing import Any

import pytest

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.cost.estimate import estimate_cost
from engine.dry_run.dry_run import dry_run
from engine.executors import admission, hosts
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

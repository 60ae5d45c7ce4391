"""Deployments: one process per base, adapters by name, told in words when it fails."""

import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import read_json, read_lines, write_json
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.team.owners import Viewer
from engine.machine.install import vllm_env
from engine.machine.processes import deployments, launcher
from engine.runs import lifecycle
from engine.serving import placement, service
from engine.serving.chat import chat
from engine.serving.chat_request import OF_CLIENTS, ChatRequest

# Each of these takes about a second; the limit is for a machine that is busy with other things.
pytestmark = pytest.mark.timeout(60)


def process_of(home: Home, deployment_id: str) -> int:
    return read_json(home.deployment(deployment_id).process)["pid"]


def test_a_deployment_answers_at_its_address_and_a_second_start_is_the_same(home, server, tuned):
    first = service.deploy(home, f"{tuned}@best")
    assert first["model"] == f"{tuned}@best" and first["base_url"].startswith("http://127.0.0.1:")
    assert first["models"] == ["pebble", f"{tuned}@best"]
    assert Path(first["api_key_file"]).stat().st_mode & 0o777 == 0o600
    again = service.deploy(home, f"{tuned}@best")
    assert again == first
    assert len(service.list_deployments(home)) == 1


def test_a_second_adapter_joins_the_process_of_its_base(home, server, tuned):
    one = service.deploy(home, f"{tuned}@best")
    two = service.deploy(home, f"{tuned}@step10")
    assert two["base_url"] == one["base_url"]
    assert two["models"] == ["pebble", f"{tuned}@best", f"{tuned}@step10"]
    assert service.deploy(home, "pebble")["base_url"] == one["base_url"]


def test_a_deployment_of_another_gets_no_further_model(home, server, tuned):
    hers = Home(home.root, Viewer("ana", may="use"))
    first = service.deploy(hers, "pebble")
    again = service.deploy(home, "pebble")
    assert again["base_url"] == first["base_url"], "what it serves already is asked there"
    own = service.deploy(home, f"{tuned}@best")
    assert own["base_url"] != first["base_url"]
    assert service.deploy(hers, "pebble")["models"] == ["pebble"]
    with Store(hers) as store:
        assert [row.adapters for row in store.list_deployments()] == [[]]


def test_a_stop_by_the_name_of_a_base_leaves_that_of_another_which_its_id_stops(home, server):
    hers = Home(home.root, Viewer("ana", may="change"))
    her_id = service.deploy(hers, "pebble")["deployment_id"]
    reply = service.deploy(home, "pebble", "stop")
    assert reply["state"] == "not_served" and f"{her_id} of ana" in reply["summary"]
    assert [row["deployment_id"] for row in service.list_deployments(hers)] == [her_id]
    (call,) = reply["next"]
    assert service.deploy(home, call["arguments"]["run_id"], "stop")["state"] == "stopped"
    assert service.list_deployments(hers) == []


def test_starts_at_once_make_one_process(home, server, tuned):
    said: list[str] = []
    names = ["pebble", f"{tuned}@best", f"{tuned}@step10", "pebble"]
    threads = [
        threading.Thread(
            target=lambda name=name: said.append(service.deploy(home, name)["base_url"])
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 4 and len(set(said)) == 1


def test_the_process_ends_with_the_last_model_asked_for(home, server, tuned):
    service.deploy(home, f"{tuned}@best")
    deployment_id = service.deploy(home, f"{tuned}@step10")["deployment_id"]
    said = service.deploy(home, f"{tuned}@best", "stop")
    assert said["state"] == "stopped"
    assert said["summary"] == (
        f"{tuned}@best is no longer served; {deployment_id} still serves {tuned}@step10."
    )
    assert said["next"] == [
        {"tool": "deploy", "arguments": {"run_id": deployment_id, "action": "stop"}}
    ]
    assert len(service.list_deployments(home)) == 1
    service.deploy(home, f"{tuned}@step10", "stop")
    assert service.list_deployments(home) == []
    assert not deployments.is_alive(home.deployment(deployment_id))
    assert "stopped on request" in service.deploy(home, f"{tuned}@best", "stop")["summary"]
    with Store(home) as store:
        assert store.get_deployment(deployment_id).message == "stopped on request"


def test_a_deployment_can_be_stopped_by_its_id(home, server, tuned):
    deployment_id = service.deploy(home, f"{tuned}@best")["deployment_id"]
    service.deploy(home, deployment_id, "stop")
    assert service.list_deployments(home) == []
    assert service.deploy(home, deployment_id, "stop")["state"] == "stopped"
    assert "stopped on request" in service.deploy(home, deployment_id, "stop")["summary"]
    with pytest.raises(UserError) as caught:
        service.deploy(home, "nobody", "stop")
    assert caught.value.code == "MODEL_NOT_FOUND"


def test_a_stop_of_what_was_never_served_says_so_and_is_no_error(home, server, tuned):
    with Store(home) as store:
        queued = store.insert_run(NewRun("sums-eval", "evaluate", "evaluate", "sums@0", "pebble"))
    for ref in (tuned, f"{tuned}@best", queued.run_id, "pebble"):
        said = service.deploy(home, ref, "stop")
        assert (said["state"], said["next"]) == ("not_served", [])
        assert said["summary"] == f"Nothing was stopped: {ref} was not being served."
    for ref in (f"{tuned}@step99", "nobody"):
        with pytest.raises(UserError) as caught:
            service.deploy(home, ref, "stop")
        assert caught.value.code == "MODEL_NOT_FOUND"


def test_a_stop_under_another_name_tells_what_of_the_run_is_served(home, server, tuned):
    service.deploy(home, f"{tuned}@best")
    said = service.deploy(home, tuned, "stop")
    assert said["state"] == "not_served" and f"{tuned}@best is" in said["summary"]
    (call,) = said["next"]
    assert call["arguments"] == {"run_id": f"{tuned}@best", "action": "stop"}
    assert len(service.list_deployments(home)) == 1


def test_a_process_that_ignores_every_request_to_stop_is_killed(home, server):
    server("stubborn")
    deployment_id = service.deploy(home, "pebble")["deployment_id"]
    pid = process_of(home, deployment_id)
    service.deploy(home, "pebble", "stop")
    assert not deployments.is_alive(home.deployment(deployment_id))
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("behave", "said"),
    [("fail", "the weights are damaged"), ("crash", "ended before it was ready")],
)
def test_a_start_that_fails_says_why_with_the_log(home, server, behave, said):
    server(behave)
    with pytest.raises(UserError) as caught:
        service.deploy(home, "pebble")
    assert caught.value.code == "DEPLOY_FAILED" and said in caught.value.message
    assert "server starts" in caught.value.message
    with Store(home) as store:
        assert store.list_deployments()[0].state == "failed"
    server("")
    assert service.deploy(home, "pebble")["state"] == "ready"


def test_an_adapter_that_changes_nothing_is_refused(home, server, tuned):
    server("same")
    with pytest.raises(UserError) as caught:
        service.deploy(home, f"{tuned}@best")
    assert caught.value.code == "DEPLOY_FAILED" and "same logits" in caught.value.message


def test_a_slow_start_is_told_and_taken_up_by_the_next_call(home, server):
    hurried = replace(OF_CLIENTS, start_s=0.0)
    with pytest.raises(UserError) as caught:
        service.deploy(home, "pebble", patience=hurried)
    assert caught.value.retryable and "call again" in caught.value.hint
    assert service.deploy(home, "pebble")["deployment_id"] == "pebble-1"


def test_a_model_that_does_not_fit_beside_what_runs_waits(home, server, monkeypatch, tuned):
    real = hardware.detect(home.root)
    full = hardware.Device("cpu", "x", "cpu", memory_total=8 << 30, memory_free=1 << 20)
    machine = hardware.Hardware((full,), real.cores, 8 << 30, 1 << 20, real.disk_free)
    monkeypatch.setattr(hardware, "detect", lambda disk=None: machine)
    with pytest.raises(UserError) as caught:
        service.deploy(home, f"{tuned}@best")
    assert caught.value.code == "DEVICE_BUSY" and caught.value.retryable
    small = hardware.Device("cpu", "x", "cpu", memory_total=1 << 20, memory_free=1 << 20)
    machine = hardware.Hardware((small,), real.cores, 1 << 20, 1 << 20, real.disk_free)
    with pytest.raises(UserError) as caught:
        service.deploy(home, f"{tuned}@best")
    assert caught.value.code == "DOES_NOT_FIT"


def needing(bench, share: float, **settings):
    """A started run that is estimated to take this share of the machine's memory."""
    run = bench.queue(**settings)
    total = hardware.detect().device.memory_total
    config = read_json(run.config)
    config["estimate"]["peak_memory"] = {
        **config["estimate"]["peak_memory"],
        "total": int(share * total),
    }
    write_json(run.config, config)
    launcher.start_queued(bench.home)
    return run


def test_a_run_leaves_deployments_alone_where_its_memory_is_free_beside_them(home, server, bench):
    service.deploy(home, "pebble")
    bench.until_state(needing(bench, 0.01, steps=1), "done")
    assert [item["deployment_id"] for item in service.list_deployments(home)] == ["pebble-1"]


def test_a_run_that_needs_the_memory_stops_idle_deployments_and_says_so(home, server, bench):
    service.deploy(home, "pebble")
    run = needing(bench, 1.0, steps=1)
    bench.until_state(run, "done")
    assert service.list_deployments(home) == []
    told = [event for event in read_lines(run.events)[0] if event["event"] == "room_made"]
    assert [event["deployments"] for event in told] == [["pebble-1"]]
    for name in ("pebble-1", "pebble"):
        said = service.deploy(home, name, "stop")["summary"]
        assert f"stopped to make room for {run.id}" in said


def test_a_run_that_needs_the_memory_leaves_busy_deployments(home, server, bench):
    server("busy")
    service.deploy(home, "pebble")
    bench.until_state(needing(bench, 1.0, steps=1), "done")
    assert [item["deployment_id"] for item in service.list_deployments(home)] == ["pebble-1"]
    assert lifecycle.overview(home, "deployments")["deployments"][0]["models"] == ["pebble"]


def test_a_process_that_ends_while_it_is_asked_for_an_adapter_is_started_again(home, server, tuned):
    """It was idle for too long, or made room, between the look at it and the question."""
    server("leaving")
    first = service.deploy(home, "pebble")["deployment_id"]
    server("")
    second = service.deploy(home, f"{tuned}@best")
    assert second["deployment_id"] != first and f"{tuned}@best" in second["models"]


def test_a_deployment_needs_an_interpreter_with_torch(home, monkeypatch):
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        service.deploy(home, "pebble")
    assert caught.value.code == "NO_TORCH"
    with pytest.raises(UserError) as caught:
        service.deploy(home, "pebble", "restart")
    assert caught.value.code == "BAD_ARGUMENT"


def test_vllm_answers_where_it_is_asked_for_or_a_gpu_has_it(home, monkeypatch):
    gb = 10**9
    cpu = hardware.Device("cpu", "CPU", "cpu", 64 * gb, 60 * gb)
    gpu = hardware.Device("cuda:0", "GPU", "cuda", 80 * gb, 79 * gb, "GPU-1", True)
    monkeypatch.delenv(vllm_env.OVERRIDE, raising=False)
    assert [placement.engine_for(home, device) for device in (cpu, gpu)] == ["torch", "torch"]
    home.config_file.write_text('serve_with = "vllm"')
    with pytest.raises(UserError) as caught:
        placement.engine_for(home, gpu)
    assert caught.value.code == "NO_VLLM" and "setup --vllm" in caught.value.hint
    monkeypatch.setenv(vllm_env.OVERRIDE, sys.executable)
    assert placement.engine_for(home, cpu) == "vllm"
    home.config_file.write_text('serve_with = "auto"')
    assert [placement.engine_for(home, device) for device in (cpu, gpu)] == ["torch", "vllm"]
    home.config_file.write_text('serve_with = "torch"')
    assert placement.engine_for(home, gpu) == "torch"


def test_the_process_is_told_what_to_answer_with(home, server, tuned, monkeypatch):
    monkeypatch.setenv(vllm_env.OVERRIDE, sys.executable)
    home.config_file.write_text('serve_with = "vllm"')
    found = service.deploy(home, f"{tuned}@best")
    told = read_json(home.deployment(found["deployment_id"]).config)
    assert (told["serve_with"], told["lora_rank"]) == ("vllm", 1)
    assert 0 < told["memory_share"] < 1 and found["memory_gb"] > 4


@pytest.mark.worker
def test_a_real_server_serves_base_and_adapter_and_refuses_one_that_does_nothing(home, tuned):
    try:
        both = ChatRequest("pebble", "What is 1 + 1?", compare_to=f"{tuned}@step10")
        found = chat(home, both)
        assert [answer["model"] for answer in found["answers"]] == ["pebble", f"{tuned}@step10"]
        assert all(answer["tokens"] >= 1 for answer in found["answers"])
        with pytest.raises(UserError) as caught:
            service.deploy(home, f"{tuned}@best")
        assert caught.value.code == "DEPLOY_FAILED" and "same logits" in caught.value.message
        deployed = service.deploy(home, f"{tuned}@step10")
        assert deployed["models"] == ["pebble", f"{tuned}@step10"]
        again = chat(home, ChatRequest("pebble", "What is 1 + 1?"))
        assert again["answers"][0]["answer"] == found["answers"][0]["answer"]
    finally:
        service.deploy(home, f"{tuned}@step10", "stop")
    assert service.list_deployments(home) == []

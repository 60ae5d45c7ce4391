"""Models served on a host over a real sshd: asked here, stopped, lost and found."""

import http.client
import json
import socket
import time
from dataclasses import replace

import pytest
from loopback_sshd import free_port

from engine.core.errors import UserError
from engine.core.files import read_json
from engine.executors import hosts
from engine.executors.ssh import HostLost
from engine.home.store import Store
from engine.machine.processes import deployments
from engine.serving import service
from engine.serving.chat import chat
from engine.serving.chat_request import OF_PEOPLE, ChatRequest
from engine.serving.far import forwarder

# Each starts a forwarder, ssh twice and a server at the other side.
pytestmark = pytest.mark.timeout(60)


def until(holds, what: str, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = holds()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(what)


def answer_of(home, model: str, question: str = "hello") -> str:
    return chat(home, ChatRequest(model=model, message=question))["answers"][0]["answer"]


def test_a_model_is_served_on_a_host_and_asked_here_through_a_tunnel(home, serving_box, tuned):
    model = f"{tuned}@best"
    deployed = service.deploy(home, model, compute="ssh:box")
    assert deployed["compute"] == "ssh:box" and deployed["memory_gb"] == 0
    assert deployed["models"] == ["pebble", model]
    assert deployed["base_url"].startswith("http://127.0.0.1:")
    assert len(serving_box.far_deployments()) == 1
    assert "heard hello" in answer_of(home, model)
    port = int(deployed["base_url"].split(":")[2].split("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("POST", "/v1/chat/completions", b"{}")
    assert connection.getresponse().status == 401, "whoever finds the port needs the key as well"
    listed = service.list_deployments(home)
    assert [each["compute"] for each in listed] == ["ssh:box"]


def test_the_files_of_an_adapter_go_there_once_and_without_what_a_trainer_needs(
    home, serving_box, tuned
):
    checkpoint = home.run(tuned).checkpoint(5)
    (checkpoint / "optimizer.safetensors").write_bytes(b"moments")
    service.deploy(home, f"{tuned}@best", compute="ssh:box")
    folders = list((serving_box.sshd.home / ".honesmith-host" / "models").iterdir())
    names = [{path.name for path in folder.iterdir()} for folder in folders]
    assert len(folders) == 2, "the base and the adapter"
    assert not any("optimizer.safetensors" in each for each in names)
    second = service.deploy(home, f"{tuned}@step10", compute="ssh:box")
    assert second["models"] == ["pebble", f"{tuned}@best", f"{tuned}@step10"]
    assert len(serving_box.far_deployments()) == 1, "one process there for all adapters of a base"


def test_chat_serves_a_model_where_serve_on_says(home, serving_box, tuned):
    with home.config_file.open("a") as file:
        text = home.config_file.read_text()
        file.truncate(0)
        file.write('serve_on = "ssh:box"\n' + text)
    assert "heard hello" in answer_of(home, "pebble")
    assert [each["compute"] for each in service.list_deployments(home)] == ["ssh:box"]


def test_a_stop_here_ends_the_server_there(home, serving_box, tuned):
    deployed = service.deploy(home, "pebble", compute="ssh:box")
    stopped = service.deploy(home, "pebble", "stop")
    assert stopped["state"] == "stopped"
    until(lambda: not serving_box.far_deployments(), "the server there has ended")
    assert not deployments.is_alive(home.deployment(deployed["deployment_id"]))


def test_a_server_that_ends_there_ends_the_deployment_here_with_its_reason(home, serving_box):
    deployed = service.deploy(home, "pebble", compute="ssh:box")
    far = serving_box.far_home
    row = deployments.living(far)[0]
    deployments.stop(far, row, "stopped to make room for arith-grpo-7")
    folder = home.deployment(deployed["deployment_id"])
    until(lambda: not deployments.is_alive(folder), "the process here has ended")
    with Store(home) as store:
        message = store.get_deployment(deployed["deployment_id"]).message
    assert message == "box: stopped to make room for arith-grpo-7"


def test_a_lost_connection_is_made_again_at_the_same_port(home, serving_box):
    deployed = service.deploy(home, "pebble", compute="ssh:box")
    far = serving_box.far_deployments()
    assert "heard one" in answer_of(home, "pebble", "one")
    serving_box.cut(deployed["deployment_id"])
    folder = home.deployment(deployed["deployment_id"])
    until(lambda: deployments.is_idle(folder), "it answers again")
    assert "heard two" in answer_of(home, "pebble", "two")
    assert service.list_deployments(home)[0]["base_url"] == deployed["base_url"]
    assert serving_box.far_deployments() == far, "the server there is the same"


def test_the_port_stays_ours_while_the_host_is_not_reached(home, serving_box, sshd):
    deployed = service.deploy(home, "pebble", compute="ssh:box")
    port = read_json(home.deployment(deployed["deployment_id"]).ready)["port"]
    sshd.stop()
    serving_box.cut(deployed["deployment_id"])
    folder = home.deployment(deployed["deployment_id"])
    until(lambda: not deployments.is_idle(folder), "it is not reached")
    with pytest.raises(OSError), socket.socket() as squatter:
        squatter.bind(("127.0.0.1", port))
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        service.deploy(home, "pebble", patience=OF_PEOPLE)
    assert "ssh:box is not reached just now" in caught.value.message and caught.value.retryable
    assert time.monotonic() - began < 12, "other starts of this home do not wait for it"
    sshd.start()
    until(lambda: deployments.is_idle(folder), "it answers again", 30)
    assert "heard two" in answer_of(home, "pebble", "two")


def test_forwardings_of_the_users_own_config_stay_shut(home, serving_box, sshd):
    own = free_port()
    with (sshd.folder / "ssh_config").open("a") as file:
        file.write(f"  LocalForward 127.0.0.1:{own} 127.0.0.1:{sshd.port}\n")
    service.deploy(home, "pebble", compute="ssh:box")
    assert "heard hello" in answer_of(home, "pebble")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", own), 1)


def test_a_server_that_ended_while_an_adapter_came_is_replaced_with_all_its_models(
    home, serving_box, tuned
):
    service.deploy(home, f"{tuned}@best", compute="ssh:box")
    far = serving_box.far_home
    (row,) = deployments.living(far)
    deployments.stop(far, row, "it was idle")
    second = service.deploy(home, f"{tuned}@step10", compute="ssh:box")
    assert "heard hello" in answer_of(home, f"{tuned}@step10")
    assert second["compute"] == "ssh:box"
    assert "heard hello" in answer_of(home, f"{tuned}@best")


def test_a_run_here_does_not_end_what_a_host_serves(home, serving_box, monkeypatch):
    service.deploy(home, "pebble", compute="ssh:box")
    monkeypatch.setattr(deployments, "_has_room_on", lambda run, device: False)
    assert deployments.make_room(home, home.run("arith-1"), "cpu") == []


def test_the_short_name_of_a_host_means_the_same_place(home, serving_box):
    first = service.deploy(home, "pebble", compute="box")
    assert first["compute"] == "ssh:box"
    assert service.deploy(home, "pebble", compute="ssh:box") == first


def test_a_stop_before_it_answers_leaves_nothing_there(home, serving_box):
    far = serving_box.far_home.root
    far.mkdir(parents=True, exist_ok=True)
    (far / "behave").write_text("slow")
    with pytest.raises(UserError) as caught:
        service.deploy(home, "pebble", compute="ssh:box", patience=replace(OF_PEOPLE, start_s=3.0))
    assert caught.value.retryable
    until(lambda: serving_box.far_deployments(), "it is being started there")
    (row,) = deployments.living(home)
    deployments.stop(home, row, "stopped on request")
    until(lambda: not serving_box.far_deployments(), "nothing is left there")


def test_a_killed_forwarder_leaves_no_tunnel_and_the_next_chat_serves_anew(home, serving_box):
    deployed = service.deploy(home, "pebble", compute="ssh:box")
    process = serving_box.forwarder(deployed["deployment_id"])
    tunnels = [child for child in process.children() if child.name() == "ssh"]
    assert len(tunnels) == 2, "a connection and a tunnel"
    process.kill()
    for tunnel in tunnels:
        tunnel.wait(20)
    again = service.deploy(home, "pebble", compute="ssh:box")
    assert again["deployment_id"] != deployed["deployment_id"]
    assert len(serving_box.far_deployments()) == 1, "the server that lives there is taken again"
    assert "heard hello" in answer_of(home, "pebble")


def test_what_does_not_start_there_fails_here_with_the_words_of_there(home, serving_box):
    far = serving_box.far_home.root
    far.mkdir(parents=True, exist_ok=True)
    (far / "behave").write_text("fail")
    with pytest.raises(UserError) as caught:
        service.deploy(home, "pebble", compute="ssh:box")
    assert caught.value.code == "DEPLOY_FAILED"
    assert "box" in caught.value.message and "the weights are damaged" in caught.value.message
    assert service.list_deployments(home) == []


def test_places_that_cannot_serve_are_refused_before_anything_starts(home, serving_box, sshd):
    with pytest.raises(UserError) as unknown:
        service.deploy(home, "pebble", compute="ssh:lab")
    assert unknown.value.code == "HOST_NOT_FOUND"
    with home.config_file.open("a") as file:
        file.write('[hosts.cluster]\nkind = "slurm"\nssh = "box"\n')
    with pytest.raises(UserError) as cluster:
        service.deploy(home, "pebble", compute="slurm:cluster")
    assert cluster.value.code == "BAD_ARGUMENT" and "serves no models" in cluster.value.message
    with home.config_file.open("a") as file:
        file.write('[hosts.new]\nssh = "box"\n')
    with pytest.raises(UserError) as new:
        service.deploy(home, "pebble", compute="ssh:new")
    assert new.value.code == "HOST_UNUSABLE"
    assert service.list_deployments(home) == []


def test_a_host_that_serves_is_not_removed(home, serving_box):
    service.deploy(home, "pebble", compute="ssh:box")
    with pytest.raises(UserError) as caught:
        hosts.refuse_while_used(home, "box")
    assert caught.value.code == "RUN_STATE" and "box serves pebble" in caught.value.message
    service.deploy(home, "pebble", "stop")
    hosts.refuse_while_used(home, "box")


def test_an_sshd_that_forwards_nothing_is_named_with_what_to_change(home, serving_box, sshd):
    sshd.stop()
    with (sshd.folder / "sshd_config").open("a") as file:
        file.write("AllowTcpForwarding no\n")
    sshd.start()
    with pytest.raises(UserError) as caught:
        service.deploy(home, "pebble", compute="ssh:box")
    assert "forwards no ports" in caught.value.message
    until(lambda: not serving_box.far_deployments(), "the server there was ended again")
    with Store(home) as store:
        assert [row.state for row in store.list_deployments()] == ["failed"]
    assert "AllowTcpForwarding local" in caught.value.message


def test_the_key_here_is_that_of_the_server_there_and_only_its_owner_can_read_it(home, serving_box):
    deployed = service.deploy(home, "pebble", compute="ssh:box")
    folder = home.deployment(deployed["deployment_id"])
    far = serving_box.far_home.deployment(serving_box.far_deployments()[0])
    assert folder.key.read_text() == far.key.read_text()
    assert folder.key.stat().st_mode & 0o777 == 0o600
    ready = read_json(folder.ready)
    connection = http.client.HTTPConnection("127.0.0.1", ready["control_port"], timeout=5)
    connection.request("POST", "/admin/stop", json.dumps({}))
    assert connection.getresponse().status == 401
    key = {"Authorization": f"Bearer {folder.key.read_text().strip()}"}
    too_long = json.dumps({"name": "x" * 70_000, "path": "y"})
    for body in (too_long, json.dumps([1]), json.dumps({"name": "", "path": ""})):
        connection = http.client.HTTPConnection("127.0.0.1", ready["control_port"], timeout=5)
        connection.request("POST", "/admin/adapters", body, key)
        assert connection.getresponse().status == 400
    assert deployments.is_alive(folder)


class Clock:
    """Time that passes only when something waits; also an event that is never set."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False

    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize("sending", [False, True])
def test_a_host_that_is_not_reached_is_given_up_and_a_long_upload_is_not(
    home, monkeypatch, sending
):
    hosts.add_host(home, "box", {"ssh": "box"})
    clock = Clock()
    monkeypatch.setattr(forwarder, "time", clock)
    folder = home.deployment("pebble-1")
    subject = forwarder.Forwarder(folder, home, hosts.host_of(home, "box"), {}, {"pebble": ""})
    subject.stop = clock
    tries: list[float] = []

    def serve_once() -> None:
        tries.append(clock.now)
        if len(tries) == 5:
            raise forwarder._Over("done")
        clock.now += 400
        if sending:
            subject.sent_at = clock.now
        raise HostLost("the line broke")

    monkeypatch.setattr(subject, "_serve_once", serve_once)
    with pytest.raises(forwarder._Over if sending else HostLost):
        subject._attend()
    assert len(tries) == (5 if sending else 2)
    subject.entrance.close()

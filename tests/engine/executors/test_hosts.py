"""Hosts in config.toml, and what is kept about them."""

import pytest

from engine.core.errors import UserError
from engine.executors import hosts
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store

DESCRIBED = {
    "hardware": {
        "devices": [
            {
                "id": "cuda:0",
                "name": "NVIDIA H200",
                "kind": "cuda",
                "memory_total": 1,
                "memory_free": 1,
            }
        ],
        "cores": 8,
        "ram_total": 2,
        "ram_free": 1,
        "disk_free": 3,
    },
    "packages": {"torch": "2.13.0"},
}


def test_a_host_is_added_beside_what_is_there_and_taken_out_again(home: Home):
    before = '# mine\ngpu_hour_price = 2.5\n\n[endpoints.e]\nurl = "http://x/v1"\nmodel = "m"\n'
    home.config_file.write_text(before)
    hosts.add_host(home, "box", {"ssh": "me@box.lan", "runs": 2, "gpu_hour_price": 1.5})
    hosts.add_host(home, "a.b", {})
    config = home.user_config()
    assert config.hosts["box"].ssh == "me@box.lan" and config.hosts["a.b"].ssh == "a.b"
    assert config.price_of("ssh:box") == 1.5 and config.price_of("local") == 2.5
    assert config.price_of("ssh:a.b") == 0
    hosts.remove_host(home, "box")
    hosts.remove_host(home, "a.b")
    assert home.config_file.read_text().strip() == before.strip()


@pytest.mark.parametrize(
    ("name", "values", "code"),
    [
        ("box", {}, "BAD_ARGUMENT"),  # there already
        ("b x", {}, "SETTING_INVALID"),
        ("b", {"ssh": "-oProxyCommand=x"}, "SETTING_INVALID"),
        ("b", {"folder": "../x"}, "SETTING_INVALID"),
        ("b", {"folder": "/x"}, "SETTING_INVALID"),
        ("b", {"runs": 0}, "SETTING_INVALID"),
        ("b", {"python": "python3"}, "SETTING_INVALID"),
        ("b", {"port": 22}, "SETTING_UNKNOWN"),
        ("b", {"address": "http://x:8265"}, "SETTING_UNKNOWN"),  # of another kind
        ("b", {"kind": "ray"}, "SETTING_INVALID"),  # without an address
        ("b", {"kind": "ray", "address": "http://me:secret@x"}, "SETTING_INVALID"),
        ("b", {"kind": "ray", "address": "http://x", "resources": "a b"}, "SETTING_INVALID"),
        ("b", {"kind": "ray", "address": "http://x", "partition": "p"}, "SETTING_UNKNOWN"),
        ("b", {"kind": "sky", "address": "https://x", "ssh": "box"}, "SETTING_UNKNOWN"),
    ],
)
def test_a_host_that_cannot_be_used_leaves_the_file_as_it_was(home: Home, name, values, code):
    hosts.add_host(home, "box", {"ssh": "box"})
    before = home.config_file.read_text()
    with pytest.raises(UserError) as error:
        hosts.add_host(home, name, values)
    assert error.value.code == code
    assert home.config_file.read_text() == before


def test_an_unknown_host_is_answered_with_those_that_are_known(home: Home):
    hosts.add_host(home, "box", {})
    with pytest.raises(UserError) as error:
        hosts.machine_of(home, "ssh:bix")
    assert (error.value.code, "box" in error.value.hint) == ("HOST_NOT_FOUND", True)


def test_a_plan_is_made_for_the_machine_that_was_found(home: Home):
    host = hosts.add_host(home, "box", {})
    with pytest.raises(UserError) as error:
        hosts.machine_of(home, "ssh:box")
    assert (error.value.code, "hosts setup box" in error.value.hint) == ("HOST_UNUSABLE", True)
    hosts.note_facts(home, host, "/venv/bin/python", DESCRIBED)
    machine = hosts.machine_of(home, "ssh:box")
    assert (machine.device.name, machine.cores, machine.disk_free) == ("NVIDIA H200", 8, 3)


@pytest.mark.parametrize(
    "described", [{}, {"hardware": {**DESCRIBED["hardware"], "devices": []}, "packages": {}}]
)
def test_a_host_that_describes_itself_in_another_form_is_refused(home: Home, described):
    host = hosts.add_host(home, "box", {})
    with pytest.raises(UserError, match="in no form of ours"):
        hosts.note_facts(home, host, "/venv/bin/python", described)


def test_a_host_with_a_run_is_not_taken_out(home: Home):
    hosts.add_host(home, "box", {})
    new = NewRun("far", "train", "sft", "e@1", "pebble", compute="ssh:box")
    with Store(home) as store:
        run_id = store.insert_run(new).run_id
    with pytest.raises(UserError, match=run_id):
        hosts.refuse_while_used(home, "box")


def test_a_home_has_one_name_on_other_machines(home: Home):
    assert hosts.home_id(home) == hosts.home_id(home) != ""

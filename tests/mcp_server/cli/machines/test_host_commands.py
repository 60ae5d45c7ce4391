"""What `honesmith hosts add` writes."""

import pytest

from engine.core.errors import UserError
from mcp_server.api import host_verbs
from mcp_server.cli.machines.host_commands import HostOptions


def test_only_what_was_given_is_written():
    assert HostOptions().table_values() == {}
    assert HostOptions(ssh="me@box", runs=2).table_values() == {"ssh": "me@box", "runs": 2}
    given = HostOptions(slurm=True, partition="gpu", memory_gb=64).table_values()
    assert given == {"kind": "slurm", "partition": "gpu", "memory_gb": 64}
    given = HostOptions(ray="https://ray.lan", token_env="T", resources="h100=1").table_values()
    address = {"kind": "ray", "address": "https://ray.lan"}
    assert given == address | {"token_env": "T", "resources": "h100=1"}


def test_a_host_that_would_be_two_kinds_of_cluster_is_refused():
    with pytest.raises(UserError, match="--slurm and --ray=http://head:8265") as refused:
        HostOptions(slurm=True, ray="http://head:8265").table_values()
    assert refused.value.code == "BAD_ARGUMENT" and "Leave one of them out" in refused.value.hint


def test_a_cluster_is_added_with_the_next_move(home):
    reply = host_verbs.add_host(home, "hpc", HostOptions(slurm=True, ssh="login").table_values())
    assert reply["compute"] == "slurm:hpc" and "`ssh login sbatch`" in reply["summary"]
    assert reply["slurm"]["gres"] == "gpu" and reply["ready"] is False
    here = host_verbs.add_host(home, "here", HostOptions(slurm=True).table_values())
    assert "`sbatch`" in here["summary"]
    box = host_verbs.add_host(home, "box", HostOptions().table_values())
    assert "`ssh box`" in box["summary"] and "slurm" not in box
    pool = HostOptions(ray="http://127.0.0.1:8265", ssh="head", without_gpu=True)
    ray = host_verbs.add_host(home, "pool", pool.table_values())
    assert "Ray at http://127.0.0.1:8265, files over `ssh head`" in ray["summary"]
    assert (ray["compute"], ray["ray"]["on_gpu"], ray["warnings"]) == ("ray:pool", False, [])
    names = [host["host"] for host in host_verbs.list_hosts(home)["hosts"]]
    assert names == ["hpc", "here", "box", "pool"]


def test_a_jobs_api_of_another_machine_over_plain_http_is_warned_of(home):
    given = HostOptions(ray="http://ray.lan:8265").table_values()
    (warning,) = host_verbs.add_host(home, "pool", given)["warnings"]
    assert "can run code on the cluster" in warning and "ssh -N -L" in warning

"""What `honesmith hosts add` writes."""

from mcp_server.api import host_verbs
from mcp_server.cli.machines.host_commands import HostOptions


def test_only_what_was_given_is_written():
    assert HostOptions().given() == {}
    assert HostOptions(ssh="me@box", runs=2).given() == {"ssh": "me@box", "runs": 2}
    given = HostOptions(slurm=True, partition="gpu", memory_gb=64).given()
    assert given == {"kind": "slurm", "partition": "gpu", "memory_gb": 64}


def test_a_cluster_is_added_with_the_next_move(home):
    reply = host_verbs.add_host(home, "hpc", HostOptions(slurm=True, ssh="login").given())
    assert reply["compute"] == "slurm:hpc" and "`ssh login sbatch`" in reply["summary"]
    assert reply["slurm"]["gres"] == "gpu" and reply["ready"] is False
    here = host_verbs.add_host(home, "here", HostOptions(slurm=True).given())
    assert "`sbatch`" in here["summary"]
    box = host_verbs.add_host(home, "box", HostOptions().given())
    assert "`ssh box`" in box["summary"] and "slurm" not in box
    names = [host["host"] for host in host_verbs.list_hosts(home)["hosts"]]
    assert names == ["hpc", "here", "box"]

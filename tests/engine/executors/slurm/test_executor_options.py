"""What sbatch is told of a job."""

import pytest

from engine.core.errors import UserError
from engine.executors import hosts
from engine.executors.slurm.executor import sbatch_options
from engine.home.config_tables.hosts import Host, SlurmOptions
from engine.home.run_dir import Home


def options(cap_hours: float = 0.0, gpus: int = 1, **asked) -> list[str]:
    return sbatch_options(Host("hpc", "", slurm=SlurmOptions(**asked)), gpus, cap_hours)


def test_a_job_asks_for_the_devices_of_its_run_and_for_what_the_host_says():
    told = options(gpus=2, gres="gpu:h100", partition="gpu", account="me", qos="q", cpus=8)
    assert {"--gres=gpu:h100:2", "--partition=gpu", "--account=me", "--qos=q"} <= set(told)
    assert {"--cpus-per-task=8", "--no-requeue", "--nodes=1", "--ntasks=1"} <= set(told)
    assert not [each for each in told if each.startswith(("--mem", "--constraint"))]
    assert "--mem=1536M" in options(memory_gb=1.5)


def test_a_partition_without_gpus_is_asked_for_none():
    assert not [each for each in options(gres="none") if each.startswith("--gres")]


@pytest.mark.parametrize(
    ("cap_hours", "gpus", "time_hours", "minutes"),
    [
        (0, 1, 24.0, 1440),  # no cap: the longest job
        (1, 1, 24.0, 75),  # a quarter of an hour above it, to start and to save
        (4, 4, 24.0, 75),  # hours of devices
        (100, 1, 24.0, 1440),  # it goes on in the next
        (0.001, 1, 24.0, 16),
        (1, 1, 0.05, 3),
    ],
)
def test_the_limit_of_a_job_is_the_cap_of_its_run(cap_hours, gpus, time_hours, minutes):
    told = options(cap_hours, gpus, time_hours=time_hours)
    assert f"--time={minutes}" in told
    assert f"--signal=B:TERM@{min(120, 20 * minutes)}" in told


def test_a_cluster_is_a_host_of_its_kind(home: Home):
    given = {"kind": "slurm", "partition": "gpu", "folder": "/scratch/me/honesmith", "ssh": "login"}
    host = hosts.add_host(home, "hpc", given)
    assert (host.compute, host.ssh, host.runs) == ("slurm:hpc", "login", 8)
    assert host.slurm.partition == "gpu" and host.slurm.gres == "gpu"
    assert hosts.host_of(home, "slurm:hpc") == hosts.host_of(home, "hpc") == host
    with pytest.raises(UserError, match="no host of the kind ssh") as error:
        hosts.host_of(home, "ssh:hpc")
    assert "slurm:hpc" in error.value.hint
    assert hosts.add_host(home, "here", {"kind": "slurm"}).ssh == ""
    assert home.user_config().price_of("slurm:hpc") == 0


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"partition": "gpu"}, "SETTING_UNKNOWN"),  # of a cluster alone
        ({"kind": "pbs"}, "SETTING_INVALID"),
        ({"kind": "slurm", "partition": "-x"}, "SETTING_INVALID"),
        ({"kind": "slurm", "account": "a b"}, "SETTING_INVALID"),
        ({"kind": "slurm", "folder": "/"}, "SETTING_INVALID"),
        ({"kind": "slurm", "folder": "/home/me"}, "SETTING_INVALID"),  # it may be wiped
        ({"kind": "slurm", "folder": "/home/../honesmith"}, "SETTING_INVALID"),
        ({"kind": "slurm", "time_hours": 0}, "SETTING_INVALID"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(home: Home, values, code):
    with pytest.raises(UserError) as error:
        hosts.add_host(home, "hpc", values)
    assert error.value.code == code

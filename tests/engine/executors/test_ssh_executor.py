"""A real training run on a host is the run that it would have been here."""

import sys

import pytest
from loops import SFT as SETTINGS
from loops import push

from engine.core.files import read_json, read_lines
from engine.evidence.verdict.provenance import verify
from engine.executors import hosts
from engine.executors.attending import host_setup
from engine.home.rows import TERMINAL
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.training import submit

pytestmark = [pytest.mark.machines, pytest.mark.worker, pytest.mark.timeout(900)]
# What a clock or the load of a machine says.
MEASURED = ("time", "mfu", "_s", "per_s", "share_of", "util", "memory")


def numbers(run) -> list[dict]:
    """The lines of a run's metrics without what was measured of the machine."""
    return [
        {k: v for k, v in line.items() if not any(k.endswith(m) or k == m for m in MEASURED)}
        for line in read_lines(run.metrics)[0]
    ]


def test_sft_over_ssh_has_the_curve_and_the_weights_of_sft_here(home, sshd, tmp_path, bench_until):
    hosts.add_host(home, "box", {"ssh": "box", "python": sys.executable})
    host_setup.set_up(home, "box")
    env_id = push(home, tmp_path / "sums")
    runs = []
    for compute in ("local", "ssh:box"):
        settings = SETTINGS | {"compute": compute}
        reply = submit(home, TrainRequest(env_id=env_id, algorithm="sft", settings=settings))
        run = home.run(str(reply["run_id"]))

        def ended(run=run) -> bool:
            with Store(home) as store:
                row = store.get_run(run.id)
            return row.state in TERMINAL and not launcher.is_alive(run)

        bench_until(ended)
        runs.append(run)
    here, there = runs
    assert numbers(here) == numbers(there) != []
    assert here.checkpoint_steps() == there.checkpoint_steps() != []
    for step in here.checkpoint_steps():
        name = "adapter_model.safetensors"
        assert (here.checkpoint(step) / name).read_bytes() == (
            there.checkpoint(step) / name
        ).read_bytes()
    assert here.best.readlink() == there.best.readlink()
    results = [read_json(run.result) for run in runs]
    assert results[0]["verdict"] == results[1]["verdict"]
    assert verify(home, there.id).intact is True
    with Store(home) as store:
        assert store.get_run(there.id).device == "ssh:box"

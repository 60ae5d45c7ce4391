"""A real training run on a host is the run that it would have been here, field by field."""

import sys

import pytest
from loops import GRPO, SFT, push
from same_run import assert_same, trained_here_and_there

from engine.executors import hosts
from engine.executors.attending import host_setup
from engine.runs.submit.requests import TrainRequest

pytestmark = [pytest.mark.machines, pytest.mark.worker, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("algorithm", "settings"), [("sft", SFT), ("grpo", GRPO)])
def test_a_run_over_ssh_is_the_run_that_it_is_here(
    home, sshd, tmp_path, bench_until, algorithm, settings
):
    hosts.add_host(home, "box", {"ssh": "box", "python": sys.executable})
    host_setup.set_up(home, "box")
    env_id = push(home, tmp_path / "sums")

    def request(compute: str) -> TrainRequest:
        chosen = settings | {"compute": compute}
        return TrainRequest(env_id=env_id, algorithm=algorithm, settings=chosen)

    here, there = trained_here_and_there(home, request, "ssh:box", bench_until)
    assert_same(home, here, there, "ssh:box")

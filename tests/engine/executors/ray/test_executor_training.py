"""A real training run on a Ray cluster is the run that it would have been here, field by field."""

import sys

import pytest
from loops import GRPO, SFT, push
from ray_pool import add_pool
from same_run import assert_same, trained_here_and_there

from engine.runs.submit.requests import TrainRequest

pytestmark = [pytest.mark.machines, pytest.mark.worker, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("algorithm", "settings"), [("sft", SFT), ("grpo", GRPO)])
def test_a_run_on_ray_is_the_run_that_it_is_here(
    home, ray_cluster, tmp_path, bench_until, monkeypatch, algorithm, settings
):
    ray_cluster.mend()
    add_pool(home, ray_cluster, tmp_path / "shared/honesmith", sys.executable, monkeypatch)
    env_id = push(home, tmp_path / "sums")

    def request(compute: str) -> TrainRequest:
        chosen = settings | {"compute": compute}
        return TrainRequest(env_id=env_id, algorithm=algorithm, settings=chosen)

    here, there = trained_here_and_there(home, request, "ray:pool", bench_until)
    assert_same(home, here, there, "ray:pool")

"""A real training run as a job of Slurm is the run that it would have been here."""

import sys
from pathlib import Path
from typing import Any

import pytest
from loops import BASE, push
from same_run import assert_same, trained_here_and_there

from engine.executors import hosts, jobs
from engine.runs.submit.requests import TrainRequest

pytestmark = [pytest.mark.machines, pytest.mark.worker, pytest.mark.timeout(3600)]
SHORT: dict[str, dict[str, Any]] = {
    "sft": {"steps": 2, "eval_rows": 4},
    "grpo": {"steps": 2, "eval_rows": 4, "prompts_per_step": 3, "max_tokens": 12},
}


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_job_has_the_numbers_and_the_weights_of_the_run_here(
    home, slurm, tmp_path: Path, bench_until, monkeypatch, algorithm
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    root = tmp_path / "shared" / "honesmith"
    options = {"kind": "slurm", "python": sys.executable, "folder": str(root), "gres": "none"}
    host = hosts.add_host(home, "hpc", options)
    root.mkdir(parents=True)
    hosts.note_facts(home, host, sys.executable, jobs.describe(str(root)))
    env_id = push(home, tmp_path / "sums")

    def request(compute: str) -> TrainRequest:
        settings = BASE[algorithm] | SHORT[algorithm] | {"compute": compute}
        return TrainRequest(env_id=env_id, algorithm=algorithm, settings=settings)

    here, there = trained_here_and_there(home, request, "slurm:hpc", bench_until)
    assert_same(home, here, there, "slurm:hpc")

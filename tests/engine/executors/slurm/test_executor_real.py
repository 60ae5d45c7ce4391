"""A real training run as a job of Slurm is the run that it would have been here."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from loops import BASE, push

from engine.evidence.verdict.provenance import verify
from engine.executors import hosts, jobs
from engine.home.rows import TERMINAL
from engine.home.run_dir import RunDir
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.training import submit

pytestmark = [pytest.mark.machines, pytest.mark.worker, pytest.mark.timeout(3600)]
# What a clock, the load of a machine or its folders say, or the name of the run.
MEASURED = re.compile(
    r"time|measured|mfu|.*_s|.*per_s|.*share_of.*|.*util.*|.*memory.*|created|started|ended|hours"
    r"|.*path|.*_dir|gpu_hours.*|hardware|device.*|duration.*|speed.*|pid|host.*|.*_hours"
)

SHORT: dict[str, dict[str, Any]] = {
    "sft": {"steps": 2, "eval_rows": 4},
    "grpo": {"steps": 2, "eval_rows": 4, "prompts_per_step": 3, "max_tokens": 12},
}


def plain(value: Any) -> Any:
    """A value without what was measured."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if not MEASURED.fullmatch(k)}
    return [plain(each) for each in value] if isinstance(value, list) else value


def content(run: RunDir) -> dict[str, Any]:
    """What a run left, by file: JSON by field without the run's name, weights byte by byte."""
    contents: dict[str, Any] = {}
    patterns = ("metrics.jsonl", "result.json", "rollouts/*.jsonl", "evals/*.jsonl")
    for pattern in patterns:
        for path in sorted(run.path.glob(pattern)):
            text = path.read_text().replace(run.id, "the run")
            documents = [text] if path.suffix == ".json" else text.splitlines()
            whole = [json.loads(document) for document in documents]
            contents[str(path.relative_to(run.path))] = plain(whole)
    for path in sorted(run.checkpoints.glob("step_*/*.safetensors")):
        contents[str(path.relative_to(run.path))] = path.read_bytes()
    return contents


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
    runs = []
    for compute in ("local", "slurm:hpc"):
        settings = BASE[algorithm] | SHORT[algorithm] | {"compute": compute}
        reply = submit(home, TrainRequest(env_id=env_id, algorithm=algorithm, settings=settings))
        run = home.run(str(reply["run_id"]))

        def ended(run: RunDir = run) -> bool:
            with Store(home) as store:
                row = store.get_run(run.id)
            return row.state in TERMINAL and not launcher.is_alive(run)

        bench_until(ended, 1500.0)
        runs.append(run)
    here, there = (content(run) for run in runs)
    assert here.keys() == there.keys() and len(here) > 3
    for name in here:
        assert here[name] == there[name], name
    assert runs[0].best.readlink() == runs[1].best.readlink()
    assert verify(home, runs[1].id).intact is True
    with Store(home) as store:
        rows = [store.get_run(run.id) for run in runs]
    assert rows[0].verdict == rows[1].verdict and rows[1].device == "slurm:hpc"
    assert [row.state for row in rows] == ["done", "done"]

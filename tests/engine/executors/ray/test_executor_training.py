"""A real training run on a Ray cluster is the run that it would have been here, field by field."""

import json
import sys

import pytest
from loops import GRPO, SFT, push
from ray_pool import add_pool

from engine.core.files import read_json, read_lines
from engine.evidence.verdict.provenance import verify
from engine.home.rows import TERMINAL
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs.submit.requests import TrainRequest
from engine.runs.submit.training import submit

pytestmark = [pytest.mark.machines, pytest.mark.worker, pytest.mark.timeout(900)]
# What a clock, the load of a machine, or its own paths say.
MEASURED = (
    "time",
    "mfu",
    "_s",
    "per_s",
    "share_of",
    "util",
    "memory",
    "seconds",
    "hours",
    "measured",
)


def plain(value):
    """A value without what was measured of the machine."""
    if isinstance(value, dict):
        return {
            key: plain(each)
            for key, each in value.items()
            if not any(key.endswith(m) or key == m for m in MEASURED)
        }
    return [plain(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("algorithm", "settings"), [("sft", SFT), ("grpo", GRPO)])
def test_a_run_on_ray_is_the_run_that_it_is_here(
    home, ray_cluster, tmp_path, bench_until, monkeypatch, algorithm, settings
):
    ray_cluster.mend()
    add_pool(home, ray_cluster, tmp_path / "shared/honesmith", sys.executable, monkeypatch)
    env_id = push(home, tmp_path / "sums")
    runs = []
    for compute in ("local", "ray:pool"):
        request = TrainRequest(
            env_id=env_id, algorithm=algorithm, settings=settings | {"compute": compute}
        )
        run = home.run(str(submit(home, request)["run_id"]))

        def ended(run=run) -> bool:
            with Store(home) as store:
                row = store.get_run(run.id)
            return row.state in TERMINAL and not launcher.is_alive(run)

        bench_until(ended)
        runs.append(run)
    here, there = runs
    with Store(home) as store:
        rows = [store.get_run(run.id) for run in runs]
    assert [row.state for row in rows] == ["done", "done"], rows
    assert rows[0].verdict == rows[1].verdict and rows[1].device == "ray:pool"

    def told(run, value) -> str:
        """A value without what was measured, and without the run's own name."""
        return json.dumps(plain(value)).replace(run.id, "RUN")

    def files(run) -> dict[str, str]:
        """What the run's lines say, by file."""
        patterns = ("metrics.jsonl", "evals/*.jsonl", "rollouts/*.jsonl")
        paths = [path for pattern in patterns for path in sorted(run.path.glob(pattern))]
        return {str(path.relative_to(run.path)): told(run, read_lines(path)[0]) for path in paths}

    assert files(here) == files(there)
    assert len(read_lines(here.metrics)[0]) > 3
    assert bool(list(here.path.glob("rollouts/*.jsonl"))) == (algorithm == "grpo")
    assert here.checkpoint_steps() == there.checkpoint_steps() != []
    for step in here.checkpoint_steps():
        name = "adapter_model.safetensors"
        assert (here.checkpoint(step) / name).read_bytes() == (
            there.checkpoint(step) / name
        ).read_bytes()
    assert here.best.readlink() == there.best.readlink()
    assert told(here, read_json(here.result)) == told(there, read_json(there.result))
    assert verify(home, there.id).intact is True

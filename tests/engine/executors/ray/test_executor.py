"""A run on a real Ray: there, back, and through every loss on the way."""

import json

import pytest

from engine.core.files import read_json, read_lines

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]


def test_a_run_becomes_a_job_and_comes_back(pool):
    run = pool.start()
    row = pool.until_ended(run)
    assert (row.state, row.reason, row.verdict) == ("done", "", "better")
    assert row.device == "ray:pool"
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]
    assert run.checkpoint_steps() == [1, 2, 3]
    assert run.resolve_checkpoint("best") == run.checkpoint(3)
    assert read_json(run.result)["verdict"] == "better"
    assert "trainer starts" in run.log(1).read_text()
    pool.bench.until(lambda: not pool.jobs(), "Ray has forgotten its job")
    assert not pool.place(run).path.exists()  # it was removed there
    names = pool.events(run)
    assert names.count("started") == names.count("finished") == names.count("trainer_exited") == 1
    assert json.loads(run.far("placement").read_text())["phase"] == "ended"

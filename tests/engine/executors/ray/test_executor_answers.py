"""A run through the Jobs API there and back, against a server that answers as Ray does."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_ray import FakeRay

from engine.core.errors import UserError
from engine.core.files import read_json, read_lines
from engine.executors import hosts
from engine.executors.attending import host_setup
from engine.executors.attending.starts import when_it_starts

pytestmark = pytest.mark.timeout(120)
TOKEN = "a-token-of-the-tests-of-at-least-32-characters"


@pytest.fixture
def fake() -> Iterator[FakeRay]:
    server = FakeRay(token=TOKEN)
    yield server
    server.close()


@pytest.fixture(name="pool")
def pool_of_answers(home, fake, fake_python, env, bench, far_box, tmp_path, monkeypatch) -> Any:
    """A cluster that was set up, with trainers without torch."""
    monkeypatch.setattr(host_setup, "PROOF", "pass")
    monkeypatch.setenv("POOL_TOKEN", TOKEN)
    monkeypatch.setenv("HONESMITH_STOP_GRACE_S", "20")
    options = {"kind": "ray", "address": fake.address, "token_env": "POOL_TOKEN", "on_gpu": False}
    root = tmp_path / "shared" / "honesmith"
    hosts.add_host(home, "pool", options | {"python": str(fake_python), "folder": str(root)})
    host_setup.set_up(home, "pool")
    return far_box(home, None, env, bench, compute="ray:pool")


def test_a_run_becomes_a_job_comes_back_and_is_forgotten_there(pool, fake):
    run = pool.start()
    row = pool.until_ended(run)
    assert (row.state, row.reason, row.verdict, row.device) == ("done", "", "better", "ray:pool")
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]
    assert run.checkpoint_steps() == [1, 2, 3]
    pool.bench.until(lambda: not fake.jobs, "Ray has forgotten its job")
    posted = [call for call in fake.calls if call == "POST /api/jobs/"]
    assert len(posted) == 2  # the one that looked at a node, and the run


@pytest.mark.machines
def test_what_its_driver_left_saves_and_ends_and_the_run_goes_on(pool, fake):
    run = pool.start(hold_at=3)
    folder = Path(hosts.host_of(pool.home, "pool").folder)

    def holds(launch: int) -> Path | None:
        home_id = hosts.home_id(pool.home)
        there = folder / f"homes/{home_id}/{run.id}.{launch}/runs/{run.id}"
        return there if (there / "holds").exists() else None

    far = pool.bench.until(lambda: holds(1), "the far trainer holds", 60)
    trainer = read_json(far / "started.json")["trainer_pid"]
    variables = Path(f"/proc/{trainer}/environ").read_bytes()
    assert TOKEN.encode() not in variables and b"RAY_" not in variables
    assert TOKEN not in json.dumps([job.facts for job in fake.jobs.values()])
    (job,) = [job for job in fake.jobs.values() if run.id in str(job.facts["submission_id"])]
    os.kill(job.process.pid, signal.SIGKILL)
    fake.lose(str(job.facts["submission_id"]))
    far = pool.bench.until(lambda: holds(2), "it goes on as another launch", 60)
    assert (
        not Path(f"/proc/{trainer}/maps").exists() or not Path(f"/proc/{trainer}/maps").read_text()
    )
    assert "node lost" in run.events.read_text()
    fake.close()  # from here on the API is away: the run itself says how it ends
    (far / "go").touch()
    assert pool.until_ended(run).state == "done"
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]


def test_a_cluster_is_checked_with_what_its_nodes_have_and_warned_of(pool, fake, home):
    reply = host_setup.check(home, "pool")
    assert (reply["host"], reply["ready"], reply["warnings"]) == ("pool", True, [])
    assert when_it_starts(home, "ray:pool", 1).startswith("1 of 1 node of Ray could take it; it")
    text = home.config_file.read_text()
    home.config_file.write_text(text.replace("on_gpu = false", "on_gpu = true"))
    assert "asks for 2 GPU and 1 CPU" in when_it_starts(home, "ray:pool", 2)
    home.config_file.write_text(text)
    fake.token = ""
    (warning,) = host_setup.check(home, "pool")["warnings"]
    assert "answers without a token" in warning
    fake.token = "another" * 8
    with pytest.raises(UserError) as error:
        host_setup.check(home, "pool")
    assert "POOL_TOKEN" in str(error.value.hint)
    fake.close()
    with pytest.raises(UserError) as error:
        host_setup.check(home, "pool")
    assert f"curl {fake.address}/api/version" in str(error.value.hint)

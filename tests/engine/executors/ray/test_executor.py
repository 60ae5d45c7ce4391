"""A run on a real Ray: there, back, and through every loss on the way."""

import json
from pathlib import Path

import loopback_ray
import pytest

from engine.core.files import read_json, read_lines
from engine.executors import hosts
from engine.executors.attending.places import connected
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs.lifecycle import cancel

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


def test_a_start_again_finds_the_job_that_was_started(pool):
    run = pool.start(hold_at=2)
    far = pool.until_held(run)
    with connected(pool.home, hosts.host_of(pool.home, "pool")) as executor:
        handle = pool.handle(run)
        executor.start(run, handle)
        executor.start(run, handle.changed(run, phase="starting"))
        # Ray itself answers a second job of one id with an error, which means that it is there.
        executor.api.submit(pool.place(run).job_name, "true", {}, {})
        assert [(job.run_id, job.launch, job.life) for job in executor.list_owned()] == [
            (run.id, 1, "running")
        ]
    assert len(pool.jobs()) == 1
    pool.bench.go(far)
    assert pool.until_ended(run).state == "done"
    assert run.log(1).read_text().count("trainer starts") == 1


def test_nothing_secret_goes_through_ray_and_its_token_reaches_no_trainer(pool, monkeypatch):
    run = pool.start(hold_at=2)
    far = pool.until_held(run)
    assert loopback_ray.TOKEN not in json.dumps(pool.jobs())
    pids = [read_json(far.started_record)["trainer_pid"]]
    pids += [each.pid for each in pool.far_processes(run) if "--carry-out" in each.cmdline()]
    for pid in pids:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert loopback_ray.TOKEN.encode() not in environment and b"RAY_" not in environment
    assert not pool.place(run).secrets.exists()
    pool.bench.go(far)
    assert pool.until_ended(run).state == "done"


def test_a_cancel_saves_over_there_and_a_resume_goes_on_from_that(pool):
    run = pool.start(hold_at=3)
    pool.until_held(run)
    cancel(pool.home, run.id)
    row = pool.until_ended(run)
    assert (row.state, row.reason) == ("cancelled", "cancelled on request")
    assert run.checkpoint_steps() == [1, 2]
    with Store(pool.home) as store:
        store.resume_run(run.id, max_gpu_hours=1, request_id="", body={})
    launcher.start_queued(pool.home)
    pool.until_launch(run, 2, 60)
    far = pool.until_held(run)
    assert far.checkpoint_steps() == [1, 2]  # it was sent back
    pool.bench.go(far)
    assert pool.until_ended(run).state == "done"
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]


def test_a_job_that_ray_has_no_room_for_waits_with_the_reason_and_is_taken_back_by_a_cancel(pool):
    text = pool.home.config_file.read_text()
    pool.home.config_file.write_text(text + 'resources = "h100=1"\n')
    run = pool.start()
    pool.bench.until(lambda: "host_waits" in pool.events(run), "it says that it waits", 60)
    assert "resources" in run.events.read_text()
    assert pool.bench.row(run).state == "preparing"
    cancel(pool.home, run.id)
    assert pool.until_ended(run).state == "cancelled"
    assert not pool.place(run).path.exists()  # so its job ends as soon as it begins


def test_a_driver_that_is_killed_loses_nothing(pool):
    run = pool.start(hold_at=3)
    pool.until_held(run)
    before = pool.far_processes(run)
    pool.driver(run).kill()
    pool.until_launch(run, 2, 90)
    pool.require_ended(before)  # they saved and ended
    far = pool.until_held(run)
    assert far.checkpoint_steps() == [1, 2]
    pool.bench.go(far)
    assert pool.until_ended(run).state == "done"
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]
    assert "was killed" in run.events.read_text()


def test_a_node_that_is_lost_is_the_cause_and_the_run_goes_on_from_its_last_checkpoint(pool):
    run = pool.start(hold_at=3)
    pool.until_held(run)
    pool.bench.until(lambda: run.checkpoint_steps() == [1, 2], "its checkpoints are here")
    pool.ray.kill("worker")
    pool.bench.until(lambda: "launched_again" in pool.events(run), "the loss is noted", 120)
    assert "node lost" in run.events.read_text()
    pool.ray.start_worker()
    far = pool.until_held(run)
    pool.bench.go(far)
    assert pool.until_ended(run).state == "done"
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]
    assert run.log(1).read_text().count("trainer starts") == 2


def test_the_daemon_of_a_node_dies_and_nothing_of_the_run_is_left_there(pool):
    run = pool.start(hold_at=3)
    pool.until_held(run)
    before = pool.far_processes(run)
    pool.ray.kill("worker", "raylet")
    pool.until_launch(run, 2, 180)
    pool.require_ended(before)
    pool.ray.mend()
    far = pool.until_held(run)
    pool.bench.go(far)
    assert pool.until_ended(run).state == "done"
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]


def test_a_head_that_is_killed_ends_no_run_and_one_that_has_ended_is_taken_over(pool):
    run = pool.start(hold_at=3)
    far = pool.until_held(run)
    pool.bench.until_state(run, "running")
    pool.ray.kill("head")
    pool.bench.go(far)  # it may have been ended, in good order, by the loss of the head
    pool.bench.until(
        lambda: pool.place(run).ended.exists() or not pool.place(run).path.exists(), "it ends", 200
    )
    assert pool.bench.row(run).state in ("running", "done")  # an API that is away is no failure
    pool.ray.mend()
    assert pool.until_ended(run).state == "done"
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]


def test_after_the_death_of_everything_here_the_next_attempt_adopts_what_runs_there(pool):
    run = pool.start(hold_at=2)
    far = pool.until_held(run)
    pool.bench.kill(*pool.bench.pids(run))
    pool.bench.until(lambda: not launcher.is_alive(run), "nothing of it lives here")
    launcher.reap(pool.home)
    assert pool.bench.row(run).attempt == 2
    pool.bench.go(far)
    assert pool.until_ended(run).state == "done"
    assert pool.handle(run).launch == 1
    assert pool.events(run).count("placed") == pool.events(run).count("started") == 1


def test_without_a_word_a_run_saves_and_ends_and_goes_on_when_there_is_one(pool):
    text = pool.home.config_file.read_text()
    pool.home.config_file.write_text(text + "lease_hours = 0.0015\n")  # 5.4 s
    run = pool.start(hold_at=3)
    far = pool.until_held(run)
    place = pool.place(run)
    pool.bench.kill(*pool.bench.pids(run))
    pool.bench.until(place.ended.exists, "the lease ends", 60)
    assert read_json(place.ended)["end"]["reason_kind"] == "lease"
    assert far.checkpoint_steps() == [1, 2]
    launcher.reap(pool.home)
    pool.until_launch(run, 2, 60)
    pool.bench.go(pool.until_held(run))
    assert pool.until_ended(run).state == "done"

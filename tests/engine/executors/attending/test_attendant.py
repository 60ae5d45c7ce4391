"""A run on a host over a real sshd: there, back, and through every loss on the way."""

import json
from pathlib import Path

import pytest

from engine.core.files import read_json, read_lines, write_json
from engine.executors.far_side import PASSED_ON, PASSED_ON_PREFIXES
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs.lifecycle import cancel

pytestmark = [pytest.mark.timeout(240)]


def test_a_run_goes_there_and_comes_back(box):
    run = box.start()
    row = box.until_ended(run)
    assert (row.state, row.reason, row.verdict) == ("done", "", "better")
    assert row.device == "ssh:box"
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]
    assert run.checkpoint_steps() == [1, 2, 3]
    assert run.resolve_checkpoint("best") == run.checkpoint(3)
    assert read_json(run.result)["verdict"] == "better"
    assert "trainer starts" in run.log(1).read_text()
    assert not box.far_run(run).path.exists()  # it was removed there
    names = box.events(run)
    assert names.count("started") == names.count("finished") == names.count("trainer_exited") == 1
    assert json.loads(run.far("placement").read_text())["phase"] == "ended"


@pytest.mark.machines
def test_a_cut_connection_loses_nothing(box):
    run = box.start(hold_at=2)
    far = box.until_held(run)
    box.cut()
    box.bench.until(lambda: "host_lost" in box.events(run), "the loss is noted")
    box.bench.go(far)
    assert box.until_ended(run).state == "done"
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]
    names = box.events(run)
    assert names.count("host_lost") == names.count("host_reached") == names.count("placed") == 1
    assert names.count("started") == 1  # it was never started again over there


@pytest.mark.machines
def test_a_run_ends_over_there_while_nobody_is_reached_and_is_fetched_afterwards(box):
    run = box.start(hold_at=2)
    far = box.until_held(run)
    box.bench.until_state(run, "running")
    box.sshd.stop()
    box.cut()
    box.bench.until(lambda: "host_lost" in box.events(run), "the loss is noted")
    box.bench.go(far)
    box.bench.until(lambda: box.far_row(run).state == "done", "it ends over there", 40)
    assert box.bench.row(run).state == "running"  # nothing is known here, which is no failure
    box.sshd.start()
    assert box.until_ended(run).verdict == "better"


@pytest.mark.machines
def test_what_looks_after_a_run_is_killed_and_started_again(box):
    run = box.start(hold_at=2)
    far = box.until_held(run)
    before = read_json(far.started_record)
    _, attendant = box.bench.pids(run)
    box.bench.kill(attendant)
    box.bench.until(lambda: "attendant_restarted" in box.events(run), "it is started again")
    assert read_json(far.started_record) == before
    box.bench.go(far)
    assert box.until_ended(run).state == "done"
    assert box.bench.row(run).attempt == 1
    assert box.events(run).count("placed") == 1
    assert run.log(1).read_text().count("trainer starts") == 1


@pytest.mark.machines
def test_after_the_death_of_everything_here_the_next_attempt_adopts_what_runs_there(box):
    run = box.start(hold_at=2)
    far = box.until_held(run)
    before = read_json(far.started_record)
    box.bench.kill(*box.bench.pids(run))
    box.bench.until(lambda: not launcher.is_alive(run), "nothing of it lives here")
    launcher.reap(box.home)
    assert box.bench.row(run).attempt == 2
    box.bench.go(far)
    assert box.until_ended(run).state == "done"
    assert before["supervisor_pid"] and box.handle(run).launch == 1
    assert box.events(run).count("placed") == box.events(run).count("started") == 1


@pytest.mark.machines
def test_a_run_whose_processes_die_over_there_goes_on_there_by_itself(box):
    run = box.start(hold_at=2)
    far = box.until_held(run)
    record = read_json(far.started_record)
    box.bench.kill(record["supervisor_pid"], record["trainer_pid"])
    box.bench.until(lambda: box.far_row(run).attempt == 2, "it goes on over there", 40)
    box.bench.go(far)
    row = box.until_ended(run)
    assert (row.state, row.attempt, box.handle(run).launch) == ("done", 1, 1)
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]
    assert run.log(1).read_text().count("trainer starts") == 2


@pytest.mark.machines
def test_a_cancel_saves_over_there_and_a_resume_goes_on_from_that(box):
    run = box.start(hold_at=3)
    box.until_held(run)
    cancel(box.home, run.id)
    row = box.until_ended(run)
    assert (row.state, row.reason) == ("cancelled", "cancelled on request")
    assert run.checkpoint_steps() == [1, 2]
    assert not box.far_run(run).path.exists()
    before = run.metrics.read_text()
    with Store(box.home) as store:
        store.resume_run(run.id, max_gpu_hours=1, request_id="", body={})
    launcher.start_queued(box.home)
    far = box.until_held(run)
    assert far.checkpoint_steps() == [1, 2]  # it was sent back
    box.bench.go(far)
    assert box.until_ended(run).state == "done"
    assert box.handle(run).launch == 2
    assert [line["step"] for line in read_lines(run.metrics)[0]] == [0, 1, 2, 3]
    assert run.metrics.read_text().startswith(before)  # no step was done again


@pytest.mark.machines
def test_without_a_word_a_run_saves_and_ends_and_goes_on_when_there_is_one(box):
    text = box.home.config_file.read_text()
    box.home.config_file.write_text(text + "lease_hours = 0.0015\n")  # 5.4 s
    run = box.start(hold_at=3)
    far = box.until_held(run)
    box.bench.kill(*box.bench.pids(run))
    box.bench.until(lambda: box.far_row(run).state == "failed", "the lease ends", 60)
    assert box.far_row(run).reason_kind == "lease"
    assert far.checkpoint_steps() == [1, 2]
    launcher.reap(box.home)
    box.bench.until(lambda: box.events(run).count("placed") == 2, "it is started again", 60)
    box.bench.go(box.until_held(run))
    assert box.until_ended(run).state == "done"
    assert box.handle(run).launch == 2
    assert "launched_again" in box.events(run)


@pytest.mark.machines
def test_what_another_launch_left_over_there_is_not_taken(box):
    run = box.start(hold_at=3)
    far = box.until_held(run)
    box.bench.kill(*box.bench.pids(run))
    box.bench.until(lambda: not launcher.is_alive(run), "nothing of it lives here")
    box.handle(run).changed(run, launch=5)  # as after a home was copied and went on elsewhere
    write_json(far.result, {"verdict": "worse"})
    launcher.reap(box.home)
    box.bench.until(lambda: box.events(run).count("placed") == 2, "it is started again", 60)
    box.bench.go(box.until_held(run))
    assert box.until_ended(run).verdict == "better"
    assert box.handle(run).launch == 6
    assert "host_forgot" in box.events(run)


@pytest.mark.machines
def test_a_job_over_there_has_no_variable_that_it_was_not_to_have(box, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-this-side")
    config = box.sshd.folder / "sshd_config"
    setting = f"SetEnv HOME={box.sshd.home}"
    config.write_text(config.read_text().replace(setting, f"{setting} AWS_SECRET_ACCESS_KEY=k X=y"))
    box.sshd.stop()
    box.sshd.start()
    run = box.start(hold_at=2)
    far = box.until_held(run)
    environ = Path(f"/proc/{read_json(far.started_record)['trainer_pid']}/environ").read_bytes()
    names = {entry.partition(b"=")[0].decode() for entry in environ.split(b"\0") if entry}
    ours = {"PYTHONPATH", "GOMP_SPINCOUNT", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE"}
    ours |= {"TRANSFORMERS_OFFLINE", "PYTHONUNBUFFERED"}
    more = {name for name in names if name not in PASSED_ON | ours}
    assert {name for name in more if not name.startswith(PASSED_ON_PREFIXES)} == set()
    box.bench.go(far)
    assert box.until_ended(run).state == "done"


@pytest.mark.machines
def test_hostile_names_and_links_over_there_are_not_taken(box):
    run = box.start(hold_at=2)
    far = box.until_held(run)
    (far.rollouts_dir / "step_000001.jsonl").symlink_to("/etc/hostname")
    (far.rollouts_dir / "step_000002.jsonl\n").write_text("{}\n")
    (far.evals_dir / "..model_0.jsonl").write_text("{}\n")
    (far.path / "unknown.bin").write_text("x")
    box.bench.until(lambda: "host_refused" in box.events(run), "they are refused", 40)
    box.bench.go(far)
    assert box.until_ended(run).state == "done"
    assert list(run.rollouts_dir.iterdir()) == list(run.evals_dir.iterdir()) == []
    assert not (run.path / "unknown.bin").exists()


@pytest.mark.machines
def test_a_file_larger_than_any_run_writes_ends_the_run_here_and_there(box):
    run = box.start(hold_at=2)
    far = box.until_held(run)
    with (far.rollouts_dir / "step_000001.jsonl").open("wb") as file:
        file.truncate(9 << 30)
    row = box.until_ended(run)
    assert (row.state, row.reason_kind) == ("failed", "infra")
    assert "rollouts/step_000001.jsonl" in row.reason
    box.bench.until(lambda: not far.path.exists() or not launcher.is_alive(far), "it ends there")


@pytest.mark.machines
def test_a_host_with_another_key_gets_nothing(box):
    box.sshd.change_host_key()
    run = box.start()
    row = box.until_ended(run)
    assert (row.state, row.reason_kind) == ("failed", "infra")
    assert "host key" in row.reason and "ssh-keygen -R" in str(row.hint)


@pytest.mark.machines
def test_the_cap_of_hours_holds_over_there_too(box):
    run = box.start(hold_at=2, max_gpu_hours=0.5)
    far = box.until_held(run)
    assert 0 < box.far_row(run).max_gpu_hours <= 0.5
    box.bench.go(far)
    assert box.until_ended(run).state == "done"

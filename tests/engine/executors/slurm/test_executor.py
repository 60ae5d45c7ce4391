"""A run on a real Slurm: there, back, and through every loss on the way."""

import json
import socket

import pytest

from engine.core.files import read_json, read_lines, write_json
from engine.executors import hosts
from engine.executors.attending import host_setup
from engine.executors.attending.places import connected
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.machine.processes.seam import Handle
from engine.runs.lifecycle import cancel

pytestmark = [pytest.mark.machines, pytest.mark.timeout(900)]
LONG = 200  # seconds, on a machine that has much else to do


def steps(run) -> list[int]:
    return [line["step"] for line in read_lines(run.metrics)[0]]


def test_a_cluster_is_made_ready_and_looked_at(cluster, monkeypatch):
    monkeypatch.setattr(host_setup, "PROOF", "pass")
    lines = []
    reply = host_setup.set_up(cluster.home, "hpc", say=lines.append)
    assert reply["ready"] is True and reply["packages"]["torch"]
    assert "Asking the cluster for a node, to see what it has" in lines
    assert reply["next_start"].endswith(f"on {socket.gethostname().partition('.')[0]}")
    assert hosts.find_facts(cluster.home, cluster.host) is not None


def test_a_run_becomes_a_job_and_comes_back(cluster):
    run = cluster.start()
    row = cluster.until_ended(run)
    assert (row.state, row.reason, row.verdict) == ("done", "", "better")
    assert row.device == "slurm:hpc"
    assert steps(run) == [0, 1, 2, 3]
    assert run.checkpoint_steps() == [1, 2, 3]
    assert run.resolve_checkpoint("best") == run.checkpoint(3)
    assert read_json(run.result)["verdict"] == "better"
    assert "trainer starts" in run.log(1).read_text()
    assert not cluster.place(run).path.exists()  # it was removed there
    names = cluster.events(run)
    assert names.count("started") == names.count("finished") == names.count("trainer_exited") == 1
    assert json.loads(run.far("placement").read_text())["phase"] == "ended"


def test_the_login_node_is_reached_over_ssh(cluster, sshd):
    config = sshd.folder / "sshd_config"
    setting = f"SetEnv HOME={sshd.home}"
    more = " ".join(f"{name}={text}" for name, text in cluster.slurm.variables.items())
    config.write_text(config.read_text().replace(setting, f"{setting} {more}"))
    sshd.stop()
    sshd.start()
    table = cluster.home.config_file
    table.write_text(table.read_text() + 'ssh = "box"\n')
    run = cluster.start()
    assert cluster.until_ended(run).verdict == "better"
    assert steps(run) == [0, 1, 2, 3]


def test_a_second_start_finds_the_job_also_where_the_answer_of_sbatch_was_lost(cluster):
    run = cluster.start(hold_at=2)
    far = cluster.until_held(run)
    handle, before = cluster.handle(run), cluster.job_id(run)
    with connected(cluster.home, cluster.host) as executor:
        executor.start(run, handle)
        write_json(cluster.place(run).submitted, {"job": ""})  # as a crash after sbatch leaves it
        executor.start(run, handle)
    assert cluster.job_id(run) == before == read_json(cluster.place(run).submitted)["job"]
    cluster.bench.go(far)
    assert cluster.until_ended(run).state == "done"
    assert run.log(1).read_text().count("trainer starts") == 1


def test_a_cancel_saves_over_there_and_a_resume_goes_on_from_that(cluster):
    run = cluster.start(hold_at=3)
    cluster.until_held(run)
    place = cluster.place(run)
    cancel(cluster.home, run.id)
    row = cluster.until_ended(run)
    assert (row.state, row.reason) == ("cancelled", "cancelled on request")
    assert run.checkpoint_steps() == [1, 2]
    assert not place.path.exists()
    with Store(cluster.home) as store:
        store.resume_run(run.id, max_gpu_hours=1, request_id="", body={})
    launcher.start_queued(cluster.home)
    cluster.bench.until(lambda: cluster.handle(run).launch == 2, "it is launched again", LONG)
    far = cluster.until_held(run)
    assert far.checkpoint_steps() == [1, 2]  # it was sent back
    cluster.bench.go(far)
    assert cluster.until_ended(run).state == "done"
    assert steps(run) == [0, 1, 2, 3]


def test_the_controller_is_killed_and_the_run_goes_on(cluster):
    run = cluster.start(hold_at=2)
    far = cluster.until_held(run)
    cluster.slurm.kill("slurmctld")
    cluster.bench.go(far)  # the job's own signs of life are enough
    row = cluster.until_ended(run)
    assert (row.state, row.attempt, cluster.handle(run).launch) == ("done", 1, 1)
    cluster.slurm.start("slurmctld")
    assert steps(run) == [0, 1, 2, 3]


def test_a_controller_that_is_away_delays_a_start_and_fails_nothing(cluster):
    cluster.slurm.kill("slurmctld")
    run = cluster.start()
    cluster.bench.until(lambda: "host_lost" in cluster.events(run), "that is noted", LONG)
    assert cluster.bench.row(run).state == "preparing"
    cluster.slurm.start("slurmctld")
    assert cluster.until_ended(run).state == "done"
    names = cluster.events(run)
    assert names.count("host_lost") == names.count("host_reached") == names.count("placed") == 1


def test_the_node_daemon_is_killed_and_the_run_goes_on(cluster):
    run = cluster.start(hold_at=2)
    far = cluster.until_held(run)
    cluster.slurm.kill("slurmd")
    cluster.bench.go(far)
    row = cluster.until_ended(run)
    assert (row.state, row.attempt, cluster.handle(run).launch) == ("done", 1, 1)


def test_after_the_death_of_everything_here_the_next_attempt_adopts_the_job(cluster):
    run = cluster.start(hold_at=2)
    far = cluster.until_held(run)
    before = cluster.job_id(run)
    cluster.bench.kill(*cluster.bench.pids(run))
    cluster.bench.until(lambda: not launcher.is_alive(run), "nothing of it lives here")
    launcher.reap(cluster.home)
    assert cluster.bench.row(run).attempt == 2
    assert cluster.job_id(run) == before
    cluster.bench.go(far)
    assert cluster.until_ended(run).state == "done"
    assert cluster.handle(run).launch == 1
    assert cluster.events(run).count("placed") == cluster.events(run).count("started") == 1


def test_a_job_whose_processes_are_killed_goes_on_in_another_from_its_last_checkpoint(cluster):
    run = cluster.start(hold_at=3)
    far = cluster.until_held(run)
    cluster.bench.until(lambda: run.checkpoint_steps() == [1, 2], "they are here", LONG)
    record = read_json(far.started_record)
    cluster.bench.kill(cluster.job_pid(run), record["supervisor_pid"], record["trainer_pid"])
    cluster.bench.until(lambda: cluster.handle(run).launch == 2, "it is launched again", LONG)
    cluster.bench.go(cluster.until_held(run))
    row = cluster.until_ended(run)
    assert (row.state, row.attempt) == ("done", 1)
    assert steps(run) == [0, 1, 2, 3]
    assert "launched_again" in cluster.events(run)


def test_what_slurm_takes_away_saves_and_goes_on_in_the_next_job(cluster):
    run = cluster.start(hold_at=3)
    cluster.until_held(run)
    # As before a time limit, or for a job that preempts it.
    cluster.slurm.call("scancel", "--batch", "--signal=TERM", cluster.job_id(run))
    cluster.bench.until(lambda: cluster.handle(run).launch == 2, "it is launched again", LONG)
    assert run.checkpoint_steps() == [1, 2]
    cluster.bench.go(cluster.until_held(run))
    assert cluster.until_ended(run).state == "done"
    assert steps(run) == [0, 1, 2, 3]


def test_a_job_that_somebody_cancels_on_the_cluster_is_not_started_again(cluster):
    run = cluster.start(hold_at=3)
    cluster.until_held(run)
    job = cluster.job_id(run)
    cluster.slurm.call("scancel", job)
    row = cluster.until_ended(run)
    assert (row.state, row.reason_kind) == ("failed", "killed")
    assert f"cancelled on the cluster (job {job}" in row.reason
    assert cluster.handle(run).launch == 1
    assert run.checkpoint_steps() == [1, 2]


def test_a_job_that_waits_says_why_and_costs_nothing_and_is_cancelled(cluster):
    cluster.slurm.call("scontrol", "update", "PartitionName=short", "State=DOWN")
    run = cluster.start(max_gpu_hours=1)
    cluster.bench.until(lambda: "host_waits" in cluster.events(run), "the reason is noted", LONG)
    text = run.events.read_text()
    assert "PartitionDown" in text and "name another partition" in text
    place = cluster.place(run)
    cluster.bench.until(lambda: run.far("spent").exists(), "hours are counted")
    cancel(cluster.home, run.id)
    row = cluster.until_ended(run)
    assert (row.state, row.spent_hours) == ("cancelled", 0)
    assert cluster.job(run) == "CANCELLED" and not place.path.exists()


def test_what_slurm_refuses_fails_with_its_words(cluster):
    config = cluster.home.config_file
    config.write_text(config.read_text().replace('gres = "none"', 'gres = "gpu:no-such"'))
    run = cluster.start()
    row = cluster.until_ended(run)
    assert (row.state, row.reason_kind) == ("failed", "infra")
    assert "sbatch" in row.reason and "hpc" in row.reason


def test_without_a_word_a_run_saves_and_ends_and_goes_on_when_there_is_one(cluster):
    text = cluster.home.config_file.read_text()
    cluster.home.config_file.write_text(text + "lease_hours = 0.0015\n")  # 5.4 s
    run = cluster.start(hold_at=3)
    far = cluster.until_held(run)
    cluster.bench.kill(*cluster.bench.pids(run))
    cluster.bench.until(lambda: cluster.place(run).ended.exists(), "the lease ends", LONG)
    assert read_json(cluster.place(run).ended)["end"]["reason_kind"] == "lease"
    assert far.checkpoint_steps() == [1, 2]
    launcher.reap(cluster.home)
    cluster.bench.until(lambda: cluster.events(run).count("placed") == 2, "it starts again", LONG)
    cluster.bench.go(cluster.until_held(run))
    assert cluster.until_ended(run).state == "done"
    assert cluster.handle(run).launch == 2


def test_a_job_without_a_run_is_listed_and_ended(cluster):
    run = cluster.start(hold_at=2)
    cluster.until_held(run)
    job = cluster.job_id(run)
    launch = cluster.place(run)
    cluster.bench.kill(*cluster.bench.pids(run))
    launch.path.rename(launch.path.with_name("elsewhere"))  # its folder is gone
    with connected(cluster.home, cluster.host) as executor:
        (owned,) = executor.list_owned()
        assert (owned.run_id, owned.launch) == (run.id, 1)
        executor.stop(run, Handle(executor.name, owned.launch, "started"))
    wanted = ("CANCELLED", "FAILED")  # the job itself notices too that its folder is gone
    state = ("squeue", "-h", "--states=all", f"--jobs={job}", "-o", "%T")
    cluster.bench.until(lambda: cluster.slurm.call(*state).strip() in wanted, "it ends", LONG)


def test_a_node_that_was_cut_off_ends_its_processes_when_another_launch_is_in_its_place(cluster):
    run = cluster.start(hold_at=3)
    far = cluster.until_held(run)
    trainer = read_json(far.started_record)["trainer_pid"]
    cluster.bench.kill(*cluster.bench.pids(run))
    launch = cluster.place(run)
    # Slurm gave the node up, and the launch was removed; its processes live on, cut off.
    launch.path.rename(launch.path.with_name("removed"))
    cluster.bench.until(lambda: not cluster.lives(trainer), "the trainer ends", LONG)
    assert not cluster.lives(trainer)


def test_the_cap_of_hours_is_the_limit_of_the_job_too(cluster):
    run = cluster.start(hold_at=2, max_gpu_hours=0.5)
    far = cluster.until_held(run)
    assert 0 < cluster.far_row(run).max_gpu_hours <= 0.5
    limit = cluster.slurm.call("squeue", "-h", f"--jobs={cluster.job_id(run)}", "-o", "%l").strip()
    assert limit in ("45:00", "44:00")  # a quarter of an hour above it, to start and to save
    cluster.bench.go(far)
    assert cluster.until_ended(run).state == "done"


def test_a_job_has_no_variable_that_it_was_not_to_have(cluster, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-this-side")
    run = cluster.start(hold_at=2)
    far = cluster.until_held(run)
    names = cluster.variables(read_json(far.started_record)["trainer_pid"])
    assert "SLURM_JOB_ID" in names and "AWS_SECRET_ACCESS_KEY" not in names
    assert not cluster.place(run).secrets.exists()  # read, and removed
    cluster.bench.go(far)
    assert cluster.until_ended(run).state == "done"

"""What the commands of Slurm print, as releases 22.05 printed it, and what is made of it."""

from pathlib import Path

import pytest

from engine.executors.slurm import commands
from engine.executors.slurm.commands import Job, SlurmDown, SlurmRefused

QUEUE = """\
7|PENDING|PartitionTimeLimit|N/A||hs-0a1b2c-far-2-1
3|RUNNING|None|2026-11-28T13:40:02|n[1-2]|hs-0a1b2c-far-1-1
4|PENDING|Resources|2026-11-29T01:00:00||x|y
5|FAILED|NonZeroExitCode|2026-11-28T13:40:02|vm|other
slurm_load_jobs error: something else
"""


def test_the_queue_is_read_line_by_line_the_newest_last():
    jobs = commands.read_queue(QUEUE)
    assert jobs == [
        Job("3", "RUNNING", "", "2026-11-28T13:40:02", "n[1-2]", "hs-0a1b2c-far-1-1"),
        Job("4", "PENDING", "Resources", "2026-11-29T01:00:00", "", "x|y"),
        Job("5", "FAILED", "NonZeroExitCode", "2026-11-28T13:40:02", "vm", "other"),
        Job("7", "PENDING", "PartitionTimeLimit", "", "", "hs-0a1b2c-far-2-1"),
    ]
    assert [job.kind for job in jobs] == ["running", "waiting", "ended", "waiting"]


@pytest.mark.parametrize(
    ("printed", "job"),
    [
        ("12|CANCELLED by 1000|None\n", Job("12", "CANCELLED")),
        ("12|CANCELLED+|None\n", Job("12", "CANCELLED")),
        ("12|NODE_FAIL|None\n12|COMPLETED|None\n", Job("12", "COMPLETED")),  # it was requeued
        ("12.batch|FAILED|\n", None),
        ("", None),
    ],
)
def test_an_ended_job_is_read_from_the_accounting(printed: str, job: Job | None):
    assert commands.read_account(printed) == job


def test_the_expected_start_is_read():
    line = (
        "sbatch: Job 2 to start at 2026-11-28T13:40:05 using 1 processors on nodes vm in "
        "partition short\n"
    )
    assert commands.read_expected_start(line) == "2026-11-28T13:40:05 on vm"
    assert commands.read_expected_start("sbatch: something else\n") == ""


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lets a command print a text on its error channel and end with a status."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def answer(program: str, status: int, *, out: str = "", error: str = "") -> None:
        script = tmp_path / program
        script.write_text(
            f"#!/bin/sh\ncat >/dev/null\nprintf '%s' '{out}'\nprintf '%s' '{error}' >&2\n"
            f"env > {tmp_path}/variables\nexit {status}\n"
        )
        script.chmod(0o700)

    return answer


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
        "squeue: error: Munge encode failed: Failed to access",
    ],
)
def test_a_controller_that_does_not_answer_says_nothing_of_a_job(answers, words: str):
    answers("squeue", 1, error=words)
    with pytest.raises(SlurmDown):
        commands.named(["x"])


def test_what_sbatch_refuses_comes_in_its_words(answers):
    answers("sbatch", 1, error="sbatch: error: invalid partition specified: nix")
    with pytest.raises(SlurmRefused, match="invalid partition specified: nix"):
        commands.submit("#!/bin/sh\n", [])


@pytest.mark.parametrize("printed", ["17\n", "17;cluster\n", "sbatch: note\n17\n"])
def test_the_id_of_a_submitted_job_is_read(answers, printed: str):
    answers("sbatch", 0, out=printed)
    assert commands.submit("#!/bin/sh\n", []) == "17"


def test_the_variables_of_a_job_that_a_session_is_in_do_not_change_a_submission(
    answers, monkeypatch, tmp_path
):
    for name in ("SLURM_JOB_ID", "SBATCH_PARTITION", "SLURM_CLUSTERS", "TMPDIR"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    answers("sbatch", 0, out="1\n")
    commands.submit("#!/bin/sh\n", [])
    names = {line.partition("=")[0] for line in (tmp_path / "variables").read_text().splitlines()}
    assert "SLURM_CONF" in names
    assert not {"SLURM_JOB_ID", "SBATCH_PARTITION", "SLURM_CLUSTERS", "TMPDIR"} & names


def test_a_cluster_without_accounting_knows_nothing_of_old_jobs(answers):
    answers("sacct", 1, error="Slurm accounting storage is disabled")
    assert commands.ended("3") is None


def test_a_job_that_has_ended_is_cancelled_without_a_word(answers):
    answers("scancel", 1, error="scancel: error: Kill job error on job id 3: Invalid job id")
    commands.cancel("3")

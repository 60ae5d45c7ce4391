"""How a silent job has ended, and why one waits, in words."""

import pytest

from engine.executors.slurm.causes import end_of, why_waiting
from engine.executors.slurm.commands import Job


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("NODE_FAIL", "its node failed"),
        ("BOOT_FAIL", "did not boot"),
        ("PREEMPTED", "to another job"),
        ("TIMEOUT", "time limit"),
        ("COMPLETED", "without a word"),
        ("FAILED", "without a word"),
        ("A_STATE_OF_LATER", "without a word"),
    ],
)
def test_what_its_place_took_away_goes_on(state: str, words: str):
    end = end_of(Job("3", state))
    assert end["is_lost"] is True and words in end["reason"] and f"job 3: {state}" in end["reason"]


def test_a_job_that_nobody_knows_any_more_goes_on():
    assert end_of(None)["is_lost"] is True


@pytest.mark.parametrize(("state", "kind"), [("OUT_OF_MEMORY", "oom"), ("CANCELLED", "killed")])
def test_what_would_end_again_or_was_ended_on_purpose_does_not_go_on(state: str, kind: str):
    for is_taken in (False, True):
        end = end_of(Job("3", state, "why"), is_taken=is_taken)
        assert (end["state"], end["reason_kind"]) == ("failed", kind)
        assert "is_lost" not in end and end["hint"] and "why" in end["reason"]


def test_a_run_that_was_told_to_end_has_ended_as_it_was_told():
    assert end_of(Job("3", "CANCELLED"), is_asked=True)["state"] == "cancelled"
    assert end_of(None, is_asked=True)["state"] == "cancelled"


def test_a_job_that_slurm_told_to_end_goes_on_in_the_next():
    end = end_of(Job("3", "COMPLETED"), is_taken=True)
    assert end["is_lost"] is True and "at its limit or for another one" in end["reason"]


def test_why_a_job_waits_is_said_with_what_to_do_and_when_it_may_start():
    job = Job("3", "PENDING", "Priority", "2026-11-29T01:00:00")
    assert why_waiting(job) == "Slurm: Priority; expected to start at 2026-11-29T01:00:00"
    assert "time_hours" in why_waiting(Job("3", "PENDING", "PartitionTimeLimit"))
    assert why_waiting(Job("3", "PENDING")) == ""  # it has not been looked at
    assert why_waiting(Job("3", "CONFIGURING")) == "Slurm: configuring"

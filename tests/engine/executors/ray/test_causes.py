"""What became of a job that left no last word, from Ray's."""

import pytest

from engine.executors.ray.causes import end_of, why_waiting
from engine.executors.ray.jobs_api import Job


@pytest.mark.parametrize(
    ("job", "is_lost", "kind", "words"),
    [
        (Job("j", "FAILED", error="JOB_SUPERVISOR_ACTOR_DIED"), True, "infra", "node lost"),
        (None, True, "infra", "node lost"),
        (Job("j", "FAILED", exit_code=137), True, "infra", "killed on its node"),
        (Job("j", "SUCCEEDED", exit_code=0), True, "infra", "without a word"),
        (Job("j", "STOPPED"), False, "killed", "stopped on the cluster"),
        (Job("j", "FAILED", "No module named x", exit_code=1), False, "infra", "No module named x"),
    ],
)
def test_a_job_that_its_place_took_away_can_go_on_and_others_say_why_not(job, is_lost, kind, words):
    end = end_of(job)
    assert (end.get("is_lost", False), end["reason_kind"]) == (is_lost, kind)
    assert words in str(end["reason"])


def test_one_that_was_told_to_end_was_cancelled_whatever_ray_says():
    assert end_of(Job("j", "FAILED", exit_code=137), is_asked=True)["state"] == "cancelled"


def test_why_it_waits_is_rays_own_reason():
    assert why_waiting(Job("j", "PENDING", "no room")) == "Ray: no room"

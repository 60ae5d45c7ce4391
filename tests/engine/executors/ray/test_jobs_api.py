"""Ray's Jobs API as it answers, against a server that answers in the same shapes."""

from collections.abc import Iterator

import pytest
from fake_ray import FakeRay

from engine.executors.ray.jobs_api import Job, JobsApi
from engine.executors.ssh import FarError, HostLost, HostRefused


@pytest.fixture
def fake() -> Iterator[FakeRay]:
    server = FakeRay(token="t" * 32)
    yield server
    server.close()


@pytest.fixture
def api(fake: FakeRay) -> Iterator[JobsApi]:
    client = JobsApi(fake.address, fake.token, "POOL_TOKEN")
    yield client
    client.close()


def test_a_job_that_was_submitted_is_found_listed_and_forgotten(fake, api):
    fake.missing.add("h100")
    api.submit("hs-a-1", "true", {"run": "a"}, {"entrypoint_resources": {"h100": 1}})
    assert (api.find("hs-a-1") or Job("", "FAILED")).status == "PENDING"
    assert "waiting for resources" in (api.find("hs-a-1") or Job("", "FAILED")).message
    api.submit("hs-b-1", "exit 3", {}, {})
    fake.jobs["hs-b-1"].process.wait()
    job = api.find("hs-b-1")
    assert job and (job.status, job.exit_code, job.is_ended) == ("FAILED", 3, True)
    assert [job.id for job in api.owned("hs-a-")] == ["hs-a-1"]
    api.delete("hs-a-1")  # it lives: Ray answers an error, and it stays
    api.delete("hs-b-1")
    api.delete("hs-b-1")
    assert [job.id for job in api.owned("hs-")] == ["hs-a-1"]
    assert api.find("hs-b-1") is None and api.version() == "2.60.0"


def test_a_job_of_an_id_that_is_there_is_that_job(fake, api):
    api.submit("hs-a-1", "sleep 30", {}, {})
    api.submit("hs-a-1", "true", {}, {})
    assert fake.jobs["hs-a-1"].facts["entrypoint"] == "sleep 30"


def test_what_ray_refuses_is_said_with_its_last_words(fake, api, monkeypatch):
    text = "Traceback (most recent call last):\n  File x\nTypeError: unexpected keyword"
    monkeypatch.setattr(fake, "_submit", lambda body: (400, text))
    with pytest.raises(FarError, match="TypeError: unexpected keyword"):
        api.submit("hs-a-1", "true", {}, {})


@pytest.mark.parametrize(("token", "env"), [("", ""), ("wrong" * 8, "POOL_TOKEN")])
def test_a_token_that_ray_does_not_take_is_for_a_person_to_mend(fake, token, env):
    with pytest.raises(HostRefused) as error:
        JobsApi(fake.address, token, env).find("x")
    assert (env or "token_env") in error.value.hint


def test_an_api_that_is_away_or_is_none_of_rays_says_nothing_of_a_job(fake, api, monkeypatch):
    assert api.is_open() is False
    monkeypatch.setattr(fake, "answer", lambda *_: (502, "<html>bad gateway</html>"))
    with pytest.raises(HostLost, match="502"):
        api.find("x")
    monkeypatch.setattr(fake, "answer", lambda *_: (200, "<html>a login page</html>"))
    with pytest.raises(HostLost, match="no form of Ray"):
        api.find("x")
    assert api.is_open() is True
    fake.close()
    with pytest.raises(HostLost, match="does not answer"):
        api.find("x")

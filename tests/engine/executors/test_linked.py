"""A probe over a connection, with a host whose answers the test gives."""

from pathlib import Path
from typing import Any, cast

import pytest

from engine.core.files import JsonObject
from engine.executors import bundle, hosts
from engine.executors.linked import LinkedExecutor
from engine.executors.ssh import Link
from engine.home.run_dir import Home
from engine.machine.processes.seam import Handle, Probe

DONE = {"state": "done", "reason_kind": "", "reason": "", "verdict": "better"}


class AnsweringLink:
    """A host that gives the same answer to every look."""

    facts: JsonObject = {"root": "/there"}  # noqa: RUF012

    def __init__(self, answer: JsonObject) -> None:
        self.answer = answer

    def call(self, *_names: str, **_arguments: Any) -> JsonObject:
        return {}

    def job(self, *_names: str, **_arguments: Any) -> JsonObject:
        return self.answer


def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **answer: object) -> Probe:
    monkeypatch.setattr(bundle, "send_source", lambda _link: "source")
    home = Home.locate(tmp_path / "home")
    host = hosts.add_host(home, "box", {})
    link = cast(Link, AnsweringLink({"launch": 1, **answer}))
    executor = LinkedExecutor(home, host, link)
    return executor.probe(home.run("far-1"), Handle(executor.name, 1, "started"))


def test_the_state_of_a_run_that_ended_is_that_of_its_end_whatever_its_last_beat_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for beat in ({}, {"state": "running"}):
        probe = probed(tmp_path / str(len(beat)), monkeypatch, life="exited", end=DONE, **beat)
        assert (probe.life, probe.state) == ("exited", "done")


def test_the_state_of_a_run_that_lives_is_that_of_its_last_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    probe = probed(tmp_path, monkeypatch, life="running", state="queued")
    assert (probe.life, probe.state, probe.end) == ("running", "queued", None)
    assert probed(tmp_path / "b", monkeypatch, life="gone-mad", end=DONE).end is None

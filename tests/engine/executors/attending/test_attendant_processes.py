"""Runs on another machine whose processes here come and go; the other machine is in memory."""

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from stand_ins import stand_in

from engine.core.errors import UserError
from engine.core.files import read_json, read_lines, write_json
from engine.core.hints import Hint
from engine.executors import hosts
from engine.executors.attending import attendant
from engine.executors.attending.attendant import Attendant, sweep
from engine.home.store import Store
from engine.home.user_config import Host
from engine.machine.processes import launcher, outcome
from engine.machine.processes.seam import End, Handle, Owned, Probe
from engine.models import catalog
from engine.runs.lifecycle import cancel
from engine.runs.run_status import status_of

CANCELLED = End("cancelled", "cancelled", "asked to end", Hint(), "unknown")
OUT_OF_MEMORY = End("failed", "oom", "no memory", Hint(), "unknown")


class Elsewhere:
    """An executor that says of each launch what a test has put there."""

    name = "ssh:box"
    link = None

    def __init__(self, home, ends: dict[int, End]) -> None:
        self.home, self.ends = home, ends
        self.look: dict = {}
        self.owned: list[Owned] = []
        self.while_listing = lambda: None
        self.while_probing = lambda: None
        self.asked: list[tuple[str, int]] = []

    def send(self, run, config, handle) -> int:
        return 0

    def folder(self, run, handle) -> str:
        return "there"

    def start(self, run, handle) -> None:
        self.asked.append(("start", handle.launch))

    def probe(self, run, handle) -> Probe:
        self.while_probing()
        return Probe("exited", end=self.ends[handle.launch], spent_s=7.0)

    def stop(self, run, handle) -> None:
        self.asked.append(("stop", handle.launch))

    def reap(self, run, handle) -> None:
        self.asked.append(("reap", handle.launch))

    def list_owned(self) -> list[Owned]:
        self.while_listing()
        return self.owned


@pytest.fixture
def far(bench):
    """A queued run that goes to ssh:box."""
    hosts.add_host(bench.home, "box", {"ssh": "box"})
    run = bench.queue()
    config = read_json(run.config)
    config["base"] = {"ref": "pebble", "path": str(catalog.BUILTIN["pebble"])}
    config["settings"]["compute"] = "ssh:box"
    write_json(run.config, config)
    with Store(bench.home) as store:
        store.update_run(run.id, only_in={"queued"}, compute="ssh:box")
    return run


def test_one_that_was_told_to_end_while_nobody_looked_after_it_is_started_again(
    bench, far, monkeypatch
):
    there = Elsewhere(bench.home, {1: CANCELLED, 2: OUT_OF_MEMORY})

    @contextlib.contextmanager
    def connected(*_: object) -> Iterator[Elsewhere]:
        yield there

    monkeypatch.setattr(attendant, "connected", connected)
    Handle("ssh:box", 1, "started").write(far)
    status = Attendant(far, far.read_config(), Host("box", "box")).attend()
    assert (status, read_json(far.failure)["kind"]) == (outcome.EXIT_FAILED, "oom")
    assert read_json(far.far("placement"))["launch"] == 2
    assert read_json(far.far("spent"))["seconds"] == 14.0  # of both launches


class Forgetful(Elsewhere):
    """A place that has nothing of the first launches any more; `spent_s` is what it counted."""

    def __init__(self, home, forgotten: int, spent_s: float | None) -> None:
        super().__init__(home, {forgotten + 1: OUT_OF_MEMORY})
        self.forgotten, self.spent_s = forgotten, spent_s

    def probe(self, run, handle) -> Probe:
        if handle.launch <= self.forgotten:
            return Probe("gone", spent_s=self.spent_s)
        return super().probe(run, handle)


@pytest.mark.parametrize(("spent_s", "launches"), [(None, 4), (0.0, 7)])
def test_what_is_lost_again_and_again_is_given_up_unless_it_never_had_a_device(
    bench, far, monkeypatch, spent_s: float | None, launches: int
):
    there = Forgetful(bench.home, 6, spent_s)

    @contextlib.contextmanager
    def connected(*_: object) -> Iterator[Elsewhere]:
        yield there

    monkeypatch.setattr(attendant, "connected", connected)
    Handle("ssh:box", 1, "started").write(far)
    assert Attendant(far, far.read_config(), Host("box", "box")).attend() == outcome.EXIT_FAILED
    handle = Handle.read(far)
    assert handle is not None and (handle.launch, handle.phase) == (launches, "ended")
    kind = read_json(far.failure)["kind"]
    assert kind == ("infra" if spent_s is None else "oom")
    if spent_s is None:
        assert "as 3 times before without a new checkpoint" in read_json(far.failure)["message"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "no space left"),
        UserError("DISK_FULL", "the disk is full", hint=""),
        UserError("HOME_UNUSABLE", "the database is locked", hint="", retryable=True),
    ],
)
def test_a_full_disk_or_a_locked_database_here_ends_nothing_over_there(
    bench, far, monkeypatch, error: Exception
):
    there = Elsewhere(bench.home, {1: OUT_OF_MEMORY})
    failures = [error, error]

    def fail_at_first() -> None:
        if failures:
            raise failures.pop()

    @contextlib.contextmanager
    def connected(*_: object) -> Iterator[Elsewhere]:
        yield there

    there.while_probing = fail_at_first
    monkeypatch.setattr(attendant, "connected", connected)
    Handle("ssh:box", 1, "started").write(far)
    status = Attendant(far, far.read_config(), Host("box", "box"), wait_s=0.01).attend()
    assert (status, read_json(far.failure)["kind"]) == (outcome.EXIT_FAILED, "oom")
    assert "stop" not in dict(there.asked)
    events = [event["event"] for event in read_lines(far.events)[0]]
    assert events.count("home_hindered") == 1


def test_what_is_resumed_while_the_other_machine_is_asked_is_left_alone(bench, far):
    there = Elsewhere(bench.home, {})
    there.owned = [Owned(far.id, 1, "running")]

    def resume() -> None:
        with Store(bench.home) as store:
            store.resume_run(far.id, max_gpu_hours=1, request_id="", body={})

    with Store(bench.home) as store:
        store.set_state(far.id, "cancelled", only_from={"queued"})
    there.while_listing = resume
    assert sweep(there) == [] == there.asked
    with Store(bench.home) as store:
        store.set_state(far.id, "cancelled", only_from={"queued"})
    there.while_listing = lambda: None
    sweep(there)
    assert there.asked == [("stop", 1)]


@pytest.fixture
def looked_after(bench, far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run, with a process that looks after it and notes what it was told."""
    script = tmp_path / "looks_after.py"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "run = pathlib.Path(sys.argv[1])\n"
        "if '--tidy' in sys.argv:\n"
        "    (run / 'tidied').touch()\n"
        "    sys.exit(0)\n"
        "def on_term(*_):\n"
        "    (run / 'told').touch()\n"
        "    sys.exit(4)\n"
        "signal.signal(signal.SIGTERM, on_term)\n"
        "(run / 'looks').touch()\n"
        "time.sleep(60)\n"
    )
    stand_in(monkeypatch, attendant=script)
    monkeypatch.setenv("HONESMITH_STOP_GRACE_S", "20")
    return far


def until_looked_after(bench, run) -> int:
    """Until the attendant stands; returns the supervisor's process id."""
    supervisor, _ = bench.pids(run)
    bench.until((run.path / "looks").exists, "it is looked after")
    (run.path / "looks").unlink()
    return supervisor


def test_a_machine_that_is_switched_off_does_not_end_what_runs_elsewhere(bench, looked_after):
    run = looked_after
    launcher.start_queued(bench.home)
    os.kill(until_looked_after(bench, run), signal.SIGTERM)
    bench.until(lambda: not launcher.is_alive(run), "nothing of it lives here")
    assert not (run.path / "told").exists()
    launcher.reap(bench.home)
    until_looked_after(bench, run)
    cancel(bench.home, run.id)
    bench.until_state(run, "cancelled")
    assert (run.path / "told").exists()


def test_however_often_this_machine_dies_a_run_elsewhere_goes_on(bench, looked_after):
    run = looked_after
    Handle("ssh:box", 1, "started").write(run)
    launcher.start_queued(bench.home)
    for _ in range(outcome.MAX_CONTINUATIONS + 1):
        bench.kill(until_looked_after(bench, run))
        bench.until(lambda: not launcher.is_alive(run), "nothing of it lives here")
        launcher.reap(bench.home)
    until_looked_after(bench, run)
    assert bench.row(run).attempt == outcome.MAX_CONTINUATIONS + 2
    cancel(bench.home, run.id)
    bench.until_state(run, "cancelled")


def test_deaths_of_this_machine_while_it_runs_elsewhere_leave_the_next_start_its_chances(
    bench, looked_after
):
    """The fourth death came while a lost launch was being started again: the run was given up."""
    run = looked_after
    Handle("ssh:box", 1, "started").write(run)
    launcher.start_queued(bench.home)
    for _ in range(outcome.MAX_CONTINUATIONS):
        bench.kill(until_looked_after(bench, run))
        bench.until(lambda: not launcher.is_alive(run), "nothing of it lives here")
        launcher.reap(bench.home)
    supervisor = until_looked_after(bench, run)
    Handle("ssh:box", 2, "starting").write(run)
    bench.kill(supervisor)
    bench.until(lambda: not launcher.is_alive(run), "nothing of it lives here")
    launcher.reap(bench.home)
    until_looked_after(bench, run)
    assert bench.row(run).continuations == 2
    cancel(bench.home, run.id)
    bench.until_state(run, "cancelled")


def test_a_cancel_of_one_that_is_queued_again_is_told_to_the_other_machine(bench, looked_after):
    run = looked_after
    Handle("ssh:box", 1, "started").write(run)
    bench.home.config_file.write_text("")  # so that it stays in the queue
    cancel(bench.home, run.id)
    assert bench.row(run).state == "cancelled"
    bench.until((run.path / "tidied").exists, "the other machine is told")


def test_a_cancel_whose_supervisor_died_before_it_acted_is_told_by_who_settles_it(
    bench, looked_after
):
    run = looked_after
    Handle("ssh:box", 1, "started").write(run)
    with Store(bench.home) as store:
        store.set_state(run.id, "preparing", only_from={"queued"}, device="ssh:box")
        store.set_state(run.id, "stopping", only_from={"preparing"}, reason_kind="cancelled")
    launcher.reap(bench.home)
    assert bench.row(run).state == "cancelled"
    bench.until((run.path / "tidied").exists, "the other machine is told")


def test_the_cancel_of_a_plan_is_told_to_the_other_machine(bench, looked_after):
    run = looked_after
    Handle("ssh:box", 1, "started").write(run)
    bench.home.config_file.write_text("")  # so that it stays in the queue
    with Store(bench.home) as store:
        store.update_run(run.id, only_in={"queued"}, plan="far-plan-1")
    cancel(bench.home, "far-plan-1")
    assert bench.row(run).state == "cancelled"
    bench.until((run.path / "tidied").exists, "the other machine is told")


def waits(bench, run) -> list[str]:
    """What the status of a queued run says of its host; nothing is started for it."""
    with Store(bench.home) as store:
        warnings = status_of(bench.home, store, store.get_run(run.id))["warnings"]
    return [text for text in warnings if "ssh:box" in text]


def test_a_run_whose_host_was_removed_says_what_it_waits_for_and_what_ends_that(bench, far):
    assert waits(bench, far) == []
    hosts.remove_host(bench.home, "box")
    (text,) = waits(bench, far)
    assert "config.toml does not name any more" in text
    assert "honesmith hosts add box" in text and "cancel the run" in text


def test_a_run_whose_host_has_all_the_runs_that_it_takes_says_so(bench, far):
    other = bench.queue("other-grpo")
    with Store(bench.home) as store:
        store.set_state(other.id, "preparing", only_from={"queued"}, device="ssh:box")
    (text,) = waits(bench, far)
    assert "1 of at most 1 runs" in text and "[hosts.box]" in text

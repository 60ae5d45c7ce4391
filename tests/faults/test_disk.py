"""F12, F13, F15: disks that are full, out of inodes, read-only, or that fail at the N-th call."""

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from disks import ended, fill, remounted, use_up_inodes
from invariants import Witness, assert_same_curve, curve, until, verify_newest
from steady_trainer import expected

from engine.core.errors import UserError
from engine.core.files import Appender, last_line, read_json, read_lines, write_json
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.machine.processes.programs import STAND_INS
from engine.runs import lifecycle
from engine.runs.reading import logs
from engine.runs.submit.requests import DryRunRequest, TrainRequest
from mcp_server.api import verbs
from mcp_server.cli import starter
from tests.engine.conftest import add_env

STEADY = {"steps": 6, "save_every": 2}
TORCH: dict[str, Any] = {
    "steps": 60,
    "batch_size": 4,
    "eval_rows": 4,
    "skill_rows": 4,
    "eval_every": 60,
    "save_every": 2,
    "keep_checkpoints": 2,
    "learning_rate": 1e-3,
    "lora_rank": 4,
}


def refused(home: Home, **asked: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        lifecycle.submit(home, TrainRequest(**asked))
    return caught.value


@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_f12_a_submit_to_a_full_disk_is_refused_in_words_and_works_after_cleaning(
    small_home, steady, monkeypatch, what
):
    home = small_home("size=4m,nr_inodes=220")
    env = add_env(home, "sums")
    witness = Witness(home)
    asked = {"env_id": env, "algorithm": "grpo", "settings": STEADY, "request_id": "r-1"}
    with monkeypatch.context() as patch:
        # What is estimated to fit is a test of its own: here the disk lies.
        patch.setattr("engine.runs.submit.training.check_size", lambda *_: None)
        left = [fill(home.root)] if what == "bytes" else use_up_inodes(home.root)
        for _ in range(2):
            error = refused(home, **asked)
            assert error.code == "DISK_FULL" and error.retryable, error.message
            assert str(home.root) in error.message
            assert "inodes" in error.message + error.hint
        witness.look()
        assert lifecycle.overview(home)["runs"] == []  # who only looks is answered
        for path in left:
            path.unlink()
        run = home.run(lifecycle.submit(home, TrainRequest(**asked))["run_id"])
    witness.acked["r-1"] = run.id
    assert ended(run).state == "done"
    assert_same_curve(curve(run), expected(STEADY["steps"]))
    witness.over()


@pytest.mark.parametrize("leave", [0, 16_384, 120_000])
def test_f12_a_disk_that_fills_up_under_a_trainer_fails_the_run_and_keeps_its_checkpoint(
    small_home, monkeypatch, leave
):
    home = small_home("size=60m")
    monkeypatch.setattr(
        "engine.runs.submit.training.check_size", lambda *_: None
    )  # half a gigabyte stays free
    env = add_env(home, "sums")
    run = home.run(
        lifecycle.submit(home, TrainRequest(env_id=env, algorithm="sft", settings=TORCH))["run_id"]
    )
    until(lambda: (last_line(run.metrics) or {}).get("step", 0) >= 5, "it trains", 100)
    filler = fill(home.root, leave)
    until(lambda: not launcher.is_alive(run), "the trainer has ended", 100)
    verify_newest(run)
    kept = run.latest_checkpoint()
    assert kept is not None
    assert lifecycle.status(home, run.id)["run_id"] == run.id  # a server answers on a full disk
    filler.unlink()
    launcher.reap(home)
    row = ended(run)
    if row.state == "failed":
        assert row.reason_kind == "infra", row
        assert str(home.root) in row.reason and "bytes" in row.reason and "resume" in str(row.hint)
        lifecycle.submit(home, TrainRequest(resume=run.id))
    else:  # there was no room for any last word: whoever looked first continued it
        assert (leave, row.state, row.continuations) == (min(leave, 16_384), "done", 1)
    assert ended(run).state == "done"
    steps = [line["step"] for line in read_lines(run.metrics, 0, 10**8)[0]]
    assert steps == list(range(TORCH["steps"] + 1))
    verify_newest(run)


def test_f13_a_home_that_cannot_be_written_is_read_and_every_change_refused_in_words(
    bench, mount, tmp_path
):
    run = bench.start(steps=3)
    bench.until_state(run, "done")
    env = add_env(bench.home, "sums")
    folder = mount("", "--bind", str(bench.home.root))
    remount = ["mount", "-o", "remount,ro,bind", str(folder)]
    assert subprocess.run(remount, capture_output=True).returncode == 0
    home = Home.locate(folder)
    assert lifecycle.status(home, run.id)["verdict"] == "better"
    assert [found["run_id"] for found in lifecycle.overview(home)["runs"]] == [run.id]
    assert logs.read_logs(home, run.id).rows
    for refuse in (
        lambda: lifecycle.submit(home, TrainRequest(env_id=env, settings=STEADY)),
        lambda: Home.locate(folder / "below"),
        lambda: _set_note(home, run),
    ):
        with pytest.raises(UserError) as caught:
            refuse()
        assert caught.value.code == "HOME_UNUSABLE" and str(folder) in caught.value.message
        assert "writ" in caught.value.hint


def _set_note(home: Home, run: RunDir) -> None:
    with Store(home) as store:
        store.update_run(run.id, only_in={"done"}, note="changed")


# --- the N-th call fails ----------------------------------------------------------------------

CALLS = ("open", "write", "fsync", "replace", "rename", "mkdir", "link", "ftruncate")
OPEN = os.open
FAULTS = (errno.EIO, errno.ENOSPC, errno.EMFILE)  # EINTR never arrives: Python calls again


def is_to_read(call: Callable[..., Any], args: Sequence[Any]) -> bool:
    return call is OPEN and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)


class Faulty:
    """Calls of `os` that change a disk, the n-th of which fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.number = 0, 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrapped(getattr(os, name)))

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if self.left and not is_to_read(call, args):
                self.left -= 1
                if not self.left:
                    raise OSError(self.number, os.strerror(self.number))
            return call(*args, **kwargs)

        return guarded

    def fail(self, nth: int, number: int) -> None:
        self.left, self.number = nth, number

    def failed(self) -> bool:
        """Whether the call was reached; from now on all goes well."""
        reached, self.left = self.left == 0, 0
        return reached


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
def test_f15_a_submit_whose_nth_call_fails_is_made_once_when_it_is_asked_again(
    home, steady, monkeypatch, number
):
    monkeypatch.setattr(launcher, "start_queued", lambda *_: [])
    asked = {"env_id": steady, "algorithm": "grpo", "settings": STEADY}
    lifecycle.submit(home, TrainRequest(request_id="warm", **asked))  # what is cached is cached
    witness, faulty = Witness(home), Faulty(monkeypatch)
    for nth in range(1, 500):
        request = f"r-{nth}"
        faulty.fail(nth, number)
        said = ""
        with contextlib.suppress(OSError, UserError):
            said = lifecycle.submit(home, TrainRequest(request_id=request, **asked))["run_id"]
        reached = faulty.failed()
        again = lifecycle.submit(home, TrainRequest(request_id=request, **asked))["run_id"]
        assert said in ("", again)
        witness.acked[request] = again
        config = read_json(home.run(again).config)
        assert config["run_id"] == again and config["settings"]["steps"] == STEADY["steps"]
        if not reached:
            break
    assert 10 < nth < 499
    witness.look()
    with Store(home) as store:
        assert len(store.list_runs(limit=1000)) == nth + 1
        for row in store.list_runs(limit=1000):
            lifecycle.cancel(home, row.run_id)
    witness.acked["warm"] = f"{steady.partition('@')[0]}-grpo-1"
    witness.over()


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
def test_f15_a_file_whose_nth_call_fails_is_as_before_or_as_wanted(tmp_path, monkeypatch, number):
    faulty = Faulty(monkeypatch)
    log, state = tmp_path / "metrics.jsonl", tmp_path / "state.json"
    write_json(state, {"n": 0})
    lines: list[int] = []
    kept = 0
    for nth in range(1, 100):
        faulty.fail(nth, number)
        told: dict[str, bool] = {}
        with contextlib.suppress(OSError), Appender(log) as appender:
            appender.append({"n": nth})
            told["line"] = True
        with contextlib.suppress(OSError):
            write_json(state, {"n": nth})
            told["state"] = True
        reached = faulty.failed()
        found = [row["n"] for row in read_lines(log)[0]]
        assert found[: len(lines)] == lines and found[len(lines) :] in ([], [nth])
        assert "line" not in told or found[-1] == nth
        now = read_json(state)["n"]
        assert now == nth if "state" in told else now in (kept, nth)
        lines, kept = found, now
        assert [p.name for p in tmp_path.iterdir() if "aside" in p.name] == []
        if not reached:
            break
    assert 5 < nth < 99


@pytest.mark.parametrize("number", FAULTS, ids=errno.errorcode.get)
def test_f15_an_outcome_whose_nth_call_fails_is_settled_by_whoever_looks_next(
    bench, monkeypatch, number
):
    from engine.machine.processes import outcome

    faulty = Faulty(monkeypatch)
    for nth in range(1, 60):
        run = bench.queue()
        with Store(bench.home) as store:
            store.lease_next(["cpu"])
            store.set_state(run.id, "running", only_from={"preparing"})
        write_json(run.result, {"verdict": "better"})
        faulty.fail(nth, number)
        with contextlib.suppress(OSError, UserError), Store(bench.home) as store:
            row = store.get_run(run.id)
            end = outcome.decide(run, row, status=0, elapsed_s=1.0)
            outcome.record(run, end)
            outcome.apply(store, run, row, end)
        reached = faulty.failed()
        (bench.home.root / "hold").touch()
        launcher.reap(bench.home)
        row = bench.row(run)
        if row.state in ("preparing", "running", "queued"):  # no record: it is done again
            (bench.home.root / "hold").unlink()
            row = bench.until_state(run, "done", "failed")
        assert row.state == "done"
        bench.until(lambda run=run: not launcher.is_alive(run), "it is over")
        if not reached:
            break
    assert 3 < nth < 59


def test_f14_half_and_empty_files_of_a_run_are_told_in_words_or_passed_over(bench):
    """Every JSON file of a finished run, cut at its middle, to nothing, and to a list."""
    run = bench.start(steps=3)
    bench.until_state(run, "done")
    files = [run.started_record, run.exit_record, run.result, run.config, run.chain, run.manifest]
    for path in (path for path in files if path.exists()):
        whole = path.read_bytes()
        for content in (b"", whole[: len(whole) // 2], b"[]", b"\xff\xfe\x00"):
            path.write_bytes(content)
            with contextlib.suppress(UserError):
                assert lifecycle.status(bench.home, run.id)["state"] == "done"
            with contextlib.suppress(UserError):
                assert lifecycle.overview(bench.home)["runs"][0]["run_id"] == run.id
            assert launcher.reap(bench.home) == []
        path.write_bytes(whole)
    assert json.loads(run.config.read_text())["run_id"] == run.id


# --- what only plans, and folders for temporary files -----------------------------------------

ASKS: dict[str, Callable[[Home, str], dict[str, Any]]] = {
    "estimate_cost": lambda home, env: verbs.estimate_cost(home, TrainRequest(env_id=env)),
    "dry_run": lambda home, env: verbs.dry_run(home, DryRunRequest(env_id=env)),
    "dry_run with samples": lambda home, env: verbs.dry_run(
        home, DryRunRequest(env_id=env, samples=2)
    ),
}


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("what", ["bytes", "inodes", "read-only"])
@pytest.mark.parametrize("before", ["never asked", "asked before"])
def test_f12_a_plan_is_judged_on_a_full_disk_or_refused_in_words(
    small_home, steady, monkeypatch, what, ask, before
):
    home = small_home("size=4m,nr_inodes=220")
    env = add_env(home, "sums")
    if before == "asked before":
        verbs.dry_run(home, DryRunRequest(env_id=env))
    left = [fill(home.root)] if what == "bytes" else use_up_inodes(home.root)
    if what == "read-only":
        for path in left:
            path.unlink()
        left = []
        remounted(home.root.parent, "ro")
    stand_ins = os.environ[STAND_INS]
    if what != "bytes":  # this machine shall be probed, and cannot be
        monkeypatch.delenv(STAND_INS)
    try:
        said = ASKS[ask](home, env)
    except UserError as error:
        assert error.code == ("HOME_UNUSABLE" if what == "read-only" else "DISK_FULL")
        assert str(home.root) in error.message and error.hint, error.message
    else:
        assert said.get("gpu_hours") or any(c["status"] == "fail" for c in said["checks"])
        assert "Errno" not in json.dumps(said), said
    monkeypatch.setenv(STAND_INS, stand_ins)
    if what == "read-only":
        remounted(home.root.parent, "rw")
    for path in left:
        path.unlink()
    assert ASKS["estimate_cost"](home, env)["gpu_hours"]["likely"] > 0


@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_f12_a_push_to_a_full_disk_is_refused_in_words(small_home, tmp_path, what):
    home = small_home("size=4m,nr_inodes=220")
    folder = tmp_path / "mine"
    starter.new_env(folder, starter.DEFAULT_TEMPLATE)
    left = [fill(home.root)] if what == "bytes" else use_up_inodes(home.root)
    with pytest.raises(UserError) as caught:
        verbs.push_env(home, str(folder))
    assert caught.value.code == "DISK_FULL" and caught.value.hint
    for path in left:
        path.unlink()
    assert verbs.push_env(home, str(folder))["env_id"].startswith("mine@")

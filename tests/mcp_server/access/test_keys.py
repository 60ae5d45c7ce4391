"""Keys of the HTTP server: made once, kept as digests, limited in rate, runs and hours."""

import json
import os
import re
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from typer.testing import CliRunner

from engine.core.errors import UserError
from engine.core.files import is_locked, take_lock
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.runs.submit.admission import EVALUATION_WALL_HOURS
from mcp_server.access.audit_log import Audit, Call
from mcp_server.access.keys import (
    LOCAL,
    OWNER,
    SCOPES,
    Key,
    Keys,
    add_key,
    list_keys,
    remove_key,
    stored_request_id,
)
from mcp_server.access.quotas import (
    LEAST_HOURS,
    Cap,
    cap_function_of,
    check_quota,
    limits_and_use,
    starts_a_run,
)
from mcp_server.access.rate import Rates
from mcp_server.access.sessions import Sessions
from mcp_server.api import verbs
from mcp_server.cli.main import app
from mcp_server.protocol import guard
from mcp_server.protocol.app import build_server
from mcp_server.protocol.guard import GuardedServer

OWNERS = "the-token-of-the-first-start-0123456789"


def call(home: Home, *argv: str) -> dict:
    done = CliRunner().invoke(app, ["key", *argv, "--home", str(home.root), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_key_is_found_by_its_token_and_by_nothing_else(home: Home):
    key, token = add_key(home, "ci", ["train", "read"])
    keys = Keys(home, OWNERS)
    assert keys.find(token.encode()) == key
    assert key.scopes == ("read", "train")
    for wrong in (
        b"",
        token[:-1].encode(),
        token.encode() + b"x",
        b"\xff\xfe",
        key.digest.encode(),
    ):
        assert keys.find(wrong) is None


def test_the_token_of_the_first_start_may_do_everything(home: Home):
    owner = Keys(home, OWNERS).find(OWNERS.encode())
    assert owner is not None and owner.name == OWNER and owner.scopes == SCOPES
    assert not owner.is_limited and not owner.max_deployments and not LOCAL.max_deployments


def test_only_digests_are_kept_and_for_the_owner_alone(home: Home):
    made = call(home, "add", "agent", "--scope", "read,train", "--max-runs", "2")
    token = made["token"]
    assert home.keys.stat().st_mode & 0o777 == 0o600
    kept = [path.read_bytes() for path in home.root.rglob("*") if path.is_file()]
    assert not any(token.encode() in data for data in kept)
    (listed,) = call(home, "list")["keys"]
    assert listed == {
        "name": "agent",
        "scopes": ["read", "train"],
        "calls_per_minute": 600,
        "max_runs": 2,
        "max_deployments": 2,
        "spent_gpu_hours": 0,
        "open_runs": 0,
    }


def test_a_key_that_is_removed_or_expired_is_refused_at_its_next_call(home: Home):
    now = [1000.0]
    keys = Keys(home, OWNERS, clock=lambda: now[0])
    assert keys.find(b"anything") is None
    _, token = add_key(home, "old", ["read"])
    assert keys.find(token.encode()) is not None
    call(home, "remove", "old")
    assert keys.find(token.encode()) is None
    key, brief = add_key(home, "brief", ["read"], days=1)
    now[0] = key.created + 86_399
    assert keys.find(brief.encode()) is not None
    now[0] += 1
    assert keys.find(brief.encode()) is None


@pytest.mark.parametrize(
    "name", ["", "Owner", "owner", "stdio", "a b", "-rf", "x" * 41, "a\n", "ä"]
)
def test_a_name_that_is_none_is_refused(home: Home, name: str):
    with pytest.raises(UserError) as refusal:
        add_key(home, name, ["read"])
    assert refusal.value.code == "BAD_ARGUMENT" and refusal.value.field == "name"


def test_a_scope_nobody_knows_and_a_name_twice_are_refused(home: Home):
    with pytest.raises(UserError, match="scope='root'"):
        add_key(home, "a", ["read", "root"])
    add_key(home, "a", ["read"])
    with pytest.raises(UserError, match="name='a'"):
        add_key(home, "a", ["read"])
    with pytest.raises(UserError, match="name='b'"):
        remove_key(home, "b")
    assert [key.name for key in list_keys(home)] == ["a"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"keys": 3}', '{"keys": [{"name": "x"}]}'])
def test_a_damaged_file_lets_nobody_in_but_the_owner(home: Home, text: str):
    _, token = add_key(home, "a", ["read"])
    home.keys.write_text(text)
    keys = Keys(home, OWNERS)
    assert keys.find(token.encode()) is None
    assert keys.find(OWNERS.encode()) is not None
    with pytest.raises(UserError) as refusal:
        list_keys(home)
    assert refusal.value.code == "HOME_UNUSABLE"


def test_a_key_may_call_so_often_and_no_more():
    now = [0.0]
    rates = Rates(clock=lambda: now[0])
    key = Key("a", calls_per_minute=60)
    assert [rates.wait_s(key) for _ in range(10)] == [0.0] * 10
    assert rates.wait_s(key) == pytest.approx(1.0)
    assert rates.wait_s(Key("b", calls_per_minute=60)) == 0.0, "another key is not held up"
    now[0] = 0.5
    assert rates.wait_s(key) == pytest.approx(0.5)
    now[0] = 1.0
    assert rates.wait_s(key) == 0.0
    assert rates.wait_s(Key("free", calls_per_minute=0)) == 0.0


def asking(*headers: tuple[bytes, bytes], path: str = "/mcp") -> dict:
    """The scope of a request."""
    return {"method": "POST", "path": path, "headers": list(headers)}


async def nowhere(message) -> None:
    """A send."""


def test_sessions_that_are_being_opened_count_and_a_failed_opening_does_not():
    sessions, key = Sessions(idle_s=600, max_sessions=2), Key("a")
    with sessions.watch_request(asking(), key, nowhere):
        assert sessions.may_open(asking(), key)
        with sessions.watch_request(asking(), key, nowhere):
            assert not sessions.may_open(asking(), key)
            assert sessions.may_open(asking(), Key("b"))
        assert sessions.may_open(asking(), key)


async def test_an_opened_session_counts_once():
    sessions, key = Sessions(idle_s=600, max_sessions=2), Key("a")
    with sessions.watch_request(asking(), key, nowhere) as send:
        headers = [(b"mcp-session-id", b"s1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        assert sessions.may_open(asking(), key)
        with sessions.watch_request(asking(), key, nowhere):
            assert not sessions.may_open(asking(), key)


def test_who_opens_no_session_is_answered_however_many_are_open():
    sessions, key = Sessions(idle_s=600, max_sessions=0), Key("a")
    assert not sessions.may_open(asking(), key)
    assert not sessions.may_open(asking((b"mcp-protocol-version", b"2025-06-18")), key)
    assert sessions.may_open(asking((b"mcp-protocol-version", b"2026-07-28")), key)
    assert sessions.may_open(asking(path="/health"), key)


def test_a_key_may_have_so_many_sessions_and_idle_ones_do_not_count():
    now = [0.0]
    sessions = Sessions(idle_s=600, max_sessions=1, clock=lambda: now[0])
    key, other = Key("a"), Key("b")
    fresh = asking()
    named = asking((b"mcp-session-id", b"s1")) | {"method": "DELETE"}

    async def send(message):
        pass

    async def answered(scope: dict, status: int, header: bytes = b"") -> None:
        headers = [(b"mcp-session-id", header)] if header else []
        started = {"type": "http.response.start", "status": status, "headers": headers}
        await sessions.counting_send(scope, key, send)(started)

    import asyncio

    assert sessions.may_open(fresh, key)
    asyncio.run(answered(fresh, 200, b"s1"))
    assert not sessions.may_open(fresh, key)
    assert sessions.may_open(named, key) and sessions.may_open(fresh, other)
    asyncio.run(answered(named, 200))
    assert sessions.may_open(fresh, key)
    asyncio.run(answered(fresh, 200, b"s2"))
    now[0] = 601
    assert sessions.may_open(fresh, key)


def started(home: Home, who: str, at: float, hours: float = 1.0) -> str:
    """A run that `who` submitted at that time."""
    with Store(home) as store:
        row = store.insert_run(
            NewRun("arith-grpo", "train", "grpo", "arith@0", "pebble", max_gpu_hours=hours)
        )
    call_ = Call(who, "http", "submit_train", {})
    with Audit(home, clock=lambda: at).recording(call_) as record:
        record.succeeded({"run_id": row.run_id})
    return row.run_id


def end(home: Home, run_id: str, spent: float) -> None:
    with Store(home) as store:
        store.lease_next(["cpu"])
        store.set_state(run_id, "running", only_from={"preparing"})
        store.set_state(run_id, "done", only_from={"running"}, spent_hours=spent)


def refused(
    home: Home, key: Key, now: float, tool: str = "submit_train", **arguments: object
) -> str:
    try:
        check_quota(home, key, tool, arguments, clock=lambda: now)
    except UserError as error:
        asked = arguments.get("max_gpu_hours", 0)
        fits_a_day = not key.gpu_hours_per_day or asked <= key.gpu_hours_per_day
        assert error.code == "QUOTA" and error.hint
        assert error.retryable == fits_a_day, "more than a day has fits on no day"
        return error.message
    return ""


def test_a_key_may_have_so_many_runs_open(home: Home):
    key = Key("agent", max_runs=2)
    first = started(home, "agent", 10)
    started(home, "somebody", 11)
    assert not refused(home, key, 20)
    started(home, "agent", 12)
    assert "may have 2" in refused(home, key, 20)
    end(home, first, 0.1)
    assert not refused(home, key, 20)


def test_the_hours_of_a_day_come_back_after_a_day(home: Home):
    key = Key("agent", gpu_hours_per_day=3)
    run = started(home, "agent", 1_000, hours=2)
    assert "promised 2" in refused(home, key, 1_000, max_gpu_hours=1.5)
    assert not refused(home, key, 1_000, max_gpu_hours=1)
    assert not refused(home, key, 1_000), "a submit that names no hours is given what is left"
    end(home, run, 0.5)
    assert not refused(home, key, 1_000, max_gpu_hours=2.5), "an ended run counts what it took"
    later = 1_000 + 86_401
    assert "promised 0" in refused(home, key, later, max_gpu_hours=4)
    assert not refused(home, key, later, max_gpu_hours=3)


def test_an_evaluation_is_given_twice_what_it_takes_at_most_or_what_is_left(home: Home):
    key = Key("agent", gpu_hours_per_day=1)
    cap_function = cap_function_of(home, key, clock=lambda: 1_000)
    assert (
        cap_function is not None
        and cap_function_of(home, Key("agent"), clock=lambda: 1_000) is None
    )
    assert cap_function(0.3) == pytest.approx(0.6) and cap_function(0.6) == 1.0
    assert cap_function(0.0) == pytest.approx(2 * LEAST_HOURS), "the start alone takes some"
    with pytest.raises(UserError) as refusal:
        cap_function(1.5)
    assert refusal.value.code == "QUOTA" and "asks for 1.5" in refusal.value.message
    assert "fewer rows" in refusal.value.hint
    run = started(home, "agent", 1_000, hours=0.6)
    assert cap_function(0.3) == pytest.approx(0.4)
    with pytest.raises(UserError, match=r"promised 0\.6; this call asks for 0\.5"):
        cap_function(0.5)
    end(home, run, 0.1)
    assert cap_function(0.5) == pytest.approx(0.9), "an ended one counts what it took"


def test_an_evaluation_is_refused_when_nothing_is_left_and_a_probe_when_it_would_start(home: Home):
    key = Key("agent", gpu_hours_per_day=1)
    run = started(home, "agent", 1_000, hours=0.99)
    assert not refused(home, key, 1_000, "evaluate")
    end(home, run, 1.0)
    assert "promised 1" in refused(home, key, 1_000, "evaluate")
    assert not refused(home, key, 1_000, "dry_run", samples=8), "it may have been made before"
    cap_function = cap_function_of(home, key, clock=lambda: 1_000)
    assert cap_function is not None
    with pytest.raises(UserError, match="promised 1"):
        cap_function(0.0)


def answered(home: Home, who: str, at: float, run_id: str, tool: str = "dry_run", **said: object):
    """The line of a call that was answered with that run."""
    with Audit(home, clock=lambda: at).recording(Call(who, "http", tool, {})) as record:
        record.succeeded({"run_id": run_id, **said})


def test_a_run_counts_for_the_key_and_on_the_day_that_started_it(home: Home):
    run, later = started(home, "first", 1_000), 1_000 + 90_000
    answered(home, "second", 1_001, run)
    answered(home, "first", later, run)
    assert Audit(home).runs_of("first") == [run] and Audit(home).runs_of("second") == []
    assert Audit(home).runs_of("first", later - 86_400) == []
    assert not refused(home, Key("second", max_runs=1, gpu_hours_per_day=2), 1_002)
    assert not refused(home, Key("first", gpu_hours_per_day=2), later)
    answered(home, "second", later, run, "submit_train", resumed_from="")
    assert Audit(home).runs_of("second", later) == [run], "a resumed run is started again"


def test_a_run_older_than_the_day_does_not_count_where_its_first_line_is_gone(home: Home):
    with Store(home) as store:
        row = store.insert_run(NewRun("sums-probe", "probe", "probe", "sums@0", "pebble"))
    tomorrow = row.created + 90_000
    answered(home, "agent", tomorrow, row.run_id)
    assert not refused(home, Key("agent", gpu_hours_per_day=2), tomorrow)


def test_an_evaluation_without_a_cap_counts_with_the_hours_after_which_it_is_ended(home: Home):
    key = Key("agent", gpu_hours_per_day=EVALUATION_WALL_HOURS + 1)
    started(home, "agent", 1_000, hours=0)
    assert f"promised {EVALUATION_WALL_HOURS:g}" in refused(home, key, 1_000, max_gpu_hours=2)


def test_a_resumed_run_counts_what_it_took_before_and_its_new_cap(home: Home):
    key = Key("agent", gpu_hours_per_day=4)
    run = started(home, "agent", 1_000, hours=2)
    with Store(home) as store:
        store.lease_next(["cpu"])
        store.set_state(run, "running", only_from={"preparing"})
        store.set_state(run, "failed", only_from={"running"}, spent_hours=1.5)
        store.resume_run(run, max_gpu_hours=2, request_id="", body={})
    assert "promised 3.5" in refused(home, key, 1_000, max_gpu_hours=1)
    assert not refused(home, key, 1_000, max_gpu_hours=0.5)


def test_what_was_answered_before_may_be_asked_again(home: Home):
    key = Key("agent", max_runs=1, gpu_hours_per_day=2)
    with Store(home) as store:
        row = store.insert_run(
            NewRun(
                *("arith-grpo", "train", "grpo", "arith@0", "pebble"),
                max_gpu_hours=2,
                request_id=stored_request_id(key, "once"),
                body={"env_id": "arith@0"},
            )
        )
    with Audit(home, clock=lambda: 1_000).recording(Call("agent", "http", "submit_train", {})) as r:
        r.succeeded({"run_id": row.run_id})
    assert not refused(home, key, 1_000, request_id="once")
    assert refused(home, key, 1_000, request_id="twice") and refused(home, key, 1_000)


@pytest.mark.parametrize("spent", [0.0001, 0.00349, 0.1 + 0.2, 1.4996, 1.9985])
def test_the_hours_that_a_refusal_names_are_not_refused_again(home: Home, spent: float):
    key = Key("agent", gpu_hours_per_day=2)
    end(home, started(home, "agent", 1_000), spent)
    with pytest.raises(UserError) as refusal:
        check_quota(home, key, "submit_train", {"max_gpu_hours": 2.0}, clock=lambda: 1_000)
    named = re.search(r"max_gpu_hours=([\d.]+)", refusal.value.hint)
    assert named, refusal.value.hint
    hours = float(named.group(1))
    assert 0 < hours <= 2 - spent and not refused(home, key, 1_000, max_gpu_hours=hours)


def test_a_submit_that_names_no_cap_is_given_what_is_left_and_a_resumed_run_its_own(home: Home):
    key = Key("agent", gpu_hours_per_day=3)

    def given(**arguments: object) -> Cap | None:
        return check_quota(home, key, "submit_train", arguments, clock=lambda: 1_000)

    assert given() == Cap(2.0) and given(max_gpu_hours=1.0) is None
    run = started(home, "agent", 1_000, hours=0.4)
    end(home, run, 0.1)
    resumed = given(resume=run)
    assert resumed and resumed.hours == 0.4 and "as the run had" in resumed.warning
    end(home, started(home, "agent", 1_000), 2.65)
    left = given()
    assert left and left.hours == 0.25 and "0.25, what is left" in left.warning
    resumed = given(resume=run)
    assert resumed and resumed.hours == 0.25
    end(home, started(home, "agent", 1_000), 0.25)
    assert "promised 3" in refused(home, key, 1_000) and refused(home, key, 1_000, resume=run)


def test_a_key_is_told_what_it_may_still_start(home: Home):
    key = Key("agent", max_runs=3, gpu_hours_per_day=3)
    assert verbs.get_status(home, key=key)["key"]["left_gpu_hours"] == 3
    assert "key" not in verbs.get_status(home) and "key" not in verbs.get_status(home, key=Key("a"))
    started(home, "somebody", 1_000, hours=2)
    run = started(home, "agent", 1_000, hours=0.4)
    assert limits_and_use(home, key, clock=lambda: 1_000) == {
        "name": "agent",
        "open_runs": [run],
        "max_runs": 3,
        "gpu_hours_per_day": 3,
        "used_gpu_hours": 0.4,
        "left_gpu_hours": 2.6,
    }


def test_what_a_key_asked_for_under_an_id_is_nothing_to_another_key(home: Home):
    night, day = Key("night"), Key("day")
    ids = [stored_request_id(key, "try-1") for key in (night, day, LOCAL)]
    assert len(set(ids)) == 3 and ids[2] == "try-1"
    assert stored_request_id(night, "") == ""
    long, longer = (stored_request_id(night, "x" * size) for size in (199, 200))
    assert long != longer and max(len(long), len(longer)) <= 200
    assert stored_request_id(night, "x" * 201) == "x" * 201, "refused in the words for all"


class Waiting:
    """A tool that waits until the test lets it go; stands where the engine would work."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.go = threading.Event()

    def __call__(self, *args: object, **more: object) -> dict:
        self.inside.set()
        assert self.go.wait(4)
        return {"run_id": "r-1"}


def server_for(home: Home, monkeypatch: pytest.MonkeyPatch) -> GuardedServer:
    """A server that takes what a call has as its context for the key that calls."""
    monkeypatch.setattr(guard, "caller_of", lambda context: context)
    return build_server(home, [])


async def test_a_call_that_takes_long_holds_up_its_own_key_alone(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    key, _ = add_key(home, "agent", ["train"], max_runs=5)
    add_key(home, "old", ["read"])
    tool = Waiting()
    monkeypatch.setattr(verbs, "evaluate", tool)
    server = server_for(home, monkeypatch)
    asked = {"env_id": "e", "models": ["pebble"]}
    async with anyio.create_task_group() as group:
        for _ in range(60):  # more than there are threads
            group.start_soon(server.call_tool, "evaluate", asked, key)
        with anyio.fail_after(3):
            assert await anyio.to_thread.run_sync(tool.inside.wait, 2)
            await anyio.to_thread.run_sync(remove_key, home, "old")
            monkeypatch.setattr(verbs, "evaluate", lambda *a, **k: {"run_id": "r-2"})
            other = Key("other", max_runs=1)
            assert not (await server.call_tool("evaluate", asked, other)).is_error
        tool.go.set()
        group.cancel_scope.cancel()


async def test_a_call_that_waits_too_long_for_its_turn_is_refused_and_recorded(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mcp_server.access.keys.LOCK_S", 0.05)
    monkeypatch.setattr(verbs, "evaluate", lambda *a, **k: {"run_id": "r-1"})
    server, key = server_for(home, monkeypatch), Key("agent", max_runs=1)
    asked = {"env_id": "e", "models": ["pebble"]}
    lock = take_lock(home.quota_lock("agent"))
    assert lock is not None
    result = await server.call_tool("evaluate", asked, key)
    os.close(lock)
    assert json.loads(result.content[0].text)["retryable"]
    assert json.loads(home.audit.read_text())["result"] == "HOME_UNUSABLE"
    assert not (await server.call_tool("evaluate", asked, key)).is_error


async def test_the_next_call_sees_the_line_of_the_call_before(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    note, held = Audit._write_line, []

    def noted(*args):
        held.append(is_locked(home.quota_lock("agent")))
        note(*args)

    monkeypatch.setattr(Audit, "_write_line", noted)
    monkeypatch.setattr(verbs, "evaluate", lambda *a, **k: {"run_id": "r-1"})
    server = server_for(home, monkeypatch)
    asked = {"env_id": "e", "models": ["pebble"]}
    assert not (await server.call_tool("evaluate", asked, Key("agent", max_runs=1))).is_error
    assert held == [True] and not is_locked(home.quota_lock("agent"))


def test_only_what_takes_a_device_is_counted():
    assert starts_a_run("submit_train", {}) and starts_a_run("evaluate", {})
    assert starts_a_run("dry_run", {"samples": 8}) and not starts_a_run("dry_run", {})
    assert not starts_a_run("push_env", {})


def test_runs_of_a_key_are_read_over_a_torn_or_strange_line(home: Home):
    run = started(home, "agent", 5)
    with home.audit.open("ab") as file:
        file.write(
            b'{"who":"agent","run_id":\n[]\n{"who":"agent","run_id":"x"}\n{"who":"agent","run_id":'
        )
    assert Audit(home).runs_of("agent") == [run]
    assert Audit(home).runs_of("agen") == []


def test_a_folder_of_keys_is_told(home: Home, tmp_path: Path):
    home.keys.mkdir()
    with pytest.raises(UserError) as refusal:
        list_keys(home)
    assert refusal.value.code == "HOME_UNUSABLE"


def test_installing_packages_is_a_scope_of_its_own(home: Home, tmp_path: Path):
    (tmp_path / "environment.py").write_text("x = 1")
    trains, _ = add_key(home, "trains", ["read", "train"])
    with pytest.raises(UserError) as refused:
        verbs.push_env(home, str(tmp_path), "tiny", install=True, key=trains)
    assert refused.value.code == "FORBIDDEN" and "install" in refused.value.message
    installs, _ = add_key(home, "installs", ["read", "train", "install"])
    with pytest.raises(UserError) as refused:
        verbs.push_env(home, str(tmp_path), "tiny", install=True, key=installs)
    assert refused.value.code == "ENV_INVALID"  # as far as its contents

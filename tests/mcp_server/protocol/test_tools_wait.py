"""`wait_run` for clients without tasks: progress while it waits, an end when nobody waits."""

import socket
import threading
import time

import anyio
import httpx2
import pytest
import uvicorn
from http_server import ACCEPT, bearer, initialize
from mcp import Client

from engine.core.errors import UserError
from engine.home.run_dir import Home
from mcp_server.access.keys import Keys
from mcp_server.api import paths, verbs
from mcp_server.protocol.app import build_server
from mcp_server.protocol.http_app import LOOPBACK, http_app


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_wait_reports_its_progress(home: Home, mode: str, monkeypatch: pytest.MonkeyPatch):
    def wait(home, run_id, until, timeout_s, cursor, on_progress):
        on_progress({"state": "queued", "step": None})
        for step in (1, 2):
            on_progress({"state": "running", "step": step, "total_steps": 4, "eta_s": 30.2})
        return {"run_id": run_id, "state": "running", "summary": "still running"}

    told: list[tuple] = []

    async def heard(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, total, message))

    monkeypatch.setattr(verbs, "wait_run", wait)
    async with Client(build_server(home, []), mode=mode) as client:
        result = await client.call_tool("wait_run", {"run_id": "r"}, progress_callback=heard)
    assert result.structured_content["summary"] == "still running"
    assert told == [
        (0, None, "queued"),
        (1, 4, "running, step 1/4, about 30 s left"),
        (2, 4, "running, step 2/4, about 30 s left"),
    ]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_wait_that_nobody_waits_for_ends(
    home: Home, mode: str, monkeypatch: pytest.MonkeyPatch
):
    began, ended = threading.Event(), threading.Event()

    def wait(home, run_id, until, timeout_s, cursor, on_progress):
        began.set()
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                on_progress({"state": "running"})
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(verbs, "wait_run", wait)
    async with Client(build_server(home, []), mode=mode) as client:
        async with anyio.create_task_group() as group:
            group.start_soon(client.call_tool, "wait_run", {"run_id": "r"})
            assert await anyio.to_thread.run_sync(began.wait, 4)
            group.cancel_scope.cancel()
        assert await anyio.to_thread.run_sync(ended.wait, 4)


async def test_a_wait_over_http_ends_when_its_client_has_left(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    ended = threading.Event()

    def wait(home, run_id, until, timeout_s, cursor, on_progress):
        try:
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                on_progress({"state": "running"})
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(verbs, "wait_run", wait)
    token = "t0ken-of-this-test-" + "x" * 24
    app = http_app(build_server(home, []), Keys(home, token), LOOPBACK)
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    call = {"name": "wait_run", "arguments": {"run_id": "r"}, "_meta": {"progressToken": 1}}
    message = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
    async with (
        anyio.create_task_group() as group,
        httpx2.AsyncClient(headers=bearer(token) | ACCEPT, timeout=4) as http,
    ):
        group.start_soon(server.serve, [listener])
        greeted = await http.post(url, json=initialize())
        http.headers["mcp-session-id"] = greeted.headers["mcp-session-id"]
        async with http.stream("POST", url, json=message) as answer:
            await anext(answer.aiter_lines())  # the first progress; then the client leaves
        assert await anyio.to_thread.run_sync(ended.wait, 4)
        server.should_exit = True


async def test_other_calls_are_answered_while_many_wait(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    many = 60  # more than the threads that answer other calls
    go_on, waiting = threading.Event(), threading.Semaphore(0)

    def wait(*args, **kwargs):
        waiting.release()
        go_on.wait(4)
        return {"state": "done"}

    monkeypatch.setattr(verbs, "wait_run", wait)
    async with Client(build_server(home, [])) as client, anyio.create_task_group() as group:
        for _ in range(many):
            group.start_soon(client.call_tool, "wait_run", {"run_id": "r"})
        with anyio.fail_after(3):
            for _ in range(many):
                await anyio.to_thread.run_sync(waiting.acquire)
            result = await client.call_tool("read_playbook", {})
        assert not result.is_error
        go_on.set()


async def test_a_wait_is_longer_than_fifty_seconds_only_for_a_client_that_takes_progress(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def wait(home, run_id, until, timeout_s, cursor, on_progress=None):
        asked.append(timeout_s)
        return {"state": "running"}

    async def heard(*_: object) -> None:
        return None

    monkeypatch.setattr("engine.runs.lifecycle.wait", wait)
    # Messages, as over stdio and HTTP: without them no token travels with the call.
    async with Client(build_server(home, []), mode="legacy") as client:
        for seconds in (0, 12, 50, 3000):
            call = {"run_id": "r", "timeout_s": seconds}
            await client.call_tool("wait_run", call)
            await client.call_tool("wait_run", call, progress_callback=heard)
    assert asked == [0, 0, 12, 12, 50, 50, 50, 3000]


async def test_a_caller_with_a_cursor_is_told_what_has_changed_and_what_to_call_next_for_as_long(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    status = {
        "run_id": "r-1",
        "state": "running",
        "kind": "train",
        "env_id": "sums@0",
        "step": 3,
        "metrics": {},
        "alerts": [],
        "eta_s": None,
        "cursor": "9",
        "until_met": False,
    }
    monkeypatch.setattr("engine.runs.lifecycle.wait", lambda *_, **__: dict(status))

    async def heard(*_: object) -> None:
        return None

    async with Client(build_server(home, []), mode="legacy") as client:
        first = await client.call_tool("wait_run", {"run_id": "r-1"})
        call = {"run_id": "r-1", "cursor": "9", "timeout_s": 600, "until": "news"}
        later = await client.call_tool("wait_run", call, progress_callback=heard)
        status |= {"state": "done"}
        last = await client.call_tool("wait_run", call, progress_callback=heard)
    assert first.structured_content["env_id"] == "sums@0"
    assert set(later.structured_content) == {
        *("summary", "next", "warnings", "run_id", "state", "step", "cursor", "until_met")
    }
    assert later.structured_content["next"] == [{"tool": "wait_run", "arguments": call}]
    assert last.structured_content["env_id"] == "sums@0"


async def test_a_wait_shows_that_it_is_alive_even_where_nothing_moves(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    def wait(home, run_id, until, timeout_s, cursor, on_progress):
        for _ in range(3):
            on_progress({"state": "running", "step": 2, "total_steps": 4, "percent": 31.0})
        return {"state": "running"}

    told: list[tuple] = []

    async def heard(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    monkeypatch.setattr(verbs, "wait_run", wait)
    async with Client(build_server(home, [])) as client:
        await client.call_tool("wait_run", {"run_id": "r"}, progress_callback=heard)
    values = [progress for progress, _ in told]
    assert values == sorted(set(values)) and values == pytest.approx([2, 2, 2], abs=1e-4)
    assert told[0][1] == "running, step 2/4, 31 %"


@pytest.mark.parametrize(
    ("reply", "tools"),
    [
        ({"state": "running", "cursor": "7"}, ["wait_run"]),
        ({"state": "done"}, ["read_rollouts", "deploy"]),
        ({"state": "done", "kind": "train"}, ["read_rollouts", "deploy"]),
        ({"state": "done", "kind": "evaluate"}, ["read_rollouts"]),
        ({"state": "done", "kind": "probe"}, ["read_rollouts"]),
        ({"state": "failed"}, ["read_logs", "diagnose"]),
        ({"state": "cancelled"}, ["submit_train"]),
        ({"state": "done", "next": []}, []),
    ],
)
def test_a_wait_suggests_what_its_state_asks_for(
    home: Home, monkeypatch: pytest.MonkeyPatch, reply: dict, tools: list[str]
):
    monkeypatch.setattr("engine.runs.lifecycle.wait", lambda *a, **k: reply)
    after = verbs.wait_run(home, "r")["next"]
    assert [call["tool"] for call in after] == tools
    if tools == ["wait_run"]:
        assert after[0]["arguments"]["cursor"] == "7"


def test_after_the_first_step_a_wait_suggests_to_look_and_to_wait_for_the_end(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    reply = {"state": "running", "cursor": "7", "until_met": True}
    monkeypatch.setattr("engine.runs.lifecycle.wait", lambda *a, **k: dict(reply))
    after = verbs.wait_run(home, "r", until="first_step")["next"]
    assert [call["tool"] for call in after] == ["read_rollouts", "read_logs", "wait_run"]
    assert after[-1]["arguments"] == {"run_id": "r", "until": "end", "cursor": "7"}
    reply["until_met"] = False
    (again,) = verbs.wait_run(home, "r", until="first_step")["next"]
    assert again["arguments"]["until"] == "first_step"


def test_an_export_stays_inside_the_roots(home: Home, tmp_path, monkeypatch: pytest.MonkeyPatch):
    written = []
    monkeypatch.setattr("engine.serving.service.deploy", lambda *a: written.append(a[4]) or {})
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    verbs.deploy(home, "r", "export", "adapter", str(root / "out"), [root])
    assert written == [str(root / "out")]
    for outside in (tmp_path / "out", root / ".." / "out", root / "link" / "out", "/etc/out"):
        with pytest.raises(UserError) as refusal:
            verbs.deploy(home, "r", "export", "adapter", str(outside), [root])
        assert refusal.value.code == "PATH_OUTSIDE_ROOTS"
    assert len(written) == 1


def test_a_relative_export_goes_into_the_first_root_wherever_the_server_stands(
    home: Home, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    written = []
    monkeypatch.setattr("engine.serving.service.deploy", lambda *a: written.append(a[4]) or {})
    first, second, elsewhere = (tmp_path / name for name in ("first", "second", "elsewhere"))
    for folder in (first, second / "has" / "it", elsewhere / "out"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    for path in ("out/x", "out", "has/it"):
        verbs.deploy(home, "r", "export", "adapter", path, [first, second])
    assert written == [str(first / "out" / "x"), str(first / "out"), str(second / "has" / "it")]
    for path, code in (("../out", "PATH_OUTSIDE_ROOTS"), ("a\0b", "BAD_ARGUMENT")):
        with pytest.raises(UserError) as refusal:
            verbs.deploy(home, "r", "export", "adapter", path, [first, second])
        assert refusal.value.code == code
    monkeypatch.chdir(second)
    verbs.deploy(home, "r", "export", "adapter", "out/y", [tmp_path])
    assert written[-1] == str(tmp_path / "out" / "y")


def test_a_relative_folder_is_found_in_a_root(tmp_path, monkeypatch: pytest.MonkeyPatch):
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project / "envs" / "arith", elsewhere / "own"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    assert paths.from_roots("envs/arith", [project]) == str(project / "envs" / "arith")
    assert paths.from_roots("own", [project]) == "own"
    assert paths.from_roots("none", [project]) == "none"
    assert paths.from_roots("/abs", [project]) == "/abs"
    assert paths.from_roots("", [project]) == ""
    assert paths.from_roots("a\0b", [project]) == "a\0b"


def test_an_alert_suggests_to_diagnose_and_then_to_wait_on(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    reply = {"state": "running", "until_met": True, "cursor": "9", "alerts": [{"id": "truncation"}]}
    monkeypatch.setattr("engine.runs.lifecycle.wait", lambda *_, **__: dict(reply))
    look, on = verbs.wait_run(home, "r-1", "alert")["next"]
    assert look == {"tool": "diagnose", "arguments": {"run_id": "r-1"}}
    assert on["arguments"] == {"run_id": "r-1", "until": "alert", "cursor": "9"}
    reply["until_met"] = False
    (on,) = verbs.wait_run(home, "r-1", "alert")["next"]
    assert on["tool"] == "wait_run"


async def test_a_wait_that_is_cut_says_so_and_why(home: Home, monkeypatch: pytest.MonkeyPatch):
    def wait(home, run_id, until, timeout_s, cursor, on_progress=None):
        state = states.pop()
        return {"run_id": run_id, "state": state, "until_met": False, "warnings": ["first"]}

    states = ["done", "running", "running"]
    monkeypatch.setattr(verbs, "wait_run", wait)
    async with Client(build_server(home, [])) as client:
        long = await client.call_tool("wait_run", {"run_id": "r", "timeout_s": 400})
        short = await client.call_tool("wait_run", {"run_id": "r", "timeout_s": 30})
        ended = await client.call_tool("wait_run", {"run_id": "r", "timeout_s": 400})
    first, cut = long.structured_content["warnings"]
    assert first == "first" and cut.startswith(
        "the wait was cut from 400 to 50 s: this client asks"
    )
    for reply in (short, ended):
        assert reply.structured_content["warnings"] == ["first"]

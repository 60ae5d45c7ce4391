"""`wait_run` as a task for clients that declare the extension, as a wait for the rest."""

import json

import pytest
from mcp import Client, MCPError
from task_client import Taker, ask

from engine.core.errors import UserError
from engine.home.run_dir import Home
from mcp_server.access.keys import LOCAL, Key
from mcp_server.access.viewing import viewing
from mcp_server.api import verbs
from mcp_server.protocol.app import build_server
from mcp_server.protocol.tasks import TaskParams, Wait, WaitTasks


class Run:
    """A run whose state the test moves; stands where the engine's wait would look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = "running"
        self.reached = False
        self.looks: list[tuple] = []
        monkeypatch.setattr(verbs, "wait_run", self.wait)

    def wait(self, home, run_id, until="end", timeout_s=45, cursor="", on_progress=None):
        self.looks.append((run_id, until, timeout_s, cursor))
        if run_id != "r-1":
            raise UserError("RUN_NOT_FOUND", f"no run {run_id}", hint="get_status()")
        return {
            "run_id": run_id,
            "state": self.state,
            "until_met": self.reached,
            "cursor": "77",
            "summary": f"r-1 is {self.state}.",
        }


async def test_a_client_that_takes_tasks_gets_one_and_the_result_at_the_end(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    run, taker = Run(monkeypatch), Taker()
    async with Client(build_server(home, []), extensions=[taker]) as client:
        await client.call_tool("wait_run", {"run_id": "r-1"})
        (task,) = taker.taken
        assert task.status == "working"
        assert task.task_id.startswith("r-1:end:")
        assert task.status_message == "r-1 is running."
        assert (await ask(client, "tasks/get", task.task_id))["status"] == "working"
        run.state = "done"
        over = await ask(client, "tasks/get", task.task_id)
    assert over["status"] == "completed"
    result = over["result"]
    assert result["structuredContent"]["state"] == "done"
    assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
    assert {"summary", "next", "warnings"} <= set(result["structuredContent"])
    assert all(look[2] == 0 for look in run.looks), "a poll never blocks"


async def test_a_task_outlives_the_server_that_gave_it(home: Home, monkeypatch: pytest.MonkeyPatch):
    run, taker = Run(monkeypatch), Taker()
    async with Client(build_server(home, []), extensions=[taker]) as client:
        await client.call_tool("wait_run", {"run_id": "r-1", "until": "next_eval"})
    run.reached = True
    async with Client(build_server(home, []), extensions=[taker]) as client:
        over = await ask(client, "tasks/get", taker.taken[0].task_id)
    assert over["status"] == "completed"
    assert over["createdAt"] == taker.taken[0].created_at
    assert run.looks[-1] == ("r-1", "next_eval", 0, "77"), "events count from when it was asked"


async def test_a_run_that_is_over_is_answered_at_once(home: Home, monkeypatch: pytest.MonkeyPatch):
    run, taker = Run(monkeypatch), Taker()
    run.state = "failed"
    async with Client(build_server(home, []), extensions=[taker]) as client:
        result = await client.call_tool("wait_run", {"run_id": "r-1", "until": "alert"})
    assert taker.taken == []
    assert result.structured_content["state"] == "failed"


async def test_just_looking_is_never_a_task(home: Home, monkeypatch: pytest.MonkeyPatch):
    Run(monkeypatch)
    taker = Taker()
    async with Client(build_server(home, []), extensions=[taker]) as client:
        result = await client.call_tool("wait_run", {"run_id": "r-1", "timeout_s": 0})
    assert taker.taken == []
    assert result.structured_content["state"] == "running"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_that_takes_no_tasks_waits(
    home: Home, mode: str, monkeypatch: pytest.MonkeyPatch
):
    run = Run(monkeypatch)
    async with Client(build_server(home, []), mode=mode) as client:
        result = await client.call_tool("wait_run", {"run_id": "r-1", "timeout_s": 3})
    assert result.structured_content["state"] == "running"
    assert run.looks == [("r-1", "end", 3, "")]


@pytest.mark.parametrize(
    "arguments", [{"run_id": "r-9"}, {}, {"run_id": "r-1", "til": "end"}, {"run_id": 4}]
)
async def test_a_bad_wait_is_refused_like_any_call(
    home: Home, arguments: dict, monkeypatch: pytest.MonkeyPatch
):
    Run(monkeypatch)
    taker = Taker()
    async with Client(build_server(home, []), extensions=[taker]) as client:
        result = await client.call_tool("wait_run", arguments)
    assert taker.taken == []
    assert result.is_error
    assert json.loads(result.content[0].text)["code"] in (
        "RUN_NOT_FOUND",
        "BAD_ARGUMENT",
        "UNKNOWN_ARGUMENT",
    )


async def test_cancelling_a_task_ends_the_waiting_and_not_the_run(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    run, taker = Run(monkeypatch), Taker()
    cancelled = []
    monkeypatch.setattr(verbs, "cancel_run", lambda *a: cancelled.append(a))
    async with Client(build_server(home, []), extensions=[taker]) as client:
        await client.call_tool("wait_run", {"run_id": "r-1"})
        await ask(client, "tasks/cancel", taker.taken[0].task_id)
        after = await ask(client, "tasks/get", taker.taken[0].task_id)
    assert after["status"] == "cancelled"
    assert cancelled == [] and run.state == "running"


async def test_cancelling_what_is_no_task_of_ours_is_refused_and_kept_nowhere(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    Run(monkeypatch)
    tasks = WaitTasks(home)
    for task_id in (Wait("r-9", "end", 1, "").task_id, Wait("r-1", "end", 1, "7" * 300).task_id):
        with viewing(LOCAL), pytest.raises(MCPError, match="Unknown task"):
            await tasks._cancel(None, TaskParams(taskId=task_id))
    assert not tasks._cancelled


async def test_the_newest_cancelled_tasks_are_kept_and_no_more(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    Run(monkeypatch)
    monkeypatch.setattr("mcp_server.protocol.tasks.MAX_CANCELLED", 2)
    tasks = WaitTasks(home)
    for created in (1, 2, 1, 3):
        with viewing(LOCAL):
            await tasks._cancel(None, TaskParams(taskId=Wait("r-1", "end", created, "").task_id))
    assert list(tasks._cancelled) == [("", "r-1:end:1:"), ("", "r-1:end:3:")]


async def test_a_key_that_cancels_its_task_leaves_the_same_task_of_another_key(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    Run(monkeypatch)
    tasks, task = WaitTasks(home), TaskParams(taskId=Wait("r-1", "end", 1, "").task_id)
    ana, bob = (Key(name, ("read",), id=name) for name in ("ana", "bob"))
    with viewing(ana):
        await tasks._cancel(None, task)
    states = {}
    for key in (ana, bob):
        with viewing(key):
            states[key.name] = (await tasks._get(None, task))["status"]
    assert states == {"ana": "cancelled", "bob": "working"}


async def test_a_run_that_vanished_completes_its_task_with_the_refusal(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    Run(monkeypatch)
    async with Client(build_server(home, []), extensions=[Taker()]) as client:
        over = await ask(client, "tasks/get", Wait("r-9", "end", 1, "").task_id)
    assert over["status"] == "completed"
    assert over["result"]["isError"] is True
    assert json.loads(over["result"]["content"][0]["text"])["code"] == "RUN_NOT_FOUND"


@pytest.mark.parametrize("method", ["tasks/get", "tasks/cancel", "tasks/update"])
async def test_a_task_id_that_is_not_ours_is_an_invalid_parameter(home: Home, method: str):
    async with Client(build_server(home, []), extensions=[Taker()]) as client:
        with pytest.raises(MCPError, match="Unknown task"):
            await ask(client, method, "nonsense")


async def test_task_methods_do_not_exist_in_the_earlier_era(home: Home):
    async with Client(build_server(home, []), mode="legacy") as client:
        with pytest.raises(MCPError, match="not found"):
            await ask(client, "tasks/get", "r-1:end:1:")


@pytest.mark.parametrize("created", ["9" * 20, "-1", "253402300800", "1e9", ""])
async def test_a_task_that_was_made_at_no_time_is_unknown(
    home: Home, created: str, monkeypatch: pytest.MonkeyPatch
):
    Run(monkeypatch)
    async with Client(build_server(home, []), extensions=[Taker()]) as client:
        for method in ("tasks/get", "tasks/cancel", "tasks/update"):
            with pytest.raises(MCPError, match="Unknown task"):
                await ask(client, method, f"r-1:end:{created}:77")
        last = await ask(client, "tasks/get", "r-1:end:253402300799:77")
    assert last["createdAt"] == "9999-12-31T23:59:59Z"

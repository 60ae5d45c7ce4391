"""The server as a whole: what it says of itself, its roots, its prompts, updates of curves."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from mcp import Client
from mcp.server import MCPServer

import mcp_server
import playbook
from engine.core.files import Appender
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from mcp_server.access.log import log_file, log_to
from mcp_server.protocol.app import CountingBus, build_server, default_roots, publish_metrics
from mcp_server.protocol.tools import all_tools


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_server_introduces_itself(home: Home, mode: str):
    async with Client(build_server(home, []), mode=mode) as client:
        info = client.server_info
        told = client.instructions
    assert (info.name, info.title, info.version) == (
        "honesmith",
        "Honesmith",
        mcp_server.__version__,
    )
    assert info.icons and info.icons[0].src.startswith("data:image/svg+xml")
    assert told and len(told) < 2000
    for tool in ("get_status", "push_env", "dry_run", "submit_train", "wait_run", "compare_runs"):
        assert tool in told


def test_the_instructions_name_only_tools_there_are(home: Home):
    told = build_server(home, []).instructions or ""
    names = {tool.name for tool in all_tools(home, ())}
    mentioned = set(re.findall(r"\b[a-z]+_[a-z]+\b", told)) - {"next_cursor"}
    assert mentioned <= names


def test_the_default_root_is_the_folder_it_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    assert default_roots() == (project.resolve(),)
    monkeypatch.setenv("HOME", str(project))
    assert default_roots() == ()
    monkeypatch.chdir("/")
    assert default_roots() == ()


@pytest.mark.timeout(60)
def test_the_module_offers_a_server_for_the_inspector(home: Home):
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('server_module', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "from mcp.server import MCPServer\n"
        "assert isinstance(module.mcp, MCPServer)\n"
        "print(module.mcp.dependencies)"
    )
    file = Path(mcp_server.__file__).parent / "dev.py"
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=Path(mcp_server.__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['mcp[cli]']"


def test_no_module_of_ours_hides_one_of_the_standard_library():
    """The inspector puts our folder first on the path."""
    names = {path.stem for path in Path(mcp_server.__file__).parent.glob("*.py")}
    assert not names & set(sys.stdlib_module_names)


@pytest.mark.timeout(60)
def test_a_module_level_server_is_made_on_first_use_only(home: Home):
    code = (
        "import mcp_server.protocol.app as app, sys\n"
        "assert 'mcp' not in vars(app)\n"
        "first = app.mcp\n"
        "assert app.mcp is first and vars(app)['mcp'] is first\n"
        "try: app.nothing\n"
        "except AttributeError: print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.parametrize("mode", ["auto", pytest.param("legacy", marks=pytest.mark.long)])
async def test_prompts_say_what_to_do_with_tools_there_are(home: Home, mode: str):
    given = {
        "train": "goal",
        "diagnose_run": "run_id",
        "design_reward": "task",
        "plan_next_experiment": "env",
    }
    async with Client(build_server(home, []), mode=mode) as client:
        listed = {prompt.name: prompt for prompt in (await client.list_prompts()).prompts}
        assert set(listed) == set(given)
        for name, argument in given.items():
            assert listed[name].title and listed[name].description
            first, *optional = listed[name].arguments
            assert first.name == argument and first.required
            assert all(each.description for each in listed[name].arguments)
            assert not any(each.required for each in optional)
            got = await client.get_prompt(name, {argument: "MARK-7"})
            assert "MARK-7" in got.messages[0].content.text


async def test_prompts_name_only_tools_and_sections_there_are(home: Home):
    known = {tool.name for tool in all_tools(home, ())} | {"run_id", "compare_to", "timeout_s"}
    slugs = {slug for slug, _ in playbook.sections()}
    async with Client(build_server(home, [])) as client:
        for prompt in (await client.list_prompts()).prompts:
            given = {argument.name: "x" for argument in prompt.arguments}
            text = (await client.get_prompt(prompt.name, given)).messages[0].content.text
            assert set(re.findall(r"\b[a-z]+_[a-z]+\b", text)) <= known
            assert set(re.findall(r"`([a-z-]+)`", text)) <= slugs


def queued(home: Home) -> str:
    with Store(home) as store:
        row = store.insert_run(NewRun("arith-sft", "train", "sft", "arith@0", "pebble"))
    home.run(row.run_id).create()
    return row.run_id


async def heard(home: Home, bus: CountingBus, grow) -> list[str]:
    """The uris told while `grow` ran, with a publisher that looks all the time."""
    told: list[str] = []
    leave = bus.subscribe(lambda event: told.append(event.uri))
    async with anyio.create_task_group() as group:
        group.start_soon(publish_metrics, home, bus, 0.01)
        await grow(told)
        group.cancel_scope.cancel()
    leave()
    return told


async def until(condition) -> None:
    with anyio.fail_after(3):
        while not condition():
            await anyio.sleep(0.005)


async def test_new_metrics_are_told_once_each_time(home: Home):
    run_id = queued(home)
    uri = f"run://{run_id}/metrics"

    async def grow(told: list[str]) -> None:
        with Appender(home.run(run_id).metrics) as metrics:
            metrics.append({"step": 1})
            await until(lambda: len(told) == 1)
            await anyio.sleep(0.05)
            assert told == [uri], "nothing new, nothing told"
            metrics.append({"step": 2})
            await until(lambda: len(told) == 2)

    assert await heard(home, CountingBus(), grow) == [uri, uri]


async def test_the_last_line_of_a_run_that_ended_is_told(home: Home):
    run_id = queued(home)

    async def grow(told: list[str]) -> None:
        with Appender(home.run(run_id).metrics) as metrics:
            metrics.append({"step": 1})
            await until(lambda: len(told) == 1)
            metrics.append({"step": 2})
            with Store(home) as store:
                store.set_state(run_id, "cancelled", only_from={"queued"})
            await until(lambda: len(told) == 2)

    assert len(await heard(home, CountingBus(), grow)) == 2


async def test_nobody_listening_costs_no_look_at_the_home(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    looked = []
    monkeypatch.setattr(
        "mcp_server.protocol.app._runs_with_new_metrics", lambda *a: looked.append(a) or []
    )
    bus = CountingBus()
    with anyio.move_on_after(0.1):
        await publish_metrics(home, bus, 0.01)
    assert looked == []
    leave = bus.subscribe(lambda event: None)
    with anyio.move_on_after(0.1):
        await publish_metrics(home, bus, 0.01)
    assert looked
    leave()
    leave()
    assert bus.listeners == 0


async def test_a_home_that_cannot_be_read_for_a_moment_ends_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    log_to(home)
    looks = []

    def grown(*args) -> list[str]:
        looks.append(args)
        if len(looks) == 1:
            raise OSError("gone for a moment")
        return ["r-1"]

    monkeypatch.setattr("mcp_server.protocol.app._runs_with_new_metrics", grown)

    async def grow(told: list[str]) -> None:
        await until(lambda: len(told) > 0)

    assert (await heard(home, CountingBus(), grow))[0] == "run://r-1/metrics"
    assert "gone for a moment" in log_file(home).read_text()


def test_a_log_that_cannot_be_written_says_nothing_on_stderr(
    home: Home, capfd: pytest.CaptureFixture[str]
):
    home.cache.rmdir()
    home.cache.touch()  # a file where the log's folder should be
    log_to(home)
    logging.getLogger("honesmith").error("a fault of ours")
    assert capfd.readouterr() == ("", "")


@pytest.mark.timeout(30)
async def test_a_server_that_starts_continues_the_home(home: Home, monkeypatch: pytest.MonkeyPatch):
    done = []
    monkeypatch.setattr("mcp_server.protocol.app.TEND_AFTER_S", 0.0)
    monkeypatch.setattr("engine.machine.processes.launcher.reap", lambda home: done.append("reap"))
    monkeypatch.setattr(
        "engine.machine.processes.launcher.start_queued", lambda home: done.append("start")
    )
    async with Client(build_server(home, [])):
        await until(lambda: len(done) == 2)
    assert done == ["reap", "start"]
    async with Client(build_server(home, [], read_only=True)):
        await anyio.sleep(0.1)
    assert done == ["reap", "start"]


async def test_a_client_that_listens_hears_of_new_metrics(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mcp_server.protocol.app.METRICS_EVERY_S", 0.02)
    run_id = queued(home)
    uri = f"run://{run_id}/metrics"
    server = build_server(home, [])
    assert isinstance(server, MCPServer)
    async with Client(server) as client, client.listen(resource_subscriptions=[uri]) as events:
        with Appender(home.run(run_id).metrics) as metrics:
            metrics.append({"step": 1})
        with anyio.fail_after(4):
            async for event in events:
                assert event.uri == uri
                break

"""F12: a full folder for temporary files: who needs none goes on, who needs one says so."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import ended, fill, use_up_inodes
from raw_server import Server

from engine.core.files import read_lines
from engine.home.run_dir import Home
from engine.machine.processes import deployments
from engine.runs import lifecycle
from engine.runs.submit.requests import TrainRequest
from engine.serving.chat_request import ChatRequest
from mcp_server.api import verbs
from mcp_server.cli import starter
from tests.engine.conftest import add_env

GRPO = {"steps": 2, "prompts_per_step": 2, "group_size": 2, "max_tokens": 8, "eval_rows": 4}


@pytest.fixture
def temporary(mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small TMPDIR for whatever is started from now on."""
    folder = mount("size=1m,nr_inodes=64")
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture(params=["bytes", "inodes"])
def full(temporary: Path, request: pytest.FixtureRequest) -> Path:
    """The same with no room left."""
    fill(temporary) if request.param == "bytes" else use_up_inodes(temporary)
    return temporary


def new_env(folder: Path) -> str:
    starter.new_env(folder, starter.DEFAULT_TEMPLATE)
    return str(folder)


def test_f12_a_server_and_its_runs_need_no_room_for_temporary_files(
    home: Home, steady: str, full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    server = Server(home)
    pushed = server.ask("push_env", path=new_env(tmp_path / "mine"))
    assert pushed["env_id"].startswith("mine@") and not pushed.get("problems"), pushed
    asked = {"env_id": steady, "algorithm": "grpo", "settings": {"steps": 3, "save_every": 1}}
    run = home.run(server.ask("submit_train", **asked)["run_id"])
    assert server.ask("wait_run", run_id=run.id)["state"] == "done"
    server.answers()
    assert ended(run).attempt == 1


def test_f12_a_folder_that_fills_up_under_a_server_is_named_and_used_again_when_there_is_room(
    home: Home, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    server = Server(home)
    assert server.ask("push_env", path=new_env(tmp_path / "first"))["env_id"]
    left = use_up_inodes(temporary)
    server.call(7, "push_env", path=new_env(tmp_path / "second"))
    assert server.ask("get_status")["envs"], "who only looks is answered"
    for path in left:
        path.unlink()
    assert server.ask("push_env", path=str(tmp_path / "second"))["env_id"].startswith("second@")
    server.answers()
    said = server.heard[7]
    refusal = json.loads(said["content"][0]["text"])
    assert said["isError"] and refusal["code"] != "INTERNAL", refusal
    assert str(temporary) in refusal["message"] and refusal["hint"], refusal


def test_f12_a_trainer_with_an_env_process_needs_no_room_for_temporary_files(
    home: Home, full: Path
):
    env = add_env(home, "sums")
    run = home.run(lifecycle.submit(home, TrainRequest(env_id=env, settings=GRPO))["run_id"])
    row = ended(run)
    assert row.state == "done", (row.reason_kind, row.reason)
    scored = read_lines(run.rollouts(1), 0, 10**7)[0]
    assert scored and not any(line.get("error") for line in scored)


def test_f12_a_deployment_needs_no_room_for_temporary_files(home: Home, full: Path):
    said = verbs.chat(home, ChatRequest("pebble", "hello", max_tokens=4))
    assert said["answers"][0]["tokens"] >= 1
    for row in deployments.living(home):
        deployments.stop(home, row, "the test is over")

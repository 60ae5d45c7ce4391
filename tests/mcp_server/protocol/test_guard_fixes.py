"""The call inside an error, made as it stands, gets past that error."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from echo_env import write_env
from mcp import Client

from engine.core import hardware
from engine.core.files import read_json, write_json
from engine.cost import throughput
from engine.home.run_dir import Home
from engine.machine.install import env_packages
from engine.machine.processes import launcher
from mcp_server.protocol.app import build_server

PAYS_EVERYTHING = """
from envs import Score, SingleTurnEnv, Task

class Generous(SingleTurnEnv):
    def tasks(self):
        return [Task(str(n), f"Say {n}.", answer=str(n)) for n in range(8)]

    def score(self, task, completion):
        return Score(1.0)

def load_environment():
    return Generous()
"""


@dataclass
class Caller:
    """Calls of tools, each by a client of its own."""

    home: Home
    project: Path

    async def call(self, tool: str, arguments: Mapping[str, object]) -> dict[str, Any]:
        async with Client(build_server(self.home, [self.project])) as client:
            result = await client.call_tool(tool, dict(arguments))
        if result.is_error:
            (part,) = result.content
            assert len(part.text) <= 1000
            return json.loads(part.text)
        assert result.structured_content is not None
        return result.structured_content

    async def mended(self, code: str, tool: str, **arguments: object) -> dict[str, Any]:
        """The answer to the call that the refusal `code` of this one holds."""
        refusal = await self.call(tool, arguments)
        assert refusal.get("code") == code, refusal
        fix = refusal["call"]
        answer = await self.call(fix["tool"], fix["arguments"])
        if fix["tool"] != tool and "code" not in answer:
            answer = await self.call(tool, arguments)
        assert answer.get("code") != code, (fix, answer)
        return answer

    async def push(self, name: str = "", text: str = "") -> str:
        folder = self.project / (name or "echo")
        if not folder.exists():
            write_env(self.project) if not name else folder.mkdir()
        if text:
            (folder / "environment.py").write_text(text)
        return (await self.call("push_env", {"path": str(folder)}))["env_id"]


@pytest.fixture
def caller(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Caller:
    """Whoever calls a server that queues runs and starts none."""
    monkeypatch.setattr(launcher, "start_queued", lambda *_: None)
    monkeypatch.setattr(launcher, "worker_python", lambda _: "python")
    monkeypatch.setattr(throughput, "ensure", lambda *_: True)
    project = tmp_path / "project"
    project.mkdir()
    return Caller(home, project)


@pytest.mark.parametrize(
    ("code", "arguments", "changed"),
    [
        ("SETTING_UNKNOWN", {"settings": {"learning_rte": 1e-4}}, {"learning_rate": 1e-4}),
        ("SETTING_UNKNOWN", {"settings": {"lr": 1e-4, "steps": 2}}, {"learning_rate": 1e-4}),
        ("SETTING_NOT_APPLICABLE", {"settings": {"batch_size": 4, "steps": 2}}, {"steps": 2}),
        ("SETTING_INVALID", {"settings": {"learning_rate": "1e-4"}}, {"learning_rate": 1e-4}),
        ("SETTING_INVALID", {"settings": {"steps": 2.0}}, {"steps": 2}),
        ("UNKNOWN_ARGUMENT", {"steps": 2}, {"steps": 2}),
        ("BAD_ARGUMENT", {"algorithm": "gropo", "settings": {"steps": 2}}, {"steps": 2}),
        ("BUDGET", {"max_gpu_hours": 1e-5}, {}),
    ],
)
async def test_a_refused_submit_says_the_one_that_is_taken(
    home: Home, caller: Caller, code: str, arguments: dict[str, Any], changed: dict[str, Any]
):
    env_id = await caller.push()
    answer = await caller.mended(code, "submit_train", env_id=env_id, **arguments)
    config = read_json(home.run(answer["run_id"]).config)
    assert {name: config["settings"][name] for name in changed} == changed


async def test_what_was_given_beside_the_settings_is_in_the_call_that_is_offered(caller: Caller):
    given = {"note": "shorter", "expect": "better", "request_id": "q"}
    call = {"env_id": await caller.push(), **given, "max_gpu_hours": 1e-5}
    refusal = await caller.call("submit_train", call)
    assert refusal["code"] == "BUDGET"
    assert given.items() <= refusal["call"]["arguments"].items()


async def test_a_value_that_stands_for_no_number_is_not_left_out_of_the_call(caller: Caller):
    given = {"env_id": await caller.push(), "settings": {"steps": 5.5}}
    refusal = await caller.call("submit_train", given)
    assert (refusal["code"], "call" in refusal) == ("SETTING_INVALID", False)


async def test_a_run_that_is_dearer_than_may_be_is_offered_shorter(home: Home, caller: Caller):
    home.config_file.write_text("auto_approve_gpu_hours = 0.5")
    long = {"env_id": await caller.push(), "settings": {"steps": 100_000}, "max_gpu_hours": 1000}
    answer = await caller.mended("NOT_APPROVED", "submit_train", **long)
    assert answer["state"] == "queued"


async def test_a_run_that_does_not_fit_is_offered_smaller(
    home: Home, caller: Caller, monkeypatch: pytest.MonkeyPatch
):
    settings = {"group_size": 256, "max_tokens": 800, "lora_rank": 256}
    large = {"env_id": await caller.push(), "settings": settings}
    need = (await caller.call("estimate_cost", large))["least_memory"] * 3 // 4
    machine = hardware.detect(home.root)
    small = replace(machine.devices[0], memory_total=int(need), memory_free=need)
    monkeypatch.setattr(hardware, "detect", lambda _: replace(machine, devices=[small]))
    answer = await caller.mended("DOES_NOT_FIT", "submit_train", **large, max_gpu_hours=1000)
    assert answer["state"] == "queued"


async def test_a_reward_that_pays_for_anything_is_shown_and_not_accepted_by_the_call(
    caller: Caller,
):
    env_id = await caller.push("generous", PAYS_EVERYTHING)
    refusal = await caller.call("submit_train", {"env_id": env_id})
    assert refusal["code"] == "REWARD_RISK" and "accept_reward_risk" in refusal["hint"]
    shown = await caller.call(refusal["call"]["tool"], refusal["call"]["arguments"])
    (audit,) = [check for check in shown["checks"] if check["name"] == "reward_audit"]
    assert (audit["status"], "call" in audit) == ("fail", False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The packages that were installed; what is installed is a link to this interpreter."""
    names: list[str] = []

    def install(home: Home, needed: list[Any], seconds: float) -> Path:
        names.extend(item.name for item in needed)
        place = env_packages.venv_of(home, needed)
        place.python.parent.mkdir(parents=True, exist_ok=True)
        place.python.symlink_to(sys.executable)
        return Path(sys.executable)

    monkeypatch.setattr(env_packages, "install", install)
    return names


async def test_missing_packages_are_installed_by_the_push_that_is_said(
    caller: Caller, installed: list[str]
):
    folder = write_env(caller.project)
    (folder / "requirements.txt").write_text("surely-not-here==1.0\n")
    answer = await caller.mended("ENV_DEPS", "push_env", path=str(folder))
    assert answer["env_id"].startswith("echo@") and installed == ["surely-not-here"]


async def test_a_version_whose_packages_are_gone_is_pushed_again_from_the_home(
    home: Home, caller: Caller, installed: list[str]
):
    folder = write_env(caller.project)
    (folder / "requirements.txt").write_text("surely-not-here==1.0\n")
    env_id = (await caller.call("push_env", {"path": str(folder), "install": True}))["env_id"]
    name, _, digest = env_id.partition("@")
    facts = home.env(name, digest) / "env.json"
    needed = env_packages.read_requirements(folder)
    python = env_packages.venv_of(home, needed).python
    write_json(facts, read_json(facts) | {"python": str(python)})
    python.unlink()
    answer = await caller.mended("ENV_DEPS", "submit_train", env_id=env_id)
    assert answer["state"] == "queued" and installed == ["surely-not-here"] * 2

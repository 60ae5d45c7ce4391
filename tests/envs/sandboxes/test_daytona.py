"""Sandboxes of Daytona, with a stand-in for its package. tests/adapters has the package itself."""

import importlib.machinery
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
from mini_container import MiniContainer

from envs.sandboxes import daytona, opening
from envs.sandboxes.contract import Order, SandboxFault

pytestmark = pytest.mark.timeout(20)


class Failure(Exception):
    def __init__(self, status_code: int) -> None:
        super().__init__("no capacity")
        self.status_code = status_code


class Api:
    """What the package does here: creates, runs, uploads, deletes."""

    def __init__(self, container: MiniContainer) -> None:
        self.container = container
        self.created: list[dict[str, Any]] = []
        self.deleted: list[str] = []
        self.failures: list[int] = []

    def create(self, parameters: Any, timeout: float) -> Any:
        self.created.append(parameters)
        if self.failures:
            raise Failure(self.failures.pop(0))
        return self.get(parameters["name"])

    def get(self, name: str) -> Any:
        def run(command: str, env: dict[str, str], timeout: int) -> Any:
            if "lost" in command:
                raise Failure(502)
            done = self.container.run(command, env)
            output = (done.stdout + done.stderr).decode()
            return SimpleNamespace(exit_code=done.returncode, result=output)

        def upload(data: bytes, path: str) -> None:
            self.container.run(f"cat >{path}", data=data)

        return SimpleNamespace(
            process=SimpleNamespace(exec=run),
            fs=SimpleNamespace(upload_file=upload),
            delete=lambda timeout: self.deleted.append(name),
        )


@pytest.fixture
def api(container: MiniContainer, monkeypatch: pytest.MonkeyPatch) -> Api:
    made = Api(container)
    module: Any = types.ModuleType("daytona")
    module.__spec__ = importlib.machinery.ModuleSpec("daytona", None)
    module.Daytona = lambda: made
    module.Resources = dict
    module.CreateSandboxFromImageParams = lambda **fields: fields
    module.CreateSandboxFromSnapshotParams = lambda **fields: fields
    monkeypatch.setitem(sys.modules, "daytona", module)
    monkeypatch.setenv("DAYTONA_API_KEY", "k")
    monkeypatch.setattr(opening, "FIRST_WAIT_S", 0.001)
    return made


ORDER = Order(image="python:3.12", cpus=2, memory_mb=1500, lifetime_s=301, labels={"task": "t"})


def test_a_sandbox_is_marked_ends_by_itself_and_has_no_network(api: Api):
    with opening.opened({"provider": "daytona"}, ORDER) as lease:
        ran = lease.sandbox.exec("echo $A; exit 3", 5, {"A": "1 2"}, grading=False)
        assert (ran.status, ran.stdout) == (3, "1 2\n")
        lease.sandbox.write("/tests/x", b"\xff")
        assert lease.sandbox.read("/tests/none", 5) is None
    (made,) = api.created
    assert made["labels"] == {"honesmith": "1", "task": "t"}
    assert made["ttl_minutes"] == 6 and made["ephemeral"] and made["network_block_all"]
    assert made["image"] == "python:3.12" and made["resources"] == {"cpu": 2, "memory": 2}
    assert api.deleted == [made["name"]]


def test_a_snapshot_takes_the_place_of_an_image(api: Api):
    with opening.opened({"provider": "daytona", "snapshot": "mine"}, ORDER):
        pass
    assert api.created[0]["snapshot"] == "mine" and "image" not in api.created[0]


def test_a_busy_cloud_is_asked_again_and_what_it_may_have_made_is_deleted(api: Api):
    api.failures = [429, 503]
    with opening.opened({"provider": "daytona"}, ORDER):
        names = [made["name"] for made in api.created]
        assert len(set(names)) == 3 and api.deleted == names[:2]
    assert api.deleted == names


def test_a_refusal_and_a_lost_command_are_faults_that_say_so(api: Api):
    api.failures = [403]
    with (
        pytest.raises(SandboxFault, match="daytona: no sandbox: no capacity"),
        opening.opened({"provider": "daytona"}, ORDER),
    ):
        pass
    with (
        pytest.raises(SandboxFault, match="daytona: a command was lost"),
        opening.opened({"provider": "daytona"}, ORDER) as lease,
    ):
        lease.sandbox.exec("echo lost", 5, {}, grading=False)
    assert len(api.created) == 2  # a command is not run twice


def test_what_is_missing_is_said_before_a_push(problems: Any):
    package, key, nothing = problems(daytona, "DAYTONA_API_KEY", {})
    assert "put daytona==" in package and 'secrets = ["DAYTONA_API_KEY"]' in key
    assert nothing == ""

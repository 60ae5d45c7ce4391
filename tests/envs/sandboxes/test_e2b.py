"""Sandboxes of E2B, with a stand-in for its package. tests/adapters has the package itself."""

import importlib.machinery
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
from mini_container import MiniContainer

from envs.sandboxes import e2b, opening
from envs.sandboxes.contract import Order, SandboxFault

pytestmark = pytest.mark.timeout(20)


class RateLimitException(Exception):
    pass


class ServiceBusyException(Exception):
    status_code = 503


class CommandExitException(Exception):
    def __init__(self, exit_code: int, stdout: str, stderr: str) -> None:
        super().__init__(f"status {exit_code}")
        self.exit_code, self.stdout, self.stderr = exit_code, stdout, stderr


class Api:
    """What the package does here: creates, runs, uploads, kills."""

    def __init__(self, container: MiniContainer) -> None:
        self.container = container
        self.created: list[dict[str, Any]] = []
        self.failures: list[Exception] = []
        self.killed: list[str] = []
        self.living: dict[str, dict[str, str]] = {}  # the metadata of each sandbox
        self.lists = 0

    def create(self, **fields: Any) -> Any:
        self.created.append(fields)
        name = f"sandbox{len(self.created)}"
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, ServiceBusyException):  # it is made all the same
                self.living[name] = fields["metadata"]
            raise failure
        self.living[name] = fields["metadata"]

        def run(text: str, envs: dict[str, str], user: str, timeout: float) -> Any:
            done = self.container.run(text, envs)
            both = done.stdout.decode(), done.stderr.decode()
            if done.returncode:
                raise CommandExitException(done.returncode, *both)
            return SimpleNamespace(exit_code=0, stdout=both[0], stderr=both[1])

        def write(path: str, data: bytes, **_: Any) -> None:
            self.container.run(f"cat >{path}", data=data)

        return SimpleNamespace(
            sandbox_id=name,
            commands=SimpleNamespace(run=run),
            files=SimpleNamespace(write=write),
            kill=lambda request_timeout: self.kill(name, request_timeout),
        )

    def kill(self, sandbox_id: str, request_timeout: float) -> None:
        self.killed.append(sandbox_id)
        self.living.pop(sandbox_id)

    def list(self, query: Any, request_timeout: float) -> Any:
        """Two pages, the first of which is empty."""
        self.lists += 1
        found = [
            SimpleNamespace(sandbox_id=name)
            for name, metadata in self.living.items()
            if query.metadata.items() <= metadata.items()
        ]
        pages = SimpleNamespace(has_next=True)
        left = [found, []]

        def next_items() -> Any:
            page = left.pop()
            pages.has_next = bool(left)
            return page

        pages.next_items = next_items
        return pages


@pytest.fixture
def api(container: MiniContainer, monkeypatch: pytest.MonkeyPatch) -> Api:
    made = Api(container)
    module: Any = types.ModuleType("e2b")
    module.__spec__ = importlib.machinery.ModuleSpec("e2b", None)
    module.Sandbox = made
    module.CommandExitException = CommandExitException
    module.SandboxQuery = SimpleNamespace
    monkeypatch.setitem(sys.modules, "e2b", module)
    monkeypatch.setenv("E2B_API_KEY", "k")
    monkeypatch.setattr(opening, "FIRST_WAIT_S", 0.001)
    return made


OPTIONS = {"provider": "e2b", "image": "my-template"}
ORDER = Order(image="my-template", lifetime_s=90.2, labels={"task": "t"})


def test_a_sandbox_is_marked_ends_by_itself_and_has_no_network(api: Api):
    with opening.opened(OPTIONS, ORDER) as lease:
        ran = lease.sandbox.exec("echo $A; echo no >&2; exit 3", 5, {"A": "1"}, grading=False)
        assert (ran.status, ran.stdout, ran.stderr) == (3, "1\n", "no\n")
        assert lease.sandbox.exec("true", 5, {}, grading=False).status == 0
        lease.sandbox.write("/tests/x", b"\xff")
        assert lease.sandbox.read("/tests/none", 5) is None
        lease.sandbox.end_processes()
    (made,) = api.created
    assert made["metadata"].pop("honesmith-order")
    assert made["metadata"] == {"honesmith": "1", "task": "t"} and made["timeout"] == 91
    assert made["template"] == "my-template" and made["allow_internet_access"] is False
    assert api.killed == ["sandbox1"]


def test_a_limit_of_the_cloud_is_waited_for_and_a_refusal_is_not(api: Api):
    api.failures = [RateLimitException("slower")]
    with opening.opened(OPTIONS, ORDER):
        assert len(api.created) == 2
    api.failures = [ValueError("401: no such key")]
    with pytest.raises(SandboxFault, match="e2b: no sandbox: 401"), opening.opened(OPTIONS, ORDER):
        pass
    assert len(api.created) == 3


def test_a_sandbox_that_was_made_although_its_order_failed_is_killed_before_the_next(api: Api):
    api.living["of another"] = {"honesmith": "1", "task": "t"}
    api.failures = [ServiceBusyException("come again")]
    with opening.opened(OPTIONS, ORDER):
        assert api.killed == ["sandbox1"] and api.lists == 1
        assert list(api.living) == ["of another", "sandbox2"]
    orders = [made["metadata"]["honesmith-order"] for made in api.created]
    assert len(set(orders)) == 2
    api.failures = [RateLimitException("slower")]  # a refusal: none can be there
    with opening.opened(OPTIONS, ORDER):
        assert api.lists == 1


def test_what_is_missing_is_said_before_a_push(problems: Any):
    package, key, image = problems(e2b, "E2B_API_KEY", {})
    assert "put e2b==" in package and 'secrets = ["E2B_API_KEY"]' in key
    assert "starts templates, not images" in image
    assert e2b.problem({"image": "t"}) == ""

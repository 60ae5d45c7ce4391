"""Opening a sandbox: which provider, which options, busy providers, and that it is given back."""

import pytest

from envs.json_types import JsonObject
from envs.sandboxes import opening
from envs.sandboxes.contract import Order, Ran, SandboxFault
from envs.sandboxes.remote import RemoteSandbox


class Cloud:
    """A provider that fails as often as it is told."""

    def __init__(self, *faults: SandboxFault) -> None:
        self.faults = list(faults)
        self.tries = 0
        self.closed = 0
        self.fails_to_close = 0

    def problem(self, options: JsonObject) -> str:
        return ""

    def open(self, options: JsonObject, order: Order) -> RemoteSandbox:
        self.tries += 1
        if self.faults:
            raise self.faults.pop(0)
        return RemoteSandbox(order, lambda *_: Ran(0), lambda *_: None, self.close)

    def close(self) -> None:
        if self.fails_to_close:
            self.fails_to_close -= 1
            raise SandboxFault("busy")
        self.closed += 1


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    made = Cloud()
    monkeypatch.setattr(opening, "PROVIDERS", {**opening.PROVIDERS, "cloud": made})
    monkeypatch.setattr(opening, "FIRST_WAIT_S", 0.001)
    return made


def busy() -> SandboxFault:
    return SandboxFault("too many", retryable=True)


def test_a_busy_provider_is_asked_again_and_its_sandbox_given_back(cloud: Cloud):
    cloud.faults = [busy(), busy()]
    with opening.opened({"provider": "cloud"}, Order()) as lease:
        assert cloud.tries == 3 and lease.seconds >= 0
    assert cloud.closed == 1


def test_a_fault_that_stays_is_not_tried_again(cloud: Cloud):
    cloud.faults = [SandboxFault("no such image")]
    with (
        pytest.raises(SandboxFault, match="no such image"),
        opening.opened({"provider": "cloud"}, Order()),
    ):
        pass
    assert cloud.tries == 1


def test_a_provider_that_stays_busy_is_given_up_within_the_limit(cloud: Cloud):
    cloud.faults = [busy() for _ in range(10_000)]
    options = {"provider": "cloud", "open_seconds": 0.05}
    with pytest.raises(SandboxFault, match="too many"), opening.opened(options, Order()):
        pass
    assert 1 < cloud.tries < 100


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, SandboxFault, ValueError])
def test_it_is_given_back_whatever_ends_the_rollout(error: type[BaseException], cloud: Cloud):
    cloud.fails_to_close = 1  # it is tried twice
    with pytest.raises(error), opening.opened({"provider": "cloud"}, Order()):
        raise error("over")
    assert cloud.closed == 1


WRONG = {
    "daytno": ({"provider": "daytno"}, "provider is one of local, docker, daytona, e2b"),
    "option": ({"provider": "local", "snapshot": "x"}, "local takes provider, image"),
    "text": ({"provider": "local", "image": 3}, "image is a text, got 3"),
    "number": ({"provider": "local", "price_per_hour": "1"}, "price_per_hour is a number"),
    "truth": ({"provider": "local", "price_per_hour": True}, "price_per_hour is a number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_table_is_refused_with_what_is_allowed(name: str):
    options, said = WRONG[name]
    assert said in opening.problem(options)

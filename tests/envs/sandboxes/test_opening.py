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
        self.ran: list[str] = []
        self.said = Ran(0)

    def problem(self, options: JsonObject) -> str:
        return ""

    def open(self, options: JsonObject, order: Order) -> RemoteSandbox:
        self.tries += 1
        if self.faults:
            raise self.faults.pop(0)
        return RemoteSandbox(order, self.run, lambda *_: None, self.close, f"box{self.tries}")

    def run(self, text: str, *_: object) -> Ran:
        self.ran.append(text)
        return self.said

    def close(self) -> None:
        if self.fails_to_close:
            self.fails_to_close -= 1
            raise SandboxFault("busy")
        self.closed += 1


CLOUD: JsonObject = {"provider": "cloud"}


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


def test_a_sandbox_that_cannot_be_prepared_is_given_back(cloud: Cloud):
    cloud.said = Ran(127, "", "bash: not found")
    with pytest.raises(SandboxFault, match="not found"), opening.opened(CLOUD, Order()):
        pass
    assert (cloud.tries, cloud.closed) == (1, 1)


def test_a_rollout_that_was_told_to_end_orders_nothing_more(cloud: Cloud):
    cloud.faults = [busy() for _ in range(10_000)]
    watch = opening.Watch(told=lambda: cloud.tries == 2)
    with (
        pytest.raises(SandboxFault, match="the rollout was ended"),
        opening.opened(CLOUD, Order(), watch),
    ):
        pass
    assert cloud.tries == 2


def test_a_sandbox_is_handed_over_before_it_is_asked_anything(cloud: Cloud):
    held: list[object] = []

    def hold(sandbox: object) -> None:
        assert cloud.ran == []
        held.append(sandbox)

    with opening.opened(CLOUD, Order(), opening.Watch(hold=hold)) as lease:
        assert held == [lease.sandbox] and cloud.ran != []


def test_a_sandbox_that_nobody_takes_charge_of_is_given_back(cloud: Cloud):
    def hold(sandbox: object) -> None:
        raise ValueError("over")

    with pytest.raises(ValueError), opening.opened(CLOUD, Order(), opening.Watch(hold=hold)):
        pass
    assert cloud.closed == 1 and cloud.ran == []


def test_a_sandbox_that_is_not_given_back_is_named(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
):
    cloud.fails_to_close = 1
    with opening.opened(CLOUD, Order()):
        pass
    assert capsys.readouterr().err == ""
    cloud.fails_to_close = 2
    with opening.opened(CLOUD, Order()):
        pass
    assert capsys.readouterr().err == "sandbox box2 was not given back: busy\n"


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

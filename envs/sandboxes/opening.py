"""Opens sandboxes at the provider that [adapter.sandbox] names; tries again where it is busy."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from envs.config.adapters import LOCAL
from envs.json_types import JsonObject
from envs.sandboxes import daytona, docker, e2b, local
from envs.sandboxes.contract import Order, Provider, Sandbox, SandboxFault
from envs.sandboxes.remote import RemoteSandbox

PROVIDERS: Mapping[str, Provider] = {
    LOCAL: local,
    "docker": docker,
    "daytona": daytona,
    "e2b": e2b,
}
OPTIONS: Mapping[str, tuple[str, ...]] = {  # of each provider, besides COMMON
    LOCAL: (),
    "docker": ("program",),
    "daytona": ("snapshot",),
    "e2b": (),
}
COMMON = ("provider", "image", "open_seconds", "price_per_hour")
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 10.0  # before the second try; doubled up to the other


@dataclass
class Lease:
    """A sandbox and the time that it has been open.

    Attributes:
        sandbox: the open sandbox.
        began: when it was ordered, on the monotonic clock: renting begins then.
    """

    sandbox: Sandbox
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since it was ordered."""
        return time.monotonic() - self.began


def problem(options: JsonObject) -> str:
    """Return what is wrong with the table [adapter.sandbox] or missing for its provider, and what
    to do; "" if nothing is."""
    name = options.get("provider", LOCAL)
    if name not in PROVIDERS:
        return f"[adapter.sandbox] provider is one of {', '.join(PROVIDERS)}, got {name!r}"
    allowed = (*COMMON, *OPTIONS[name])
    for option, value in options.items():
        if option not in allowed:
            return f"[adapter.sandbox] of {name} takes {', '.join(allowed)}; got {option!r}"
        is_number = option in ("open_seconds", "price_per_hour")
        expected = (int, float) if is_number else (str,)
        if isinstance(value, bool) or not isinstance(value, expected):
            word = "a number" if is_number else "a text"
            return f"[adapter.sandbox] {option} is {word}, got {value!r}"
    return PROVIDERS[name].problem(options)


@dataclass(frozen=True)
class Watch:
    """Whoever may end a rollout while its sandbox is opened.

    Attributes:
        told: whether the rollout was told to end, so that nothing more is ordered.
        hold: takes charge of a sandbox the moment it is there, before anything is asked of it. It
            may raise, and the sandbox is given back.
    """

    told: Callable[[], bool] = lambda: False
    hold: Callable[[Sandbox], None] = lambda sandbox: None


@contextmanager
def opened(options: JsonObject, order: Order, watch: Watch | None = None) -> Iterator[Lease]:
    """A context with an open sandbox, which is given back at its end whatever happens.

    Args:
        options: the table [adapter.sandbox].
        order: what the task needs.
        watch: who may end the rollout meanwhile; None for nobody.

    Raises SandboxFault if none can be had within `open_seconds` (60) of the options, or if the
    rollout was told to end. A sandbox that
    cannot be given back ends with its lifetime, and no rollout fails for it.
    """
    provider = PROVIDERS[str(options.get("provider", LOCAL))]
    deadline = time.monotonic() + float(options.get("open_seconds", 60.0))
    lease = _lease(provider, options, order, deadline, watch or Watch())
    try:
        yield lease
    finally:
        close(lease.sandbox)


def _lease(
    provider: Provider, options: JsonObject, order: Order, deadline: float, watch: Watch
) -> Lease:
    """Open a sandbox, again and again while the provider is busy. Raises SandboxFault, also where
    the rollout is told to end."""
    wait_s = FIRST_WAIT_S
    while not watch.told():
        began = time.monotonic()
        try:
            return Lease(_prepared(provider.open(options, order), watch), began)
        except SandboxFault as fault:
            if not fault.retryable or time.monotonic() + wait_s > deadline:
                raise
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    raise SandboxFault("the rollout was ended while its sandbox was opened")


def _prepared(sandbox: Sandbox, watch: Watch) -> Sandbox:
    """Prepare a sandbox that is there now, and return it; one that cannot be prepared, or that
    nobody wants any more, is given back. Raises SandboxFault."""
    try:
        watch.hold(sandbox)
        if isinstance(sandbox, RemoteSandbox):
            sandbox.prepare()
    except BaseException:
        close(sandbox)
        raise
    return sandbox


def close(sandbox: Sandbox) -> None:
    """Give a sandbox back; a second try where the first fails, then its lifetime ends it, and a
    line on stderr names it."""
    fault = None
    for _ in range(2):
        try:
            sandbox.close()
        except SandboxFault as raised:
            fault = raised
            continue
        return
    name = sandbox.name if isinstance(sandbox, RemoteSandbox) else ""
    sys.stderr.write(f"sandbox {name or 'without a name'} was not given back: {fault}\n")

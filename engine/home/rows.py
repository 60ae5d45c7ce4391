"""The rows of the database and the states a run may be in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.core.hints import Call, Hint

State = Literal[
    "queued", "preparing", "running", "stopping", "interrupted", "done", "failed", "cancelled"
]

# Every legal change of state. `done` never changes; failed and cancelled only by a resume.
TRANSITIONS: dict[str, frozenset[str]] = {
    "queued": frozenset({"preparing", "cancelled", "failed"}),  # failed: see `waits_for`
    "preparing": frozenset({"running", "stopping", "interrupted", "failed"}),
    "running": frozenset({"stopping", "interrupted", "done", "failed"}),
    "stopping": frozenset({"cancelled", "done", "failed"}),
    "interrupted": frozenset({"queued", "failed", "cancelled"}),
    "done": frozenset(),
    "failed": frozenset({"queued"}),
    "cancelled": frozenset({"queued"}),
}
STATES = tuple(TRANSITIONS)
# States of a run that has a device; of one that has not ended; and of one that has.
HOLDS_DEVICE = ("preparing", "running", "stopping")
OPEN = ("queued", "interrupted", *HOLDS_DEVICE)
TERMINAL = ("done", "failed", "cancelled")

DEFAULT_GPU_HOURS = 2  # cap of a training run that was given none


def taken_as(field: str, given: str, full_id: str) -> list[str]:
    """A warning for a caller who gave only the beginning of an id, such as
    `parent 'sums-g' was taken as sums-grpo-3`. [] where the whole id was given, or nothing ("").

    Args:
        field: the name of the argument.
        given: what the caller gave.
        full_id: the id that begins with it.
    """
    return [] if given in ("", full_id) else [f"{field} {given!r} was taken as {full_id}"]


@dataclass(frozen=True)
class NewRun:
    """What a submit stores of a run. `name` is the part of the run's id before its number."""

    name: str
    kind: str
    algorithm: str
    env_id: str
    model: str
    note: str = ""
    expect: str = ""
    parent: str = ""
    max_gpu_hours: float = 0.0  # 0: no cap
    estimated_hours: float = 0.0
    request_id: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)  # what request_id stands for
    waits_for: str = ""  # as in a RunRow
    plan: str = ""
    gpus: int = 1


@dataclass(frozen=True)
class RunRow:
    """One run. Times are unix seconds; an empty string or None says not yet or not at all.

    `waits_for` holds the ids, with commas between them, of the runs whose models it needs and does
    not have yet; it is not started before all of them are done. `plan` is the id of the plan that
    it is a step of: the runs of a plan share the cap `max_gpu_hours`. `gpus` is how many devices it
    is to have, 0 for one that asks nothing but models behind a URL; `device` those that it was
    leased last, with commas between them.
    """

    rowid: int
    run_id: str
    kind: str
    algorithm: str
    state: str
    created: float
    queued: float
    started: float | None
    ended: float | None
    attempt: int
    device: str
    request_id: str
    env_id: str
    model: str
    note: str
    expect: str
    parent: str
    max_gpu_hours: float
    estimated_hours: float
    spent_hours: float  # over all attempts
    spent_before: float  # of it, before the last submit or resume: the cap counts from there
    continuations: int
    reason_kind: str
    reason: str
    hint: Hint
    verdict: str
    waits_for: str = ""
    plan: str = ""
    gpus: int = 1

    @property
    def devices(self) -> list[str]:
        """The ids of the devices that it was leased last; [] before its first start."""
        return self.device.split(",") if self.device else []

    def device_hours(self, seconds: float) -> float:
        """The hours that count for so many seconds on its devices: those of each of them."""
        if self.gpus == 0:
            return 0.0
        return seconds / 3600 * max(1, len(self.devices))

    @property
    def awaited_ids(self) -> list[str]:
        """The ids of the runs that it waits for."""
        return self.waits_for.split(",") if self.waits_for else []

    @property
    def wait_calls(self) -> list[Call]:
        """The call that waits on, for the run or the plan that it belongs to; [] where the run has
        ended."""
        if self.state not in OPEN:
            return []
        return [Call("wait_run", {"run_id": self.plan or self.run_id})]


def plan_state(rows: Sequence[RunRow]) -> str:
    """The state of a plan, from its runs: "running" as long as a run is open and any has begun; of
    one that is over "done" only where all runs are."""
    states = [row.state for row in rows]
    if any(state in OPEN for state in states):
        return "queued" if set(states) == {"queued"} else "running"
    return next((state for state in ("failed", "cancelled") if state in states), "done")


@dataclass(frozen=True)
class EnvRow:
    """One version of a pushed environment; `pushed` is the last time it was pushed."""

    env_id: str
    name: str
    hash: str
    kind: str
    created: float
    pushed: float
    info: dict[str, Any]


@dataclass(frozen=True)
class DeploymentRow:
    """One serving process. `adapters` are those asked for: {"name", "path"} each."""

    deployment_id: str
    base_name: str
    base_path: str
    state: str  # starting | ready | failed | stopped
    url: str
    adapters: list[dict[str, str]]
    serve_base: bool
    memory_bytes: int
    created: float
    ended: float | None
    message: str

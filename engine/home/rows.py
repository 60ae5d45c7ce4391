"""The rows of the database and the states a run may be in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.core.hints import Call, Hint
from engine.home.team.owners import Viewer

State = Literal[
    "queued", "preparing", "running", "stopping", "interrupted", "done", "failed", "cancelled"
]

# State -> the states to which it may change. "done" never changes; "failed" and "cancelled" change
# only by a resume.
TRANSITIONS: dict[str, frozenset[str]] = {
    # A queued run fails if a run for which it waits (`waits_for`) does not get done.
    "queued": frozenset({"preparing", "cancelled", "failed"}),
    "preparing": frozenset({"running", "stopping", "interrupted", "failed"}),
    "running": frozenset({"stopping", "interrupted", "done", "failed"}),
    "stopping": frozenset({"cancelled", "done", "failed"}),
    "interrupted": frozenset({"queued", "failed", "cancelled"}),
    "done": frozenset(),
    "failed": frozenset({"queued"}),
    "cancelled": frozenset({"queued"}),
}
STATES = tuple(TRANSITIONS)
HOLDS_DEVICE = ("preparing", "running", "stopping")  # the run has a device
OPEN = ("queued", "interrupted", *HOLDS_DEVICE)  # the run has not ended
TERMINAL = ("done", "failed", "cancelled")  # the run has ended

PREDICTIONS = ("better", "no_difference")  # verdicts that `expect` may name; else it is a target
# The `reason_kind` of a step that a plan skipped; its state is "cancelled".
SKIPPED = "target_reached"

LOCAL = "local"  # a run's `compute` on this machine
DEFAULT_GPU_HOURS = 2  # the cap on device hours of a training run for which none was given


def viewer_id(viewer: Viewer | None) -> str:
    """Return the id of the key for whom a home is opened; "" for the local user."""
    return viewer.owner if viewer else ""


def shown_owner(viewer: Viewer | None, owner: str) -> str:
    """Return the name under which replies show an owner: its id, or "local" for the local user,
    whose id is ""; "" if the owner is the viewer itself."""
    if owner == viewer_id(viewer):
        return ""
    return owner or LOCAL


def abbreviation_warning(field: str, given: str, full_id: str) -> list[str]:
    """Return a warning if a caller gave only the beginning of an id; otherwise [].

    For example `parent 'sums-g' was taken as sums-grpo-3`.

    Args:
        field: the name of the argument.
        given: what the caller gave; "" for nothing.
        full_id: the whole id, which begins with `given`.
    """
    if given in ("", full_id):
        return []
    return [f"{field} {given!r} was taken as {full_id}"]


@dataclass(frozen=True)
class NewRun:
    """The values that a submit stores of a run. `name` is the run's id without its number."""

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
    body: Mapping[str, Any] = field(default_factory=dict)  # arguments that request_id identifies
    waits_for: str = ""  # ids of runs, see `RunRow`
    plan: str = ""
    gpus: int = 1
    compute: str = LOCAL


@dataclass(frozen=True)
class RunRow:
    """One run in the database. Times are unix seconds. "" or None means not yet, or not at all.

    Attributes:
        waits_for: ids, separated by commas, of runs whose models this run needs and which have not
            made them yet. The run is not started before all of these runs are done.
        plan: the id of the plan of which the run is a step. The runs of a plan share the cap
            `max_gpu_hours`.
        gpus: how many devices the run is to have; 0 if it asks only models behind a URL.
        device: ids, separated by commas, of the devices that the run got last.
        compute: where the run runs: "local", or "ssh:" and the name of a host, which is then its
            device.
        earlier_hours: JSON: place -> the part of `spent_hours` that was taken there, of the places
            that the run has left because they failed; "" if it has left none.
        owner: the id of the key whose run it is; "" for the local user.
        project: the project of that key when the run was submitted; "" for none.
        priority: one of `PRIORITIES`.
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
    spent_hours: float  # of all attempts
    # The part of spent_hours before the last submit or resume; the cap does not count these hours.
    spent_before: float
    continuations: int
    reason_kind: str
    reason: str
    hint: Hint
    verdict: str
    waits_for: str = ""
    plan: str = ""
    gpus: int = 1
    compute: str = LOCAL
    owner: str = ""
    project: str = ""
    priority: str = "normal"
    earlier_hours: str = ""

    def hours_by_place(self) -> dict[str, float]:
        """Return place -> device hours that the run has taken there, as `compute` names places; the
        places that it has left come first, the present one last."""
        earlier: dict[str, float] = json.loads(self.earlier_hours) if self.earlier_hours else {}
        return {**earlier, self.compute: self.spent_hours - sum(earlier.values())}

    @property
    def is_elsewhere(self) -> bool:
        """Whether it runs on another machine."""
        return self.compute != LOCAL

    @property
    def devices(self) -> list[str]:
        """The ids of the devices that the run got last; [] before its first start."""
        return self.device.split(",") if self.device else []

    def device_hours(self, seconds: float) -> float:
        """Return the device hours of `seconds` on the run's devices: the hours times their number.

        The result is 0 for a run without a device.
        """
        if self.gpus == 0:
            return 0.0
        count = self.gpus if self.is_elsewhere else len(self.devices)
        return seconds / 3600 * max(1, count)

    @property
    def awaited_ids(self) -> list[str]:
        """The ids of the runs for whose models this run waits."""
        return self.waits_for.split(",") if self.waits_for else []

    @property
    def is_skipped(self) -> bool:
        """Whether its plan skipped it, because a step before it had reached the target."""
        return self.state == "cancelled" and self.reason_kind == SKIPPED

    @property
    def has_target(self) -> bool:
        """Whether a level to reach was given at submit, such as "90 %"."""
        return self.expect not in ("", *PREDICTIONS)

    @property
    def wait_calls(self) -> list[Call]:
        """A list with the call that waits for the run, or for its whole plan; [] if the run has
        ended."""
        if self.state not in OPEN:
            return []
        return [Call("wait_run", {"run_id": self.plan or self.run_id})]


def plan_state(rows: Sequence[RunRow]) -> str:
    """Return the state of a plan, from the states of its runs.

    While a run is open, the plan is "queued" if all of its runs are, otherwise "running". When all
    runs have ended, it is "failed" or "cancelled" if any run is, otherwise "done". Skipped runs
    count as done.
    """
    states = ["done" if row.is_skipped else row.state for row in rows]
    if any(state in OPEN for state in states):
        return "queued" if set(states) == {"queued"} else "running"
    for bad_end in ("failed", "cancelled"):
        if bad_end in states:
            return bad_end
    return "done"


@dataclass(frozen=True)
class EnvRow:
    """One version of a pushed environment, of one of its owners.

    Attributes:
        pushed: when the owner pushed it last.
        owner: the id of the key that pushed it; "" for the local user.
    """

    env_id: str
    name: str
    hash: str
    kind: str
    created: float
    pushed: float
    info: dict[str, Any]
    owner: str = ""


@dataclass(frozen=True)
class DeploymentRow:
    """One serving process. `adapters` are the adapters to serve: {"name", "path"} each."""

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
    owner: str = ""  # the id of the key that started it; "" for the local user

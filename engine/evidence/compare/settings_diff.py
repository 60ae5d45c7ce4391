"""What was changed between two models, and whether a difference can be put down to it.

A lever is something that changes what is learned. When exactly one was moved, a difference may be
attributed to it; when several were, it may not, and they are named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.evidence.compare.candidates import Arm
from engine.evidence.verdict.lineage import trained_by
from engine.home.run_dir import Home
from engine.records.run_config import TrainConfig

# Settings that change what is recorded or how fast, not what is learned.
NEUTRAL = frozenset(
    {
        "accept_reward_risk",
        "eval_every",
        "eval_rows",
        "gradient_checkpointing",
        "keep_checkpoints",
        "sampler",
        "save_every",
    }
)
_CHOSEN = ("user", "parent run")  # a value from elsewhere follows from the choices
_DEEPEST = 12


@dataclass(frozen=True)
class Making:
    """How a model came to be: the run that trained it, as it was submitted; empty for a base."""

    run_id: str = ""
    config: TrainConfig | None = None

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        return self.config.settings.model_dump() if self.config else {}

    @property
    def sources(self) -> Mapping[str, str]:
        return self.config.sources if self.config else {}

    @property
    def start(self) -> str:
        return self.config.model if self.config else ""

    def choices(self) -> dict[str, Any]:
        """What identifies the training beside its settings."""
        algorithm, env_id = (
            (self.config.algorithm, self.config.env_id) if self.config else (None, None)
        )
        return {"model": self.start, "algorithm": algorithm, "env_id": env_id}


def making_of_run(home: Home, run_id: str) -> Making:
    """How a training run was made; empty where its config is gone, or it is no training run."""
    config = home.run(run_id).find_config()
    return Making(run_id, config if isinstance(config, TrainConfig) else None)


def making_of(home: Home, arm: Arm) -> Making:
    """The run that trained an arm's model, as it was submitted."""
    return making_of_run(home, arm.run_id) if arm.run_id else Making()


def ancestors(home: Home, making: Making) -> list[str]:
    """The runs a model descends from, itself first, then the model it started from."""
    chain: list[str] = []
    while making.config and len(chain) < _DEEPEST and making.run_id not in chain:
        chain.append(making.run_id)
        parent = trained_by(home, making.start)
        if not parent:
            chain.append(making.start)
            break
        making = making_of_run(home, parent)
    return chain


def attribution(home: Home, one: Arm, other: Arm) -> dict[str, Any]:
    """Which levers differ between two arms, and whether the difference can be attributed.

    `to` is the one lever, or "" when there is none or more than one; `levers` names them all.
    """
    a, b = making_of(home, one), making_of(home, other)
    levers = _lineage_levers(home, one, other, a, b)
    if levers is None:
        levers = moved_levers(a, b)
    seeds = {str(made.settings.get("seed")) for made in (a, b) if made.config}
    if len(levers) == 1:
        return {"to": levers[0], "levers": levers, "refused": False, "reason": ""}
    if levers:
        reason = (
            f"{len(levers)} levers changed ({', '.join(levers)}): the difference cannot be "
            "attributed to one of them"
        )
        return {"to": "", "levers": levers, "refused": True, "reason": reason}
    reason = "only the seed differs" if len(seeds) > 1 else "no lever differs"
    return {"to": "", "levers": [], "refused": False, "reason": f"{reason}: what is left is noise"}


def differing_settings(home: Home, arms: Sequence[Arm]) -> dict[str, dict[str, Any]]:
    """Setting -> arm -> value, for the settings that are not the same everywhere.

    Arms that no run of this home trained have no settings and are left out.
    """
    made = {arm.label: making_of(home, arm) for arm in arms}
    trained = {label: making for label, making in made.items() if making.config}
    if len(trained) < 2:
        return {}
    values = {label: making.choices() | dict(making.settings) for label, making in trained.items()}
    names = dict.fromkeys(name for chosen in values.values() for name in chosen)
    table: dict[str, dict[str, Any]] = {}
    for name in names:
        row = {label: chosen.get(name) for label, chosen in values.items()}
        if any(value != next(iter(row.values())) for value in row.values()):
            table[name] = row
    return table


def _lineage_levers(home: Home, one: Arm, other: Arm, a: Making, b: Making) -> list[str] | None:
    """The trainings that lie between two models of one line, None when they are not of one."""
    if a.run_id and a.run_id == b.run_id:
        return ["checkpoint"] if (one.step, one.label) != (other.step, other.label) else []
    for young, elder, elder_label in ((a, b, other.label), (b, a, one.label)):
        line = ancestors(home, young)
        root = elder.run_id or elder_label
        if root in line:
            return [f"training of {run_id}" for run_id in line[: line.index(root)]]
    if a.config and b.config:
        return None
    return ["base model"] + [f"training of {made.run_id}" for made in (a, b) if made.config]


def _chose(made: Making, name: str) -> bool:
    """Whether somebody gave this setting, instead of a rule."""
    return name in made.settings and made.sources.get(name, "user") in _CHOSEN


def moved_levers(a: Making, b: Making) -> list[str]:
    """What was changed from one training to another: choices, then settings; seeds do not count."""
    levers = [name for name, value in a.choices().items() if value != b.choices()[name]]
    names = dict.fromkeys([*a.settings, *b.settings])
    moved = [
        name
        for name in names
        if name not in NEUTRAL and name != "seed" and a.settings.get(name) != b.settings.get(name)
    ]
    chosen = [name for name in moved if any(_chose(made, name) for made in (a, b))]
    # A default that moved because something else did is no lever of its own.
    return levers + chosen if levers or chosen else moved

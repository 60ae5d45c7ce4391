"""What was changed between two models, and whether a difference can be put down to it.

What counts is what changes what is learned: a setting, the environment, the model to start from.
When exactly one of them differs, a difference of results may be attributed to it; when several do,
it may not, and they are named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.evidence.compare.candidates import Candidate
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
_MOST_GENERATIONS = 12


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

    def choices(self) -> dict[str, object]:
        """What identifies the training beside its settings."""
        algorithm, env_id = (
            (self.config.algorithm, self.config.env_id) if self.config else (None, None)
        )
        return {"model": self.start, "algorithm": algorithm, "env_id": env_id}


def making_of_run(home: Home, run_id: str) -> Making:
    """How a training run was made; empty where its config is gone, or it is no training run."""
    config = home.run(run_id).find_config()
    return Making(run_id, config if isinstance(config, TrainConfig) else None)


def making_of(home: Home, candidate: Candidate) -> Making:
    """The run that trained a candidate's model, as it was submitted."""
    return making_of_run(home, candidate.run_id) if candidate.run_id else Making()


def ancestors(home: Home, making: Making) -> list[str]:
    """The runs a model descends from, itself first, then the model it started from."""
    line: list[str] = []
    while making.config and len(line) < _MOST_GENERATIONS and making.run_id not in line:
        line.append(making.run_id)
        parent = trained_by(home, making.start)
        if not parent:
            line.append(making.start)
            break
        making = making_of_run(home, parent)
    return line


@dataclass(frozen=True)
class Attribution:
    """What a difference between two candidates may be put down to.

    Attributes:
        changed: everything that differs and changes what is learned.
        reason: why it is put down to nothing, "" where exactly one thing changed.
    """

    changed: Sequence[str]
    reason: str = ""

    @property
    def to(self) -> str:
        """The one thing that changed, "" where there is none or more than one."""
        return self.changed[0] if len(self.changed) == 1 else ""

    @property
    def refused(self) -> bool:
        return len(self.changed) > 1

    def to_json(self) -> dict[str, object]:
        return {
            "to": self.to,
            "levers": list(self.changed),
            "refused": self.refused,
            "reason": self.reason,
        }


def attribution(home: Home, one: Candidate, other: Candidate) -> Attribution:
    """What differs between two candidates, and whether the difference can be attributed to it."""
    first, second = making_of(home, one), making_of(home, other)
    changed = _trainings_between(home, one, other, first, second)
    if changed is None:
        changed = changed_choices(first, second)
    if len(changed) == 1:
        return Attribution(changed)
    if changed:
        reason = (
            f"{len(changed)} levers changed ({', '.join(changed)}): the difference cannot be "
            "attributed to one of them"
        )
        return Attribution(changed, reason)
    seeds = {str(made.settings.get("seed")) for made in (first, second) if made.config}
    reason = "only the seed differs" if len(seeds) > 1 else "no lever differs"
    return Attribution([], f"{reason}: what is left is noise")


def differing_settings(home: Home, candidates: Sequence[Candidate]) -> dict[str, dict[str, object]]:
    """Setting -> candidate -> value, for the settings that are not the same everywhere.

    Candidates that no run of this home trained have no settings and are left out.
    """
    made = {each.label: making_of(home, each) for each in candidates}
    trained = {label: making for label, making in made.items() if making.config}
    if len(trained) < 2:
        return {}
    values = {label: making.choices() | dict(making.settings) for label, making in trained.items()}
    names = dict.fromkeys(name for chosen in values.values() for name in chosen)
    table: dict[str, dict[str, object]] = {}
    for name in names:
        row = {label: chosen.get(name) for label, chosen in values.items()}
        if any(value != next(iter(row.values())) for value in row.values()):
            table[name] = row
    return table


def _trainings_between(
    home: Home, one: Candidate, other: Candidate, first: Making, second: Making
) -> list[str] | None:
    """The trainings that lie between two models of which one descends from the other, None where
    neither does."""
    if first.run_id and first.run_id == second.run_id:
        return ["checkpoint"] if (one.step, one.label) != (other.step, other.label) else []
    for young, elder, elder_label in ((first, second, other.label), (second, first, one.label)):
        line = ancestors(home, young)
        root = elder.run_id or elder_label
        if root in line:
            return [f"training of {run_id}" for run_id in line[: line.index(root)]]
    if first.config and second.config:
        return None
    trainings = [f"training of {made.run_id}" for made in (first, second) if made.config]
    return ["base model", *trainings]


def _chosen(made: Making, name: str) -> bool:
    """Whether somebody gave this setting, instead of a rule."""
    return name in made.settings and made.sources.get(name, "user") in _CHOSEN


def changed_choices(first: Making, second: Making) -> list[str]:
    """What was changed from one training to another: choices, then settings; seeds do not count."""
    choices = [name for name, value in first.choices().items() if value != second.choices()[name]]
    names = dict.fromkeys([*first.settings, *second.settings])
    settings = [
        name
        for name in names
        if name not in NEUTRAL
        and name != "seed"
        and first.settings.get(name) != second.settings.get(name)
    ]
    chosen = [name for name in settings if any(_chosen(made, name) for made in (first, second))]
    # A default that moved because something else did is no change of its own.
    return choices + chosen if choices or chosen else settings

"""What was changed between two models, and whether a difference can be put down to it.

A change counts if it changes what the model learns: a setting, the environment, or the model that
training starts from; messages call each of them a lever. When exactly one of them differs, a
difference of results may be attributed to it. When several differ, it may not, and they are named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
# Sources of a setting that somebody chose; a value from any other source is a computed default.
_CHOSEN = ("user", "parent run")
_MOST_GENERATIONS = 12  # of ancestors; longer chains are cut, so that a search always ends


@dataclass(frozen=True)
class Making:
    """How a model was made: the training run that made it, as the run was submitted.

    Attributes:
        run_id: the training run; "" for a base model, which no run of this home made.
        config: what was submitted. None for a base model, and where the run's config is gone or
            damaged; then all properties are empty.
    """

    run_id: str = ""
    config: TrainConfig | None = None

    @property
    def seed(self) -> int | None:
        """The seed of the training run; None without a config."""
        return self.config.settings.seed if self.config else None

    @cached_property
    def setting_values(self) -> Mapping[str, object]:
        """Setting -> value, defaults included."""
        return self.config.settings.model_dump() if self.config else {}

    @property
    def sources(self) -> Mapping[str, str]:
        """Setting -> where its value came from, such as "user"."""
        return self.config.sources if self.config else {}

    @property
    def start(self) -> str:
        """The reference of the model that training started from; "" without a config."""
        return self.config.model if self.config else ""

    def choices(self) -> dict[str, object]:
        """What identifies the training besides its settings.

        The keys are model (that training started from), algorithm and env_id. The values are empty
        or None without a config.
        """
        algorithm, env_id = (
            (self.config.algorithm, self.config.env_id) if self.config else (None, None)
        )
        return {"model": self.start, "algorithm": algorithm, "env_id": env_id}


def making_of_run(home: Home, run_id: str) -> Making:
    """How the model of a run was made.

    The config in the result is None where the run's own is gone or damaged, or where the run is not
    a training run.
    """
    config = home.run(run_id).find_config()
    return Making(run_id, config if isinstance(config, TrainConfig) else None)


def making_of(home: Home, candidate: Candidate) -> Making:
    """How the model of a candidate was made; an empty `Making` for a base model."""
    return making_of_run(home, candidate.run_id) if candidate.run_id else Making()


def ancestors(home: Home, making: Making) -> list[str]:
    """The ids of the runs that made a model, the newest first.

    The first is the model's own run, then comes the run of its start model, and so on. The last
    entry is the reference of the base model where the chain could be followed that far. Empty where
    the training is not known.
    """
    descent: list[str] = []
    # The last condition ends a chain that leads back to itself.
    while making.config and len(descent) < _MOST_GENERATIONS and making.run_id not in descent:
        descent.append(making.run_id)
        parent = trained_by(home, making.start)
        if not parent:  # the start is a base model
            descent.append(making.start)
            break
        making = making_of_run(home, parent)
    return descent


@dataclass(frozen=True)
class Attribution:
    """What a difference between two candidates may be attributed to.

    Attributes:
        changed: everything that differs and changes what is learned.
        reason: why the difference is not attributed, "" where exactly one thing changed.
    """

    changed: Sequence[str]
    reason: str = ""

    @property
    def to(self) -> str:
        """The one thing that changed, "" where there is none or more than one."""
        return self.changed[0] if len(self.changed) == 1 else ""

    @property
    def refused(self) -> bool:
        """Whether several things changed, so that none of them can be named as the cause."""
        return len(self.changed) > 1

    def to_json(self) -> dict[str, object]:
        """The attribution as JSON; everything that changed is called `levers` there."""
        return {
            "to": self.to,
            "levers": list(self.changed),
            "refused": self.refused,
            "reason": self.reason,
        }


def attribution(home: Home, one: Candidate, other: Candidate) -> Attribution:
    """What differs between two candidates, and whether a difference of results is attributed to it.

    Where one model descends from the other, the trainings in between are what differs. Otherwise
    the start model, the algorithm, the environment and the settings are compared. A difference of
    results is attributed only if exactly one thing differs.
    """
    one_training, other_training = making_of(home, one), making_of(home, other)
    changed = _trainings_between(home, one, other, one_training, other_training)
    if changed is None:
        changed = changed_choices(one_training, other_training)
    if len(changed) == 1:
        return Attribution(changed)
    if changed:
        reason = (
            f"{len(changed)} levers changed ({', '.join(changed)}): the difference cannot be "
            "attributed to one of them"
        )
        return Attribution(changed, reason)
    seeds = {str(training.seed) for training in (one_training, other_training) if training.config}
    reason = "only the seed differs" if len(seeds) > 1 else "no lever differs"
    return Attribution([], f"{reason}: what is left is noise")


def differing_settings(home: Home, candidates: Sequence[Candidate]) -> dict[str, dict[str, object]]:
    """The settings, start models, algorithms and environments that are not the same for all.

    The result maps setting -> candidate's label -> value, such as
    {"learning_rate": {"r-1": 1e-5, "r-2": 3e-5}}; None where a candidate has no such setting.
    Candidates that no run of this home trained have no settings and are left out. {} where fewer
    than two candidates are left.
    """
    trainings = {candidate.label: making_of(home, candidate) for candidate in candidates}
    trained = {label: making for label, making in trainings.items() if making.config}
    if len(trained) < 2:
        return {}
    values_by_label = {
        label: making.choices() | dict(making.setting_values) for label, making in trained.items()
    }
    setting_names = dict.fromkeys(
        name for candidate_values in values_by_label.values() for name in candidate_values
    )
    table: dict[str, dict[str, object]] = {}
    for name in setting_names:
        value_by_label = {
            label: candidate_values.get(name) for label, candidate_values in values_by_label.items()
        }
        if any(value != next(iter(value_by_label.values())) for value in value_by_label.values()):
            table[name] = value_by_label
    return table


def _trainings_between(
    home: Home, one: Candidate, other: Candidate, one_training: Making, other_training: Making
) -> list[str] | None:
    """The trainings that lie between two models, as texts for `Attribution.changed`.

    Depending on how the models are related:
        two checkpoints of one run: ["checkpoint"], or [] for the same checkpoint.
        one descends from the other: "training of <run>" for each run between them.
        one is a base model that the other does not descend from: "base model", and "training of
            <run>" for the other.
        both were trained, and neither descends from the other: None, as their settings are to be
            compared.
    """
    if one_training.run_id and one_training.run_id == other_training.run_id:
        return ["checkpoint"] if (one.step, one.label) != (other.step, other.label) else []
    for descendant, ancestor, ancestor_label in (
        (one_training, other_training, other.label),
        (other_training, one_training, one.label),
    ):
        descent = ancestors(home, descendant)
        ancestor_name = ancestor.run_id or ancestor_label
        if ancestor_name in descent:
            return [f"training of {run_id}" for run_id in descent[: descent.index(ancestor_name)]]
    if one_training.config and other_training.config:
        return None
    trainings = [
        f"training of {training.run_id}"
        for training in (one_training, other_training)
        if training.config
    ]
    return ["base model", *trainings]


def _was_chosen(training: Making, name: str) -> bool:
    """Whether the value of a setting was chosen by somebody, for this run or for its parent run.

    A setting whose source was not recorded counts as chosen.
    """
    return name in training.setting_values and training.sources.get(name, "user") in _CHOSEN


def changed_choices(first: Making, second: Making) -> list[str]:
    """The names of what was changed from one training to another.

    First those of model, algorithm and env_id that differ, then the settings that somebody chose.
    Seeds and neutral settings do not count. Computed defaults that differ are listed only where
    nothing else changed, because they usually follow from another change.
    """
    choices = [name for name, value in first.choices().items() if value != second.choices()[name]]
    names = dict.fromkeys([*first.setting_values, *second.setting_values])
    differing = [
        name
        for name in names
        if name not in NEUTRAL
        and name != "seed"
        and first.setting_values.get(name) != second.setting_values.get(name)
    ]
    chosen_settings = [
        name
        for name in differing
        if any(_was_chosen(training, name) for training in (first, second))
    ]
    # A default that changed because something else did is no change of its own.
    return choices + chosen_settings if choices or chosen_settings else differing

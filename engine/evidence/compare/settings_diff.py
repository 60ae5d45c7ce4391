"""What was changed between two models, and whether a difference of results can be attributed to it.

A change counts if it changes what the model learns: a setting, the environment, or the model that
training starts from; messages call each of these a lever. If exactly one of them differs, a
difference of results may be attributed to it. If several differ, it may not, and they are named.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from engine.evidence.bases.bases import BaseThen, base_then, trained_base
from engine.evidence.compare.candidates import Candidate
from engine.evidence.verdict.lineage import sees, trained_by
from engine.evidence.verdict.sides import step_in_ref
from engine.home.run_dir import Home
from engine.records.lines.prompt_line import chosen_prompt
from engine.records.run_config import PromptConfig, TrainConfig

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
_BASE_WEIGHTS = "base weights"  # what changed if a base's folder holds another model than before
_LENGTH = ("steps", "epochs")  # both say how long to train; every run has `steps`
# Sources of a setting that somebody chose; a value from any other source is a computed default.
_CHOSEN = ("user", "parent run")
_MOST_GENERATIONS = 12  # of ancestors; longer chains are cut, so that a search always ends


@dataclass(frozen=True)
class Making:
    """How a model was made: the config with which its training run was submitted.

    Attributes:
        run_id: the training run; "" for a base model, which no run of this home made.
        config: what was submitted. None for a base model, or if the config is missing or damaged;
            then all properties are empty.
        base: the SHA-256 of the weights that the run began with; "" if it is not known, as
            before the run has started.
    """

    run_id: str = ""
    config: TrainConfig | None = None
    base: str = ""

    @property
    def seed(self) -> int | None:
        """The seed of the training run; None without a config."""
        return self.config.settings.seed if self.config else None

    @cached_property
    def setting_values(self) -> Mapping[str, object]:
        """The value of each setting, also of defaults, by name."""
        return self.config.settings.model_dump() if self.config else {}

    @property
    def sources(self) -> Mapping[str, str]:
        """The source of each setting's value, such as "user", by name."""
        return self.config.sources if self.config else {}

    @property
    def start(self) -> str:
        """The reference of the model that training started from; "" without a config."""
        return self.config.model if self.config else ""

    def choices(self) -> dict[str, object]:
        """What identifies the training besides its settings: model (that training started from),
        algorithm and env_id.

        Without a config the model is "" and the others are None.
        """
        if self.config is None:
            return {"model": "", "algorithm": None, "env_id": None}
        return {
            "model": self.config.model,
            "algorithm": self.config.algorithm,
            "env_id": self.config.env_id,
        }


def making_of_run(home: Home, run_id: str) -> Making:
    """How the model of a run was made.

    Its config is None if the run is no training run, if the config is missing or damaged, and if
    the viewer of the home does not see the run.
    """
    return making_of_seen(home, run_id) if sees(home, run_id) else Making(run_id)


def making_of_seen(home: Home, run_id: str) -> Making:
    """How the model of a run was made, for a run that the viewer of the home is known to see (the
    database is not asked). Otherwise as `making_of_run`."""
    run = home.run(run_id)
    config = run.find_config()
    if not isinstance(config, TrainConfig):
        return Making(run_id)
    return Making(run_id, config, trained_base(run))


def making_of(home: Home, candidate: Candidate) -> Making:
    """How the model of a candidate was made; an empty `Making` for a base model."""
    return making_of_run(home, candidate.run_id) if candidate.run_id else Making()


def ancestors(home: Home, making: Making) -> list[str]:
    """The ids of the runs that made a model, the newest first. Returns [] if that is not known.

    The first is the model's own run, then comes the run of its start model, and so on. The last
    entry is the reference of the base model, if the chain could be followed that far: it ends
    before a run that the viewer of the home does not see.
    """
    ancestor_names: list[str] = []
    while (
        making.config
        and len(ancestor_names) < _MOST_GENERATIONS
        and making.run_id not in ancestor_names  # stop if the chain leads back to itself
    ):
        ancestor_names.append(making.run_id)
        parent = trained_by(home, making.start)
        if not parent:  # the start is a base model
            ancestor_names.append(making.start)
            break
        making = making_of_run(home, parent)
    return ancestor_names


@dataclass(frozen=True)
class Attribution:
    """What a difference between two candidates may be attributed to.

    Attributes:
        changed: everything that differs and changes what is learned.
        reason: why the difference is not attributed; "" if exactly one thing changed.
    """

    changed: Sequence[str]
    reason: str = ""

    @property
    def only_change(self) -> str:
        """The one choice or setting in which the candidates differ, to which a difference in their
        scores is attributed; "" if there is none or more than one."""
        return self.changed[0] if len(self.changed) == 1 else ""

    @property
    def refused(self) -> bool:
        """Whether several things changed, so that none of them can be named as the cause."""
        return len(self.changed) > 1

    def to_json(self) -> dict[str, object]:
        """The attribution as a JSON object; everything that changed is called `levers` there."""
        return {
            "to": self.only_change,
            "levers": list(self.changed),
            "refused": self.refused,
            "reason": self.reason,
        }


def attribution(home: Home, first: Candidate, second: Candidate) -> Attribution:
    """What differs between two candidates, and whether a difference of results is attributed to it.

    If one model descends from the other, the trainings in between are what differs. Otherwise the
    start model, the algorithm, the environment and the settings are compared. A difference of
    results is attributed only if exactly one thing differs.
    """
    first, first_prompt = _model_and_prompt(home, first)
    second, second_prompt = _model_and_prompt(home, second)
    first_making, second_making = making_of(home, first), making_of(home, second)
    same_model = (first.label, first.step) == (second.label, second.step)
    prompts_differ = first_prompt != second_prompt
    if same_model and prompts_differ:  # one model, asked with two prompts
        changes = []
    else:
        changes = _trainings_between(home, first, second, first_making, second_making)
    if changes is None:  # both were trained, and neither was trained into the other
        changes = changed_names(first_making, second_making)
    if prompts_differ:  # another prompt makes another environment version, so that is no change
        changes = ["prompt", *(name for name in changes if name != "env_id")]
    if swapped_base(home, first, second) is not None:
        changes = [*changes, _BASE_WEIGHTS]
    if len(changes) == 1:
        return Attribution(changes)
    if not changes:
        return Attribution(changed=[], reason=_reason_for_noise(first_making, second_making))
    reason = (
        f"{len(changes)} levers changed ({', '.join(changes)}): the difference cannot be "
        "attributed to one of them"
    )
    return Attribution(changes, reason)


def swapped_base(
    home: Home, first: Candidate, second: Candidate
) -> tuple[BaseThen, BaseThen] | None:
    """The bases of two candidates, if they are one folder that had other weights when the second
    was asked than when the first was. Returns None otherwise, or if that is not known."""
    before, after = _base_of(home, first), _base_of(home, second)
    if before is None or after is None or not before.was_swapped(after):
        return None
    return before, after


def _base_of(home: Home, candidate: Candidate) -> BaseThen | None:
    """The base under a candidate when its answers were given. Of several seeds, whose bases are
    equal, it is that of the first."""
    first_seed = candidate.members[0] if candidate.members else candidate
    ref, _, _ = first_seed.label.partition(" in ")  # a label may be "r-1@best in e-1"
    ref, _, _ = ref.partition(" (#")  # or "pebble (#2)", where a model was asked twice
    return base_then(home.run(first_seed.source), ref)


def _model_and_prompt(home: Home, candidate: Candidate) -> tuple[Candidate, str]:
    """(a candidate that names the model itself, the id of the environment version whose prompt it
    was asked with).

    A candidate of a run that searched for a prompt has that run as its `run_id`, although the run
    trained no model. In the result, label, run_id and step are those of the model that the search
    asked, and the version is the one with the new prompt; if none was chosen, it stays
    `candidate.env_id`. Every other candidate keeps its run and its version.
    """
    # `_with_distinct_labels` has added this to a label that two candidates share.
    label = candidate.label.removesuffix(f" on {candidate.env_id}")
    model = replace(candidate, label=label)
    if not candidate.run_id:  # a base model
        return model, candidate.env_id
    run = home.run(candidate.run_id)
    config = run.find_config()
    if not isinstance(config, PromptConfig):
        return model, candidate.env_id
    env_id = candidate.env_id
    new_prompt = chosen_prompt(run.prompts)
    if new_prompt and new_prompt.env_id:
        env_id = new_prompt.env_id
    asked_model = config.model  # its reference, such as "r-1@best"
    training_run_id = trained_by(home, asked_model)  # "" for a base model
    step = step_in_ref(asked_model) if training_run_id else None
    return replace(candidate, label=asked_model, run_id=training_run_id, step=step), env_id


def _reason_for_noise(first: Making, second: Making) -> str:
    """Why a difference is noise: the two trainings differ only in the seed, or not at all."""
    # A model that no run of this home trained has no seed.
    seeds = {making.seed for making in (first, second) if making.config}
    what_differs = "only the seed differs" if len(seeds) > 1 else "no lever differs"
    return f"{what_differs}: what is left is noise"


def differing_settings(home: Home, candidates: Sequence[Candidate]) -> dict[str, dict[str, object]]:
    """The settings, start models, algorithms and environments that are not the same for all
    candidates.

    The result maps setting -> candidate's label -> value, such as {"learning_rate": {"r-1": 1e-5,
    "r-2": 3e-5}}; the value is None if a candidate has no such setting. Returns {} if fewer than
    two candidates were trained by runs of this home.
    """
    settings_of: dict[str, dict[str, object]] = {}  # label -> setting -> value
    for candidate in candidates:
        making = making_of(home, candidate)
        if making.config:  # a model that no run of this home trained has no settings
            # `choices` gives the start model, the algorithm and the environment.
            settings_of[candidate.label] = making.choices() | dict(making.setting_values)
    if len(settings_of) < 2:
        return {}
    return _differing_values(settings_of)


def _differing_values(settings_of: Mapping[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """The value of each setting under each label, for settings that are not the same under all
    labels.

    `settings_of` maps label -> setting -> value, and holds at least two labels.
    """
    # A dict instead of a set, to keep the order.
    names = dict.fromkeys(name for settings in settings_of.values() for name in settings)
    differing: dict[str, dict[str, object]] = {}
    for name in names:
        value_of_label = {label: settings.get(name) for label, settings in settings_of.items()}
        if not _all_equal(value_of_label.values()):
            differing[name] = value_of_label
    return differing


def _all_equal(values: Iterable[object]) -> bool:
    """Whether all values equal the first; there must be one."""
    first, *others = values
    return all(value == first for value in others)


def _trainings_between(
    home: Home, first: Candidate, second: Candidate, first_making: Making, second_making: Making
) -> list[str] | None:
    """What lies between two models if one was trained further into the other, as a list of texts.

    - [] for one and the same checkpoint, ["checkpoint"] for two checkpoints of one run.
    - The trainings in between if one model descends from the other, such as ["training of r-1"].
    - None if both were trained and neither descends from the other: the caller then compares their
      settings.
    - Else "base model" and each training: at least one of the two is a base model (or one whose
      training is not known), and no ancestor of the other.
    """
    if first_making.run_id and first_making.run_id == second_making.run_id:
        same_checkpoint = (first.step, first.label) == (second.step, second.label)
        return [] if same_checkpoint else ["checkpoint"]
    # `ancestors` names a trained model by its run, and a base model by its reference (its label).
    first_name = first_making.run_id or first.label
    second_name = second_making.run_id or second.label
    trainings = _trainings_since(home, first_making, ancestor=second_name)
    if trainings is None:
        trainings = _trainings_since(home, second_making, ancestor=first_name)
    if trainings is not None:
        return trainings
    both_were_trained = bool(first_making.config and second_making.config)
    if both_were_trained:
        return None
    return ["base model", *_trainings_of(first_making), *_trainings_of(second_making)]


def _trainings_of(making: Making) -> list[str]:
    """The training that made a model, as a list of one text. Returns [] if it is not known."""
    return [f"training of {making.run_id}"] if making.config else []


def _trainings_since(home: Home, descendant: Making, ancestor: str) -> list[str] | None:
    """The trainings that led from the model `ancestor` to `descendant`, the newest first.

    `ancestor` is the id of the run that trained it, or the reference of a base model. Returns None
    if `descendant` does not descend from it.
    """
    newest_first = ancestors(home, descendant)  # run ids, and the base model as the last entry
    if ancestor not in newest_first:
        return None
    runs_since = newest_first[: newest_first.index(ancestor)]
    return [f"training of {run_id}" for run_id in runs_since]


def was_chosen(making: Making, name: str) -> bool:
    """Whether the value of a setting was chosen by somebody, for this run or for its parent run.

    A setting whose source was not recorded counts as chosen.
    """
    return name in making.setting_values and making.sources.get(name, "user") in _CHOSEN


def changed_names(first: Making, second: Making) -> list[str]:
    """The names of what was changed from one training to another.

    First come those of model, algorithm and env_id that differ, then the settings that differ and
    that somebody chose. Computed defaults that differ are listed only if nothing else changed,
    because they usually follow from another change.
    """
    second_choices = second.choices()
    changed_choices = [
        name for name, value in first.choices().items() if value != second_choices[name]
    ]
    changed_settings = _changed_settings(first, second)
    chosen_settings = [
        name for name in changed_settings if was_chosen(first, name) or was_chosen(second, name)
    ]
    changed_by_somebody = changed_choices + chosen_settings
    return once_per_length(changed_by_somebody or changed_settings)


def once_per_length(names: Sequence[str]) -> list[str]:
    """The names; if all settings that say how long to train (`_LENGTH`) are among them, only the
    first of these is kept."""
    if not all(name in names for name in _LENGTH):
        return list(names)
    redundant = _LENGTH[1:]
    return [name for name in names if name not in redundant]


def continues(second: Making, first: Making) -> bool:
    """Whether the training `second` starts from a model that the run of `first` made."""
    start_run_id, _, _ = second.start.partition("@")  # the start may be "r-1@best"
    return bool(first.run_id) and start_run_id == first.run_id


def _changed_settings(first: Making, second: Making) -> list[str]:
    """The names of the settings that differ, except the seed and those in `NEUTRAL`.

    Results that differ by the seed alone differ by noise (`_reason_for_noise`).
    """
    setting_names = dict.fromkeys([*first.setting_values, *second.setting_values])  # each once
    ignored_names = {*NEUTRAL, "seed"}
    return [
        name
        for name in setting_names
        if name not in ignored_names
        and first.setting_values.get(name) != second.setting_values.get(name)
    ]

"""How two trainings were configured, side by side, whether or not either was evaluated.

A value that somebody chose is told apart from one that follows from it. `steps` and `epochs` both
say how long to train, so never both are listed as chosen.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.core.reply import Reply
from engine.evidence.compare.settings_diff import making_of_run, once_per_length, was_chosen
from engine.home.run_dir import Home


@dataclass(frozen=True)
class Described:
    """The configuration of a training, from a run's config or a TOML file.

    Attributes:
        name: of the run, or of the file.
        choices: what was chosen beside the settings: model, algorithm, env_id and more.
        settings: name -> value; all settings, or only those given if `is_complete` is False.
        chosen: the names of the settings that somebody chose.
    """

    name: str
    choices: Mapping[str, object]
    settings: Mapping[str, object]
    chosen: frozenset[str]
    is_complete: bool = True


@dataclass(frozen=True)
class Difference:
    """How two described trainings differ. Each mapping is name -> (first value, second value); a
    value is None if that side has no such setting.

    Attributes:
        chosen: differences in what somebody chose on at least one side.
        followed: settings that differ although nobody chose them.
        partial: whether only the settings given on one side could be compared.
    """

    chosen: Mapping[str, tuple[object, object]]
    followed: Mapping[str, tuple[object, object]]
    partial: bool = False

    def to_json(self) -> Reply:
        """The difference as a JSON object with two lists of {name, before, after}."""
        return {"changed": _rows(self.chosen), "followed": _rows(self.followed)}

    def in_words(self) -> str:
        """The settings that somebody chose and that differ, such as "learning_rate 0.0001 ->
        0.0003, seed 0 -> 1". If there are none, the computed defaults that differ; "" if nothing
        differs."""
        changes = self.chosen or self.followed
        return ", ".join(
            f"{name} {_text(before)} -> {_text(after)}" for name, (before, after) in changes.items()
        )


def _rows(values: Mapping[str, tuple[object, object]]) -> list[Reply]:
    """Differing values, name -> (before, after), as a list of {name, before, after}."""
    return [
        {"name": name, "before": before, "after": after} for name, (before, after) in values.items()
    ]


def _text(value: object) -> str:
    """A value as text in a sentence: "none" for None, at most six digits for a float."""
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def described_run(home: Home, run_id: str) -> Described | None:
    """The configuration of a training run. Returns None for a run that trains nothing, or whose
    config is missing or damaged."""
    making = making_of_run(home, run_id)
    if making.config is None:
        return None
    chosen = frozenset(name for name in making.setting_values if was_chosen(making, name))
    return Described(run_id, making.choices(), making.setting_values, chosen)


def difference(first: Described, second: Described) -> Difference:
    """How two described trainings differ, in their choices and in the settings that can be
    compared."""
    setting_names = _comparable_names(first, second)
    settings = _differing_values(first.settings, second.settings, setting_names)
    choice_names = dict.fromkeys([*first.choices, *second.choices])
    choices = _differing_values(first.choices, second.choices, choice_names)
    chosen_by_somebody = first.chosen | second.chosen
    chosen_settings = once_per_length([name for name in settings if name in chosen_by_somebody])
    followed = {name: pair for name, pair in settings.items() if name not in chosen_settings}
    both_complete = first.is_complete and second.is_complete
    return Difference(
        chosen=choices | {name: settings[name] for name in chosen_settings},
        followed=followed,
        partial=not both_complete,
    )


def _differing_values(
    first: Mapping[str, object], second: Mapping[str, object], names: Iterable[str]
) -> dict[str, tuple[object, object]]:
    """(first value, second value) by name, for those `names` whose values differ. A missing value
    is None."""
    return {
        name: (first.get(name), second.get(name))
        for name in names
        if first.get(name) != second.get(name)
    }


def _comparable_names(first: Described, second: Described) -> list[str]:
    """The names of the settings that can be compared, each once. They are those that either
    training has; if a training is not described completely, only those that an incomplete one
    has."""
    incomplete = [side for side in (first, second) if not side.is_complete]
    sides = incomplete or [first, second]
    return list(dict.fromkeys(name for side in sides for name in side.settings))

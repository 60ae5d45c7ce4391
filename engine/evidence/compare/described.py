"""What two trainings were told, side by side, whether or not either was evaluated.

A value that somebody chose is told apart from one that follows from it. How long to train is one
thing, however it was said: `steps` and `epochs` never both stand among what was chosen.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.core.reply import Reply
from engine.evidence.compare.settings_diff import making_of_run, once_per_length, was_chosen
from engine.home.run_dir import Home


@dataclass(frozen=True)
class Described:
    """A training as it was described: by a run's config, or by files.

    Attributes:
        name: of the run, or of the files.
        choices: what is said beside the settings: model, algorithm, env_id and more.
        settings: name -> value; all of them, or those given where `is_complete` is False.
        chosen: the names of the settings that somebody chose.
    """

    name: str
    choices: Mapping[str, object]
    settings: Mapping[str, object]
    chosen: frozenset[str]
    is_complete: bool = True


@dataclass(frozen=True)
class Difference:
    """How two described trainings differ; each maps a name to (first value, second value), None
    where a side has no such setting.

    Attributes:
        chosen: what somebody chose on at least one side.
        followed: settings that differ though nobody chose them.
        partial: whether only what one side gives could be compared.
    """

    chosen: Mapping[str, tuple[object, object]]
    followed: Mapping[str, tuple[object, object]]
    partial: bool = False

    def to_json(self) -> Reply:
        """The difference as two lists of {name, before, after}."""
        return {"changed": _rows(self.chosen), "followed": _rows(self.followed)}

    def in_words(self) -> str:
        """The chosen differences: "learning_rate 0.0001 -> 0.0003, seed 0 -> 1"."""
        changes = self.chosen or self.followed
        return ", ".join(f"{name} {_text(a)} -> {_text(b)}" for name, (a, b) in changes.items())


def _rows(values: Mapping[str, tuple[object, object]]) -> list[Reply]:
    """Differing values as rows of a table."""
    return [{"name": name, "before": a, "after": b} for name, (a, b) in values.items()]


def _text(value: object) -> str:
    """A value in a sentence; "none" for no value."""
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def described_run(home: Home, run_id: str) -> Described | None:
    """What a run was told; None for one that trains nothing or whose config is gone or damaged."""
    making = making_of_run(home, run_id)
    if making.config is None:
        return None
    chosen = frozenset(name for name in making.setting_values if was_chosen(making, name))
    return Described(run_id, making.choices(), making.setting_values, chosen)


def difference(first: Described, second: Described) -> Difference:
    """How two described trainings differ."""
    names = _comparable_names(first, second)
    differing = {
        name: (first.settings.get(name), second.settings.get(name))
        for name in names
        if first.settings.get(name) != second.settings.get(name)
    }
    chosen_names = once_per_length(
        [name for name in differing if name in first.chosen | second.chosen]
    )
    choice_names = dict.fromkeys([*first.choices, *second.choices])
    choices = {
        name: (first.choices.get(name), second.choices.get(name))
        for name in choice_names
        if first.choices.get(name) != second.choices.get(name)
    }
    return Difference(
        chosen=choices | {name: differing[name] for name in chosen_names},
        followed={name: pair for name, pair in differing.items() if name not in chosen_names},
        partial=not (first.is_complete and second.is_complete),
    )


def _comparable_names(first: Described, second: Described) -> list[str]:
    """The settings that can be compared: all of both; where one side is not complete, those that
    it gives."""
    if first.is_complete and second.is_complete:
        return list(dict.fromkeys([*first.settings, *second.settings]))
    given = [side for side in (first, second) if not side.is_complete]
    return list(dict.fromkeys(name for side in given for name in side.settings))

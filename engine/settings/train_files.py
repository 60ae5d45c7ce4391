"""A run or a plan as TOML files: each is read and checked, several are merged in order.

A later file replaces what earlier ones say: a key, a single setting, the values of a varied
setting, the whole list `then`. `steps` and `epochs` say the same thing, so the later one replaces
the other. What each file changed is kept.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.records.settings import TRAINERS, GivenSettings
from engine.settings import aliases
from engine.settings.resolution import validate

# The keys of a file beside its tables: name -> value if no file has the key.
_TEXT_KEYS = {"model": "pebble", "algorithm": "grpo", "env": ""}
_DURATIONS = ("steps", "epochs")  # both say how long to train
MOST_FILES = 8  # the most files that are merged


@dataclass(frozen=True)
class FileChanges:
    """What one of several merged files adds to the files before it, and what it changes.

    Attributes:
        source: the path of the file, or the command-line option that is merged like a file.
        sets: name -> value, for names that no earlier file gave. A setting is named
            "settings.steps".
        changes: name -> (value before, value now), for values that the file replaced. The value now
            is None if the file removed the name.
    """

    source: str
    sets: Mapping[str, object]
    changes: Mapping[str, tuple[object, object]]

    def to_json(self) -> JsonObject:
        """Return the changes as a JSON object."""
        changes = {name: list(pair) for name, pair in self.changes.items()}
        return {"file": self.source, "sets": dict(self.sets), "changes": changes}


@dataclass(frozen=True)
class TrainFile:
    """The merged content of one or more TOML files.

    Attributes:
        env: the environment; "" if the files name none.
        then, vary: further steps and varied settings, which make the run a plan
            (engine/runs/submit/plan_steps.py).
        files: what each file changed, in order.
    """

    model: str
    algorithm: str
    env: str
    settings: GivenSettings
    then: list[JsonObject]
    vary: JsonObject
    files: Sequence[FileChanges] = ()


@dataclass(frozen=True)
class _File:
    """A TOML file that was read: its path, its text, and what it holds."""

    path: Path
    text: str
    content: Mapping[str, Any]


def load_toml(path: Path) -> TrainFile:
    """Read one TOML file. Raises the UserErrors of `load_files`."""
    return load_files([path])


def load_files(paths: Sequence[Path]) -> TrainFile:
    """Read TOML files, merge them in order, and check the merged settings.

    A file may have the keys `model`, `algorithm` and `env`, the tables `[settings]` and `[vary]`,
    and the list of tables `[[then]]`.

    Raises UserError BAD_ARGUMENT if a file does not exist or there are more than `MOST_FILES`.
    Raises SETTING_UNKNOWN for an unknown key, SETTING_INVALID for a value of the wrong type, and
    every error of `validate`; the message of these names file and line.
    """
    if len(paths) > MOST_FILES:
        raise UserError(
            "BAD_ARGUMENT",
            f"{len(paths)} files were named; at most {MOST_FILES} are merged",
            hint="Put what belongs together into one file.",
        )
    files = [_read_file(path) for path in paths]
    merged: JsonObject = {}  # flat: "settings.steps" -> value
    changes: list[FileChanges] = []
    for file in files:
        merged, changed = merge(merged, _flatten(file.content), str(file.path))
        changes.append(changed)
    texts = {name: merged.get(name, default) for name, default in _TEXT_KEYS.items()}
    settings = _table_of(merged, "settings")
    _check_settings(texts["algorithm"], settings, files)
    return TrainFile(
        **texts,
        settings=settings,
        then=merged.get("then", []),
        vary=_table_of(merged, "vary"),
        files=changes,
    )


def merge(
    earlier: Mapping[str, Any], later: Mapping[str, Any], source: str
) -> tuple[JsonObject, FileChanges]:
    """Merge `later` over `earlier`; a value of `later` replaces a value of the same name.

    Args:
        earlier, later: name -> value, where a setting is named "settings.steps".
        source: where `later` comes from, for the changes.

    Returns (the merged values, what `later` changed).
    """
    merged = dict(earlier)
    sets: dict[str, object] = {}
    changes: dict[str, tuple[object, object]] = {}
    for name, value in later.items():
        for replaced_name in _names_replaced_by(name, later):
            if replaced_name in merged:
                changes[replaced_name] = (merged.pop(replaced_name), None)
        if name not in merged:
            sets[name] = value
        elif merged[name] != value:
            changes[name] = (merged[name], value)
        merged[name] = value
    return merged, FileChanges(source, sets, changes)


def with_settings(
    settings: GivenSettings, later: GivenSettings, source: str
) -> tuple[GivenSettings, FileChanges]:
    """Merge the settings `later`, which come from `source`, over `settings`.

    Returns (the merged settings, what `later` changed).
    """
    merged, changed = merge(_with_table_prefix(settings), _with_table_prefix(later), source)
    return _table_of(merged, "settings"), changed


def _with_table_prefix(settings: GivenSettings) -> JsonObject:
    """Return the settings under flat names: "steps" becomes "settings.steps"."""
    return {f"settings.{name}": value for name, value in settings.items()}


def _names_replaced_by(name: str, later: Mapping[str, Any]) -> list[str]:
    """Return the names of settings in earlier files that `name` in `later` removes.

    Steps and epochs both say how long to train, so each removes the other. Any other name removes
    nothing.
    """
    durations = [f"settings.{setting}" for setting in _DURATIONS]
    # If one file has both, neither is removed, and `validate` refuses the file.
    if name not in durations or all(duration in later for duration in durations):
        return []
    return [duration for duration in durations if duration != name]


def _flatten(content: Mapping[str, Any]) -> JsonObject:
    """Flatten the content of a file: {"settings": {"steps": 60}} -> {"settings.steps": 60}.

    Only the tables `settings` and `vary` are flattened.
    """
    flat: JsonObject = {}
    for name, value in content.items():
        if name in ("settings", "vary"):
            flat |= {f"{name}.{key}": setting_value for key, setting_value in value.items()}
        else:
            flat[name] = value
    return flat


def _table_of(merged: Mapping[str, Any], table: str) -> JsonObject:
    """Return the values of one table of `merged`, where "settings.steps" becomes "steps"."""
    prefix = f"{table}."
    return {
        name.removeprefix(prefix): value
        for name, value in merged.items()
        if name.startswith(prefix)
    }


def _check_settings(algorithm: str, settings: GivenSettings, files: Sequence[_File]) -> None:
    """Check the merged settings of the TOML `files`.

    Raises the UserErrors of `validate`, with file and line in the message. The file is the last one
    that has the setting under [settings], else the last one that has a key of that name (such as
    `algorithm`), else the last of all.
    """
    try:
        validate(algorithm, settings)
    except UserError as error:
        name = error.field.removeprefix("settings.")
        with_setting = [file for file in files if name in file.content.get("settings", {})]
        with_key = [file for file in files if name in file.content]
        file = (with_setting or with_key or files)[-1]
        raise UserError(
            error.code,
            f"{file.path}:{_line_of(file.text, name)}: {error.message}",
            hint=error.advice,
            field=error.field,
        ) from error


def _read_file(path: Path) -> _File:
    """Read the TOML file at `path` and check its keys.

    Raises UserError BAD_ARGUMENT if there is no such file, SETTING_INVALID if it is not TOML or
    cannot be read, SETTING_UNKNOWN for an unknown key.
    """
    text, content = _read_toml(path)
    for name, value in content.items():
        _check_file_key(f"{path}:{_line_of(text, name)}", name, value)
    return _File(path, text, content)


def _read_toml(path: Path) -> tuple[str, Mapping[str, Any]]:
    """Return the text of the TOML file at `path`, and what it holds.

    Raises UserError BAD_ARGUMENT if there is no such file, SETTING_INVALID if it is not TOML or
    cannot be read.
    """
    try:
        text = path.read_text("utf-8-sig")  # editors on Windows write a byte order mark
        return text, tomllib.loads(text)
    except FileNotFoundError as error:
        raise UserError("BAD_ARGUMENT", f"{path} does not exist", hint="Check the path.") from error
    # ValueError: the text is not TOML or not UTF-8. RecursionError: it is nested too deeply.
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            "SETTING_INVALID", f"{path}: {error}", hint="Correct the file: it must be valid TOML."
        ) from error


def _check_file_key(place: str, name: str, value: Any) -> None:
    """Check the key `name` of a settings file and the type of its value.

    `place` is file and line, such as "run.toml:3". Raises UserError SETTING_UNKNOWN if the key is
    unknown, SETTING_INVALID if its value has the wrong type.
    """
    if name in ("settings", "vary"):
        if not isinstance(value, dict):
            raise _file_error(place, f"{name} is not a table", f"Put the {name} under [{name}].")
    elif name == "then":
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise _file_error(place, "then is no list of tables", "Write each under [[then]].")
    elif name not in _TEXT_KEYS:
        raise _unknown_key_error(place, name, value)
    elif not isinstance(value, str):
        raise _file_error(place, f"{name} = {value!r} is not text", f'Write {name} = "...".')


def _unknown_key_error(place: str, name: str, value: Any) -> UserError:
    """Make the error for an unknown key or table of a settings file; `place` is file and line."""
    if any(name in schema.model_fields for schema in TRAINERS.values()):
        hint = f"Put {name} under [settings]."
    else:
        # "grpo" stands for any algorithm: the name is compared with the keys of a file only.
        hint = aliases.suggest(name, "grpo", [*_TEXT_KEYS, "settings", "then", "vary"])
    is_table = isinstance(value, dict)
    fault = f"[{name}] is no table of this file" if is_table else f"{name} is no key of this file"
    return UserError(
        "SETTING_UNKNOWN",
        f"{place}: {fault}",
        hint=hint or "A file has model, algorithm, env and the table [settings].",
        field=name,
    )


def _file_error(place: str, fault: str, hint: str) -> UserError:
    """Make the error SETTING_INVALID for a settings file; `place` is file and line."""
    return UserError("SETTING_INVALID", f"{place}: {fault}", hint=hint)


def _line_of(text: str, name: str) -> int:
    """Return the number of the line in the TOML text `text` that sets `name` or opens its table; 1
    if no line does.

    Such a line is `name = ...`, `name.key = ...`, `[name]` or `[settings.name]`, with or without
    quotes around the name.
    """
    key = rf"[\"']?{re.escape(name)}[\"']?"
    table_header = rf"\[+\s*(settings\s*\.\s*)?{key}\s*[\].]"
    assignment = rf"{key}\s*[.=]"
    pattern = re.compile(rf"^\s*({table_header}|{assignment})")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.match(line):
            return number
    return 1

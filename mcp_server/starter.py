"""Starts things: an environment from a template, a project with an environment and a plan."""

import re
import shutil
from importlib.resources import files
from pathlib import Path

from engine.errors import UserError

DEFAULT_TEMPLATE = "single_turn"
_SKIP = shutil.ignore_patterns("__pycache__", "*.pyc")

PLAN = """\
# What to train; run it with: honesmith train {file}
model = "pebble"
algorithm = "grpo"
env = "{env}"

[settings]
# Every setting has a default that fits the model, the environment and this machine;
# `honesmith dry-run {env}` shows them. Write here only what should differ, e.g.
# steps = 60
"""


def templates() -> list[str]:
    """The names of the templates."""
    folder = _templates_folder()
    return sorted(path.name for path in folder.iterdir() if (path / "environment.py").is_file())


def new_env(folder: Path, template: str = DEFAULT_TEMPLATE) -> list[str]:
    """Copy a template to `folder`; returns the files written.

    Raises UserError BAD_ARGUMENT on an unknown template, a folder that holds something or to which
    a relative path leads out of the present one, or a name that could not be pushed.
    """
    if template not in templates():
        raise UserError(
            "BAD_ARGUMENT",
            f"there is no template {template!r}",
            hint=f"Available: {', '.join(templates())}.",
            field="template",
        )
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", folder.absolute().name):
        raise UserError(
            "BAD_ARGUMENT",
            f"{folder.absolute().name!r} cannot be the name of an environment",
            hint="Use small letters, digits, dots, dashes and underscores.",
            field="folder",
        )
    if not folder.is_absolute() and not folder.resolve().is_relative_to(Path.cwd().resolve()):
        raise UserError(
            "BAD_ARGUMENT",
            f"{folder} lies outside the folder you are in",
            hint="Go there first, or name it in full.",
            field="folder",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            "BAD_ARGUMENT",
            f"{folder} exists and is not empty",
            hint="Name a new folder; nothing is overwritten.",
            field="folder",
        )
    shutil.copytree(_templates_folder() / template, folder, dirs_exist_ok=True, ignore=_SKIP)
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def starter_project(folder: Path, env: str = "first_env") -> tuple[list[str], list[str]]:
    """An environment and a plan in `folder`: (files written, files kept as they were)."""
    written: list[str] = []
    kept: list[str] = []
    target = folder / "environments" / env
    if target.exists():
        kept.append(f"environments/{env}/")
    else:
        written += [f"environments/{env}/{name}" for name in new_env(target)]
    plan = folder / "train.toml"
    if plan.exists():
        kept.append(plan.name)
    else:
        plan.write_text(PLAN.format(file=plan.name, env=env), encoding="utf-8")
        written.append(plan.name)
    return written, kept


def _templates_folder() -> Path:
    return Path(str(files("envs"))) / "templates"

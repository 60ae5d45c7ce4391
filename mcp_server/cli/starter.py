"""Starts things: an environment from a template, a project with an environment and a plan."""

import re
from pathlib import Path

from engine.core.agent_files import refuse_agent_place, refuse_links
from engine.core.errors import UserError
from engine.core.hints import Call
from engine.core.reply import Reply
from envs.config import scaffold
from envs.config.problem import EnvProblem

DEFAULT_TEMPLATE = "single_turn"
FIRST_ENV = "first_env"

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


def templates() -> dict[str, str]:
    """Each template by name, with what it is for."""
    return dict(sorted(scaffold.TEMPLATES.items()))


def after_new(folder: Path, template: str = "") -> Reply:
    """The next call after a new environment (its push), and what to edit before it."""
    file = folder / "environment.py"
    if template.replace("-", "_") == "sft_only":
        first = f"put your rows into {folder / 'datasets'}"
    else:
        first = f"edit tasks() and score() in {file}"
    return Call("push_env", {"path": str(folder)}).to_json() | {"first": first}


def new_env(folder: Path, template: str = DEFAULT_TEMPLATE) -> list[str]:
    """Copy a template to `folder`; returns the files written.

    Raises UserError BAD_ARGUMENT on an unknown template, a folder that holds something or to which
    a relative path leads out of the present one, or a name that could not be pushed.
    """
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
    refuse_agent_place(folder.absolute(), "folder")
    try:
        written = scaffold.copy_template(template, folder)
    except EnvProblem as problem:
        raise UserError(problem.code, problem.message, hint=problem.hint) from problem
    return sorted(path.relative_to(folder).as_posix() for path in written)


def starter_project(folder: Path, env: str = FIRST_ENV) -> tuple[list[str], list[str]]:
    """An environment and a plan in `folder`: (files written, files kept as they were)."""
    written: list[str] = []
    kept: list[str] = []
    target = folder / "environments" / env
    refuse_links(folder, f"environments/{env}")
    refuse_links(folder, "train.toml")
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

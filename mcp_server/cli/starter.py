"""Makes a new environment from a template, and a new project with an environment and a plan."""

import re
from pathlib import Path

from engine.core.agent_files import refuse_folder_of_agent_files, refuse_links
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
    """Return the templates for environments, sorted: name -> what the template is for."""
    return dict(sorted(scaffold.TEMPLATES.items()))


def push_suggestion(folder: Path, template: str = "") -> Reply:
    """Return the call to suggest after an environment was made in `folder`: `push_env`.

    The field `first` of the call says what to edit before, such as "edit tasks() and score() in
    ...". `template` is the one that the environment was made from; "" means the default.
    """
    file = folder / "environment.py"
    if template.replace("-", "_") == "sft_only":  # the user may write "sft-only" too
        first_step = f"put your rows into {folder / 'datasets'}"
    else:
        first_step = f"edit tasks() and score() in {file}"
    return Call("push_env", {"path": str(folder)}).to_json() | {"first": first_step}


def new_env(folder: Path, template: str = DEFAULT_TEMPLATE) -> list[str]:
    """Copy a template to `folder`, and return the paths of the files written, relative to it.

    Raises UserError BAD_ARGUMENT if no environment may be made in the folder. If the template is
    unknown or the folder is not empty, the error has the code of the EnvProblem behind it.
    """
    _check_folder(folder)
    try:
        written_paths = scaffold.copy_template(template, folder)
    except EnvProblem as problem:
        raise UserError(problem.code, problem.message, hint=problem.hint) from problem
    return sorted(path.relative_to(folder).as_posix() for path in written_paths)


def _check_folder(folder: Path) -> None:
    """Raise UserError BAD_ARGUMENT unless a new environment may be made in `folder`.

    It may not be made
    - if the folder's name is no valid name for an environment;
    - if a relative path leads out of the current folder;
    - if the folder is a link, or lies where coding agents keep files.
    """
    # A name has at most 63 characters, and the first is a letter or digit.
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
    # In folders such as .claude, coding agents keep files that they obey or run.
    refuse_folder_of_agent_files(folder.absolute(), field="folder")


def starter_project(folder: Path, env: str = FIRST_ENV) -> tuple[list[str], list[str]]:
    """Make an environment named `env` and a plan (train.toml) in `folder`.

    Returns:
        Two lists of paths relative to `folder`: the files written, and the files or folders that
        existed already and are kept as they are.

    Raises:
        UserError: BAD_ARGUMENT if one of the paths is a link or goes through one, or if `new_env`
            cannot make the environment.
    """
    written_files: list[str] = []
    kept_files: list[str] = []
    env_folder = folder / "environments" / env
    refuse_links(folder, f"environments/{env}")
    refuse_links(folder, "train.toml")
    if env_folder.exists():
        kept_files.append(f"environments/{env}/")
    else:
        written_files += [f"environments/{env}/{name}" for name in new_env(env_folder)]
    plan = folder / "train.toml"
    if plan.exists():
        kept_files.append(plan.name)
    else:
        plan.write_text(PLAN.format(file=plan.name, env=env), encoding="utf-8")
        written_files.append(plan.name)
    return written_files, kept_files

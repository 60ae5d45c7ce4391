"""Templates to start an environment from. Each loads and passes its audit without changes."""

import difflib
import shutil
from pathlib import Path

from envs.config.problem import EnvProblem

FOLDER = Path(__file__).resolve().parents[1] / "templates"
TEMPLATES = {
    "single_turn": "one answer that code can check",
    "multi_turn_tool": "a tool the model calls before it answers",
    "judge_graded": "a rubric: hard checks, then a model as judge",
    "sft_only": "rows to learn from, no scorer",
}


def copy_template(name: str, target: Path) -> list[Path]:
    """Copy the template `name` into the folder `target`, which must be new or empty.

    Hyphens in the name count as underscores. `__pycache__` folders are not copied. Returns the
    files written, sorted by path.

    Raises:
        EnvProblem: BAD_ARGUMENT for an unknown template, or a target that is a file or not empty.
    """
    template = name.replace("-", "_")
    if template not in TEMPLATES:
        raise _unknown_template(name, template)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise EnvProblem(
            "BAD_ARGUMENT", f"{target} is in use", hint="Name a folder that is new or empty."
        )
    return _copy_files(FOLDER / template, target)


def _copy_files(source: Path, target: Path) -> list[Path]:
    """Copy all files of the folder `source` into `target`, except those in `__pycache__` folders.

    Returns the files written, sorted by path.
    """
    copies = []
    for path in sorted(source.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            copies.append(copy)
    return copies


def _unknown_template(name: str, template: str) -> EnvProblem:
    """Return the error BAD_ARGUMENT for a template that does not exist; its hint lists those that
    do.

    Args:
        name: the template's name as the user gave it.
        template: the same name with hyphens replaced by underscores, as templates are named.
    """
    close_names = difflib.get_close_matches(template, TEMPLATES, n=1)
    suggestion = f"; did you mean {close_names[0]}?" if close_names else ""
    known_templates = ", ".join(f"{key} ({description})" for key, description in TEMPLATES.items())
    return EnvProblem(
        "BAD_ARGUMENT", f"no template {name!r}{suggestion}", hint=f"There are {known_templates}."
    )

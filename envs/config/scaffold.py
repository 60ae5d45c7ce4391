"""Templates to start an environment from: each loads and passes its audit as it is."""

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
    """Copies a template into the folder `target`, which must be new or empty.

    Returns the files written. Raises EnvProblem for an unknown template or a folder in use.
    """
    chosen = name.replace("-", "_")
    if chosen not in TEMPLATES:
        near = difflib.get_close_matches(chosen, TEMPLATES, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        known = ", ".join(f"{key} ({what})" for key, what in TEMPLATES.items())
        raise EnvProblem("BAD_ARGUMENT", f"no template {name!r}{meant}", hint=f"There are {known}.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise EnvProblem(
            "BAD_ARGUMENT", f"{target} is in use", hint="Name a folder that is new or empty."
        )
    source = FOLDER / chosen
    written = []
    for path in sorted(source.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            written.append(copy)
    return written

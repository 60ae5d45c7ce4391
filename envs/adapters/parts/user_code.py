"""Imports functions and classes from files of the environment's folder."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.config.problem import EnvProblem
from envs.config.settings import FILE


def load_file(folder: Path, file: str) -> ModuleType:
    """Import `file`, a path in `folder` such as "my_env.py" or "tests/evaluate.py", as a module.

    Raises EnvProblem ENV_INVALID if the folder has no such file, and any error of the file's code.
    """
    path = (folder / file).resolve()
    if not path.is_file() or not path.is_relative_to(folder.resolve()):
        message = f"[adapter] names the file {file!r}, which the folder does not have"
        raise EnvProblem("ENV_INVALID", message, hint="Correct its path.", file=FILE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a .py path always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # a dataclass in the file looks its module up there
    spec.loader.exec_module(module)
    return module


def load_name(folder: Path, reference: str, default_name: str) -> Any:
    """Return the object that `reference` names, e.g. "my_eval.py:score".

    A reference without ":" is a file, in which `default_name` is taken. Raises EnvProblem
    ENV_INVALID if the file or the name is missing.
    """
    file, _, name = reference.partition(":")
    module = load_file(folder, file)
    value = getattr(module, name or default_name, None)
    if value is None:
        message = f"{file} does not define {name or default_name}"
        raise EnvProblem("ENV_INVALID", message, file=file)
    return value

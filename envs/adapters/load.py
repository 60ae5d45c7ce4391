"""A folder whose environment.toml has `[adapter]` becomes an `Env`. Runs in the env process."""

import importlib
from pathlib import Path

from envs.base import Env
from envs.config.adapters import Adapter
from envs.isolation.packages import add_source
from envs.json_types import JsonObject


def load(folder: Path, adapter: Adapter, params: JsonObject) -> Env:
    """The environment in `folder`, read by the module of the adapter's kind.

    Args:
        params: of environment.toml, for formats whose environments are made by a function.

    Raises EnvProblem ENV_INVALID for an option that is unknown or of another type, and whatever the
    foreign code raises; ModuleNotFoundError where its package is not installed.
    """
    add_source(folder)
    module = importlib.import_module(f"envs.adapters.{adapter.of.module}")
    return module.load(folder, adapter, params)

"""Makes an `Env` of a folder whose environment.toml has `[adapter]`. Runs in the env process."""

import importlib
from pathlib import Path

from envs.base import Env
from envs.config.adapters import Adapter
from envs.isolation.packages import add_source
from envs.json_types import JsonObject


def load(folder: Path, adapter: Adapter, params: JsonObject) -> Env:
    """Load the environment in `folder` with the module for the adapter's kind.

    Args:
        folder: the environment's folder.
        adapter: the table [adapter] of environment.toml.
        params: the [params] of environment.toml, for formats whose environments are made by a
            function.

    Raises EnvProblem ENV_INVALID for an option that is unknown or has the wrong type,
    ModuleNotFoundError if the foreign package is not installed, and any error of the foreign code.
    """
    add_source(folder)
    module = importlib.import_module(f"envs.adapters.{adapter.format.module}")
    return module.load(folder, adapter, params)

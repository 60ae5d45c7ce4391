"""A task family of reasoning-gym: its generator makes the tasks, its own code scores the answers.

`import reasoning_gym` loads a hundred families with their plotting and solving libraries: 0.7 s and
85 MB in every process that scores. So only the family's own module is loaded, if that works.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from envs.adapters.parts.options import read_options
from envs.base import Score, SingleTurnEnv, Task
from envs.config.adapters import Adapter
from envs.json_types import JsonObject

PACKAGE = "reasoning_gym"


@dataclass(frozen=True)
class Options:
    """The options of [adapter] for this format.

    Attributes:
        family: the name of the task family.
        size: how many tasks are generated.
        seed: seed of the generator.
        suffix: a text that is added to every question, after a space.
        settings: the family's own settings.
    """

    family: str
    size: int = 500
    seed: int = 42
    suffix: str = ""
    settings: JsonObject = field(default_factory=dict)


class ReasoningGym(SingleTurnEnv):
    """One task family; the same options make the same tasks."""

    def __init__(self, options: Options) -> None:
        """Load the family's generator and scorer."""
        self.options = options
        self.module = family_module(options.family)
        self.grade = self.module.get_score_answer_fn(options.family)

    def tasks(self) -> list[Task]:
        """Return the generated tasks; the metadata of each hold the package's entry, which its
        scorer needs."""
        options = self.options
        entries = self.module.create_dataset(
            options.family, size=options.size, seed=options.seed, **options.settings
        )
        return [
            Task(
                id=f"{options.family}-{index}",
                prompt=f"{entry['question']} {options.suffix}".strip(),
                answer=entry["answer"],
                metadata={"entry": dict(entry)},
            )
            for index, entry in enumerate(entries)
        ]

    def score(self, task: Task, completion: str) -> Score:
        """Return the grade from 0 to 1 that the package gives; a grade of 1 counts as solved."""
        grade = float(self.grade(completion.strip(), task.metadata["entry"]))
        return Score(grade, success=grade == 1.0)


def load(folder: Path, adapter: Adapter, params: JsonObject) -> ReasoningGym:
    """Load the family that the options name."""
    return ReasoningGym(read_options(adapter, Options))


def family_module(family: str) -> Any:
    """Return a module with `create_dataset` and `get_score_answer_fn` for the tasks of `family`.

    Only the family's own module is loaded if that works, else the whole package. Raises
    ModuleNotFoundError if the package is not installed.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)
    try:
        return _import_family_alone(family)
    except Exception:  # noqa: BLE001 - the normal import works whatever a release has moved
        # Remove what `_import_family_alone` has put into sys.modules, so that the package is
        # imported as usual.
        module_names = [name for name in sys.modules if name.split(".")[0] == PACKAGE]
        for name in module_names:
            del sys.modules[name]
        return importlib.import_module(PACKAGE)


def _import_family_alone(family: str) -> Any:
    """Return the package's module `factory` after importing, besides it, only the module of
    `family`.

    Raises an error of any kind if the package is not laid out as expected.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(PACKAGE)
    root = Path(next(iter(spec.submodule_search_locations)))
    (path,) = root.glob(f"*/{family}.py")  # exactly one, such as algebra/simple_equations.py
    subpackage = f"{PACKAGE}.{path.parent.name}"
    # The __init__ of these packages would import all families, so they are put there without it.
    for name, folder in ((PACKAGE, root), (subpackage, path.parent)):
        if name not in sys.modules:
            sys.modules[name] = _package_without_init(name, folder)
    importlib.import_module(f"{subpackage}.{family}")  # registers the family
    factory = importlib.import_module(f"{PACKAGE}.factory")
    if family not in factory.DATASETS:
        raise ImportError(f"{path} does not register {family}")
    return factory


def _package_without_init(name: str, folder: Path) -> ModuleType:
    """Return an empty package for `folder`: its modules can be imported, but its `__init__` is not
    run."""
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    module.__spec__ = spec
    return module

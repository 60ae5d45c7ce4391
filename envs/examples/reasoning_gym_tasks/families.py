"""Families of reasoning-gym, each loaded alone.

`import reasoning_gym` loads all of its hundred families and what they plot and solve with: 0.7 s
and 85 MB, for every process that scores. A family's own module is found by its name and needs
little; where the package is laid out otherwise the whole of it is imported.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "reasoning_gym"

if importlib.util.find_spec(PACKAGE) is None:
    raise ModuleNotFoundError(f"No module named {PACKAGE!r}", name=PACKAGE)


def load(family: str) -> Any:
    """A module with `create_dataset` and `get_score_answer_fn` for the tasks of `family`.

    Only the family's own module is loaded if that works, else the whole package.
    """
    try:
        return _alone(family)
    except Exception:  # noqa: BLE001 - whatever a release moved, the public way is still there
        # Forget what `_alone` has put there, so that the package is imported as usual.
        for name in [n for n in sys.modules if n.split(".")[0] == PACKAGE]:
            del sys.modules[name]
        return importlib.import_module(PACKAGE)


def _alone(family: str) -> Any:
    """The package's module `factory`, after importing only the module of `family` beside it.

    Raises an error of any kind if the package is not laid out as expected.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(PACKAGE)
    root = Path(next(iter(spec.submodule_search_locations)))
    (path,) = root.glob(f"*/{family}.py")
    for name, folder in ((PACKAGE, root), (f"{PACKAGE}.{path.parent.name}", path.parent)):
        if name not in sys.modules:
            sys.modules[name] = _bare(name, folder)
    importlib.import_module(f"{PACKAGE}.{path.parent.name}.{family}")
    factory = importlib.import_module(f"{PACKAGE}.factory")
    if family not in factory.DATASETS:
        raise ImportError(f"{path} does not register {family}")
    return factory


def _bare(name: str, folder: Path) -> ModuleType:
    """An empty package over `folder`: its modules can be imported, its `__init__` is not run."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    module.__spec__ = spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return module

"""Keeps the list of classes that transformers otherwise makes twice whenever it is imported.

`import transformers` reads the 1,700 files of its folder `models` to learn which class stands in
which file, and reads them again when the first class is asked for: a second of a worker's start.
The list depends on the installed release alone. So it is written beside the compiled files of the
package (`transformers/__pycache__`), as Python writes those, and read from there the next time.

Nothing is kept of a package outside site-packages, whose files may be edited, and nothing where the
folder cannot be written: then transformers makes its list as it always does.
"""

import contextlib
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PATCHED_MODULE = "transformers.utils.import_utils"  # defines the function that makes the list
FUNCTION = "define_import_structure"
FILE = "honesmith-import-structure.json"
MODELS = "models"  # the folder of transformers with its families of models
INSTALLED = ("site-packages", "dist-packages")  # folders whose packages are not edited in place

# Names of packages that classes need -> module -> names of classes in it.
Structure = Mapping[frozenset[str], Mapping[str, set[str]]]


def install() -> None:
    """Use the kept list in this process. Must be called before transformers is imported; later it
    changes nothing. A second call changes nothing either."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds PATCHED_MODULE as Python would, and replaces FUNCTION in it once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of PATCHED_MODULE with a loader that calls `_replace`; None for other modules,
        which Python then finds by its other finders."""
        if name != PATCHED_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from its file and replaces FUNCTION in it."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then replace its FUNCTION by one that uses the kept list."""
        super().exec_module(module)
        make_structure: Callable[..., Structure] | None = getattr(module, FUNCTION, None)
        models = Path(self.path).parents[1] / MODELS
        if make_structure is not None and models.parents[1].name in INSTALLED:
            setattr(module, FUNCTION, _with_kept_list(make_structure, models))


def _with_kept_list(
    make_structure: Callable[..., Structure], models: Path
) -> Callable[..., Structure]:
    """Return a function like `make_structure` that takes the list of the folder `models` from the
    file, or makes and writes it; for every other folder it calls `make_structure`."""

    def structure_of(module_path: Any, prefix: str | None = None) -> Structure:
        """What transformers' own function returns for the folder of `module_path`."""
        path = Path(module_path)
        if (path.parent if path.is_file() else path) != models:
            return make_structure(module_path, prefix)
        structure = read_list(models)
        if structure is None:
            structure = make_structure(models)
            write_list(models, structure)
        before = f"{prefix}." if prefix is not None else ""
        return {
            backends: {f"{before}{module}": names for module, names in modules.items()}
            for backends, modules in structure.items()
        }

    return structure_of


def read_list(models: Path) -> Structure | None:
    """The kept list of transformers' folder `models`; None if there is none, or if the folder is no
    longer the one that it was made of."""
    # OSError: no file; ValueError, TypeError, KeyError: not a file that this version wrote.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(_file(models).read_text("utf-8"))
        if kept["folder"] == _state(models):
            return {
                frozenset(entry["backends"]): {
                    module: set(names) for module, names in entry["modules"].items()
                }
                for entry in kept["structure"]
            }
    return None


def write_list(models: Path, structure: Structure) -> None:
    """Keep the list of the folder `models`; where it cannot be written, keep nothing."""
    entries = [
        {
            "backends": sorted(backends),
            "modules": {module: sorted(names) for module, names in modules.items()},
        }
        for backends, modules in structure.items()
    ]
    text = json.dumps({"folder": _state(models), "structure": entries})
    file = _file(models)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(text, "utf-8")
        temporary.replace(file)  # in one step: another process reads the old file or the new one


def _file(models: Path) -> Path:
    """The file in which the list of the folder `models` is kept."""
    return models.parent / "__pycache__" / FILE


def _state(models: Path) -> list[int]:
    """What an installation changes: time of writing (ns) and size of two files of the package."""
    stats = [(package / "__init__.py").stat() for package in (models.parent, models)]
    return [value for stat in stats for value in (stat.st_mtime_ns, stat.st_size)]

"""Keeps the list of classes that transformers otherwise makes twice whenever it is imported.

`import transformers` reads the 1,700 files of its folder `models` to learn which class stands in
which file, and reads them again when the first class is asked for: a second of a worker's start.
So the list is kept in the user's folder of caches ($XDG_CACHE_HOME, else ~/.cache), together with
the name, time and size of every file that it was made of, and is made anew once one of them
differs. Where nothing can be written, transformers makes its list once for each process.
"""

import contextlib
import hashlib
import importlib.machinery
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PATCHED_MODULE = "transformers.utils.import_utils"  # defines the function that makes the list
FUNCTION = "define_import_structure"
MODELS = "models"  # the folder of transformers with its families of models

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
        """The spec of PATCHED_MODULE with a loader that replaces FUNCTION; None for other modules,
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
        if make_structure is not None:
            models = Path(self.path).parents[1] / MODELS
            setattr(module, FUNCTION, _with_kept_list(make_structure, models))


def _with_kept_list(
    make_structure: Callable[..., Structure], models: Path
) -> Callable[..., Structure]:
    """Return a function like `make_structure` that takes the list of the folder `models` from the
    file, or makes and writes it; for every other folder it calls `make_structure`."""
    structures: list[Structure] = []  # the list, once it is known: it is asked for twice

    def structure_of(module_path: Any, prefix: str | None = None) -> Structure:
        """What transformers' own function returns for the folder of `module_path`."""
        path = Path(module_path)
        if (path.parent if path.is_file() else path) != models:
            return make_structure(module_path, prefix)
        if not structures:
            structures.append(_structure_of_models(make_structure, models))
        before = f"{prefix}." if prefix is not None else ""
        return {
            backends: {f"{before}{module}": set(names) for module, names in modules.items()}
            for backends, modules in structures[0].items()
        }

    return structure_of


def _structure_of_models(make_structure: Callable[..., Structure], models: Path) -> Structure:
    """The list of the folder `models`, as it is kept or made anew."""
    file, state = file_of(models), state_of(models)
    structure = read_list(file, state)
    if structure is None:
        structure = make_structure(models)
        # A list that was made while files were being installed is not kept.
        if state and state_of(models) == state:
            write_list(file, state, structure)
    return structure


def state_of(models: Path) -> str:
    """A SHA-256 of the name, time and size of every file from which the list is made; "" if one of
    them cannot be looked at."""
    digest = hashlib.sha256()
    try:
        for path in (models.parent / "__init__.py", models.parent / "utils" / "import_utils.py"):
            _add(digest, path.name, path.stat())
        for folder in sorted(os.scandir(models), key=lambda entry: entry.name):
            entries = os.scandir(folder.path) if folder.is_dir() else [folder]
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.endswith(".py"):
                    _add(digest, f"{folder.name}/{entry.name}", entry.stat())
    except OSError:
        return ""
    return digest.hexdigest()


def _add(digest: Any, name: str, stat: os.stat_result) -> None:
    """Add a file to the digest (a hashlib object)."""
    digest.update(f"{name} {stat.st_mtime_ns} {stat.st_size}\n".encode())


def file_of(models: Path) -> Path:
    """The file in which the list of the folder `models` is kept, one for each installation."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path("~").expanduser() / ".cache"
    name = hashlib.sha256(str(models).encode()).hexdigest()[:16]
    return Path(caches) / "honesmith" / f"transformers-{name}.json"


def read_list(file: Path, state: str) -> Structure | None:
    """The list that is kept in `file`; None if there is none, or if it was made of other files than
    those of `state`."""
    # OSError: no file; the others: not a file that this version wrote.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        kept = json.loads(file.read_text("utf-8"))
        if kept["state"] == state:
            return {
                frozenset(entry["backends"]): {
                    module: set(names) for module, names in entry["modules"].items()
                }
                for entry in kept["structure"]
            }
    return None


def write_list(file: Path, state: str, structure: Structure) -> None:
    """Keep a list in `file`, with the state of the files that it was made of. Where that cannot be
    written, nothing is kept."""
    entries = [
        {
            "backends": sorted(backends),
            "modules": {module: sorted(names) for module, names in modules.items()},
        }
        for backends, modules in structure.items()
    ]
    text = json.dumps({"state": state, "structure": entries})
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent)
        try:
            with open(descriptor, "w", encoding="utf-8") as opened:
                opened.write(text)
            os.replace(temporary, file)  # in one step: a reader sees the old list or the new one
        except OSError:
            os.unlink(temporary)
            raise

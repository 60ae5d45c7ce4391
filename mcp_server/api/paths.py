"""Paths as agents and people write them."""

from collections.abc import Sequence
from pathlib import Path

from engine.core.errors import UserError


def names_data(env_id: str) -> bool:
    """Whether `env_id` is the path of a data file or the id of a dataset, not an environment."""
    from envs.dataset import FORMATS  # noqa: PLC0415  a server starts without it

    return "/" in env_id or env_id.lower().endswith(FORMATS)


def from_roots(path: str, roots: Sequence[Path]) -> str:
    """Find a relative path in the current folder, or else in the first of `roots` that has it.

    Clients start servers in any folder, while an agent names paths relative to its project. A path
    that is absolute, empty, not possible (with a NUL) or in no such folder is returned unchanged.
    """
    # The last of these: the current folder has it.
    if not path or "\0" in path or Path(path).expanduser().is_absolute() or exists(Path(path)):
        return path
    return next((str(root / path) for root in roots if exists(root / path)), path)


def exists(path: Path) -> bool:
    """Whether there is a file or folder at `path`; False if the file system refuses to look."""
    try:
        return path.exists()
    except OSError:  # such as a name that is too long
        return False


def inside_roots(path: str, roots: Sequence[Path]) -> Path:
    """Resolve `path`, links included, and check that it lies inside one of `roots`.

    A relative path may be meant from the current folder or from a root. Of these the first is taken
    in which it exists and lies inside a root. If there is none, it is meant from the first root.

    Raises:
        UserError: PATH_OUTSIDE_ROOTS, the path lies outside all roots. BAD_ARGUMENT, the path has a
            NUL character in it.
    """
    if "\0" in path:
        raise UserError("BAD_ARGUMENT", "path has a NUL in it", hint="Name a folder.", field="path")
    user_path = Path(path).expanduser()
    if user_path.is_absolute():
        candidates = [user_path]
    else:
        in_roots = [root / user_path for root in roots]
        existing = [option for option in (user_path, *in_roots) if exists(option)]
        candidates = existing + in_roots  # if no existing one lies in a root: in the first root
    for candidate in candidates:
        resolved = candidate.resolve()
        if any(resolved.is_relative_to(root.resolve()) for root in roots):
            return resolved
    raise _outside(path, roots)


def _outside(path: str, roots: Sequence[Path]) -> UserError:
    """Make the PATH_OUTSIDE_ROOTS error for a path that lies inside none of `roots`."""
    allowed = ", ".join(str(root) for root in roots) or "none"
    return UserError(
        "PATH_OUTSIDE_ROOTS",
        f"{path} lies outside the folders this server may use ({allowed})",
        hint="Choose a path inside them, or start the server with another --root FOLDER.",
        field="path",
    )


def names_dataset(text: str) -> bool:
    """Whether `text` names a benchmark, or a dataset on the hub, and no file or folder here."""
    from engine.hub import benchmarks, data  # noqa: PLC0415  most commands need nothing of the hub

    names_one = benchmarks.names_benchmark(text) or data.parse(text) is not None
    return names_one and not exists(Path(text))

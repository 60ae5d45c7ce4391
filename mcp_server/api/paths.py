"""Paths as agents and people write them."""

from collections.abc import Sequence
from pathlib import Path

from engine.core.errors import UserError
from engine.home.run_dir import Home


def names_data(env_id: str) -> bool:
    """Whether `env_id` is not the id of an environment but the path of a data file, e.g.
    "rows.csv", or the id of a dataset on the hub, e.g. "openai/gsm8k"."""
    from envs.dataset import FORMATS  # noqa: PLC0415  a server starts without it

    return "/" in env_id or env_id.lower().endswith(FORMATS)


def from_roots(path: str, roots: Sequence[Path]) -> str:
    """Find a relative path in the current folder, or else in the first of `roots` that has it.

    Clients start servers in any folder, but an agent names paths relative to its project. The path
    is returned unchanged if it is absolute or empty, if it has a NUL character, which no path can
    have, or if none of these folders has it.
    """
    if not path or "\0" in path:
        return path
    is_absolute = Path(path).expanduser().is_absolute()
    if is_absolute or exists(Path(path)):  # a relative path is tried from the current folder
        return path
    for root in roots:
        if exists(root / path):
            return str(root / path)
    return path


def exists(path: Path) -> bool:
    """Whether there is a file or folder at `path`; False if the file system refuses to look."""
    try:
        return path.exists()
    except OSError:  # such as a name that is too long
        return False


def inside_roots(path: str, roots: Sequence[Path]) -> Path:
    """Resolve `path`, links included, check that it lies inside one of `roots`, and return it.

    A relative path is tried from the current folder and from each root. The first of these places
    wins where something exists and which lies inside a root. If nothing exists yet, the path is
    taken from the first root.

    Raises:
        UserError: PATH_OUTSIDE_ROOTS if the path lies outside all roots. BAD_ARGUMENT if the path
            has a NUL character in it.
    """
    if "\0" in path:
        raise UserError("BAD_ARGUMENT", "path has a NUL in it", hint="Name a folder.", field="path")
    user_path = Path(path).expanduser()
    if user_path.is_absolute():
        candidates = [user_path]
    else:
        in_roots = [root / user_path for root in roots]
        existing = [option for option in (user_path, *in_roots) if exists(option)]
        candidates = existing + in_roots  # `in_roots` comes last, for a path that is yet to be made
    for candidate in candidates:
        resolved = candidate.resolve()
        if any(resolved.is_relative_to(root.resolve()) for root in roots):
            return resolved
    raise _outside(path, roots)


def refuse_hidden(home: Home, path: str, roots: Sequence[Path]) -> None:
    """Raise UserError PATH_OUTSIDE_ROOTS if `path` lies inside the home folder and the call comes
    from a key (`home` has a viewer).

    One of `roots`, the folders that calls may use, may hold the home. Its files belong to other
    keys too, so no key may reach them by a path.
    """
    from engine.environments.snapshot import is_hidden  # noqa: PLC0415  few calls need it

    if is_hidden(home, path):
        raise _outside(path, roots)


def names_shared_env(home: Home, env_id: str) -> bool:
    """Whether `env_id`, such as OWNER/NAME, names an environment that the viewer of the home (the
    caller) sees."""
    from engine.home.store import Store  # noqa: PLC0415  few calls need it

    with Store(home) as store:
        return bool(store.find_env(env_id))


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
    """Whether `text` names a benchmark or a dataset on the hub. A file or folder of that name on
    this machine comes first: then the result is False."""
    from engine.hub import benchmarks, data  # noqa: PLC0415  most commands need nothing of the hub

    is_remote_name = benchmarks.names_benchmark(text) or data.parse(text) is not None
    return is_remote_name and not exists(Path(text))

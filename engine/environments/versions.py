"""What can be done with stored versions of environments beside using them.

Their packages are built ahead of a push, their files compared, taken out, and thrown away.
"""

import difflib
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.core.agent_files import is_agent_file, refuse_agent_place
from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.hints import Call, Hint
from engine.core.reply import ReplyBase
from engine.environments.registry import FACTS, EnvRecord, find_env, prefix_meant
from engine.home.rows import OPEN
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.install import env_packages

BUILD_S = 3_600.0
DIFF_LINES = 400
_SHOWN = 5


@dataclass(frozen=True)
class BuiltPackages(ReplyBase):
    """Packages that are installed, and the interpreter that has them; None where none are named."""

    packages: list[str]
    summary: str
    python: str | None = None
    next: list[Call] | None = None


@dataclass(frozen=True)
class VersionDiff(ReplyBase):
    """What two versions differ in.

    Attributes:
        files: path -> added, removed or changed.
        rows: number of rows per split, by version.
        diff: the changed lines of files that are text, unified.
    """

    files: dict[str, str]
    rows: dict[str, dict[str, int]]
    diff: str
    summary: str
    warnings: list[str]


@dataclass(frozen=True)
class PulledVersion(ReplyBase):
    """The files of a version that were copied."""

    env_id: str
    files: list[str]
    summary: str
    warnings: list[str]
    next: list[Call]


@dataclass(frozen=True)
class DeletedVersion(ReplyBase):
    """A version that is gone."""

    env_id: str
    summary: str
    warnings: list[str]


def build(home: Home, folder: Path, patience_s: float = BUILD_S) -> BuiltPackages:
    """Install the packages that the requirements.txt in `folder` names, as a push would.

    Raises UserError ENV_INVALID or ENV_DEPS.
    """
    needed = env_packages.read_requirements(folder)
    if not needed:
        return BuiltPackages([], f"{folder} names no packages; nothing to build.")
    python = env_packages.install(home, needed, patience_s)
    named = [str(requirement) for requirement in needed]
    return BuiltPackages(
        packages=named,
        summary=f"{counted(len(named), 'package')} ready for a push of {folder}.",
        python=str(python),
        next=[Call("push_env", {"path": str(folder)})],
    )


def diff(home: Home, before: str, after: str) -> VersionDiff:
    """What two versions differ in: files, and at most 400 lines of those that are text.

    Raises UserError ENV_NOT_FOUND or ENV_AMBIGUOUS.
    """
    old, new = find_env(home, before), find_env(home, after)
    old_files, new_files = _files(old), _files(new)
    files: dict[str, str] = {}
    lines: list[str] = []
    for name in sorted({*old_files, *new_files}):
        if name not in new_files or name not in old_files:
            files[name] = "removed" if name in old_files else "added"
        elif old_files[name] != new_files[name]:
            files[name] = "changed"
        else:
            continue
        lines += _lines(name, old_files.get(name, b""), new_files.get(name, b""))
    counts = {kind: list(files.values()).count(kind) for kind in ("added", "removed", "changed")}
    changes = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "no file"
    cut = len(lines) > DIFF_LINES
    return VersionDiff(
        files=files,
        rows={old.env_id: old.rows, new.env_id: new.rows},
        diff="\n".join(lines[:DIFF_LINES]),
        summary=f"{old.env_id} and {new.env_id}: {changes}.",
        warnings=[f"{counted(len(lines) - DIFF_LINES, 'line')} left out"] if cut else [],
    )


def pull(home: Home, ref: str, folder: Path) -> PulledVersion:
    """Copy a version's files into the new folder `folder`.

    Files that coding agents obey (AGENTS.md, say) are left out. Raises UserError ENV_NOT_FOUND,
    ENV_AMBIGUOUS, or BAD_ARGUMENT when the folder holds something, is a link, or is a place that
    agents obey.
    """
    record = find_env(home, ref)
    refuse_agent_place(folder.absolute(), "folder")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise _bad(folder, "exists and is not empty", "Name a new folder; nothing is replaced.")
        left_out: list[str] = []
        shutil.copytree(
            record.source, folder, dirs_exist_ok=True, ignore=partial(_obeyed, left_out)
        )
    except OSError as error:
        raise _bad(folder, f"cannot be written: {error.strerror or error}", "Name another.") from (
            error
        )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return PulledVersion(
        env_id=record.env_id,
        files=[path.relative_to(folder).as_posix() for path in files],
        summary=f"Wrote {counted(len(files), 'file')} of {record.env_id} to {folder}.",
        warnings=[f"left out, coding agents would obey it: {name}" for name in left_out],
        next=[Call("push_env", {"path": str(folder)})],
    )


def delete(home: Home, ref: str, force: bool = False) -> DeletedVersion:
    """Throw a version away, its files and its row.

    Raises UserError RUN_STATE when an open run uses it, or (without `force`) one that has ended:
    its answers could not be scored again.
    """
    record = find_env(home, ref)
    with Store(home) as store:
        users = [row for row in store.list_runs(100_000) if row.env_id == record.env_id]
        going = [row.run_id for row in users if row.state in OPEN]
        if going:
            wait = Call("wait_run", {"run_id": going[0]})
            raise _used(record, going, Hint("Wait for them or cancel them, then delete it.", wait))
        if users and not force:
            named = [row.run_id for row in users]
            raise _used(record, named, "Keep it, or delete it with --force.")
        (record.dir / FACTS).unlink(missing_ok=True)  # a folder without it is no version
        store.delete_env(record.env_id)
    shutil.rmtree(record.dir, ignore_errors=True)
    used = [f"{counted(len(users), 'run')} used it"] if users else []
    return DeletedVersion(
        env_id=record.env_id,
        summary=f"{record.env_id} is gone.",
        warnings=prefix_meant(ref, record) + used,
    )


def _obeyed(left_out: list[str], folder: str, names: list[str]) -> list[str]:
    """Of the `names` in `folder` those that agents obey, which a stranger may have written."""
    obeyed = [name for name in names if is_agent_file(name)]
    left_out += sorted(obeyed)
    return obeyed


def _files(record: EnvRecord) -> dict[str, bytes]:
    paths = (path for path in record.source.rglob("*") if path.is_file())
    return {path.relative_to(record.source).as_posix(): path.read_bytes() for path in paths}


def _lines(name: str, old: bytes, new: bytes) -> list[str]:
    try:
        before, after = old.decode().splitlines(), new.decode().splitlines()
    except UnicodeDecodeError:
        return [f"{name}: {len(old)} bytes, then {len(new)}, not text"]
    return list(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="", n=2))


def _used(record: EnvRecord, runs: list[str], hint: str | Hint) -> UserError:
    shown = ", ".join(runs[:_SHOWN]) + (", ..." if len(runs) > _SHOWN else "")
    return UserError("RUN_STATE", f"{record.env_id} is used by {shown}", hint=hint, field="env_id")


def _bad(folder: Path, what: str, hint: str) -> UserError:
    return UserError("BAD_ARGUMENT", f"{folder} {what}", hint=hint, field="folder")

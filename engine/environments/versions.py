"""Managing environment versions: build packages ahead of a push, diff, pull, seal and delete them.

A sealed version is an exam: nobody is shown its tasks, an answer or the score of a single task.
If an exam can be read, training is in the end fitted to it, even without intention, because agents
read tasks, answers and failures. Only the owner can seal a version, by a command; only deleting the
version ends the seal. Models may still be evaluated on all its held-out tasks at once, as often as
the seal says, and compared. A seal binds tools, resources and commands; it hides nothing from those
who may read the home's files.
"""

import difflib
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.core.agent_files import is_agent_file, refuse_folder_of_agent_files
from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.hints import Call, Hint
from engine.core.reply import ReplyBase
from engine.environments.registry import FACTS, EnvRecord, find_env, prefix_warning
from engine.evidence.verdict.holdout_reuse import holdout_use
from engine.home.owner_marks import seal_in
from engine.home.rows import OPEN, RunRow
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.install import env_packages
from engine.records.env_version import SEAL, Seal

BUILD_S = 3_600.0  # seconds that installing packages may take
DIFF_LINES = 400  # lines of a diff that a reply shows, so that it stays readable
_MOST_RUNS_NAMED = 5  # runs that an error message names
_ALL_RUNS = 100_000  # a limit that no home reaches
MOST_LOOKS = 1000  # the most evaluations that a seal may allow


@dataclass(frozen=True)
class BuiltPackages(ReplyBase):
    """Installed packages, and the path of the interpreter that has them (None: no packages)."""

    packages: list[str]
    summary: str
    python: str | None = None
    next: list[Call] | None = None


@dataclass(frozen=True)
class VersionDiff(ReplyBase):
    """The differences of two versions.

    Attributes:
        files: path -> "added", "removed" or "changed"; equal files are left out.
        rows: env_id -> number of rows per split.
        diff: a unified diff of the text files.
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


@dataclass(frozen=True)
class SealReply(ReplyBase):
    """A version that is sealed.

    Attributes:
        looks: how many models may be evaluated on it; every evaluation of a model counts as one.
    """

    env_id: str
    looks: int
    summary: str
    warnings: list[str]
    next: list[Call]


def build(home: Home, folder: Path, patience_s: float = BUILD_S) -> BuiltPackages:
    """Install the packages that the requirements.txt in `folder` names, as a push would.

    The reply names an interpreter only if the file names packages. Raises UserError ENV_INVALID if
    requirements.txt is malformed, or ENV_DEPS if the installation fails or takes longer than
    `patience_s` seconds.
    """
    requirements = env_packages.read_requirements(folder)
    if not requirements:
        return BuiltPackages(packages=[], summary=f"{folder} names no packages; nothing to build.")
    python = env_packages.install(home, requirements, patience_s)
    names = [str(requirement) for requirement in requirements]  # with their versions
    return BuiltPackages(
        packages=names,
        summary=f"{counted(len(names), 'package')} ready for a push of {folder}.",
        python=str(python),
        next=[Call("push_env", {"path": str(folder)})],
    )


def diff(home: Home, old_ref: str, new_ref: str) -> VersionDiff:
    """Compare the files of two versions, each named by its id, its name or a prefix.

    The diff is cut after `DIFF_LINES` lines, with a warning. Raises UserError ENV_NOT_FOUND or
    ENV_AMBIGUOUS if one of the two names no version or several, and ENV_SEALED if one is sealed.
    """
    old = find_env(home, old_ref)
    new = find_env(home, new_ref)
    old_files = _read_files(old)
    new_files = _read_files(new)
    changes = _changes(old_files, new_files)
    lines = [
        line
        for name in changes
        for line in _diff_lines(name, old_files.get(name, b""), new_files.get(name, b""))
    ]
    extra_lines = len(lines) - DIFF_LINES
    return VersionDiff(
        files=changes,
        rows={old.env_id: old.rows, new.env_id: new.rows},
        diff="\n".join(lines[:DIFF_LINES]),
        summary=f"{old.env_id} and {new.env_id}: {_counted_changes(changes) or 'no file'}.",
        warnings=[f"{counted(extra_lines, 'line')} left out"] if extra_lines > 0 else [],
    )


def _changes(old_files: Mapping[str, bytes], new_files: Mapping[str, bytes]) -> dict[str, str]:
    """Return path -> "added", "removed" or "changed" for the files that differ, sorted by path.

    The arguments are path -> content.
    """
    changes: dict[str, str] = {}
    for name in sorted({*old_files, *new_files}):
        if name not in new_files:
            changes[name] = "removed"
        elif name not in old_files:
            changes[name] = "added"
        elif old_files[name] != new_files[name]:
            changes[name] = "changed"
    return changes


def _counted_changes(changes: Mapping[str, str]) -> str:
    """Say how many files have which change: "1 added, 2 changed"; "" for none.

    `changes` maps a file name to "added", "removed" or "changed".
    """
    files_with_change = Counter(changes.values())
    return ", ".join(
        f"{files_with_change[change]} {change}"
        for change in ("added", "removed", "changed")
        if files_with_change[change]
    )


def pull(home: Home, ref: str, folder: Path) -> PulledVersion:
    """Copy a version's files into `folder`, which must be new or empty, and return the reply.

    Files that coding agents would obey, such as AGENTS.md, are left out with a warning.

    Raises UserError ENV_NOT_FOUND or ENV_AMBIGUOUS if `ref` names no version or several, ENV_SEALED
    if the version is sealed, or BAD_ARGUMENT if the folder cannot be used.
    """
    record = find_env(home, ref)
    # A stranger's files must not land where coding agents look for instructions.
    refuse_folder_of_agent_files(folder.absolute(), "folder")
    left_out = _copy_without_agent_files(record.source, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return PulledVersion(
        env_id=record.env_id,
        files=[path.relative_to(folder).as_posix() for path in files],
        summary=f"Wrote {counted(len(files), 'file')} of {record.env_id} to {folder}.",
        warnings=[f"left out, coding agents would obey it: {name}" for name in left_out],
        next=[Call("push_env", {"path": str(folder)})],
    )


def _copy_without_agent_files(source: Path, folder: Path) -> list[str]:
    """Copy `source` into `folder`, which must be new or empty, without files that coding agents
    would obey. Returns the names of the files left out. Raises UserError BAD_ARGUMENT if `folder`
    cannot be used."""
    left_out: list[str] = []
    try:
        is_usable = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        if not is_usable:
            raise _bad_folder(
                folder, "exists and is not empty", "Name a new folder; nothing is replaced."
            )
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=partial(_agent_files, left_out))
    except OSError as error:
        raise _bad_folder(
            folder, f"cannot be written: {error.strerror or error}", "Name another."
        ) from error
    return left_out


def seal(home: Home, ref: str, looks: int) -> SealReply:
    """Seal the version that `ref` names; `looks` is how many models may be evaluated on it.

    Raises UserError BAD_ARGUMENT if `looks` is out of range or the version has no held-out tasks
    with a score, RUN_STATE if it is sealed already or a run that has not ended uses it, and
    ENV_NOT_FOUND or ENV_AMBIGUOUS if `ref` names no version or several.
    """
    if not 1 <= looks <= MOST_LOOKS:
        raise UserError(
            "BAD_ARGUMENT",
            f"looks = {looks} is not from 1 to {MOST_LOOKS}",
            hint="Say how many models may be evaluated on it, such as 20.",
            field="looks",
        )
    record = find_env(home, ref, sealed=True)
    _refuse_unfit_exam(home, record)
    Seal(looks=looks, sealed=time.time()).write(record.dir / SEAL)
    return SealReply(
        env_id=record.env_id,
        looks=looks,
        summary=f"{record.env_id} is sealed: {counted(looks, 'look')} at its "
        f"{counted(record.rows['heldout'], 'held-out task')}, a verdict and nothing else.",
        warnings=[*prefix_warning(ref, record), *_earlier_use_warning(home, record)],
        next=[Call("evaluate", {"env_id": record.env_id, "rows": record.rows["heldout"]})],
    )


def _refuse_unfit_exam(home: Home, record: EnvRecord) -> None:
    """Raise UserError BAD_ARGUMENT if the version has no held-out tasks with a score, or RUN_STATE
    if it is sealed already or a run that has not ended uses it."""
    if not record.scored or not record.rows.get("heldout"):
        raise UserError(
            "BAD_ARGUMENT",
            f"{record.env_id} has no held-out tasks that are scored: nothing of it can be an exam",
            hint="Push tasks of split heldout with a score, then seal that version.",
            field="env_id",
        )
    if seal_in(record.dir) is not None:
        raise UserError(
            "RUN_STATE",
            f"{record.env_id} is sealed already, and a seal does not change",
            hint="Delete the version (honesmith env delete) to end it.",
            field="env_id",
        )
    with Store(home) as store:
        _refuse_if_open(record, _runs_on(store, record), then="seal it")


def _earlier_use_warning(home: Home, record: EnvRecord) -> list[str]:
    """Return a list with one warning if models were trained or judged on the version before it was
    sealed; else []."""
    use = holdout_use(home, record.env_id)
    if not use.total:
        return []
    return [
        f"its tasks were used {counted(use.total, 'time')} before it was sealed, and could be read"
    ]


def delete(home: Home, ref: str, force: bool = False) -> DeletedVersion:
    """Delete a version, its files and its database row, and return the reply.

    Raises UserError RUN_STATE if a run uses the version. A run that has not ended always forbids
    the deletion. A run that has ended forbids it unless `force` is given, because its answers could
    not be scored again. Raises ENV_NOT_FOUND or ENV_AMBIGUOUS if `ref` names no version or several.
    """
    record = find_env(home, ref, sealed=True)
    with Store(home) as store:
        runs = _runs_on(store, record)
        _refuse_if_used(record, runs, force)
        # env.json is removed first: without it the folder does not count as a version. So what an
        # interrupted delete leaves behind is not taken for one.
        (record.dir / FACTS).unlink(missing_ok=True)
        store.delete_env(record.env_id)
    shutil.rmtree(record.dir, ignore_errors=True)
    use_warnings = [f"{counted(len(runs), 'run')} used it"] if runs else []
    return DeletedVersion(
        env_id=record.env_id,
        summary=f"{record.env_id} is gone.",
        warnings=prefix_warning(ref, record) + use_warnings,
    )


def _refuse_if_used(record: EnvRecord, runs: list[RunRow], force: bool) -> None:
    """Raise UserError RUN_STATE if one of the `runs` that use the version has not ended, or if any
    run uses it and `force` is not given."""
    _refuse_if_open(record, runs, then="delete it")
    if runs and not force:
        run_ids = [row.run_id for row in runs]
        raise _in_use_error(record, run_ids, "Keep it, or delete it with --force.")


def _runs_on(store: Store, record: EnvRecord) -> list[RunRow]:
    """Return all runs on the version, the newest first."""
    return [row for row in store.list_runs(limit=_ALL_RUNS) if row.env_id == record.env_id]


def _refuse_if_open(record: EnvRecord, runs: list[RunRow], then: str) -> None:
    """Raise UserError RUN_STATE if one of the `runs` on the version has not ended. `then` says in
    the hint what can be done after that, e.g. "delete it"."""
    open_runs = [row.run_id for row in runs if row.state in OPEN]
    if open_runs:
        wait_call = Call("wait_run", {"run_id": open_runs[0]})
        hint = Hint(f"Wait for them or cancel them, then {then}.", wait_call)
        raise _in_use_error(record, open_runs, hint)


def _agent_files(left_out: list[str], folder: str, names: list[str]) -> list[str]:
    """Return which of the `names` in `folder` are not copied; `shutil.copytree` calls this.

    These are files that coding agents would obey, because a stranger may have written them. Their
    names are also added to `left_out`.
    """
    agent_files = [name for name in names if is_agent_file(name)]
    left_out += sorted(agent_files)
    return agent_files


def _read_files(record: EnvRecord) -> dict[str, bytes]:
    """Read all files of a version: path -> content."""
    paths = (path for path in record.source.rglob("*") if path.is_file())
    return {path.relative_to(record.source).as_posix(): path.read_bytes() for path in paths}


def _diff_lines(name: str, old: bytes, new: bytes) -> list[str]:
    """Return the lines of a unified diff of the two contents of the file `name`. If one of them is
    not text, return a single line with both sizes.
    """
    try:
        old_lines = old.decode().splitlines()
        new_lines = new.decode().splitlines()
    except UnicodeDecodeError:
        return [f"{name}: {len(old)} bytes, then {len(new)}, not text"]
    return list(
        difflib.unified_diff(old_lines, new_lines, f"a/{name}", f"b/{name}", lineterm="", n=2)
    )


def _in_use_error(record: EnvRecord, runs: list[str], hint: str | Hint) -> UserError:
    """Make the error for a version that cannot be deleted or sealed because `runs` use it."""
    names = ", ".join(runs[:_MOST_RUNS_NAMED])
    if len(runs) > _MOST_RUNS_NAMED:
        names += ", ..."
    return UserError("RUN_STATE", f"{record.env_id} is used by {names}", hint=hint, field="env_id")


def _bad_folder(folder: Path, fault: str, hint: str) -> UserError:
    """Make the error for a folder that a version cannot be copied to; `fault` says why."""
    return UserError("BAD_ARGUMENT", f"{folder} {fault}", hint=hint, field="folder")

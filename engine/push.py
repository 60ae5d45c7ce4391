"""push_env: a folder becomes a version that never changes.

Copy and hash, run `tasks()` in the env process, split, replay the reference answers, audit the
scorer, write it all aside and rename. Nothing of a push that fails stays behind.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from engine import env_packages, registry, snapshot, split
from engine.errors import UserError
from engine.evidence import contamination
from engine.registry import AUDIT, FACTS, SOURCE, TASKS
from engine.run_dir import Home, sync_folder, write_json
from engine.store import Store
from envs.again import THIRD_S
from envs.audit import OVERRUN, audit
from envs.problem import EnvProblem
from envs.process import EnvProcess, EpisodeFailed
from envs.settings import EnvSettings, read_settings

PUSH_SECONDS = 45.0  # a tool call may not take longer
START_SECONDS = 15.0  # of them for an import, and for tasks()
INSTALL_SECONDS = 40.0
AUDIT_SECONDS = 5.0
CALL_SECONDS = 10.0  # for one answer of the environment, while it is pushed
_STAGING = ".push-"
_TOLD = ("verdict", "headline", "risks", "share", "fresh_process")
GIVE_UP_REPLAYS = 20  # failures after which the remaining reference answers are not replayed
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")


@dataclass
class _Draft:
    """A version being made."""

    name: str
    folder: Path
    shot: snapshot.Snapshot
    settings: EnvSettings
    python: str = ""  # "" for any interpreter
    warnings: list[str] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)

    @property
    def hash(self) -> str:
        return self.shot.digest[:12]

    @property
    def source(self) -> Path:
        return self.folder / SOURCE


def push_env(
    home: Home,
    path: str | Path,
    *,
    name: str = "",
    install: bool = False,
    roots: list[Path] | None = None,
) -> dict[str, Any]:
    """Stores the environment in the folder `path`; the same content gives the same version.

    Args:
        path: a folder inside one of `roots` (None: anywhere).
        name: the name to push under, the folder's by default.
        install: build an environment from its requirements.txt where packages are missing.

    Raises UserError PATH_OUTSIDE_ROOTS, ENV_INVALID, ENV_IMPORT, ENV_PARAM, ENV_DEPS, ENV_LIMITS,
    DATASET_INVALID, BAD_ARGUMENT or DISK_FULL; nothing is stored then.
    """
    deadline = time.monotonic() + PUSH_SECONDS
    source = snapshot.resolve_inside(path, roots)
    name = _name(name, source)
    with _staging(home, name) as folder:
        shot = snapshot.take(source, folder / SOURCE)
        try:
            draft = _Draft(name, folder, shot, read_settings(folder / SOURCE))
            final = home.env(name, draft.hash)
            if not (final / FACTS).is_file():
                _make(home, draft, install, deadline)
                _publish(folder, final)
        except EnvProblem as problem:
            raise as_user_error(problem) from problem
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UserError(
                "DISK_FULL",
                f"the disk that holds {home.root} is full",
                hint="Free space there, then push again; nothing of this push was kept.",
                retryable=True,
            ) from error
    record = _remember(home, name, shot.digest[:12])
    return _result(record, shot)


def as_user_error(problem: EnvProblem) -> UserError:
    """The refusal an environment's fault becomes: its place, what is wrong, what to edit."""
    hint = problem.hint or "Correct it and push again."
    return UserError(problem.code, str(problem)[:700], hint=hint, field="path")


def _make(home: Home, draft: _Draft, install: bool, deadline: float) -> None:
    """Everything a version holds beside its files."""
    draft.python = _interpreter(home, draft.source, install, deadline)
    limits = draft.settings.limits
    patient = replace(
        limits,
        start_seconds=min(limits.start_seconds, START_SECONDS),
        call_seconds=min(limits.call_seconds, CALL_SECONDS),
    )
    values = {n: os.environ[n] for n in draft.settings.secrets if os.environ.get(n)}
    unset = [n for n in draft.settings.secrets if n not in values]
    if unset:
        draft.warnings.append(f"secrets not set for this server: {', '.join(unset)}")

    around = registry.sandbox_of(home)

    def process() -> EnvProcess:
        return EnvProcess(
            draft.source,
            python=draft.python or None,
            limits=patient,
            secrets=values,
            sandbox=around,
        )

    with process() as env, process() as another:
        began = time.monotonic()
        described = env.describe()
        launch = time.monotonic() - began
        began = time.monotonic()
        rows = env.tasks()
        took = time.monotonic() - began
        second = _Second(another, [dict(row) for row in rows], launch, took, deadline)
        sides = _split(rows, draft)
        for row, side in zip(rows, sides.sides, strict=True):
            row["split"] = side
        _add_gold(env, rows, described["kind"], deadline, draft)
        left = deadline - CALL_SECONDS - launch - time.monotonic()
        budget = max(1.0, min(AUDIT_SECONDS, left / OVERRUN))
        findings = audit(env, rows, described["kind"], budget_s=budget, fresh=second.fresh)
        isolation = env.isolation
        draft.warnings += second.warnings()
    train = [row for row in rows if row["split"] == "train"]
    heldout = [row for row in rows if row["split"] == "heldout"]
    left = max(0.5, min(contamination.BUDGET_S, deadline - time.monotonic()))
    shared = contamination.scan(train, heldout, left)
    _write_rows(draft.folder / TASKS, rows)
    write_json(draft.folder / AUDIT, findings)
    facts = {
        "env_id": f"{draft.name}@{draft.hash}",
        "name": draft.name,
        "hash": draft.hash,
        "digest": draft.shot.digest,
        "kind": described["kind"],
        "scored": described["scored"],
        "tools": described["tools"],
        "params": json.loads(json.dumps(draft.settings.params, default=str)),
        "rows": {s: sides.sides.count(s) for s in ("train", "heldout")},
        "split": sides.source,
        "contamination": shared,
        "files": len(draft.shot.files),
        "size": draft.shot.size,
        "left_out": draft.shot.left_out,
        "limits": asdict(limits),
        "secrets": list(draft.settings.secrets),
        "python": draft.python,
        "isolation": isolation,
        "warnings": draft.warnings,
        "problems": draft.problems,
    }
    write_json(draft.folder / FACTS, facts)  # last: a folder without it is no version


def _interpreter(home: Home, source: Path, install: bool, deadline: float) -> str:
    """The interpreter that has the packages the environment names; "" where it names none."""
    needed = env_packages.read_requirements(source)
    if not needed:
        return ""
    place = env_packages.venv_of(home, needed)
    if place.is_ready():
        return str(place.python)
    missing = env_packages.missing(needed)
    if not missing:
        return sys.executable
    if not install:
        raise UserError(
            "ENV_DEPS",
            f"packages are missing: {', '.join(missing)}",
            hint="Push again with install=true: they get an environment of their own, once.",
            field="install",
        )
    left = deadline - time.monotonic()
    python = env_packages.install(home, needed, min(INSTALL_SECONDS, left))
    if deadline - time.monotonic() < START_SECONDS:
        raise UserError(
            "ENV_DEPS",
            "the packages are installed, but that took as long as one call may",
            hint="Push again; it goes on from here.",
            retryable=True,
        )
    return str(python)


@dataclass
class _Second:
    """A second process: asked for its tasks once, and to score as one that has scored nothing.

    The tasks come first: rows drawn after answers were scored with the same dice would be others.

    Attributes:
        rows: what `tasks()` of the first process gave.
        launch, took: seconds that it needed to start, and for `tasks()`.
    """

    process: EnvProcess
    rows: list[dict[str, Any]]
    launch: float
    took: float
    deadline: float
    _said: list[str] | None = None  # None: not asked for its tasks yet
    _given: bool = False

    def fresh(self) -> EnvProcess:
        """The process, started anew; EnvProblem where that may take the time the push has left."""
        slow = 2 * self.launch + CALL_SECONDS
        if self._left() < slow + (THIRD_S if self._given else 0.0):
            why = f"it takes {self.launch:.1f} s to start: too long for another"
            raise EnvProblem("ENV_LIMITS", why)
        if self._given:
            self.process.close()
        self._given = True
        self.process.describe()
        self.warnings()
        return self.process

    def warnings(self) -> list[str]:
        """What is to be said of its `tasks()`: rows that differ cannot be made from the files."""
        if self._said is None:
            self._said = [said] if (said := self._compared()) else []
        return self._said

    def _left(self) -> float:
        return self.deadline - time.monotonic()

    def _compared(self) -> str:
        if self._left() < 2 * (self.launch + self.took):
            return "tasks() is slow; whether it repeats itself was not checked"
        try:
            second = self.process.tasks()
        except EnvProblem as problem:
            return f"tasks() failed when it was called again: {problem}"
        if second == self.rows:
            return ""
        differing = sum(a != b for a, b in zip(self.rows, second, strict=False))
        return (
            f"tasks() gave other rows when called again ({len(self.rows)} and {len(second)} rows, "
            f"{differing} differ): seed it; the rows of the first call are stored"
        )


def _split(rows: list[dict[str, Any]], draft: _Draft) -> split.Split:
    try:
        sides = split.split_rows(rows)
    except split.UnknownSplit as error:
        raise UserError(
            "ENV_INVALID",
            str(error),
            field="path",
            hint='Use "train" or "heldout" ("test", "eval", "validation"), or leave it out.',
        ) from error
    draft.warnings += sides.warnings
    return sides


def _add_gold(
    env: EnvProcess, rows: list[dict[str, Any]], kind: str, deadline: float, draft: _Draft
) -> None:
    """`gold` of each row: the whole conversation with the reference answer, or None."""
    failures: list[str] = []
    unplayed = 0
    for row in rows:
        row["gold"] = None
        if row["answer"] is None:
            continue
        if kind != "multi":
            row["gold"] = [*row["prompt"], *row["answer"]]
        elif len(failures) >= GIVE_UP_REPLAYS or time.monotonic() > deadline - AUDIT_SECONDS:
            unplayed += 1
        else:
            try:
                row["gold"] = _replay(env, row)
            except EpisodeFailed as error:
                failures.append(f"{row['id']}: {error}")
    if failures:
        count = f"{len(failures)} reference answers cannot be replayed"
        draft.warnings.append(f"{count}, the first is {failures[0][:200]}")
        draft.problems += [{"message": failure[:300]} for failure in failures[:5]]
    if unplayed:
        draft.warnings.append(f"{unplayed} reference answers were not replayed, for want of time")


def _replay(env: EnvProcess, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation that the answer's assistant messages lead to. Raises EpisodeFailed."""
    conversation = list(row["prompt"])
    episode = env.start(row)
    try:
        for message in row["answer"]:
            if message["role"] != "assistant":
                continue
            conversation.append(message)
            reply = episode.step(message)
            if reply is None:
                break
            conversation += reply
    finally:
        episode.close()
    while conversation[-1]["role"] != "assistant":  # nobody answers the environment's last words
        conversation.pop()
    return conversation


@contextlib.contextmanager
def _staging(home: Home, name: str) -> Iterator[Path]:
    """A folder beside the versions, gone afterwards unless it was renamed to one.

    Its lock lives as long as the push; what a killed one left is cleared away by the next push.
    """
    for left in home.envs.glob(f"*/{_STAGING}*"):
        _sweep(left)
    parent = home.env(name, "x").parent
    folder = parent / f"{_STAGING}{secrets.token_hex(6)}"
    lock = None
    while lock is None:  # another push may take a folder without a lock yet for a dead one's
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _lock_folder(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # a name that got no version leaves no folder
            parent.rmdir()


def _sweep(left: Path) -> None:
    lock = _lock_folder(left)
    if lock is not None:
        shutil.rmtree(left, ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError):
            left.parent.rmdir()


def _lock_folder(folder: Path) -> int | None:
    """A lock on the folder that is at this path now, None when somebody has it or it is gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(folder)):
            return lock
    os.close(lock)
    return None


def _publish(folder: Path, final: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not (final / FACTS).is_file():
            shutil.rmtree(final)  # what an interrupted delete left
    try:
        os.rename(folder, final)
    except OSError:
        if not (final / FACTS).is_file():  # else somebody pushed the same content just now
            raise
    sync_folder(final.parent)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _remember(home: Home, name: str, hash12: str) -> registry.EnvRecord:
    """The version's row in the store, made or made the newest of its name again."""
    folder = home.env(name, hash12)
    facts = json.loads((folder / FACTS).read_text("utf-8"))
    findings = json.loads((folder / AUDIT).read_text("utf-8"))
    info = {
        "rows": facts["rows"],
        "scored": facts["scored"],
        "tools": len(facts["tools"]),
        "audit": findings["verdict"],
        "headline": findings["headline"],
    }
    with Store(home) as store:
        store.add_env(name, hash12, kind=facts["kind"], info=info)
    return registry.find_env(home, f"{name}@{hash12}")


def _result(record: registry.EnvRecord, shot: snapshot.Snapshot) -> dict[str, Any]:
    findings = record.audit
    warnings = list(record.facts["warnings"]) + list(findings["problems"])
    if findings["verdict"] != "ok":
        warnings.insert(0, f"reward audit: {findings['headline']}")
    shared = record.contamination
    if shared.get("verdict", "clean") != "clean":
        warnings.insert(0, f"contamination: {shared['headline']}")
    train, heldout = record.rows["train"], record.rows["heldout"]
    return {
        "env_id": record.env_id,
        "kind": record.kind,
        "rows": record.rows,
        "split": record.facts["split"],
        "files": len(shot.files),
        "left_out": shot.left_out,
        "audit": {key: findings[key] for key in _TOLD if key in findings},
        "problems": record.facts["problems"],
        "isolation": record.facts["isolation"],
        "summary": f"Pushed {record.env_id}: {train} train and {heldout} held-out rows, "
        f"{record.kind}, audit {findings['verdict']}.",
        "next": [{"tool": "dry_run", "arguments": {"env_id": record.env_id}}],
        "warnings": warnings,
    }


def _name(given: str, source: Path) -> str:
    if given:
        if not NAME.fullmatch(given):
            raise UserError(
                "BAD_ARGUMENT",
                f"{given[:60]!r} is no name",
                field="name",
                hint="Use up to 40 of a-z, 0-9, dot, - and _, beginning with a letter or digit"
                f": {_tidied(given)!r}.",
            )
        return given
    return _tidied(source.name)


def _tidied(name: str) -> str:
    tidy = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return tidy or "env"

"""push_env: a folder becomes a version that never changes.

Copy and hash, run `tasks()` in the env process, split, replay the reference answers, audit the
scorer, write it all aside and rename. Nothing of a push that fails stays behind.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.core import split
from engine.core.errors import UserError
from engine.core.files import sync_folder, write_json, write_text
from engine.environments import env_packages, registry, snapshot
from engine.environments.registry import AUDIT, EARLIER, FACTS, SOURCE, TASKS
from engine.evidence.stats import overlap
from engine.home import recovery
from engine.home.database import tells_of_the_disk
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor
from engine.home.store import Store
from envs.audit.rescore import THIRD_S
from envs.audit.reward_audit import OVERRUN, audit
from envs.config.problem import EnvProblem
from envs.config.settings import EnvSettings, read_settings
from envs.host.process import EnvProcess, EpisodeFailed

PUSH_SECONDS = 45.0  # a tool call may not take longer
AFTER_START = 15.0  # of them kept for the audit and what comes after it
START_SECONDS = 15.0  # left for an import at least, however long the packages took
TASKS_SECONDS = 10.0  # left for tasks() at least, however long the import took
INSTALL_SECONDS = 40.0
AUDIT_SECONDS = 5.0
CALL_SECONDS = 10.0  # for one answer of the environment, while it is pushed
_STAGING = ".push-"
_NOT_SET = "secrets not set for this server: "
_UNSET = "secrets_unset"
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


@tells_of_the_disk
def push_env(
    home: Home,
    path: str | Path,
    name: str = "",
    install: bool = False,
    roots: list[Path] | None = None,
    allowed: Callable[[EnvSettings], None] | None = None,
) -> dict[str, Any]:
    """Stores the environment in the folder `path`; the same content gives the same version.

    Args:
        path: a folder inside one of `roots` (None: anywhere).
        name: the name to push under, the folder's by default.
        install: build an environment from its requirements.txt where packages are missing.
        allowed: raises UserError for what its environment.toml may not ask for. A version that
            is stored already was allowed to whoever stored it.

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
            if _row(final) is None:
                if allowed is not None:
                    allowed(draft.settings)
                _make(home, draft, install, deadline)
                _store(home, draft, final)
            else:
                if _wants_audit(home, draft) and _may(allowed, draft.settings):
                    _audit_again(home, draft, final, deadline)
                _remember(home, draft, final)
        except EnvProblem as problem:
            raise as_user_error(problem) from problem
    return _result(registry.find_env(home, f"{name}@{shot.digest[:12]}"), shot)


def as_user_error(problem: EnvProblem) -> UserError:
    """The refusal an environment's fault becomes: its place, what is wrong, what to edit."""
    safe = Redactor().text
    hint = safe(problem.hint)[:700] or "Correct it and push again."
    return UserError(problem.code, safe(str(problem))[:2000], hint=hint, field="path")


def _make(home: Home, draft: _Draft, install: bool, deadline: float) -> None:
    """Everything a version holds beside its files."""
    draft.python = _interpreter(home, draft.source, install, deadline)
    limits = draft.settings.limits
    safe = Redactor(_secrets(draft)).value

    with _process(home, draft, deadline) as env, _process(home, draft, deadline) as another:
        described, launch = _timed(draft, env.limits.start_seconds, env.describe)
        left = max(TASKS_SECONDS, deadline - AFTER_START - time.monotonic())
        left = min(env.limits.start_seconds, left)
        rows, took = _timed(draft, left, lambda: env.tasks(left))
        second = _Second(another, [dict(row) for row in rows], launch, took, deadline)
        sides = _split(rows, draft)
        for row, side in zip(rows, sides.sides, strict=True):
            row["split"] = side
        _add_gold(env, rows, described["kind"], deadline, draft)
        findings = _audited(env, rows, described["kind"], second, draft)
        isolation = env.isolation
        draft.warnings += second.warnings()
    train = [row for row in rows if row["split"] == "train"]
    heldout = [row for row in rows if row["split"] == "heldout"]
    left = max(0.5, min(overlap.BUDGET_S, deadline - time.monotonic()))
    shared = overlap.scan(train, heldout, left)
    _write_rows(draft.folder / TASKS, rows)
    write_json(draft.folder / AUDIT, safe(findings))
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
        "warnings": safe(draft.warnings),
        "problems": safe(draft.problems),
    }
    write_json(draft.folder / FACTS, facts)  # last: a folder without it is no version


def _process(home: Home, draft: _Draft, deadline: float) -> EnvProcess:
    """A process of the version, with as much patience as the push has."""
    limits = draft.settings.limits
    start = max(START_SECONDS, deadline - AFTER_START - time.monotonic())
    return EnvProcess(
        draft.source,
        python=draft.python or None,
        limits=replace(
            limits,
            start_seconds=min(limits.start_seconds, start),
            call_seconds=min(limits.call_seconds, CALL_SECONDS),
        ),
        secrets=_secrets(draft),
        sandbox=registry.sandbox_of(home),
    )


def _secrets(draft: _Draft) -> dict[str, str]:
    """The secrets of the version that are set for this server."""
    return {n: os.environ[n] for n in draft.settings.secrets if os.environ.get(n)}


def _unset(draft: _Draft) -> list[str]:
    return [n for n in draft.settings.secrets if not os.environ.get(n)]


def _timed(draft: _Draft, limit: float, call: Callable[[], Any]) -> tuple[Any, float]:
    """What `call` gives, and its seconds; one that took as long as `limit` hears what may be set.

    Raises EnvProblem."""
    began = time.monotonic()
    try:
        return call(), time.monotonic() - began
    except EnvProblem as problem:
        if time.monotonic() - began >= limit:
            problem.hint = (
                f"It had {limit:.3g} s: limits.start_seconds in environment.toml is "
                f"{draft.settings.limits.start_seconds:g}, and a push has {PUSH_SECONDS:g} s in "
                f"all, {AFTER_START:g} of them for the audit. Load or compute less at the start, "
                "or raise the limit where it is below that."
            )
        raise


def _audited(
    env: EnvProcess, rows: list[dict[str, Any]], kind: str, second: "_Second", draft: _Draft
) -> dict[str, Any]:
    """The reward audit, in the time that is left of the push."""
    left = second.deadline - CALL_SECONDS - second.launch - time.monotonic()
    budget = max(1.0, min(AUDIT_SECONDS, left / OVERRUN))
    findings = audit(env, rows, kind, budget_s=budget, fresh=second.fresh)
    # What it was made without: it is made again by a push that has them.
    return findings | ({_UNSET: _unset(draft)} if draft.settings.secrets else {})


def _may(allowed: Callable[[EnvSettings], None] | None, settings: EnvSettings) -> bool:
    """Whether who pushes a stored version again may have its code run with the secrets."""
    with contextlib.suppress(UserError):
        if allowed is not None:
            allowed(settings)
        return True
    return False


def _wants_audit(home: Home, draft: _Draft) -> bool:
    """Whether the stored audit was made without secrets that are set now."""
    record = registry.read_version(home, draft.name, draft.hash)
    return record.scored and bool(_audited_without(record) & set(_secrets(draft)))


def _audited_without(record: registry.EnvRecord) -> set[str]:
    """The secrets that were not set when the version was audited."""
    without = record.audit.get(_UNSET)
    if without is None:  # stored before the audit said so itself
        said = " ".join(w for w in record.facts["warnings"] if w.startswith(_NOT_SET))
        without = said.removeprefix(_NOT_SET).split(", ") if said else []
    return set(without)


def _audit_again(home: Home, draft: _Draft, final: Path, deadline: float) -> None:
    """Replaces the audit of a stored version; its rows and env.json stay.

    The audit before it is kept: runs were sealed with it.
    """
    record = registry.read_version(home, draft.name, draft.hash)
    draft.python = registry.env_python(record)
    rows = registry.read_tasks(record)
    with _process(home, draft, deadline) as env, _process(home, draft, deadline) as another:
        _, launch = _timed(draft, env.limits.start_seconds, env.describe)
        second = _Second(another, rows, launch, 0.0, deadline, _said=[])
        findings = _audited(env, rows, record.kind, second, draft)
    old = (final / AUDIT).read_bytes()
    kept = final / EARLIER / f"{hashlib.sha256(old).hexdigest()}.json"
    kept.parent.mkdir(exist_ok=True)
    write_text(kept, old.decode())
    sync_folder(kept.parent)
    write_json(final / AUDIT, Redactor(_secrets(draft)).value(findings))


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
        if _row(final) is None:
            shutil.rmtree(final)  # what an interrupted delete left
    try:
        os.rename(folder, final)
    except OSError:
        if _row(final) is None:  # else somebody pushed the same content just now
            raise
    sync_folder(final.parent)


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _row(folder: Path) -> dict[str, Any] | None:
    """What the store keeps of a version's folder; None where the folder is no whole version."""
    found = recovery.env_row(folder)
    return found if found and (folder / TASKS).is_file() else None


def _store(home: Home, draft: _Draft, final: Path) -> None:
    """Publishes the version once its row can be written: a push that fails leaves neither."""
    row = _row(draft.folder)
    assert row is not None  # _make has just written it
    with Store(home) as store:
        _publish(draft.folder, final)
        store.add_env(draft.name, draft.hash, kind=row["kind"], info=row["info"])


def _remember(home: Home, draft: _Draft, final: Path) -> None:
    """The row of a stored version, made the newest of its name again."""
    row = _row(final)
    assert row is not None  # asked for before
    with Store(home) as store:
        store.add_env(draft.name, draft.hash, kind=row["kind"], info=row["info"])


def _warnings(record: registry.EnvRecord) -> list[str]:
    """What a push has to say of the version; secrets are looked for now, not when it was made."""
    stored = [said for said in record.facts["warnings"] if not said.startswith(_NOT_SET)]
    unset = [name for name in record.secrets if not os.environ.get(name)]
    missing = [_NOT_SET + ", ".join(unset)] if unset else []
    if late := sorted(_audited_without(record) - set(unset)):
        missing.append(f"the audit was made without the secrets {', '.join(late)}")
    return [*missing, *stored, *record.audit["problems"]]


def _result(record: registry.EnvRecord, shot: snapshot.Snapshot) -> dict[str, Any]:
    findings = record.audit
    warnings = _warnings(record)
    if findings["verdict"] != "ok":
        warnings.insert(0, f"reward audit: {findings['headline']}")
    shared = record.contamination
    if shared.get("verdict", "clean") != "clean":
        warnings.insert(0, f"contamination: {shared['headline']}")
    train, heldout = record.rows["train"], record.rows["heldout"]
    safe = Redactor({n: os.environ.get(n, "") for n in record.secrets}).value
    return {
        "env_id": record.env_id,
        "kind": record.kind,
        "rows": record.rows,
        "split": record.facts["split"],
        "files": len(shot.files),
        "left_out": shot.left_out,
        "audit": safe({key: findings[key] for key in _TOLD if key in findings}),
        "problems": safe(record.facts["problems"]),
        "isolation": record.facts["isolation"],
        "secrets": list(record.secrets),
        "network": record.limits.network,
        "summary": f"Pushed {record.env_id}: {train} train and {heldout} held-out rows, "
        f"{record.kind}, audit {findings['verdict']}.",
        "next": [{"tool": "dry_run", "arguments": {"env_id": record.env_id}}],
        "warnings": safe(warnings),
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

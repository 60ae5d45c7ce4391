"""push_env: a folder becomes a version that never changes.

Copy and hash, run `tasks()` in the env process, split, replay the reference answers, audit the
scorer, write it all aside and rename. Nothing of a push that fails stays behind.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import JsonObject, write_json
from engine.core.hints import Call, Change, Hint
from engine.core.reply import ReplyBase
from engine.environments import (
    push_audit,
    push_limits,
    registry,
    snapshot,
    task_rows,
)
from engine.environments.draft import Draft, database_row, publish, staging
from engine.environments.registry import AUDIT, FACTS, SOURCE, TASKS
from engine.evidence.stats import overlap
from engine.home.database import tells_of_the_disk
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor
from engine.home.store import Store
from engine.install import env_packages
from engine.records.env_version import EnvVersion, PushProblem
from envs.config.problem import EnvProblem
from envs.config.settings import EnvSettings, read_settings

_SHOWN_OF_AUDIT = ("verdict", "headline", "risks", "share", "fresh_process")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")

Allowed = Callable[[EnvSettings], None]  # raises UserError for what may not be asked for


@dataclass(frozen=True)
class ShownProblem:
    """Something that the author of an environment should look at."""

    message: str


@dataclass(frozen=True)
class PushReply(ReplyBase):
    """A version that is stored.

    Attributes:
        rows: per split; `split` says where the split came from.
        files: how many; `left_out` names those of the folder that are not among them.
        audit: of audit.json the keys in `_SHOWN_OF_AUDIT`.
        secrets, network: what the environment asks for.
    """

    env_id: str
    kind: str
    rows: dict[str, int]
    split: str
    files: int
    left_out: list[str]
    audit: JsonObject
    problems: list[ShownProblem]
    isolation: str
    secrets: list[str]
    network: bool
    summary: str
    next: list[Call]
    warnings: list[str]


@tells_of_the_disk
def push_env(
    home: Home,
    path: str | Path,
    name: str = "",
    install: bool = False,
    roots: list[Path] | None = None,
    allowed: Allowed | None = None,
) -> PushReply:
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
    deadline = time.monotonic() + push_limits.PUSH_SECONDS
    readable = None if roots is None else [*roots, *_stored(home, path)]
    source = snapshot.resolve_inside(path, readable)
    name = _name(name, source)
    with staging(home, name) as folder:
        shot = snapshot.take(source, folder / SOURCE)
        try:
            settings = read_settings(folder / SOURCE)
            draft = Draft(home, name, folder, shot, settings, deadline)
            final = home.env(name, draft.hash)
            if database_row(final) is None:
                if allowed is not None:
                    allowed(draft.settings)
                _make(draft, install)
                _store(draft, final)
            else:
                if install:
                    _put_back_packages(draft)
                if push_audit.is_outdated(draft) and _is_allowed(allowed, draft.settings):
                    push_audit.repeat_audit(draft, final)
                _remember(draft, final)
        except EnvProblem as problem:
            raise as_user_error(problem) from problem
    return _reply(registry.find_env(home, f"{name}@{shot.digest[:12]}"), shot)


def _stored(home: Home, path: str | Path) -> list[Path]:
    """`path` itself where it is the copy of a pushed version's files: what was pushed may be pushed
    again. Not what lies beside it, the held-out rows."""
    place = Path(path)
    return [place] if place.name == SOURCE and place.parents[2:3] == (home.envs,) else []


def as_user_error(problem: EnvProblem) -> UserError:
    """The refusal an environment's fault becomes: its place, what is wrong, what to edit."""
    safe = Redactor().text
    hint = safe(problem.hint)[:700] or "Correct it and push again."
    return UserError(problem.code, safe(str(problem))[:2000], hint=hint, field="path")


def _put_back_packages(draft: Draft) -> None:
    """Installs the packages of a stored version again where they are gone."""
    try:
        registry.env_python(registry.read_version(draft.home, draft.name, draft.hash))
    except UserError as error:
        if error.code != "ENV_DEPS":
            raise
        _interpreter(draft, install=True)


def _make(draft: Draft, install: bool) -> None:
    """Everything a version holds beside its files."""
    draft.python = _interpreter(draft, install)
    safe = Redactor(draft.secrets)
    with draft.process() as env, draft.process() as another:
        described, start_seconds = draft.timed(env.limits.start_seconds, env.describe)
        left = max(push_limits.TASKS_SECONDS, draft.seconds_left - push_limits.AFTER_START)
        left = min(env.limits.start_seconds, left)
        rows, tasks_seconds = draft.timed(left, lambda: env.tasks(left))
        as_given = [dict(row) for row in rows]
        second = push_audit.SecondProcess(
            another, as_given, start_seconds, tasks_seconds, draft.deadline
        )
        sides = task_rows.assign_split(rows, draft)
        task_rows.add_gold(env, rows, described["kind"], draft)
        audit = push_audit.run_audit(env, rows, described["kind"], second, draft)
        isolation = env.isolation
        draft.warnings += second.warnings()
    train = [row for row in rows if row["split"] == "train"]
    heldout = [row for row in rows if row["split"] == "heldout"]
    shared = overlap.scan(train, heldout, max(0.5, min(overlap.BUDGET_S, draft.seconds_left)))
    task_rows.write(draft.folder / TASKS, rows)
    write_json(draft.folder / AUDIT, safe.value(audit))
    version = EnvVersion(
        env_id=f"{draft.name}@{draft.hash}",
        name=draft.name,
        hash=draft.hash,
        digest=draft.shot.digest,
        kind=described["kind"],
        scored=described["scored"],
        tools=described["tools"],
        params=json.loads(json.dumps(draft.settings.params, default=str)),
        rows={name: sides.sides.count(name) for name in ("train", "heldout")},
        split=sides.source,
        contamination=shared,
        files=len(draft.shot.files),
        size=draft.shot.size,
        left_out=tuple(draft.shot.left_out),
        limits=draft.settings.limits,
        secrets=draft.settings.secrets,
        python=draft.python,
        isolation=isolation,
        warnings=tuple(safe.text(warning) for warning in draft.warnings),
        problems=tuple(PushProblem(message=safe.text(text)) for text in draft.problems),
    )
    version.write(draft.folder / FACTS)  # last: a folder without it is no version


def _is_allowed(allowed: Allowed | None, settings: EnvSettings) -> bool:
    """Whether who pushes a stored version again may have its code run with the secrets set now."""
    with contextlib.suppress(UserError):
        if allowed is not None:
            allowed(settings)
        return True
    return False


def _interpreter(draft: Draft, install: bool) -> str:
    """The interpreter that has the packages the environment names; "" where it names none."""
    needed = env_packages.read_requirements(draft.source)
    if not needed:
        return ""
    venv = env_packages.venv_of(draft.home, needed)
    if venv.is_ready():
        return str(venv.python)
    missing = env_packages.missing(needed)
    if not missing:
        return sys.executable
    if not install:
        raise UserError(
            "ENV_DEPS",
            f"packages are missing: {', '.join(missing)}",
            hint=Hint(
                "Push again; the packages get an environment of their own, once.",
                change=Change(arguments={"install": True}),
            ),
            field="install",
        )
    seconds = min(push_limits.INSTALL_SECONDS, draft.seconds_left)
    python = env_packages.install(draft.home, needed, seconds)
    if draft.seconds_left < push_limits.START_SECONDS:
        raise UserError(
            "ENV_DEPS",
            "the packages are installed, but that took as long as one call may",
            hint="Push again; it goes on from here.",
            retryable=True,
        )
    return str(python)


def _store(draft: Draft, final: Path) -> None:
    """Publishes the version once its row can be written: a push that fails leaves neither."""
    row = database_row(draft.folder)
    assert row is not None  # _make has just written it
    with Store(draft.home) as store:
        publish(draft.folder, final)
        store.add_env(draft.name, draft.hash, kind=row["kind"], info=row["info"])


def _remember(draft: Draft, final: Path) -> None:
    """The row of a stored version, made the newest of its name again."""
    row = database_row(final)
    assert row is not None  # asked for before
    with Store(draft.home) as store:
        store.add_env(draft.name, draft.hash, kind=row["kind"], info=row["info"])


def _reply(record: registry.EnvRecord, shot: snapshot.Snapshot) -> PushReply:
    """The reply of a push; texts that the environment wrote have their secrets hidden."""
    audit = record.audit.as_written()
    warnings = push_audit.warnings_of(record)
    if record.audit.verdict != "ok":
        warnings.insert(0, f"reward audit: {record.audit.headline}")
    shared = record.contamination
    if shared.get("verdict", "clean") != "clean":
        warnings.insert(0, f"contamination: {shared['headline']}")
    train, heldout = record.rows["train"], record.rows["heldout"]
    redact = Redactor({name: os.environ.get(name, "") for name in record.secrets})
    return PushReply(
        env_id=record.env_id,
        kind=record.kind,
        rows=record.rows,
        split=record.version.split,
        files=len(shot.files),
        left_out=shot.left_out,
        audit=redact.value({key: audit[key] for key in _SHOWN_OF_AUDIT if key in audit}),
        problems=[ShownProblem(redact.text(each.message)) for each in record.version.problems],
        isolation=record.isolation,
        secrets=list(record.secrets),
        network=record.limits.network,
        summary=f"Pushed {record.env_id}: {train} train and {heldout} held-out rows, "
        f"{record.kind}, audit {record.audit.verdict}.",
        next=[Call("dry_run", {"env_id": record.env_id})],
        warnings=[redact.text(warning) for warning in warnings],
    )


def _name(given: str, source: Path) -> str:
    """The name to push under. Raises UserError BAD_ARGUMENT for one that cannot be used."""
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
    """The nearest name that can be used."""
    tidy = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return tidy or "env"

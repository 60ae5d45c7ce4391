"""push_env: a folder becomes a version that never changes.

A push copies and hashes the files, runs `tasks()` in the env process, splits the rows, replays the
reference answers and audits the scorer. All of it is written to a staging folder that is renamed
at the end, so a push that fails leaves nothing behind.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import JsonObject, write_json
from engine.core.hints import Call, Change, Hint
from engine.core.reply import ReplyBase
from engine.core.split import Split
from engine.environments import (
    push_audit,
    push_large,
    registry,
    snapshot,
    task_rows,
)
from engine.environments.draft import Draft, database_row, publish, staging
from engine.environments.indexed.build import Indexed
from engine.environments.registry import AUDIT, FACTS, SOURCE, TASKS
from engine.evidence.overlap import overlap
from engine.evidence.overlap.families import family_hint
from engine.home.database import reports_unwritable_disk
from engine.home.owner_marks import refuse_if_sealed
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor
from engine.home.store import Store
from engine.hub import benchmarks
from engine.hub import data as hub_data
from engine.install import env_packages
from engine.records.env_version import EnvVersion, PushProblem
from envs.config import push_limits
from envs.config.problem import EnvProblem
from envs.config.settings import EnvSettings, read_settings
from envs.host.process import EnvProcess
from envs.json_types import EnvDescription, TaskRow

_AUDIT_KEYS_IN_REPLY = ("verdict", "headline", "risks", "share", "fresh_process")
_NAME_CHARS = 40  # that NAME allows
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")

# Called with the settings of environment.toml; raises UserError for what they may not ask for.
SettingsCheck = Callable[[EnvSettings], None]
_AFTER_FETCHING_S = 20.0  # of a push, kept for what follows the fetching of a dataset
_LEAST_SCAN_S = 0.5  # for the search for shared tasks, even if the push has no time left
_HINT_CHARS, _MESSAGE_CHARS = 700, 2000  # of an error of the environment that a reply shows


@dataclass(frozen=True)
class ShownProblem:
    """Something that the author of an environment should look at."""

    message: str


@dataclass(frozen=True)
class PushReply(ReplyBase):
    """A version that is stored.

    Attributes:
        rows: per split; `split` says where the split came from.
        files: number of stored files.
        left_out: "path (reason)" of the files that were not stored.
        audit: the keys in `_AUDIT_KEYS_IN_REPLY` of audit.json.
        secrets, network: the secrets the environment names, and whether it needs the network.
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


@reports_unwritable_disk
def push_env(
    home: Home,
    path: str | Path,
    name: str = "",
    install: bool = False,
    roots: list[Path] | None = None,
    check_settings: SettingsCheck | None = None,
) -> PushReply:
    """Store the environment in the folder `path` as a version; the same content gives the same one.

    Args:
        path: a folder inside one of `roots` (None: anywhere) or with the files of a stored version.
            Or a dataset of the hub (`ORG/NAME`, `ORG/NAME:SUBSET`) or a known benchmark
            (`benchmark:NAME`); both of these are fetched first.
        name: the name to push under; "" takes the folder's.
        install: install the packages of requirements.txt that are missing.
        check_settings: refuses a new version whose settings ask for too much; None allows all.

    Raises UserError, for a fault of the environment or the arguments; nothing is stored then.
    DATASET_READING: reading the data takes longer than one push may; the next push goes on there.
    """
    deadline = time.monotonic() + push_limits.PUSH_SECONDS
    source = _source(home, path, roots, deadline)
    name = _version_name(name, source.default_name)
    large = push_large.find(home, source.folder, deadline)
    with staging(home, name) as folder:
        copied = snapshot.take(source.folder, folder / SOURCE, _hashes_of_large_files(large))
        try:
            settings = read_settings(folder / SOURCE)
            draft = Draft(home, name, folder, copied, settings, deadline)
            _store_version(draft, large, install, check_settings)
        except EnvProblem as problem:
            raise as_user_error(problem) from problem
    env_id = f"{name}@{copied.digest[:12]}"  # as `Draft.hash`
    stored = registry.find_env(home, env_id, sealed=True)
    return _with_origin(_reply(stored, copied), source.origin)


def _with_origin(reply: PushReply, origin: str) -> PushReply:
    """The reply, with the sentences about where the files came from, "" for none."""
    return replace(reply, summary=f"{reply.summary} {origin}") if origin else reply


@dataclass(frozen=True)
class _Source:
    """Where the files of a push come from.

    Attributes:
        default_name: the version's name is made from it if the caller names none.
        origin: sentences about a dataset of the hub; "" for a folder of the user.
    """

    folder: Path
    default_name: str
    origin: str = ""


def _source(home: Home, path: str | Path, roots: list[Path] | None, deadline: float) -> _Source:
    """Find the folder to push. `path` names a folder, or a dataset or benchmark, which is fetched
    into a folder first.

    `deadline`: of the push, in seconds of `time.monotonic`. The other arguments and the errors are
    those of `push_env`.
    """
    # The rest of the push needs some of the time.
    dataset = _fetched_dataset(home, path, roots, deadline - _AFTER_FETCHING_S)
    if dataset is None:
        folder = _allowed_folder(home, path, roots)
        return _Source(folder, folder.name)
    return _Source(dataset.folder, dataset.name, dataset.origin.in_words())


def _fetched_dataset(
    home: Home, path: str | Path, roots: list[Path] | None, deadline: float
) -> hub_data.Dataset | None:
    """The benchmark or dataset of the hub that `path` names; None if it names neither."""
    places = [Path(), *(roots or [])]  # where a folder of this name would be meant
    benchmark = benchmarks.named_benchmark(home, path, deadline)
    return benchmark or hub_data.named_dataset(home, path, places, deadline)


def _allowed_folder(home: Home, path: str | Path, roots: list[Path] | None) -> Path:
    """The folder `path`, which must lie inside one of `roots` (None: anywhere) or hold the files of
    a stored version. Raises UserError as `snapshot.resolve_inside` does."""
    stored_version = _root_of_stored_version(home, path)
    allowed_roots = None if roots is None else [*roots, *stored_version]
    return snapshot.resolve_inside(path, allowed_roots)


def _hashes_of_large_files(large: Indexed | None) -> dict[str, str] | None:
    """Return the SHA-256 by name of the files that stay where they are; None if all are copied."""
    if large is None:
        return None
    return {file.name: file.sha256 for file in large.facts.files}


def _store_version(
    draft: Draft, large: Indexed | None, install: bool, check_settings: SettingsCheck | None
) -> None:
    """Store the draft as a new version. If a version with the same content is stored already, that
    one is pushed again.

    `large` is the draft's data if that is too large to copy, else None. `install`: install missing
    packages; `check_settings` refuses settings that ask for too much.
    """
    version_folder = draft.home.env(draft.name, draft.hash)
    if database_row(version_folder) is not None:
        _push_again(draft, version_folder, install, check_settings)
        return
    if check_settings is not None:
        check_settings(draft.settings)
    if large:
        push_large.build_version(draft, large)
    else:
        _build_version(draft, install)
    _publish_version(draft, version_folder)


def _push_again(
    draft: Draft, version_folder: Path, install: bool, check_settings: SettingsCheck | None
) -> None:
    """Make the stored version in `version_folder` the newest of its name; `install` and
    `check_settings` are those of `push_env`.

    Its audit is repeated if secrets that the audit lacked are set by now. But this gives them to
    the version's code, so it is done only if `check_settings` accepts the version.
    """
    if install:
        _reinstall_packages(draft)
    if push_audit.is_outdated(draft) and _passes_check(check_settings, draft.settings):
        push_audit.repeat_audit(draft, version_folder)
    _make_newest(draft, version_folder)


def _root_of_stored_version(home: Home, path: str | Path) -> list[Path]:
    """The folder `path` as one more allowed root, if it holds the files of a stored version.

    Returns [path] or []. Such a folder may always be pushed again, but that of a sealed exam never:
    raises UserError ENV_SEALED. The folder of the whole version is not allowed, because it also
    holds the held-out rows.
    """
    folder = Path(path)
    # A stored version lies at home.envs / name / hash / source. A slice, because a short path has
    # fewer than three folders above it.
    is_stored_version = folder.name == SOURCE and folder.parents[2:3] == (home.envs,)
    if is_stored_version:
        refuse_if_sealed(
            folder.parent, folder.parent.parent.name, "its files cannot be pushed again"
        )
    return [folder] if is_stored_version else []


def as_user_error(problem: EnvProblem) -> UserError:
    """Convert a fault of the environment to a UserError, with secrets hidden and texts cut."""
    redact = Redactor().text
    hint = redact(problem.hint)[:_HINT_CHARS] or "Correct it and push again."
    return UserError(problem.code, redact(str(problem))[:_MESSAGE_CHARS], hint=hint, field="path")


def _reinstall_packages(draft: Draft) -> None:
    """Install the packages of a stored version again, if the virtual environment that held them is
    gone.

    Raises UserError ENV_DEPS if they could not be installed in the time of the push.
    """
    record = registry.read_version(draft.home, draft.name, draft.hash)
    try:
        registry.env_python(record)  # raises ENV_DEPS where it is gone
    except UserError as error:
        if error.code != "ENV_DEPS":
            raise
        _interpreter(draft, install=True)


def _build_version(draft: Draft, install: bool) -> None:
    """Write the rows, the audit and env.json of a new version into the draft's folder.

    The copied files are there already. Raises EnvProblem for a fault of the environment, or
    UserError ENV_DEPS (its packages) or ENV_INVALID (a split of an unknown name).
    """
    draft.python = _interpreter(draft, install)
    played = _play(draft)
    contamination = _contamination(played.rows, draft.seconds_left)
    if contamination["leaked"]:
        draft.problems += task_rows.leak_problems(played.rows, draft)
    task_rows.write(draft.folder / TASKS, played.rows)
    write_json(draft.folder / AUDIT, Redactor(draft.secrets).value(played.audit))
    version = _env_version(draft, played, contamination)
    version.write(draft.folder / FACTS)  # last, because it makes the folder a version


@dataclass(frozen=True)
class _Played:
    """What a push learns by running the environment.

    Attributes:
        description: of the environment; its `kind` is that of the version.
        rows: with their sides and the conversations of their reference answers.
        split: how the sides were decided.
        audit: the content of audit.json.
        isolation: how the process was isolated, in words.
    """

    description: EnvDescription
    rows: list[TaskRow]
    split: Split
    audit: JsonObject
    isolation: str


def _play(draft: Draft) -> _Played:
    """Run the environment of a draft: get its rows, replay reference answers, audit its scorer.

    Raises EnvProblem for a fault of the environment, or UserError ENV_INVALID.
    """
    with draft.process() as env, draft.process() as second_env:
        description, start_seconds = draft.timed(env.limits.start_seconds, env.describe)
        rows, tasks_seconds = _timed_rows(draft, env)
        first_rows = [dict(row) for row in rows]  # copies: the rows are changed below
        # For checks that need a process that has scored nothing; it starts when it is used.
        second_process = push_audit.SecondProcess(
            second_env, first_rows, start_seconds, tasks_seconds, draft.deadline
        )
        env_kind = description["kind"]  # of a dataset "sft", also where its rows are preferences
        kind = task_rows.kind_of(env_kind, rows)
        named_splits = [row.get("split") for row in rows]
        split = task_rows.assign_split(rows, draft)
        task_rows.add_gold(env, rows, env_kind, draft)
        if draft.settings.drop_leaks:
            split = task_rows.drop_leaks(rows, named_splits, split, draft)
        draft.warnings += family_hint(rows)
        draft.problems += task_rows.scorer_problem(rows, kind, draft)
        audit = push_audit.run_audit(env, rows, env_kind, second_process, draft)
        isolation = env.isolation  # known only while the process runs
        draft.warnings += second_process.warnings()
    return _Played(
        description={**description, "kind": kind},
        rows=rows,
        split=split,
        audit=audit,
        isolation=isolation,
    )


def _timed_rows(draft: Draft, env: EnvProcess) -> tuple[list[TaskRow], float]:
    """The rows that the environment's `tasks()` returns, and the seconds that took.

    The call may take what the push can spare, but not more than the environment's own limit.
    """
    spare_seconds = max(push_limits.TASKS_SECONDS, draft.seconds_left - push_limits.AFTER_START)
    limit_s = min(env.limits.start_seconds, spare_seconds)  # it covers tasks() too
    return draft.timed(limit_s, lambda: env.tasks(limit_s))


def _contamination(rows: list[TaskRow], seconds_left: float) -> JsonObject:
    """What the train rows share with the held-out and the dev rows, searched for in the seconds
    left, but for `_LEAST_SCAN_S` at least."""
    train = [row for row in rows if row["split"] == "train"]
    heldout = [row for row in rows if row["split"] != "train"]
    scan_s = min(overlap.BUDGET_S, seconds_left)
    return overlap.scan(train, heldout, max(_LEAST_SCAN_S, scan_s))


def _env_version(draft: Draft, played: _Played, contamination: JsonObject) -> EnvVersion:
    """The content of env.json, from the `draft` to store and from what its code showed when it was
    run (`played`). Secrets are hidden in the environment's own texts.

    `contamination` tells what the train rows share with the held-out ones.
    """
    redactor = Redactor(draft.secrets)
    copied, settings, description = draft.copied, draft.settings, played.description
    return EnvVersion(
        env_id=f"{draft.name}@{draft.hash}",
        name=draft.name,
        hash=draft.hash,
        digest=copied.digest,
        kind=description["kind"],
        scored=description["scored"],
        scorer=settings.scorer,
        tools=description["tools"],
        params=_params_as_json(settings),
        rows=played.split.counts(),
        split=played.split.source,
        contamination=contamination,
        files=len(copied.files),
        size=copied.size,
        left_out=tuple(copied.left_out),
        limits=settings.limits,
        secrets=settings.secrets,
        python=draft.python,
        isolation=played.isolation,
        warnings=tuple(redactor.text(warning) for warning in draft.warnings),
        problems=tuple(PushProblem(message=redactor.text(text)) for text in draft.problems),
    )


def _params_as_json(settings: EnvSettings) -> JsonObject:
    """The environment's own parameters, with TOML's dates as text, which JSON does not have."""
    return json.loads(json.dumps(settings.params, default=str))


def _passes_check(check_settings: SettingsCheck | None, settings: EnvSettings) -> bool:
    """Whether `check_settings` accepts the settings of a stored version; None accepts everything.

    A version that is not accepted stays stored, but its audit is not repeated, because an audit
    runs the version's code with the secrets that are set now.
    """
    if check_settings is None:
        return True
    try:
        check_settings(settings)
    except UserError:
        return False
    return True


def _interpreter(draft: Draft, install: bool) -> str:
    """Path of the interpreter that has the packages of the environment's requirements.txt; "" if
    the file names none.

    Raises UserError ENV_DEPS if packages are missing and `install` is False, or if they could not
    be installed in the time of the push.
    """
    needed = env_packages.read_requirements(draft.source)
    if not needed:
        return ""
    venv = env_packages.venv_of(draft.home, needed)
    if venv.is_ready():
        return str(venv.python)
    missing = env_packages.missing(needed)
    if not missing:
        return sys.executable  # our own interpreter happens to have all of them
    if not install:
        raise _packages_missing(missing)
    seconds = min(push_limits.INSTALL_SECONDS, draft.seconds_left)
    python = env_packages.install(draft.home, needed, seconds)
    if draft.seconds_left < push_limits.START_SECONDS:  # too little to start the environment
        raise UserError(
            "ENV_DEPS",
            "the packages are installed, but that took as long as one call may",
            hint="Push again; it goes on from here.",
            retryable=True,
        )
    return str(python)


def _packages_missing(missing: list[str]) -> UserError:
    """The error for an environment whose packages are not installed; its hint is to install."""
    return UserError(
        "ENV_DEPS",
        f"packages are missing: {', '.join(missing)}",
        hint=Hint(
            "Push again; the packages get an environment of their own, once.",
            change=Change(arguments={"install": True}),
        ),
        field="install",
    )


def _publish_version(draft: Draft, version_folder: Path) -> None:
    """Move the draft to `version_folder` and add it to the database.

    The database is opened first, so that nothing is moved if that fails.
    """
    row = database_row(draft.folder)
    assert row is not None  # the version has just been built in the draft's folder
    with Store(draft.home) as store:
        publish(draft.folder, version_folder)
        store.add_env(draft.name, draft.hash, kind=row["kind"], info=row["info"])


def _make_newest(draft: Draft, version_folder: Path) -> None:
    """Write the database row of a stored version again, so that it is the newest of its name."""
    row = database_row(version_folder)
    assert row is not None  # `_store_version` has looked it up before
    with Store(draft.home) as store:
        store.add_env(draft.name, draft.hash, kind=row["kind"], info=row["info"])


def _reply(record: registry.EnvRecord, copied: snapshot.Snapshot) -> PushReply:
    """The reply of a push, with secrets hidden in every text that the environment wrote.

    `record` is the stored version, `copied` tells which files were copied.
    """
    audit = record.audit.as_written()
    shown_audit = {key: audit[key] for key in _AUDIT_KEYS_IN_REPLY if key in audit}
    redact = Redactor({name: os.environ.get(name, "") for name in record.secrets})
    problems = [redact.text(problem.message) for problem in record.version.problems]
    return PushReply(
        env_id=record.env_id,
        kind=record.kind,
        rows=record.rows,
        split=record.version.split,
        files=len(copied.files),
        left_out=copied.left_out,
        audit=redact.value(shown_audit),
        problems=[ShownProblem(problem) for problem in problems],
        isolation=record.isolation.partition(":")[0],  # the level; doctor says what it holds
        secrets=list(record.secrets),
        network=record.limits.network,
        summary=_summary(record),
        next=[_next_call(record)],
        warnings=[redact.text(warning) for warning in _reply_warnings(record)],
    )


def _summary(record: registry.EnvRecord) -> str:
    """One sentence about the version that was stored."""
    train, dev, heldout = (record.rows.get(name, 0) for name in ("train", "dev", "heldout"))
    counts = f"{train} train, {dev} dev" if dev else f"{train} train"
    scorer = f", scored by {record.version.scorer}" if record.version.scorer else ""
    audit = f"audit {record.audit.verdict}" if record.scored else "no scorer"
    return (
        f"Pushed {record.env_id}: {counts} and {heldout} held-out rows, {record.kind}{scorer}, "
        f"{audit}."
    )


def _reply_warnings(record: registry.EnvRecord) -> list[str]:
    """Warnings of a stored version, most urgent first: overlapping rows, then a failed audit."""
    warnings = push_audit.warnings_of(record)
    if record.audit.verdict != "ok":
        warnings.insert(0, f"reward audit: {record.audit.headline}")
    contamination = record.contamination
    if contamination.get("verdict", "clean") != "clean":
        remedy = ""
        if contamination.get("leaked"):
            remedy = "; drop_leaks = true under [split] in environment.toml leaves those rows out"
        # Before the audit's.
        warnings.insert(0, f"contamination: {contamination['headline']}{remedy}")
    return warnings


def _next_call(record: registry.EnvRecord) -> Call:
    """The call that follows a push: an evaluation on an exam, which has no training rows; else the
    dry run, by an algorithm that the environment is made for."""
    arguments: JsonObject = {"env_id": record.env_id}
    if record.scored and not record.rows.get("train"):
        return Call("evaluate", arguments | {"models": ["pebble"]})
    # Without a scorer the default, grpo, would only be refused; scored data files have an answer in
    # each row, by which the base first learns what is asked.
    if not record.scored or record.version.scorer:
        arguments["algorithm"] = "dpo" if record.kind == "preference" else "sft"
    return Call("dry_run", arguments)


def _version_name(requested: str, folder_name: str) -> str:
    """The name to push under: `requested`, or one made from the folder's name if that is "".

    Raises UserError BAD_ARGUMENT for a name that NAME does not allow.
    """
    if not requested:
        return _nearest_name(folder_name)
    if not NAME.fullmatch(requested):
        raise UserError(
            "BAD_ARGUMENT",
            f"{requested[:60]!r} is no name",
            field="name",
            hint="Use up to 40 of a-z, 0-9, dot, - and _, beginning with a letter or digit"
            f": {_nearest_name(requested)!r}.",
        )
    return requested


def _nearest_name(name: str) -> str:
    """The most similar name that NAME allows, as "word-game" for "Word Game!".

    "env" if no character of `name` can be used.
    """
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    shortened = words[:_NAME_CHARS].strip("-")  # the cut may leave a dash at the end
    return shortened or "env"

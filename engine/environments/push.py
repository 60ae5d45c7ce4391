"""push_env: store a folder as a version of an environment, which then never changes.

A push copies and hashes the files, runs `tasks()` in the env process, splits the rows, replays the
reference answers and audits the scorer. All of this is written to a staging folder that is renamed
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
from engine.home.owner_marks import own_part, refuse_if_sealed
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor
from engine.home.store import Store
from engine.hub import benchmarks
from engine.hub import data as hub_data
from engine.machine.install import env_packages
from engine.records.env_version import EnvVersion, PushProblem
from envs.config import push_limits
from envs.config.problem import EnvProblem
from envs.config.settings import EnvSettings, read_settings
from envs.host.process import EnvProcess
from envs.json_types import EnvDescription, TaskRow

_AUDIT_KEYS_IN_REPLY = ("verdict", "headline", "risks", "share", "fresh_process")
_NAME_CHARS = 40  # the longest name that NAME allows
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")

# Called with the settings of environment.toml; raises UserError if they ask for what is forbidden.
SettingsCheck = Callable[[EnvSettings], None]
_AFTER_FETCHING_S = 20.0  # seconds of a push that are kept for its work after fetching a dataset
_LEAST_SCAN_S = 0.5  # seconds for the search for shared tasks, even if the push has no time left
_HINT_CHARS, _MESSAGE_CHARS = 700, 2000  # the most that a reply shows of an environment's error


@dataclass(frozen=True)
class ShownProblem:
    """Something that the author of an environment should look at."""

    message: str


@dataclass(frozen=True)
class PushReply(ReplyBase):
    """The reply of a push, about the version that is stored.

    Attributes:
        rows: number of rows per split; `split` says how the split was decided.
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
    """Store the environment in the folder `path` as a version; equal files give the same version.

    Args:
        path: the environment's folder, inside one of `roots` (None: anywhere), or that with the
            files of a stored version; or a name: a dataset of the hub (`ORG/NAME`,
            `ORG/NAME:SUBSET`) or a benchmark (`benchmark:NAME`), which is fetched first.
        name: the name of the environment; "" takes the folder's name.
        install: install the packages of requirements.txt that are missing.
        check_settings: refuses a new version whose settings ask for too much; None allows all.

    Raises UserError if the environment or an argument has a fault; nothing is stored then. The code
    DATASET_READING means that reading the data takes longer than a push may; push again to go on.
    """
    deadline = time.monotonic() + push_limits.PUSH_SECONDS
    source = _source(home, path, roots, deadline)
    name = _version_name(name, source.default_name)
    indexed_data = push_large.index_if_large(home, source.folder, deadline)
    with staging(home, name) as folder:
        file_copy = snapshot.take(
            source.folder, folder / SOURCE, _hashes_of_large_files(indexed_data)
        )
        try:
            settings = read_settings(folder / SOURCE)
            draft = Draft(home, name, folder, file_copy, settings, deadline)
            _store_version(draft, indexed_data, install, check_settings)
        except EnvProblem as problem:
            raise as_user_error(problem) from problem
    env_id = f"{name}@{draft.hash}"
    stored = registry.find_env(home, env_id, sealed=True)  # sealed exams are found too
    return _with_origin(_reply(stored, file_copy), source.origin)


def _with_origin(reply: PushReply, origin: str) -> PushReply:
    """Return `reply` with `origin` (sentences about where the files came from; "" for none) at the
    end of its summary."""
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
    """Return the folder to push. If `path` names a dataset or a benchmark, it is first fetched into
    a folder.

    A folder must lie inside one of `roots` (None: anywhere). `deadline` is the value of
    `time.monotonic()` by which the push must be done. Raises UserError if there is nothing called
    `path`, or if it may not be read.
    """
    fetch_deadline = deadline - _AFTER_FETCHING_S  # the rest of the push needs some of the time
    dataset = _fetched_dataset(home, path, roots, fetch_deadline)
    if dataset is None:
        folder = _allowed_folder(home, path, roots)
        return _Source(folder, folder.name)
    return _Source(dataset.folder, dataset.name, dataset.origin.in_words())


def _fetched_dataset(
    home: Home, path: str | Path, roots: list[Path] | None, deadline: float
) -> hub_data.Dataset | None:
    """Fetch the benchmark or the dataset of the hub that `path` names, and return it. Returns None
    if `path` names neither. `deadline` is the value of `time.monotonic()` until which it may take.
    """
    local_folders = [Path(), *(roots or [])]  # a folder of this name in one of them goes first
    benchmark = benchmarks.named_benchmark(home, path, deadline)
    return benchmark or hub_data.named_dataset(home, path, local_folders, deadline)


def _allowed_folder(home: Home, path: str | Path, roots: list[Path] | None) -> Path:
    """Return the folder `path` as an absolute path. It must lie inside one of `roots` (None:
    anywhere), or hold the files of a stored version. Raises UserError if there is no such folder,
    if it lies outside `roots`, or if its version is sealed."""
    stored_version = _root_of_stored_version(home, path)  # [] if `path` is no such folder
    allowed_roots = None if roots is None else [*roots, *stored_version]
    if not stored_version and snapshot.is_hidden(home, path):
        allowed_roots = []  # a root may hold the home: what is in it belongs to somebody
    return snapshot.resolve_inside(path, allowed_roots)


def _hashes_of_large_files(large: Indexed | None) -> dict[str, str] | None:
    """Return file name -> SHA-256 of the large files that are not copied; None if all files are."""
    if large is None:
        return None
    return {file.name: file.sha256 for file in large.facts.files}


def _store_version(
    draft: Draft, indexed_data: Indexed | None, install: bool, check_settings: SettingsCheck | None
) -> None:
    """Store the draft as a new version. If a version with the same content exists, make that one
    the newest of its name instead (`_push_again`).

    `indexed_data` are its data if they are too large to copy, else None. `install` allows to
    install missing packages. `check_settings` raises UserError if the settings ask for too much;
    None allows all. A version that the caller owns already was checked when it became theirs.
    """
    version_folder = draft.home.env(draft.name, draft.hash)
    is_stored = database_row(version_folder) is not None
    with Store(own_part(draft.home)) as store:
        is_own = store.sees_env(f"{draft.name}@{draft.hash}")
    # A version that only others own is checked like a new one, even if they share it: by this push
    # the caller comes to own it too, and keeps it when the others stop sharing.
    if check_settings is not None and not (is_stored and is_own):
        check_settings(draft.settings)
    if is_stored:
        # It calls `check_settings` itself before it repeats an audit, even for the owner.
        _push_again(draft, version_folder, install, check_settings)
        return
    if indexed_data:
        push_large.build_version(draft, indexed_data)
    else:
        _build_version(draft, install)
    _publish_version(draft, version_folder)


def _push_again(
    draft: Draft, version_folder: Path, install: bool, check_settings: SettingsCheck | None
) -> None:
    """Make the stored version in `version_folder` the newest of its name. With `install`, its
    packages are installed again if they are gone.

    If secrets that the version's audit lacked are set by now, the audit is repeated. This gives the
    secrets to the version's code, so it is done only if `check_settings` accepts the version.
    """
    if install:
        _reinstall_packages(draft)
    if push_audit.is_outdated(draft) and _passes_check(check_settings, draft.settings):
        push_audit.repeat_audit(draft, version_folder)
    _make_newest(draft, version_folder)


def _root_of_stored_version(home: Home, path: str | Path) -> list[Path]:
    """Return [path] if `path` is the folder with the files of a stored version, else [].

    Such a folder may be pushed again from anywhere, so it counts as one more allowed root. The
    folder above it, that of the whole version, does not: it also holds the held-out rows. Raises
    UserError ENV_SEALED if the version is a sealed exam (its tasks are shown to nobody).
    """
    folder = Path(path)
    # The files of a version lie at home.envs / name / hash / source. `parents` is sliced because a
    # short path has fewer than three folders above it.
    is_stored_version = folder.name == SOURCE and folder.parents[2:3] == (home.envs,)
    if is_stored_version and home.viewer is not None:
        with Store(home) as store:  # a version that the caller may not use is none to it
            is_stored_version = store.sees_env("@".join(folder.parts[-3:-1]))
    if is_stored_version:
        refuse_if_sealed(
            folder.parent, folder.parent.parent.name, "its files cannot be pushed again"
        )
    return [folder] if is_stored_version else []


def as_user_error(problem: EnvProblem) -> UserError:
    """Convert a fault of the environment into a UserError, with secrets hidden and texts cut."""
    redact = Redactor().text
    hint = redact(problem.hint)[:_HINT_CHARS] or "Correct it and push again."
    return UserError(problem.code, redact(str(problem))[:_MESSAGE_CHARS], hint=hint, field="path")


def _reinstall_packages(draft: Draft) -> None:
    """Install the packages of a stored version again if the virtual environment that held them is
    gone; otherwise do nothing.

    Raises UserError ENV_DEPS if they cannot be installed in the time of the push.
    """
    record = registry.read_version(draft.home, draft.name, draft.hash)
    try:
        registry.env_python(record)  # raises ENV_DEPS if the virtual environment is gone
    except UserError as error:
        if error.code != "ENV_DEPS":
            raise
        _interpreter(draft, install=True)


def _build_version(draft: Draft, install: bool) -> None:
    """Write the rows, the audit and env.json of a new version into the draft's folder.

    The copied files are there already. Raises EnvProblem if the environment has a fault, and
    UserError ENV_DEPS if its packages are missing or ENV_INVALID if a row names an unknown split.
    """
    draft.python = _interpreter(draft, install)
    env_run = _run_environment(draft)
    contamination = _find_contamination(env_run.rows, draft.seconds_left)
    if contamination["leaked"]:
        draft.problems += task_rows.leak_problems(env_run.rows, draft)
    task_rows.write(draft.folder / TASKS, env_run.rows)
    write_json(draft.folder / AUDIT, Redactor(draft.secrets).value(env_run.audit))
    version = _env_version(draft, env_run, contamination)
    version.write(draft.folder / FACTS)  # written last: a folder with this file counts as a version


@dataclass(frozen=True)
class _EnvironmentRun:
    """What a push learns by running the environment.

    Attributes:
        description: what the environment says of itself; its `kind` is that of the version.
        rows: the task rows, each with its side (train, dev or heldout) and the conversation of its
            reference answer.
        split: the sides, and how they were decided.
        audit: the content of audit.json.
        isolation: how the process was isolated, in words.
        prompt_of: the version that is the same but for the texts of [prompt]; "" for none.
    """

    description: EnvDescription
    rows: list[TaskRow]
    split: Split
    audit: JsonObject
    isolation: str
    prompt_of: str = ""


def _run_environment(draft: Draft) -> _EnvironmentRun:
    """Run the environment of a draft: get its rows, replay its reference answers, audit its scorer.

    Raises EnvProblem if the environment has a fault, and UserError ENV_INVALID if a row names an
    unknown split.
    """
    with draft.process() as env, draft.process() as second_env:
        description, start_seconds = draft.timed(env.limits.start_seconds, env.describe)
        rows, tasks_seconds = _timed_rows(draft, env)
        first_rows = [dict(row) for row in rows]  # copies: the rows are changed below
        # Some checks need a process that has scored nothing. It is started at its first use.
        second_process = push_audit.SecondProcess(
            second_env, first_rows, start_seconds, tasks_seconds, draft.deadline
        )
        env_kind = description["kind"]  # "sft" for every dataset, even one of preferences
        kind = task_rows.kind_of(env_kind, rows)
        named_splits = [row.get("split") for row in rows]
        split = task_rows.assign_split(rows, draft)
        task_rows.add_gold(env, rows, env_kind, draft)
        if draft.settings.drop_leaks:
            split = task_rows.drop_leaks(rows, named_splits, split, draft)
        # The texts of [prompt] enter the rows only now: the split and the search for leaks then
        # give the same result as for the version without these texts.
        description = task_rows.apply_prompt_texts(rows, description, draft.settings.prompt)
        prompt_of = task_rows.comparable_version(rows, draft)
        draft.warnings += family_hint(rows)
        draft.problems += task_rows.scorer_problem(rows, kind, draft)
        audit = push_audit.run_audit(env, rows, env_kind, second_process, draft)
        isolation = env.isolation  # known only while the process runs
        draft.warnings += second_process.warnings()
    return _EnvironmentRun(
        description={**description, "kind": kind},
        rows=rows,
        split=split,
        audit=audit,
        isolation=isolation,
        prompt_of=prompt_of,
    )


def _timed_rows(draft: Draft, env: EnvProcess) -> tuple[list[TaskRow], float]:
    """Call the environment's `tasks()`; return its rows and the seconds that the call took.

    The call may take as long as the push can spare, but not longer than the environment's own
    limit.
    """
    spare_seconds = max(push_limits.TASKS_SECONDS, draft.seconds_left - push_limits.AFTER_START)
    limit_s = min(env.limits.start_seconds, spare_seconds)  # start_seconds limits tasks() too
    return draft.timed(limit_s, lambda: env.tasks(limit_s))


def _find_contamination(rows: list[TaskRow], seconds_left: float) -> JsonObject:
    """Search the train rows for texts of the held-out and dev rows, and return what they share. The
    search takes at most `seconds_left`, but always gets `_LEAST_SCAN_S`."""
    train = [row for row in rows if row["split"] == "train"]
    heldout = [row for row in rows if row["split"] != "train"]
    scan_s = min(overlap.BUDGET_S, seconds_left)
    return overlap.scan(train, heldout, max(_LEAST_SCAN_S, scan_s))


def _env_version(draft: Draft, env_run: _EnvironmentRun, contamination: JsonObject) -> EnvVersion:
    """Return the content of env.json for a draft. Secrets are hidden in the environment's texts.

    `env_run` is what running the environment has shown; `contamination` is what the train rows
    share with the held-out ones.
    """
    redactor = Redactor(draft.secrets)
    file_copy, settings, description = draft.copied, draft.settings, env_run.description
    return EnvVersion(
        env_id=f"{draft.name}@{draft.hash}",
        name=draft.name,
        hash=draft.hash,
        digest=file_copy.digest,
        kind=description["kind"],
        scored=description["scored"],
        scorer=settings.scorer,
        tools=description["tools"],
        params=_params_as_json(settings),
        rows=env_run.split.counts(),
        split=env_run.split.source,
        prompt_of=env_run.prompt_of,
        contamination=contamination,
        files=len(file_copy.files),
        size=file_copy.size,
        left_out=tuple(file_copy.left_out),
        limits=settings.limits,
        secrets=settings.secrets,
        python=draft.python,
        isolation=env_run.isolation,
        warnings=tuple(redactor.text(warning) for warning in draft.warnings),
        problems=tuple(PushProblem(message=redactor.text(text)) for text in draft.problems),
    )


def _params_as_json(settings: EnvSettings) -> JsonObject:
    """Return the environment's own parameters with dates as texts, because JSON has no dates."""
    return json.loads(json.dumps(settings.params, default=str))


def _passes_check(check_settings: SettingsCheck | None, settings: EnvSettings) -> bool:
    """Return whether `check_settings` accepts the settings of a stored version; None accepts
    everything.

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
    """Return the path of an interpreter that has the packages of the environment's
    requirements.txt; "" if the file names none. With `install`, missing packages are installed.

    Raises UserError ENV_DEPS if packages are missing and `install` is False, or if they cannot be
    installed in the time of the push.
    """
    requirements = env_packages.read_requirements(draft.source)
    if not requirements:
        return ""
    venv = env_packages.venv_of(draft.home, requirements)
    if venv.is_ready():
        return str(venv.python)
    missing = env_packages.missing(requirements)
    if not missing:
        return sys.executable  # our own interpreter happens to have all of them
    if not install:
        raise _packages_missing(missing)
    seconds = min(push_limits.INSTALL_SECONDS, draft.seconds_left)
    python = env_packages.install(draft.home, requirements, seconds)
    if draft.seconds_left < push_limits.START_SECONDS:  # too little to start the environment
        raise UserError(
            "ENV_DEPS",
            "the packages are installed, but that took as long as one call may",
            hint="Push again; it goes on from here.",
            retryable=True,
        )
    return str(python)


def _packages_missing(missing: list[str]) -> UserError:
    """Make the error for an environment whose packages are not installed; the hint is to push with
    `install`."""
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
    """Move the draft's folder to `version_folder` and add the version to the database.

    The database is opened first, so that nothing is moved if that fails.
    """
    row = database_row(draft.folder)
    assert row is not None  # the version has just been built in the draft's folder
    with Store(draft.home) as store:
        publish(draft.folder, version_folder)
        store.add_env(draft.name, draft.hash, kind=row["kind"], info=row["info"])


def _make_newest(draft: Draft, version_folder: Path) -> None:
    """Write the database row of a stored version again, which makes it the newest of its name."""
    row = database_row(version_folder)
    assert row is not None  # `_store_version` has checked this
    with Store(draft.home) as store:
        store.add_env(draft.name, draft.hash, kind=row["kind"], info=row["info"])


def _reply(record: registry.EnvRecord, file_copy: snapshot.Snapshot) -> PushReply:
    """Return the reply of a push. Secrets are hidden in every text that the environment wrote.

    `record` is the stored version, `file_copy` the copy of the pushed folder.
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
        files=len(file_copy.files),
        left_out=file_copy.left_out,
        audit=redact.value(shown_audit),
        problems=[ShownProblem(problem) for problem in problems],
        isolation=record.isolation.partition(":")[0],  # only the level; `doctor` explains it
        secrets=list(record.secrets),
        network=registry.uses_network(record),
        summary=_summary(record),
        next=[_next_call(record)],
        warnings=[redact.text(warning) for warning in _reply_warnings(record)],
    )


def _summary(record: registry.EnvRecord) -> str:
    """Return one sentence about the stored version: its rows per side, kind, scorer and audit."""
    train, dev, heldout = (record.rows.get(name, 0) for name in ("train", "dev", "heldout"))
    counts = f"{train} train, {dev} dev" if dev else f"{train} train"
    scorer = f", scored by {record.version.scorer}" if record.version.scorer else ""
    audit = f"audit {record.audit.verdict}" if record.scored else "no scorer"
    return (
        f"Pushed {record.env_id}: {counts} and {heldout} held-out rows, {record.kind}{scorer}, "
        f"{audit}."
    )


def _reply_warnings(record: registry.EnvRecord) -> list[str]:
    """Return the warnings of a stored version, most urgent first: rows that overlap between train
    and held-out, then a failed audit, then all others."""
    warnings = push_audit.warnings_of(record)
    if record.audit.verdict != "ok":
        warnings.insert(0, f"reward audit: {record.audit.headline}")
    contamination = record.contamination
    if contamination.get("verdict", "clean") != "clean":
        remedy = ""
        if contamination.get("leaked"):
            remedy = "; drop_leaks = true under [split] in environment.toml leaves those rows out"
        # Inserted second, so that it stands before the warning about the audit.
        warnings.insert(0, f"contamination: {contamination['headline']}{remedy}")
    return warnings


def _next_call(record: registry.EnvRecord) -> Call:
    """Return the call to suggest after a push: an evaluation if the version is an exam (scored, but
    without training rows); else a dry run with an algorithm that fits the environment."""
    arguments: JsonObject = {"env_id": record.env_id}
    if record.scored and not record.rows.get("train"):
        return Call("evaluate", arguments | {"models": ["pebble"]})
    # The default algorithm, grpo, is refused without a scorer. Data files with a scorer have an
    # answer in each row: SFT on these first teaches the base model what is asked.
    if not record.scored or record.version.scorer:
        arguments["algorithm"] = "dpo" if record.kind == "preference" else "sft"
    return Call("dry_run", arguments)


def _version_name(requested: str, folder_name: str) -> str:
    """Return the name of the new version: `requested`, or if that is "" a name made from the
    folder's name.

    Raises UserError BAD_ARGUMENT if NAME does not allow `requested`.
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
    """Return the most similar name that an environment may have (NAME), e.g. "word-game" for "Word
    Game!"; "env" if no character of `name` can be used.
    """
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    shortened = words[:_NAME_CHARS].strip("-")  # the cut may leave a dash at the end
    return shortened or "env"

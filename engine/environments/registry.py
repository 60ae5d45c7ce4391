"""Pushed environments: looking up versions, starting their processes and reading their rows.

A version is named by a content hash of its files (engine/environments/push.py makes it) and never
changes. Its folder holds the files, the rows that `tasks()` returned at push, the facts about it
(env.json) and its reward audit.
"""

import difflib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import JsonObject
from engine.core.hints import Call, Hint
from engine.core.reply import ReplyBase
from engine.endpoints import judges, references
from engine.environments.indexed.rows import ROWS_INDEX, IndexedRows, check_files
from engine.home.owner_marks import refuse_if_sealed
from engine.home.rows import EnvRow, abbreviation_warning, shown_owner
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.models.served.judge import is_local, local_judge
from engine.records.audit import Audit
from engine.records.env_version import EnvVersion
from engine.records.record import DamagedRecord
from envs.config.problem import EnvProblem
from envs.config.settings import Limits, read_settings
from envs.host.process import EnvProcess
from envs.isolation.sandbox import Sandbox
from envs.json_types import TaskRow, ToolSchema

SOURCE, TASKS, FACTS, AUDIT = "source", "tasks.jsonl", "env.json", "audit.json"
EARLIER = "earlier"  # folder of audits that were replaced, each named by its SHA-256


@dataclass(frozen=True)
class EnvRecord:
    """One version of a pushed environment: the content of its files, and their place.

    Attributes:
        env_id: `name@hash12`.
        dir: the folder of the version: source/, tasks.jsonl, env.json, audit.json.
        version: the content of env.json.
        audit: the stored reward audit.
    """

    env_id: str
    name: str
    hash: str
    dir: Path
    version: EnvVersion
    audit: Audit

    @property
    def source(self) -> Path:
        """The folder with the files as they were pushed."""
        return self.dir / SOURCE

    @property
    def kind(self) -> str:
        """The kind of environment: "single", "multi", "command", "sft" or "preference"."""
        return self.version.kind

    @property
    def scored(self) -> bool:
        """Whether the environment can score a completion."""
        return self.version.scored

    @property
    def tools(self) -> list[ToolSchema]:
        """Schemas, in OpenAI's form, of the functions that the model may call."""
        return self.version.tools

    @property
    def rows(self) -> dict[str, int]:
        """Rows per side: {"train": n, "heldout": n}, and "dev" if the version has such rows."""
        return self.version.rows

    @property
    def limits(self) -> Limits:
        """What the environment's process may use: time, memory, processes, network."""
        return self.version.limits

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the secrets that the environment needs."""
        return self.version.secrets

    @property
    def contamination(self) -> JsonObject:
        """What the training rows share with the held-out tasks, measured at push; {} if unknown."""
        return self.version.contamination

    @property
    def isolation(self) -> str:
        """How the environment's code was isolated at push, in words."""
        return self.version.isolation


def find_env(home: Home, ref: str, *, sealed: bool = False) -> EnvRecord:
    """Return the version of an environment that `ref` names.

    `ref` is an id (`name@hash`), a name, which means its newest version, or the beginning of one of
    these, if it fits only one environment. `sealed` allows a sealed exam; only callers that show
    nothing of its tasks may pass it.

    Raises UserError ENV_NOT_FOUND if no version fits or its files are gone, ENV_AMBIGUOUS if
    several environments fit, and ENV_SEALED if the version is sealed and `sealed` is False.
    """
    record = _find_version(home, ref)
    if not sealed:
        request = "its tasks cannot be read, trained on or scored again"
        refuse_if_sealed(record.dir, record.env_id, request)
    return record


def _find_version(home: Home, ref: str) -> EnvRecord:
    """Return the version that `ref` names, sealed or not. Raises UserError ENV_NOT_FOUND if none
    fits, or ENV_AMBIGUOUS if several environments fit."""
    with Store(home) as store:
        matches = store.find_env(ref)
        # A folder `word_game` is stored as `word-game`; either spelling finds it.
        stored_name = ref.lower().replace("_", "-")
        if not matches and stored_name != ref:
            matches = store.find_env(stored_name)
            ref = stored_name
        if not matches:
            raise _not_found(ref, store.list_envs())
    newest = matches[0]
    name = ref.rpartition("/")[2]  # without the owner, who may stand before a slash
    is_exact = name in (newest.env_id, newest.name)
    if not is_exact:
        _require_single_meaning(name, matches)
    return read_version(home, newest.name, newest.hash)


def _require_single_meaning(prefix: str, matches: Sequence[EnvRow]) -> None:
    """Raise UserError ENV_AMBIGUOUS if a prefix fits several environments.

    `matches` are the versions that it fits. A prefix with an @ must fit a single version. A prefix
    without an @ must fit a single name, and means the newest version of that name.
    """
    if "@" in prefix:
        candidates = {match.env_id for match in matches}
    else:
        candidates = {match.name for match in matches}
    if len(candidates) > 1:
        names = ", ".join(sorted(candidates)[:5])
        raise UserError(
            "ENV_AMBIGUOUS",
            f"{prefix!r} begins more than one environment: {names}",
            field="env_id",
            hint="Pass a longer prefix or the whole id.",
        )


def prefix_warning(ref: str, record: EnvRecord) -> list[str]:
    """Return a list with one warning if `ref` was only a prefix of the version's name or id; else
    []. The whole name gives no warning, even if it is spelt with _ in place of -.
    """
    name = ref.rpartition("/")[2]  # without the owner, who may stand before a slash
    if record.name in (name, name.lower().replace("_", "-")):
        return []
    return abbreviation_warning("env_id", name, record.env_id)


@dataclass(frozen=True)
class ListedVersion(ReplyBase):
    """A version in a listing.

    Attributes:
        rows: number of rows per split.
        audit: verdict of its reward audit; "" if there was none.
        pushed: when it was last pushed, seconds since the epoch.
        owner: the key whose it is, if it is not the caller's own; the local user is "local".
    """

    env_id: str
    kind: str
    rows: dict[str, int]
    audit: str
    pushed: float
    owner: str | None = None


def list_envs(home: Home, limit: int = 1000, offset: int = 0) -> list[ListedVersion]:
    """Return at most `limit` stored versions that the home's viewer sees, the last pushed first;
    the first `offset` of them are skipped."""
    with Store(home) as store:
        rows = store.list_envs(limit, offset)
    return [
        ListedVersion(
            owner=shown_owner(home.viewer, row.owner) or None,
            env_id=row.env_id,
            kind=row.kind,
            rows=row.info.get("rows", {}),
            audit=row.info.get("audit", ""),
            pushed=row.pushed,
        )
        for row in rows
    ]


def open_process(record: EnvRecord, log: Path | None = None) -> EnvProcess:
    """Return the env process of a version, which starts with the first call of it.

    The process is isolated as the home's config.toml says, and writes its output to the file `log`,
    if one is given. Raises UserError ENV_SECRETS if a secret that the version names, or the key of
    an endpoint that it may ask, is not set for this server, MODEL_NOT_FOUND if config.toml lacks
    that endpoint or the home a model that it may ask, ENV_DEPS if the version's interpreter is
    gone.
    """
    home = Home(record.dir.parents[2])  # `dir` is HOME/envs/name/hash
    return EnvProcess(
        record.source,
        python=env_python(record),
        limits=record.limits,
        secrets=secrets_of(record.secrets),
        log=log,
        sandbox=sandbox_of(home),
        upstreams=judges.upstreams(home, endpoints_of(record)),
    )


def endpoints_of(record: EnvRecord) -> tuple[str, ...]:
    """Return the models that a version may ask by name, such as "openai:big" and "model:pebble"."""
    try:
        return read_settings(record.source).endpoints
    except EnvProblem:  # whoever starts the version reports it
        return ()


def uses_network(record: EnvRecord) -> bool:
    """Return whether anything is asked over the network for a version, by its process or for a
    reward."""
    try:
        return read_settings(record.source).network
    except EnvProblem:  # whoever starts the version reports it
        return record.limits.network


def check_judges(home: Home, env_id: str) -> None:
    """Check that the caller may use the judges of an environment: the models that it may ask.

    Raises UserError FORBIDDEN if one is behind a URL and only the owner of the home may ask it,
    MODEL_NOT_FOUND if there is no such model, or none that the home's viewer sees. A version that
    cannot be found is not checked: whoever uses it reports that.
    """
    try:
        record = find_env(home, env_id, sealed=True)
    except UserError:
        return
    for ref in endpoints_of(record):
        if is_local(ref):
            local_judge(home, ref)
        else:
            references.check_shared(home, ref, "env_id")


def sandbox_of(home: Home) -> Sandbox:
    """Return the sandbox for the code of environments, as the home's config.toml describes it.

    The home itself is hidden from that code. Raises UserError if config.toml is invalid.
    """
    config = home.user_config()
    return Sandbox(mode=config.sandbox, allow_root=config.allow_root, hidden=(str(home.root),))


def env_python(record: EnvRecord) -> str:
    """Return the path of the interpreter that runs a version.

    It is the interpreter that had the version's packages at its push; if the version names no
    packages, it is that of this process. Raises UserError ENV_DEPS if the interpreter is gone.
    """
    python = record.version.python
    if not python:
        return sys.executable
    if os.access(python, os.X_OK):
        return python
    raise UserError(
        "ENV_DEPS",
        f"the interpreter with the packages of {record.env_id} is gone: {python}",
        hint=Hint(
            "Push the environment again; its packages are installed once more.",
            Call("push_env", {"path": str(record.source), "name": record.name, "install": True}),
        ),
        field="env_id",
    )


def secrets_of(names: tuple[str, ...]) -> dict[str, str]:
    """Return name -> value of the named secrets, from this process's environment variables.

    Raises UserError ENV_SECRETS if some of them are unset or empty; the message names these.
    """
    unset = [name for name in names if not os.environ.get(name)]
    if unset:
        raise UserError(
            "ENV_SECRETS",
            f"not set for this server: {', '.join(unset)}",
            hint="Set them where the server is started (its client's configuration), not in a "
            "tool argument, and restart it.",
        )
    return {name: os.environ[name] for name in names}


def read_tasks(record: EnvRecord, split: str | None = None) -> Sequence[TaskRow]:
    """Return the rows of a version: those of `split` ("train", "dev" or "heldout").

    If `split` is None, the rows of all splits are returned, with one exception: of a version with
    large data these are the training rows alone. Large data are training rows that were too large
    to copy when the version was pushed: they stay in the user's files, apart from the stored rows
    of the other splits. Raises UserError DATASET_INVALID if those files are gone or changed.
    """
    large_data = record.version.data  # the user's files; empty if all rows are stored
    if large_data and split in ("train", None):
        check_files(large_data, record.env_id)
        # They would not fit into a list: each row is read when it is asked for.
        return IndexedRows(large_data, record.dir / ROWS_INDEX)
    rows = read_rows(record.dir / TASKS)
    return [row for row in rows if split is None or row["split"] == split]


def read_rows(path: Path) -> Iterator[TaskRow]:
    """Yield the rows of a tasks.jsonl file one after the other."""
    with open(path, "rb") as file:
        for line in file:
            yield json.loads(line)


def read_version(home: Home, name: str, hash12: str) -> EnvRecord:
    """Return the stored version `name@hash12`. Raises UserError ENV_NOT_FOUND if its files are gone
    or damaged."""
    folder = home.env(name, hash12)
    try:
        return _read_folder(folder, name, hash12)
    except (OSError, DamagedRecord) as error:
        raise UserError(
            "ENV_NOT_FOUND",
            f"the files of {name}@{hash12} are gone or damaged: {error}",
            hint="Push the environment again.",
            field="env_id",
        ) from error


def _read_folder(folder: Path, name: str, hash12: str) -> EnvRecord:
    """Read the version in `folder`. Raises OSError or DamagedRecord if a file cannot be read."""
    return EnvRecord(
        env_id=f"{name}@{hash12}",
        name=name,
        hash=hash12,
        dir=folder,
        version=EnvVersion.read(folder / FACTS),
        audit=Audit.read(folder / AUDIT),
    )


def _not_found(ref: str, stored_versions: list[EnvRow]) -> UserError:
    """Make the error for a reference that fits no stored version; the hint names similar ones."""
    names = list(dict.fromkeys(row.name for row in stored_versions))
    if names:
        hint = f"Known: {', '.join(names[:5])}."
    else:
        hint = "Push one with push_env (honesmith env push)."
    similar = difflib.get_close_matches(ref.partition("@")[0], names, n=1, cutoff=0.5)
    if similar:
        hint = f"Did you mean {similar[0]}? {hint}"
    return UserError(
        "ENV_NOT_FOUND", f"no environment matches {ref[:80]!r}", field="env_id", hint=hint
    )

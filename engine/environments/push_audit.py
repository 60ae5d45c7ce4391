"""The reward audit of a version: within a push, again once missing secrets have been set, and over
every row (`honesmith env audit ENV --all`).

Of the last what was scored is kept in the home's cache until the audit is whole, so that it can be
killed and goes on when it is asked for again. Its result takes the place of the push's audit."""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import JsonObject, sync_folder, write_json, write_text
from engine.core.format import words
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.environments import registry
from engine.environments.draft import Draft
from engine.environments.registry import AUDIT, EARLIER
from engine.home.run_dir import Home
from engine.home.sanitize import Redactor
from engine.sizing.score_workers import default_workers
from envs.audit.full_audit import FullAudit
from envs.audit.rescore import THIRD_S
from envs.audit.reward_audit import OVERRUN, audit
from envs.config import push_limits
from envs.config.problem import EnvProblem
from envs.host.judge_budget import JudgeBudget
from envs.host.process import EnvProcess
from envs.json_types import TaskRow
from envs.metering.judge_calls import JudgeUse

# An audit of so many rows, or of this share, tells enough of a scorer.
ENOUGH_ROWS, ENOUGH_SHARE = 20, 0.5
# The keys of an audit that a reply shows.
_SHOWN = ("verdict", "headline", "risks", "weaknesses", "share", "problems", "fresh_process")
OnRow = Callable[[int, int], None]
_UNSET_PREFIX = "secrets not set for this server: "


@dataclass
class SecondProcess:
    """A second env process of a push, for two checks: whether `tasks()` gives the same rows again,
    and whether answers get the same scores in a process that has not scored anything before.

    `tasks()` is called before any scoring: scoring may draw random numbers, and `tasks()` would
    give other rows after that.

    Attributes:
        process: the second process; it need not be started yet.
        rows: what `tasks()` of the first process returned.
        start_seconds: how long the first process took to start.
        tasks_seconds: how long its `tasks()` took.
        deadline: value of `time.monotonic()` by which the push must be done.
        repeat_warnings: warnings about `tasks()`; None until it has been called.
    """

    process: EnvProcess
    rows: Sequence[Mapping[str, Any]]
    start_seconds: float
    tasks_seconds: float
    deadline: float
    repeat_warnings: list[str] | None = None
    _handed_out: bool = False  # whether `fresh` has returned it before

    def fresh(self) -> EnvProcess:
        """A process that has scored nothing: this one, restarted if it was handed out before.

        Raises EnvProblem ENV_LIMITS if the push has too little time left to start it, or another
        EnvProblem if the start fails.
        """
        # Twice as long as the first process took to start, because this one may be slower.
        needed_seconds = 2 * self.start_seconds + push_limits.CALL_SECONDS
        if self._handed_out:  # then it is the push's third process, which the audit uses for longer
            needed_seconds += THIRD_S
        if self._seconds_left() < needed_seconds:
            message = f"it takes {self.start_seconds:.1f} s to start: too long for another"
            raise EnvProblem("ENV_LIMITS", message)
        if self._handed_out:
            self.process.close()
        self._handed_out = True
        self.process.describe()  # the first call starts the process
        self.warnings()  # calls tasks() before anything is scored
        return self.process

    def warnings(self) -> list[str]:
        """Return a warning if `tasks()` gives other rows than in the first process; otherwise [].

        The warning also says if that could not be checked. `tasks()` is called the first time only;
        later calls return the same list.
        """
        if self.repeat_warnings is None:
            warning = self._repeat_warning()
            self.repeat_warnings = [warning] if warning else []
        return self.repeat_warnings

    def _seconds_left(self) -> float:
        """Seconds until the push must be done."""
        return self.deadline - time.monotonic()

    def _repeat_warning(self) -> str:
        """Call `tasks()` and compare its rows with the first ones; returns a warning, or "".

        It also warns if the call failed, or if there was too little time for it.
        """
        # Twice the time of the first process, because this one may be slower.
        if self._seconds_left() < 2 * (self.start_seconds + self.tasks_seconds):
            return "tasks() is slow; whether it repeats itself was not checked"
        try:
            repeated_rows = self.process.tasks()
        except EnvProblem as problem:
            return f"tasks() failed when it was called again: {problem}"
        if repeated_rows == self.rows:
            return ""
        # Rows that only the longer list has are not counted.
        row_pairs = zip(self.rows, repeated_rows, strict=False)
        differing_count = sum(row != repeated_row for row, repeated_row in row_pairs)
        return (
            f"tasks() gave other rows when called again ({len(self.rows)} and "
            f"{len(repeated_rows)} rows, {differing_count} differ): seed it; the rows of the first "
            "call are stored"
        )


def run_audit(
    env: EnvProcess, rows: list[TaskRow], kind: str, second_process: SecondProcess, draft: Draft
) -> JsonObject:
    """Run the reward audit in the time the push has left; returns the content of audit.json.

    If the version names secrets, `secrets_unset` lists those that are not set, so that a later push
    that has them can repeat the audit.
    """
    # One call may be under way when the time is up, and the second process has to start.
    seconds_left = draft.seconds_left - push_limits.CALL_SECONDS - second_process.start_seconds
    # The audit may take OVERRUN times its budget; it gets at least one second, however late it is.
    fitting_s = min(push_limits.AUDIT_SECONDS, seconds_left / OVERRUN)
    budget_s = max(1.0, fitting_s)
    env.judge_budget = JudgeBudget()
    report: JsonObject = {**audit(env, rows, kind, budget_s=budget_s, fresh=second_process.fresh)}
    if use := env.judge_budget.used:
        report["judge"] = per_score(use, report["probes"])
    if draft.settings.secrets:
        report["secrets_unset"] = draft.unset_secrets
    return report


def per_score(use: JudgeUse, probes: Sequence[Mapping[str, Any]]) -> JsonObject:
    """What judges took for one score of an audit, mean; `probes` are the lines of its report."""
    scores = sum(line["rows"] for line in probes)
    return {name: round(value / max(1, scores), 6) for name, value in use.to_json().items()}


def is_outdated(draft: Draft) -> bool:
    """Whether secrets are set now that were not set when the stored version was audited."""
    record = registry.read_version(draft.home, draft.name, draft.hash)
    return record.scored and bool(_secrets_unset_at_audit(record) & set(draft.secrets))


def repeat_audit(draft: Draft, version_folder: Path) -> None:
    """Replace the audit of the stored version in `version_folder`; nothing else there changes.

    The old audit is kept in the folder EARLIER under its hash, because earlier runs recorded that
    hash, which `honesmith verify` searches for.
    """
    record = registry.read_version(draft.home, draft.name, draft.hash)
    draft.python = registry.env_python(record)  # the audit runs with the version's packages
    report = _audit_of_stored(draft, record)
    _store_audit(version_folder, report, draft.secrets)


def replace_audit(record: registry.EnvRecord, report: JsonObject) -> None:
    """Put `report` in the place of the stored version's audit, which is kept under EARLIER."""
    if record.secrets:
        report["secrets_unset"] = [name for name in record.secrets if not os.environ.get(name)]
    _store_audit(record.dir, report, registry.secrets_of(record.secrets))


def seconds_for_all(audit: Mapping[str, Any]) -> float:
    """How long an audit of every row would take about, by what this one took; 0 where it covered
    every row, or scored none."""
    share = float(audit.get("share") or 0.0)
    return 0.0 if share in (0.0, 1.0) else float(audit.get("seconds") or 0.0) / share


def _store_audit(version_folder: Path, report: JsonObject, secrets: Mapping[str, str]) -> None:
    """Replace the audit of the version in `version_folder`; the old one is kept under EARLIER."""
    _keep_old_audit(version_folder)
    write_json(version_folder / AUDIT, Redactor(secrets).value(report))


def _audit_of_stored(draft: Draft, record: registry.EnvRecord) -> JsonObject:
    """Audit a stored version with the rows that it has; returns the content of audit.json."""
    rows = list(registry.read_tasks(record))
    with draft.process() as env, draft.process() as second_env:
        _, start_seconds = draft.timed(env.limits.start_seconds, env.describe)
        # The stored rows stay: giving `repeat_warnings` says that tasks() need not be called again.
        second_process = SecondProcess(
            second_env,
            rows,
            start_seconds,
            tasks_seconds=0.0,  # tasks() is not called
            deadline=draft.deadline,
            repeat_warnings=[],
        )
        return run_audit(env, rows, record.kind, second_process, draft)


def _keep_old_audit(version_folder: Path) -> None:
    """Copy the audit of a version into the folder EARLIER, under its hash."""
    old_audit = (version_folder / AUDIT).read_bytes()
    copy = version_folder / EARLIER / f"{hashlib.sha256(old_audit).hexdigest()}.json"
    copy.parent.mkdir(exist_ok=True)
    write_text(copy, old_audit.decode())
    sync_folder(copy.parent)


def warnings_of(record: registry.EnvRecord) -> list[str]:
    """All warnings about a stored version that a push reports, most urgent first.

    Which secrets are unset is checked now; the stored warning about it may be out of date.
    """
    stored = [text for text in record.version.warnings if not text.startswith(_UNSET_PREFIX)]
    unset = [name for name in record.secrets if not os.environ.get(name)]
    secret_warnings = [_UNSET_PREFIX + ", ".join(unset)] if unset else []
    set_after_audit = sorted(_secrets_unset_at_audit(record) - set(unset))
    if set_after_audit:
        names = ", ".join(set_after_audit)
        secret_warnings.append(f"the audit was made without the secrets {names}")
    return [*secret_warnings, *stored, *record.audit.problems, *coverage(record)]


def coverage(record: registry.EnvRecord) -> list[str]:
    """That the audit scored few of the rows within its time, and how to have all scored, as a list
    of one sentence; [] where it scored at least half of them, or enough to tell."""
    audit = record.audit
    if audit.rows_scored >= ENOUGH_ROWS or audit.share >= ENOUGH_SHARE or not audit.rows_scored:
        return []
    left = words(seconds_for_all(audit.as_written()) / 3600)
    return [
        f"the audit scored {audit.rows_scored} of {audit.rows} rows in its {audit.seconds:.0f} s: "
        f"`honesmith env audit {record.env_id} --all` scores every row, in about {left}"
    ]


def _secrets_unset_at_audit(record: registry.EnvRecord) -> set[str]:
    """The names of the secrets that were not set when the version was audited."""
    if record.audit.secrets_unset is not None:
        return set(record.audit.secrets_unset)
    # Older releases wrote the names into a warning of the version instead.
    for text in record.version.warnings:
        if text.startswith(_UNSET_PREFIX):  # "secrets not set for this server: A, B"
            return set(text.removeprefix(_UNSET_PREFIX).split(", "))
    return set()


def audit_reply(home: Home, env_id: str) -> Reply:
    """The stored audit of a version, and how long one of every row would take."""
    record = registry.find_env(home, env_id)
    return _reply(record, record.audit.as_written())


def _require_scorer(record: registry.EnvRecord) -> None:
    """Raise UserError BAD_ARGUMENT for a version without a scorer of single answers."""
    if not record.scored or record.kind not in ("single", "multi"):
        message = f"{record.env_id} has no scorer that can be asked about single answers"
        raise UserError("BAD_ARGUMENT", message, hint="Audit one with score().", field="env_id")


def audit_all(
    home: Home, env_id: str, *, workers: int = 0, on_row: OnRow = lambda done, of: None
) -> Reply:
    """Audit every row of a version and store the result; goes on where an earlier call ended.

    Args:
        workers: env processes that score at once; 0 for as many as training would take.
        on_row: called after each row with how many are done, and of how many.

    Raises UserError ENV_NOT_FOUND, ENV_SECRETS or ENV_DEPS, BAD_ARGUMENT where nothing is scored,
    ENV_BUSY while another process does this audit, and EnvProblem where the environment does not
    start.
    """
    record = registry.find_env(home, env_id)
    _require_scorer(record)
    rows = list(registry.read_tasks(record))
    score_s = record.audit.score_seconds_p95
    count = workers or default_workers(score_s, record.limits.network, os.cpu_count() or 1)
    began = time.monotonic()
    with _kept_rows(home, record.env_id) as file, registry.open_process(record) as process:
        process.judge_budget = JudgeBudget(borrowers=count)
        process.describe()  # so that a fault of the environment comes now
        whole = FullAudit(rows, record.kind, file, on_row=lambda done: on_row(done, len(rows)))
        with _fresh_processes(record) as fresh:
            report: JsonObject = {
                **whole.run(process.team(count), fresh, lambda: time.monotonic() - began)
            }
        if use := process.judge_budget.used:
            report["judge"] = per_score(use, report["probes"])
        replace_audit(record, report)
        file.unlink()
    return _reply(record, report)


@contextmanager
def _kept_rows(home: Home, env_id: str) -> Iterator[Path]:
    """The file that keeps what was scored, while no other process has it. Raises UserError BUSY."""
    folder = home.cache / "audits"
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / f"{env_id}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            hint = Hint("Wait for it; its result is stored.", Call("dry_run", {"env_id": env_id}))
            raise UserError("ENV_BUSY", f"{env_id} is being audited already", hint=hint) from None
        yield folder / f"{env_id}.jsonl"
    finally:
        os.close(lock)


@contextmanager
def _fresh_processes(record: registry.EnvRecord) -> Iterator[Callable[[], EnvProcess]]:
    """Gives what starts env processes that have scored nothing; they end with the context."""
    started: list[EnvProcess] = []

    def fresh() -> EnvProcess:
        process = registry.open_process(record)
        started.append(process)
        process.describe()
        return process

    try:
        yield fresh
    finally:
        for process in started:
            process.close()


def _reply(record: registry.EnvRecord, audit: JsonObject) -> Reply:
    """What an audit says, and how to have every row audited where not all were."""
    reply: Reply = {
        "summary": f"{record.env_id}: {audit.get('headline') or 'no audit'}",
        "env_id": record.env_id,
        "audit": {key: audit[key] for key in _SHOWN if key in audit},
        "next": [],
    }
    left = seconds_for_all(audit)
    if left:
        command = f"honesmith env audit {record.env_id} --all"
        reply["warnings"] = [f"{command} scores every row, in about {words(left / 3600)}"]
    return reply

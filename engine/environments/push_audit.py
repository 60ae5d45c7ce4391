"""The reward audit of a version: what its scorer pays for answers that are none.

An audit is made within a push, again when missing secrets have been set, and over every row
(`honesmith env audit ENV --all`). The last one stores its scores in the home's cache until it is
whole, so that a killed audit goes on when it is asked for again. Its result replaces the push's
audit."""

import fcntl
import hashlib
import json
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
from engine.home.sanitize import Redactor, clip
from engine.models.sizing.score_workers import default_workers
from engine.records.audit import Audit
from envs.audit.full_audit import FullAudit
from envs.audit.rescore import THIRD_S
from envs.audit.reward_audit import OVERRUN, audit
from envs.config import push_limits
from envs.config.problem import EnvProblem
from envs.host.judge_budget import JudgeBudget
from envs.host.process import EnvProcess
from envs.json_types import TaskRow
from envs.metering.judge_calls import JudgeUse

# An audit says enough about a scorer if it covers this many rows, or this share of all rows.
ENOUGH_ROWS, ENOUGH_SHARE = 20, 0.5
_MOST_QUOTED, _QUOTED_CHARS = 3, 80  # paid answers that a warning quotes, and how much of each
# The keys of an audit that a reply shows.
_SHOWN = ("verdict", "headline", "risks", "weaknesses", "share", "problems", "fresh_process")
OnRow = Callable[[int, int], None]
_UNSET_PREFIX = "secrets not set for this server: "


@dataclass
class SecondProcess:
    """A second env process of a push, for two checks: whether `tasks()` gives the same rows again,
    and whether answers get the same scores in a process that has not scored anything before.

    `tasks()` is called before any scoring, because scoring may draw random numbers, after which
    `tasks()` would give other rows.

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
    _handed_out: bool = False  # whether `fresh` has returned the process before

    def fresh(self) -> EnvProcess:
        """Return the second process, running and without having scored anything. If an earlier call
        has returned it already, it is restarted first.

        Raises EnvProblem ENV_LIMITS if the push has too little time left to start the process, or
        another EnvProblem if the start fails.
        """
        # Twice as long as the first process took to start, because this one may be slower.
        needed_seconds = 2 * self.start_seconds + push_limits.CALL_SECONDS
        if self._handed_out:  # the restarted process, the push's third, is used for longer
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
        """Return a list with one warning if `tasks()` gives other rows than in the first process,
        or if that cannot be checked; otherwise [].

        `tasks()` is called only the first time; later calls return the same list.
        """
        if self.repeat_warnings is None:
            warning = self._repeat_warning()
            self.repeat_warnings = [warning] if warning else []
        return self.repeat_warnings

    def _seconds_left(self) -> float:
        """Return the seconds until the push must be done; negative after that."""
        return self.deadline - time.monotonic()

    def _repeat_warning(self) -> str:
        """Call `tasks()` and compare its rows with those of the first process.

        Returns a warning if the rows differ, if the call failed, or if there is too little time for
        it; otherwise "".
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
        # strict=False: rows that only the longer list has are not counted; both lengths are told.
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
    """Run the reward audit in the time that the push has left; return the content of audit.json.

    If the version names secrets, `secrets_unset` in the result lists those that are not set, so
    that a later push with these secrets can repeat the audit.

    Args:
        env: the running env process of the version, which scores.
        rows: the rows of the version.
        kind: the kind of environment that the env process names.
        second_process: a process that has scored nothing, for checks that need one.
        draft: the version that is being pushed.
    """
    # Time is kept for one call that is under way at the end, and for starting the second process.
    seconds_left = draft.seconds_left - push_limits.CALL_SECONDS - second_process.start_seconds
    # The audit may take OVERRUN times its budget. It gets at least one second, however late it is.
    fitting_s = min(push_limits.AUDIT_SECONDS, seconds_left / OVERRUN)
    budget_s = max(1.0, fitting_s)
    env.judge_budget = JudgeBudget()
    report: JsonObject = {**audit(env, rows, kind, budget_s=budget_s, fresh=second_process.fresh)}
    if judge_use := env.judge_budget.used:
        report["judge"] = per_score(judge_use, report["probes"])
    if draft.settings.secrets:
        report["secrets_unset"] = draft.unset_secrets
    return report


def per_score(judge_use: JudgeUse, probes: Sequence[Mapping[str, Any]]) -> JsonObject:
    """Return the mean use of judges (language models that score) per score of an audit, e.g. their
    calls and tokens.

    `judge_use` is their use in the whole audit; `probes` are the lines of its report, each with the
    number of rows that it scored.
    """
    scores = max(1, sum(line["rows"] for line in probes))
    return {name: round(value / scores, 6) for name, value in judge_use.to_json().items()}


def is_outdated(draft: Draft) -> bool:
    """Return whether secrets are set now that were not set when the stored version was audited."""
    record = registry.read_version(draft.home, draft.name, draft.hash)
    return record.scored and bool(_secrets_unset_at_audit(record) & set(draft.secrets))


def repeat_audit(draft: Draft, version_folder: Path) -> None:
    """Replace the audit of the stored version in `version_folder`; nothing else there changes.

    The old audit is kept in the folder EARLIER under its hash: earlier runs have recorded that
    hash, and `honesmith verify` searches for it.
    """
    record = registry.read_version(draft.home, draft.name, draft.hash)
    draft.python = registry.env_python(record)  # the audit runs with the version's packages
    report = _audit_of_stored(draft, record)
    _store_audit(version_folder, report, draft.secrets)


def replace_audit(record: registry.EnvRecord, report: JsonObject) -> None:
    """Store `report` as the audit of a stored version. The old audit is kept in EARLIER."""
    if record.secrets:
        report["secrets_unset"] = [name for name in record.secrets if not os.environ.get(name)]
    _store_audit(record.dir, report, registry.secrets_of(record.secrets))


def seconds_for_all(audit: Mapping[str, Any]) -> float:
    """Estimate the seconds that an audit of every row would take, from the time that `audit` took.
    Returns 0 if `audit` covered every row, or scored none."""
    share = float(audit.get("share") or 0.0)  # of all rows
    if share in (0.0, 1.0):
        return 0.0
    return float(audit.get("seconds") or 0.0) / share


def _store_audit(version_folder: Path, report: JsonObject, secrets: Mapping[str, str]) -> None:
    """Write `report`, without the values of `secrets`, as the audit of the version in
    `version_folder`. The old audit is kept in EARLIER."""
    _keep_old_audit(version_folder)
    write_json(version_folder / AUDIT, Redactor(secrets).value(report))


def _audit_of_stored(draft: Draft, record: registry.EnvRecord) -> JsonObject:
    """Run the reward audit of a stored version again, with its stored rows; return the content of
    audit.json."""
    rows = list(registry.read_tasks(record))
    with draft.process() as env, draft.process() as second_env:
        _, start_seconds = draft.timed(env.limits.start_seconds, env.describe)
        # The stored rows are kept, so `repeat_warnings` is given: tasks() is then not called.
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
    """Return all warnings about a stored version that a push reports, most urgent first.

    Whether secrets are set is checked now, because the stored warning may be out of date.
    """
    # Without the stored warning about secrets.
    stored = [text for text in record.version.warnings if not text.startswith(_UNSET_PREFIX)]
    unset = [name for name in record.secrets if not os.environ.get(name)]
    secret_warnings = [_UNSET_PREFIX + ", ".join(unset)] if unset else []
    set_after_audit = sorted(_secrets_unset_at_audit(record) - set(unset))
    if set_after_audit:
        names = ", ".join(set_after_audit)
        secret_warnings.append(f"the audit was made without the secrets {names}")
    return [
        *_paid_answers(record.audit),
        *secret_warnings,
        *stored,
        *record.audit.problems,
        *coverage_warning(record),
    ]


def _paid_answers(audit: Audit) -> list[str]:
    """Return a list with one warning that quotes answers which should earn nothing and did, the
    first of each risk; [] if the audit found none."""
    quoted = [
        f"{line.probe} {_quote(line.example.completion)} {line.example.reward:.2f}"
        for line in audit.probes
        if line.probe in audit.risks and line.example is not None
    ]
    return [f"answers that earned a reward: {', '.join(quoted[:_MOST_QUOTED])}"] if quoted else []


def _quote(answer: str) -> str:
    """Return the beginning of an answer in quotes, on one line."""
    return json.dumps(clip(answer, _QUOTED_CHARS), ensure_ascii=False)


def coverage_warning(record: registry.EnvRecord) -> list[str]:
    """Return a list with one warning if the audit scored too few rows in its time; the warning says
    how to have all rows scored. Returns [] if it scored at least `ENOUGH_ROWS` rows or
    `ENOUGH_SHARE` of them, or none at all."""
    audit = record.audit
    if audit.rows_scored >= ENOUGH_ROWS or audit.share >= ENOUGH_SHARE or not audit.rows_scored:
        return []
    time_for_all = words(seconds_for_all(audit.as_written()) / 3600)
    return [
        f"the audit scored {audit.rows_scored} of {audit.rows} rows in its {audit.seconds:.0f} s: "
        f"`honesmith env audit {record.env_id} --all` scores every row, in about {time_for_all}"
    ]


def _secrets_unset_at_audit(record: registry.EnvRecord) -> set[str]:
    """Return the names of the secrets that were not set when the version was audited."""
    if record.audit.secrets_unset is not None:
        return set(record.audit.secrets_unset)
    # Older releases wrote the names into a warning of the version instead.
    for text in record.version.warnings:
        if text.startswith(_UNSET_PREFIX):  # "secrets not set for this server: A, B"
            return set(text.removeprefix(_UNSET_PREFIX).split(", "))
    return set()


def audit_reply(home: Home, env_id: str) -> Reply:
    """Return the reply about the stored reward audit of a version. If the audit did not cover every
    row, the reply also says how long that would take.

    Raises UserError ENV_NOT_FOUND if there is no such version.
    """
    record = registry.find_env(home, env_id)
    return _reply(record, record.audit.as_written())


def _require_scorer(record: registry.EnvRecord) -> None:
    """Raise UserError BAD_ARGUMENT if the version has no scorer that takes single answers."""
    if not record.scored or record.kind not in ("single", "multi"):
        message = f"{record.env_id} has no scorer that can be asked about single answers"
        raise UserError("BAD_ARGUMENT", message, hint="Audit one with score().", field="env_id")


def audit_all(
    home: Home, env_id: str, *, workers: int = 0, on_row: OnRow = lambda done, of: None
) -> Reply:
    """Audit every row of a version, store the result, and return the reply about it. Rows that an
    earlier call scored before it was ended are not scored again.

    Args:
        workers: env processes that score at once; 0: as many as a training would use.
        on_row: called after each row with (rows done, rows in all).

    Raises UserError ENV_NOT_FOUND if there is no such version, BAD_ARGUMENT if it has no scorer,
    ENV_SECRETS or ENV_DEPS if secrets or packages are missing, ENV_BUSY if another process is doing
    this audit, and EnvProblem if the environment does not start.
    """
    record = registry.find_env(home, env_id)
    _require_scorer(record)
    rows = list(registry.read_tasks(record))
    score_s = record.audit.score_seconds_p95
    worker_count = workers or default_workers(score_s, record.limits.network, os.cpu_count() or 1)
    began = time.monotonic()
    with (
        _lock_unfinished_scores(home, record.env_id) as file,
        registry.open_process(record) as process,
    ):
        process.judge_budget = JudgeBudget(borrowers=worker_count)
        process.describe()  # starts the process, so that a fault of the environment shows now
        full_audit = FullAudit(rows, record.kind, file, on_row=lambda done: on_row(done, len(rows)))
        with _fresh_processes(record) as fresh:
            report: JsonObject = {
                **full_audit.run(
                    process.team(worker_count), fresh, lambda: time.monotonic() - began
                )
            }
        if judge_use := process.judge_budget.used:
            report["judge"] = per_score(judge_use, report["probes"])
        replace_audit(record, report)
        file.unlink()
    return _reply(record, report)


@contextmanager
def _lock_unfinished_scores(home: Home, env_id: str) -> Iterator[Path]:
    """Context manager: yield the file that keeps the scores of an unfinished audit, and lock it.
    Raises UserError ENV_BUSY if another process holds the lock."""
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
    """Context manager: yield a function that starts an env process of the version, which has scored
    nothing, and returns it. All these processes are closed at the end of the block."""
    started: list[EnvProcess] = []

    def fresh() -> EnvProcess:
        """Start an env process and return it."""
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
    """Return the reply about a reward audit (the content of audit.json). If the audit did not cover
    every row, a warning says which command does."""
    reply: Reply = {
        "summary": f"{record.env_id}: {audit.get('headline') or 'no audit'}",
        "env_id": record.env_id,
        "audit": {key: audit[key] for key in _SHOWN if key in audit},
        "next": [],
    }
    full_audit_s = seconds_for_all(audit)
    if full_audit_s:
        command = f"honesmith env audit {record.env_id} --all"
        reply["warnings"] = [f"{command} scores every row, in about {words(full_audit_s / 3600)}"]
    return reply

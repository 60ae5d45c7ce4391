"""The reward audit of a push, and its repetition once secrets are set that it had lacked."""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.files import JsonObject, sync_folder, write_json, write_text
from engine.environments import push_limits, registry
from engine.environments.draft import Draft
from engine.environments.registry import AUDIT, EARLIER
from engine.home.sanitize import Redactor
from envs.audit.rescore import THIRD_S
from envs.audit.reward_audit import OVERRUN, audit
from envs.config.problem import EnvProblem
from envs.host.process import EnvProcess
from envs.json_types import TaskRow

_NOT_SET = "secrets not set for this server: "


@dataclass
class SecondProcess:
    """A second env process of a push: asked for its tasks once, then to score as one that has
    scored nothing.

    The tasks come first: rows drawn after answers were scored with the same random numbers would
    be others.

    Attributes:
        rows: what `tasks()` of the first process gave.
        start_seconds, tasks_seconds: what the first one needed to start, and for `tasks()`.
        repeat_warnings: what is wrong with its `tasks()`; None until it was asked.
    """

    process: EnvProcess
    rows: Sequence[Mapping[str, Any]]
    start_seconds: float
    tasks_seconds: float
    deadline: float
    repeat_warnings: list[str] | None = None
    _handed_out: bool = False

    def fresh(self) -> EnvProcess:
        """The process, started anew; EnvProblem where that may take the time the push has left."""
        needed = 2 * self.start_seconds + push_limits.CALL_SECONDS
        if self._seconds_left() < needed + (THIRD_S if self._handed_out else 0.0):
            why = f"it takes {self.start_seconds:.1f} s to start: too long for another"
            raise EnvProblem("ENV_LIMITS", why)
        if self._handed_out:
            self.process.close()
        self._handed_out = True
        self.process.describe()
        self.warnings()
        return self.process

    def warnings(self) -> list[str]:
        """A warning where its `tasks()` gives other rows: they cannot be made from the files."""
        if self.repeat_warnings is None:
            warning = self._compare_tasks()
            self.repeat_warnings = [warning] if warning else []
        return self.repeat_warnings

    def _seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def _compare_tasks(self) -> str:
        """What to warn of: other rows, a failure, too little time to ask; "" for nothing."""
        if self._seconds_left() < 2 * (self.start_seconds + self.tasks_seconds):
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


def run_audit(
    env: EnvProcess, rows: list[TaskRow], kind: str, second: SecondProcess, draft: Draft
) -> JsonObject:
    """audit.json: the reward audit, in the time that is left of the push."""
    left = draft.seconds_left - push_limits.CALL_SECONDS - second.start_seconds
    budget = max(1.0, min(push_limits.AUDIT_SECONDS, left / OVERRUN))
    result = audit(env, rows, kind, budget_s=budget, fresh=second.fresh)
    # What it was made without: it is made again by a push that has them.
    return result | ({"secrets_unset": draft.unset_secrets} if draft.settings.secrets else {})


def is_outdated(draft: Draft) -> bool:
    """Whether the stored audit was made without secrets that are set now."""
    record = registry.read_version(draft.home, draft.name, draft.hash)
    return record.scored and bool(_made_without(record) & set(draft.secrets))


def repeat_audit(draft: Draft, final: Path) -> None:
    """Replaces the audit of the stored version in `final`; its rows and env.json stay.

    The audit before it is kept: runs were sealed with it.
    """
    record = registry.read_version(draft.home, draft.name, draft.hash)
    draft.python = registry.env_python(record)
    rows = registry.read_tasks(record)
    with draft.process() as env, draft.process() as another:
        _, start_seconds = draft.timed(env.limits.start_seconds, env.describe)
        second = SecondProcess(
            another, rows, start_seconds, 0.0, draft.deadline, repeat_warnings=[]
        )
        result = run_audit(env, rows, record.kind, second, draft)
    old = (final / AUDIT).read_bytes()
    earlier = final / EARLIER / f"{hashlib.sha256(old).hexdigest()}.json"
    earlier.parent.mkdir(exist_ok=True)
    write_text(earlier, old.decode())
    sync_folder(earlier.parent)
    write_json(final / AUDIT, Redactor(draft.secrets).value(result))


def warnings_of(record: registry.EnvRecord) -> list[str]:
    """What a push has to say of the version; secrets are looked for now, not when it was made."""
    stored = [text for text in record.version.warnings if not text.startswith(_NOT_SET)]
    unset = [name for name in record.secrets if not os.environ.get(name)]
    missing = [_NOT_SET + ", ".join(unset)] if unset else []
    if late := sorted(_made_without(record) - set(unset)):
        missing.append(f"the audit was made without the secrets {', '.join(late)}")
    return [*missing, *stored, *record.audit.problems]


def _made_without(record: registry.EnvRecord) -> set[str]:
    """The secrets that were not set when the version was audited."""
    if record.audit.secrets_unset is not None:
        return set(record.audit.secrets_unset)
    # Older releases wrote them into a warning of the version instead.
    stored = [text for text in record.version.warnings if text.startswith(_NOT_SET)]
    return set(" ".join(stored).removeprefix(_NOT_SET).split(", ")) if stored else set()

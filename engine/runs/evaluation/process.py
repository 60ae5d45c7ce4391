"""The process of an evaluation that needs no device, from its start to its exit status."""

import contextlib
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from engine.core.errors import UserError
from engine.core.files import JsonObject, write_json
from engine.core.hints import Hint, hint_of
from engine.environments.registry import EnvRecord
from engine.home.run_dir import RunDir
from engine.home.sanitize import redactor_for
from engine.home.store import Store
from engine.machine.processes.outcome import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, Failure
from envs.config.problem import EnvProblem


class Job(Protocol):
    """The work of one evaluation process.

    Attributes:
        record: the environment version whose tasks are scored.
    """

    record: EnvRecord

    def go(self) -> JsonObject:
        """Do all of the work, and return the content of result.json."""
        ...

    def event(self, name: str, message: str, **fields: Any) -> None:
        """Append an event to the run's events.jsonl; `message` is a text for people."""
        ...


Explanation = tuple[str, str, str | Hint]  # kind, message and hint of a failure


def carry_out(
    folder: Path,
    make_job: Callable[[Path], Job],
    name: str,
    stop_exception: type[Exception],
    explain: Callable[[Exception], Explanation | None] = lambda error: None,
) -> int:
    """Carry out the job that the run folder `folder` describes, and record how it ended.

    Args:
        make_job: reads the folder and returns the job.
        name: what the job does, as a noun for a message, such as "regrading".
        stop_exception: the exception that `go` raises when it was asked to stop.
        explain: returns what an exception of this kind of job means; None for any other exception.

    Returns the exit status of the process: 0 done (result.json is written), 3 failed (failure.json
    is written), 4 stopped on request.
    """
    run = RunDir(folder)
    job: Job | None = None
    try:
        job = make_job(folder)
        with Store(run.home) as store:
            store.set_state(run.id, "running", only_from={"preparing"}, started=time.time())
        result = job.go()
    except stop_exception:
        # The event is for people; without it the exit status says the same.
        with contextlib.suppress(OSError):
            if job is not None:  # None: stopped while the job was being prepared
                job.event("stopped", "stopped on request")
        return EXIT_STOPPED
    except Exception as error:  # noqa: BLE001 - the top of the process: every failure is recorded
        redact = redactor_for(run.home, job.record.dir if job else None)
        print(redact.text(traceback.format_exc()), file=sys.stderr)  # noqa: T201 - the console log
        failure = _failure_of(error, name, explain(error))
        write_json(run.failure, redact.value(failure.to_json()))
        return EXIT_FAILED
    write_json(run.result, result)
    return EXIT_DONE


def _failure_of(error: Exception, name: str, explanation: Explanation | None) -> Failure:
    """Make the content of failure.json for the exception `error` that ended the run.

    `explanation` is what the job's `explain` returned for the error, or None; `name` is what the
    job does, such as "regrading".
    """
    if explanation is not None:
        kind, message, hint = explanation
    elif isinstance(error, EnvProblem):
        kind, message = "env_import", "The environment could not be started."
        hint = "Push a version that loads, and call again with that."
    elif isinstance(error, UserError):
        kind, message, hint = "config", error.message, error.advice
    elif isinstance(error, OSError):
        kind, message = "infra", "A file of the run could not be read or written."
        hint = "Free disk space or mend the home folder, then call again."
    else:
        kind, message = "internal", f"The {name} stopped on a fault."
        hint = "Read the end of the console log."
    evidence = f"{type(error).__name__}: {error}"[:500]
    return Failure(kind, message, evidence, hint_of(hint))

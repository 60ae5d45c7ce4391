"""How a worker's failure is recorded: its kind, its evidence, and what to try next.

Code that knows the reason raises `WorkerFailure`; `explain` derives a record from any other
exception.
"""

import contextlib
import errno
import os
import traceback
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.core.errors import FAILURE_KINDS, UserError
from engine.core.hints import Hint, hint_of
from engine.machine.processes.outcome import Failure

HINTS: dict[str, str] = {
    "oom": "Lower max_length, or batch_size (SFT) or prompts_per_step (GRPO), or set "
    "gradient_checkpointing true; then submit again.",
    "nonfinite": "Lower learning_rate three- to tenfold, or set precision float32; then submit "
    "again or resume from the last checkpoint.",
    "infra": "Free disk space or mend the home folder, then resume the run.",
    "endpoint": "Start the model that did not answer, then resume the run.",
    "config": "A dry run with the same settings names what to change.",
    "internal": "Read the end of the console log; resume continues from the last checkpoint.",
}


EVIDENCE_CHARS = 500  # evidence in a failure record is cut to this length


class WorkerFailure(Exception):
    """Ends a run that cannot go on; holds everything that is recorded about the failure."""

    def __init__(
        self, kind: str, message: str, *, evidence: str = "", hint: str | Hint = ""
    ) -> None:
        """Describe the failure. Raises ValueError if `kind` is not in FAILURE_KINDS.

        Args:
            message: what happened, in one sentence.
            evidence: numbers or a line of output that show it.
            hint: what to try next; "" takes the hint of the kind in HINTS.
        """
        if kind not in FAILURE_KINDS:
            raise ValueError(f"unknown failure kind {kind!r}")
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.evidence = evidence
        self.advice = hint_of(hint or HINTS.get(kind, ""))


# The message of a failed CPU allocation contains one of these, on Linux and with other allocators.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc")


def out_of_memory(error: BaseException) -> bool:
    """Tell whether the error means that memory ran out, on a GPU or on the machine itself."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # On a CPU torch raises a plain RuntimeError: only its text tells what went wrong.
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _NO_MEMORY)


def explain(error: BaseException) -> Failure:
    """Make the failure record of any exception that ended a run. An exception of no known type gets
    the kind internal, and evidence that names the file and line that raised it."""
    # The order goes from the types that tell most about the failure to those that tell least.
    if isinstance(error, WorkerFailure):
        return _record(error.kind, error.message, error.evidence, error.advice)
    if isinstance(error, UserError):
        return _record("config", error.message, error.code, error.advice)
    if out_of_memory(error):
        return _record("oom", "Memory ran out.", _first_line(error), Hint(HINTS["oom"]))
    if is_full_or_read_only(error):
        failure = not_written(getattr(error, "filename", None), error)
        return _record("infra", failure.message, failure.evidence, failure.advice)
    evidence = _first_line(error) + _place_of(error)
    return _record("internal", "The trainer stopped on a fault.", evidence, Hint(HINTS["internal"]))


def _place_of(error: BaseException) -> str:
    """Return the file and line that raised the error, such as " at sft.py:80"; "" if unknown."""
    if not error.__traceback__:
        return ""
    innermost_call = traceback.extract_tb(error.__traceback__)[-1]
    file_name = innermost_call.filename.rsplit("/", 1)[-1]
    return f" at {file_name}:{innermost_call.lineno}"


def not_written(path: str | os.PathLike[str] | None, error: BaseException) -> WorkerFailure:
    """Make the failure (kind infra) of a run that could not write `path` because of `error`; with
    None for `path`, some file of the home folder. The message says how many bytes and inodes are
    free on that disk, if that can be read."""
    free_space = ""
    # OSError: there is no such folder; ValueError: the path is not valid.
    with contextlib.suppress(OSError, ValueError):
        disk = os.statvfs(Path(path or ".").parent)
        free_space = (
            f": {disk.f_bavail * disk.f_frsize} bytes and {disk.f_favail} inodes are left there"
        )
    target = path or "the home folder"
    return WorkerFailure(
        "infra", f"Could not write {target}{free_space}.", evidence=_first_line(error)
    )


def is_full_or_read_only(error: BaseException) -> bool:
    """Tell whether `error` (Python's or safetensors') means that a disk is full, over quota or
    mounted read-only."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    if isinstance(error, OSError):
        return error.errno in codes
    if not isinstance(error, SafetensorError):
        return False
    # safetensors writes in Rust. The number of the system's error is only in its message.
    return any(f"os error {code})" in str(error) for code in codes)


def _record(kind: str, message: str, evidence: str, hint: Hint) -> Failure:
    """Make a failure record, with the evidence cut to `EVIDENCE_CHARS` characters."""
    return Failure(kind, message, evidence[:EVIDENCE_CHARS], hint)


def _first_line(error: BaseException) -> str:
    """Return the exception's type and the first line of its text: "ValueError: bad rank"."""
    lines = str(error).strip().splitlines()
    first_line = lines[0] if lines else ""
    return f"{type(error).__name__}: {first_line}"

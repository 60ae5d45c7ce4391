"""A worker's failure is a row: what kind, the evidence, what to try.

`WorkerFailure` is raised where the reason is known; `explain` names the rest.
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
from engine.processes.outcome import Failure

HINTS: dict[str, str] = {
    "oom": "Lower max_length, or batch_size (SFT) or prompts_per_step (GRPO), or set "
    "gradient_checkpointing true; then submit again.",
    "nonfinite": "Lower learning_rate three- to tenfold, or set precision float32; then submit "
    "again or resume from the last checkpoint.",
    "infra": "Free disk space or mend the home folder, then resume the run.",
    "config": "A dry run with the same settings names what to change.",
    "internal": "Read the end of the console log; resume continues from the last checkpoint.",
}


class WorkerFailure(Exception):
    """A run that cannot go on, with everything its row needs.

    Args:
        kind: one of `engine.core.errors.FAILURE_KINDS`.
        message: what happened, one sentence.
        evidence: numbers or a line of output that show it.
        hint: the next move, in words or with the call that makes it.
    """

    def __init__(
        self, kind: str, message: str, *, evidence: str = "", hint: str | Hint = ""
    ) -> None:
        if kind not in FAILURE_KINDS:
            raise ValueError(f"unknown failure kind {kind!r}")
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.evidence = evidence
        self.advice = hint_of(hint or HINTS.get(kind, ""))


# How a CPU allocation that failed reads on Linux, and on systems with another allocator.
_NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of a GPU or of the machine; torch tells the latter only in words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _NO_MEMORY)


def explain(error: BaseException) -> Failure:
    """The failure record of an exception."""
    if isinstance(error, WorkerFailure):
        return _record(error.kind, error.message, error.evidence, error.advice)
    if isinstance(error, UserError):
        return _record("config", error.message, error.code, error.advice)
    if out_of_memory(error):
        return _record("oom", "Memory ran out.", _last_line(error), Hint(HINTS["oom"]))
    if is_full_or_read_only(error):
        failure = not_written(getattr(error, "filename", None), error)
        return _record("infra", failure.message, failure.evidence, failure.advice)
    where = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    place = f" at {where.filename.rsplit('/', 1)[-1]}:{where.lineno}" if where else ""
    evidence = _last_line(error) + place
    return _record("internal", "The trainer stopped on a fault.", evidence, Hint(HINTS["internal"]))


def not_written(path: str | os.PathLike[str] | None, error: BaseException) -> WorkerFailure:
    """What a disk that is full or only for reading makes of writing `path`."""
    left = ""
    with contextlib.suppress(OSError, ValueError):
        disk = os.statvfs(Path(path or ".").parent)
        left = f": {disk.f_bavail * disk.f_frsize} bytes and {disk.f_favail} inodes are left there"
    where = path or "the home folder"
    return WorkerFailure("infra", f"Could not write {where}{left}.", evidence=_last_line(error))


def is_full_or_read_only(error: BaseException) -> bool:
    """Whether a disk refused to be written."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    if isinstance(error, OSError):
        return error.errno in codes
    # safetensors writes in Rust and only tells the number in words.
    message = str(error)
    return isinstance(error, SafetensorError) and any(f"os error {c})" in message for c in codes)


def _record(kind: str, message: str, evidence: str, hint: Hint) -> Failure:
    return Failure(kind, message, evidence[:500], hint)


def _last_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"

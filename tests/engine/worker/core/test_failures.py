"""A worker that cannot go on says what kind of failure it was, with evidence and a next move."""

import errno

import pytest
import torch
from safetensors import SafetensorError

from engine.core.errors import FAILURE_KINDS, UserError
from engine.worker.core.failures import WorkerFailure, explain


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), "oom"),
        (OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl"), "infra"),
        (OSError(errno.EROFS, "Read-only file system", "metrics.jsonl"), "infra"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "infra"),
        (SafetensorError("header too large"), "internal"),
        (UserError("MODEL_NOT_FOUND", "no such model", hint="name another"), "config"),
        (WorkerFailure("reward", "too many errors", evidence="step 3"), "reward"),
        (ZeroDivisionError("division by zero"), "internal"),
    ],
)
def test_every_failure_has_a_kind_evidence_and_a_hint(error: Exception, kind: str) -> None:
    record = explain(error)
    assert record.kind == kind
    assert record.kind in FAILURE_KINDS
    assert record.message
    assert record.evidence


def test_a_fault_of_ours_names_where_it_happened() -> None:
    try:
        [][1]
    except IndexError as error:
        record = explain(error)
    assert record.kind == "internal"
    assert "IndexError" in record.evidence and "test_failures.py:" in record.evidence


def test_evidence_is_one_short_line() -> None:
    record = explain(RuntimeError("x" * 5000 + "\nsecond line"))
    assert len(record.evidence) <= 500 and "second line" not in record.evidence


def test_a_kind_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown failure kind"):
        WorkerFailure("bad luck", "it happened")

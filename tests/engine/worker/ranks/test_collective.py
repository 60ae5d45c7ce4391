"""What becomes of an error of a collective call."""

import pytest
import torch

from engine.worker.core.failures import explain
from engine.worker.ranks import collective


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("Connection closed by peer [127.0.0.1]"), collective.Disconnected),
        (RuntimeError("No space left on device"), OSError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    ],
)
def test_only_another_rank_is_blamed_for_what_it_can_have_done(
    error: RuntimeError, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as raised, collective.errors_translated():
        raise error
    kinds = {collective.Disconnected: "internal", OSError: "infra"}
    assert explain(raised.value).kind == kinds.get(kind, "oom")

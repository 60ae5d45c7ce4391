"""FlashAttention 3 is switched on and off through torch's own registry, here with a stand-in that
registers nothing."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import attention

from engine.worker.fast_paths import trials
from engine.worker.fast_paths.trial import try_path
from engine.worker.ops import flash3

CPU = torch.device("cpu")


class Handle:
    def remove(self) -> None:
        pass


@pytest.fixture
def stand_in() -> Iterator[None]:
    registered = attention._registry._FLASH_ATTENTION_IMPLS
    original = registered[flash3.NAME]
    attention.register_flash_attention_impl(flash3.NAME, register_fn=Handle)
    yield
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
    registered[flash3.NAME] = original


def test_torch_knows_it_by_that_name():
    assert flash3.NAME in attention.list_flash_attention_impls()


def test_it_is_used_inside_the_context_and_nothing_is_left_behind(stand_in: None):
    current = attention.current_flash_attention_impl
    with flash3.in_use(wanted=True):
        assert current() == flash3.NAME
        with flash3.in_use(wanted=False):
            assert current() is None
        assert current() == flash3.NAME
    assert current() is None


def test_where_it_cannot_run_it_is_skipped_with_the_reason():
    result = try_path("flash_attention_3", trials.TRIALS["flash_attention_3"], CPU)
    assert result.state == "skipped" and "compute capability 9.0" in result.reason


def test_on_hopper_without_its_package_the_reason_is_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert (
        flash3.why_not(torch.device("cuda")) == "the module flash_attn_interface is not installed"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "Hopper" in flash3.why_not(torch.device("cuda"))

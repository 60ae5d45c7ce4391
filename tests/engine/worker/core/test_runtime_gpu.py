"""What a worker does with a GPU's memory, by a torch whose GPU is a stand-in."""

import os

import pytest
import torch

from engine.models.sizing.layers import OVERHEAD
from engine.worker.core import runtime
from engine.worker.ops import matmul
from engine.worker.update import meter


def test_freed_memory_of_a_gpu_goes_back_to_its_driver(monkeypatch: pytest.MonkeyPatch):
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    runtime.release_memory()
    assert emptied == []  # a CPU run never touches CUDA
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    runtime.release_memory()
    assert emptied == [True]


def test_memory_is_taken_in_segments_that_grow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    runtime.prepare()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_peak_of_a_gpu_is_what_was_reserved_with_the_context(monkeypatch: pytest.MonkeyPatch):
    """What is allocated alone would teach estimates to plan too little."""
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 * 10**9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10**9)
    assert meter.peak_memory(torch.device("cuda")) == 5 * 10**9 + OVERHEAD["cuda"][0]


class OnGpu:
    """A tensor that says that it lies on a GPU."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda")


def test_logits_on_a_gpu_are_summed_and_kept_in_float32(monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []

    def product(x: object, weight: torch.Tensor, *, out_dtype: torch.dtype) -> str:
        asked.append((x, tuple(weight.shape), out_dtype))
        return "float32 logits"

    monkeypatch.setattr(torch, "mm", product)
    x, layer = OnGpu(), matmul.OutputLayer(torch.zeros(6, 4, dtype=torch.bfloat16))
    assert layer.float_logits(x) == "float32 logits"  # pyright: ignore[reportArgumentType]
    assert asked == [(x, (4, 6), torch.float32)]


def test_logits_on_a_cpu_are_those_of_the_usual_product():
    weight, x = torch.randn(6, 4), torch.randn(3, 4)
    assert torch.equal(
        matmul.OutputLayer(weight).float_logits(x), torch.nn.functional.linear(x, weight)
    )

"""The policy against transformers and PEFT themselves, in float64 where numbers are compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model, set_peft_model_state_dict
from safetensors.torch import save_file
from typed_settings import grpo_settings

from engine.worker.core.batch import Row
from engine.worker.core.failures import WorkerFailure
from engine.worker.network.adapter import read_adapter
from engine.worker.network.hub_network import lora_config
from engine.worker.network.policy import (
    Base,
    Policy,
    load_base,
    load_transformers,
    pick_device,
)
from tests.engine.worker.conftest import SETTINGS

PEBBLE = Path(__file__).resolve().parents[4] / "engine" / "pebble"
pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

ROWS = [
    Row([10, 20, 30, 40, 50, 60], [0, 0, 0, 1, 1, 1]),
    Row([11, 21, 31], [0, 1, 1]),
    Row([12, 22, 32, 42, 52, 62, 72, 82], [0, 0, 1, 1, 0, 0, 1, 1]),
]


def gradients(policy: Policy) -> list[torch.Tensor]:
    """The adapter's gradients, one tensor per projection and factor; cleared afterwards."""
    found = policy.adapter.gradients()
    out = [found[name].clone() for name in sorted(found)]
    policy.adapter.clear_gradients()
    return out


def relative(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).norm() / (y.norm() + 1e-12)) for x, y in zip(a, b, strict=True))


def test_logprobs_and_gradients_equal_transformers_and_peft_one_row_at_a_time(
    pebble: Base, tuned: Callable[..., Policy]
) -> None:
    policy = tuned(pebble)
    ours, _ = policy.logprobs(policy.collate(ROWS))
    ours.sum().backward()
    mine = gradients(policy)
    model, _ = load_transformers(PEBBLE, torch.device("cpu"), "float32")
    peft = get_peft_model(model, lora_config(policy.adapter.spec))
    set_peft_model_state_dict(peft, policy.adapter.state())
    peer = {n.replace(".default", ""): p for n, p in peft.named_parameters() if "lora" in n}
    for parameter in peer.values():
        parameter.requires_grad_()
    expected = []
    for row in ROWS:
        logits = peft(input_ids=torch.tensor([row.ids])).logits[0].double()
        scores = logits[:, : pebble.vocab].log_softmax(-1)
        picked = [scores[i - 1, row.ids[i]] for i, m in enumerate(row.loss_mask) if m]
        torch.stack(picked).sum().backward()
        expected += [x.item() for x in picked]
    assert ours.tolist() == pytest.approx(expected, abs=2e-5)
    theirs = [p.grad for _, p in sorted(peer.items()) if p.grad is not None]
    assert relative(mine, theirs) < 1e-5


def test_microbatching_does_not_change_the_gradient(
    pebble: Base, tuned: Callable[..., Policy]
) -> None:
    policy = tuned(pebble)
    policy.logprobs(policy.collate(ROWS))[0].sum().backward()
    whole = gradients(policy)
    parts = policy.split(ROWS, 8)
    assert len(parts) > 1
    for members in parts:
        policy.logprobs(policy.collate([ROWS[i] for i in members]))[0].sum().backward()
    assert relative(gradients(policy), whole) < 1e-5


def test_untrained_tokens_get_no_gradient(pebble: Base, tuned: Callable[..., Policy]) -> None:
    policy = tuned(pebble)
    first = Row([10, 20, 30, 40, 50], [0, 0, 1, 0, 0])
    changed = Row([10, 20, 30, 99, 98], [0, 0, 1, 0, 0])  # differs only after the trained token
    policy.logprobs(policy.collate([first]))[0].sum().backward()
    one = gradients(policy)
    policy.logprobs(policy.collate([changed]))[0].sum().backward()
    assert relative(gradients(policy), one) < 1e-6


def test_the_reference_is_the_base_when_starting_from_one(
    pebble: Base, tuned: Callable[..., Policy]
) -> None:
    policy = Policy(pebble, settings())
    batch = policy.collate(ROWS)
    plain, _ = policy.logprobs(batch)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1)
    moved, _ = policy.logprobs(batch)
    reference = policy.reference_logprobs(batch)
    assert not torch.allclose(moved, plain)
    torch.testing.assert_close(reference, plain, rtol=0, atol=0)
    assert not reference.requires_grad


def test_the_reference_is_a_frozen_copy_when_starting_from_an_adapter(
    pebble: Base, tuned: Callable[..., Policy], tmp_path: Path
) -> None:
    first = tuned(pebble)
    batch = first.collate(ROWS)
    started, _ = first.logprobs(batch)
    save_file(first.adapter.state(), tmp_path / "adapter_model.safetensors")
    policy = Policy(pebble, settings(), tmp_path)
    torch.testing.assert_close(policy.logprobs(batch)[0], started, rtol=0, atol=1e-6)
    trained = len(policy.parameters())
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1)
    torch.testing.assert_close(policy.reference_logprobs(batch), started, rtol=0, atol=1e-6)
    assert not torch.allclose(policy.logprobs(batch)[0], started)
    assert len(policy.parameters()) == trained, "the reference copy must not be trained"


def test_an_adapter_that_does_not_fit_is_refused_by_name(
    pebble: Base, tuned: Callable[..., Policy], tmp_path: Path
) -> None:
    state = tuned(pebble).adapter.state()
    state.pop(sorted(state)[0])
    save_file(state, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WorkerFailure) as caught:
        Policy(load_base(pebble.path, torch.device("cpu"), "float32"), settings(), tmp_path)
    assert "1 missing" in caught.value.evidence


def test_an_adapter_with_nan_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([float("nan")])}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WorkerFailure, match="NaN"):
        read_adapter(tmp_path)


def test_gradient_checkpointing_changes_no_number(
    pebble: Base, tuned: Callable[..., Policy]
) -> None:
    policy = tuned(pebble)
    policy.logprobs(policy.collate(ROWS))[0].sum().backward()
    plain = gradients(policy)
    again = tuned(load_base(PEBBLE, torch.device("cpu"), "float32"), gradient_checkpointing=True)
    assert again.checkpointing
    again.logprobs(again.collate(ROWS))[0].sum().backward()
    assert relative(gradients(again), plain) < 1e-6


def test_adapters_are_float32_even_on_a_bfloat16_base() -> None:
    base = load_base(PEBBLE, torch.device("cpu"), "bfloat16")
    assert base.network.dtype == torch.bfloat16
    policy = Policy(base, settings())
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert policy.logprobs(policy.collate(ROWS))[0].dtype == torch.float32


def test_lora_settings_reach_the_adapter(pebble: Base) -> None:
    policy = Policy(
        pebble, settings(lora_rank=3, lora_alpha=12, lora_dropout=0.25, lora_targets=["q_proj"])
    )
    spec = policy.adapter.spec
    assert (spec.rank, spec.alpha, spec.dropout) == (3, 12, 0.25)
    state = policy.adapter.state()
    assert {name.split(".")[-3] for name in state} == {"q_proj"}
    assert {tuple(tensor.shape) for tensor in state.values()} == {(3, 192), (192, 3)}


def test_a_folder_without_a_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure) as caught:
        load_base(tmp_path, torch.device("cpu"), "auto")
    assert caught.value.kind == "config" and "config.json" in str(caught.value.advice)


def settings(**changes: Any) -> dict[str, Any]:
    return grpo_settings(SETTINGS | changes)


def test_a_gpu_that_torch_cannot_use_ends_the_run_and_names_driver_and_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        "engine.worker.network.policy.driver", lambda: "driver 570.86.10, CUDA 12.8"
    )
    with pytest.raises(WorkerFailure) as caught:
        pick_device("cuda:0")
    failure = caught.value
    assert failure.kind == "infra" and "cuda:0" in failure.message
    assert "built for CUDA 13.0" in failure.evidence and "570.86.10" in failure.evidence
    assert pick_device("cpu") == torch.device("cpu")


def test_weights_are_loaded_to_the_gpu_itself_and_not_through_the_machines_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    class Loads:
        """The class of a model, as far as it is told how to load."""

        @staticmethod
        def from_pretrained(path: Path, **options: Any) -> torch.nn.Module:
            given.update(options)
            return torch.nn.Linear(2, 2)

    monkeypatch.setattr("engine.worker.network.policy._model_class", lambda path: Loads)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)
    load_transformers(PEBBLE, torch.device("cuda"), "bfloat16")
    assert given["device_map"] == {"": "cuda"}
    given.clear()
    load_transformers(PEBBLE, torch.device("cpu"), "float32")
    assert "device_map" not in given

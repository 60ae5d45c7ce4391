"""The policy against transformers and PEFT themselves, in float64 where numbers are compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.worker.batch import Row, collate, microbatches
from engine.worker.failures import WorkerFailure
from engine.worker.policy import Base, Policy, load_base, read_adapter

PEBBLE = Path(__file__).resolve().parents[3] / "engine" / "pebble"
pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

ROWS = [
    Row([10, 20, 30, 40, 50, 60], [0, 0, 0, 1, 1, 1]),
    Row([11, 21, 31], [0, 1, 1]),
    Row([12, 22, 32, 42, 52, 62, 72, 82], [0, 0, 1, 1, 0, 0, 1, 1]),
]


def gradients(policy: Policy) -> list[torch.Tensor]:
    out = []
    for p in policy.parameters():
        assert p.grad is not None
        out.append(p.grad.clone())
        p.grad = None
    return out


def relative(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).norm() / (y.norm() + 1e-12)) for x, y in zip(a, b, strict=True))


def test_logprobs_and_gradients_equal_the_plain_forward_one_row_at_a_time(
    pebble: Base, tuned: Callable[..., Policy]
) -> None:
    policy = tuned(pebble)
    ours, _ = policy.logprobs(collate(ROWS, pebble.pad_id))
    ours.sum().backward()
    mine = gradients(policy)
    expected = []
    for row in ROWS:
        logits = policy.model(input_ids=torch.tensor([row.ids])).logits[0].double()
        scores = logits.log_softmax(-1)
        picked = [scores[i - 1, row.ids[i]] for i, m in enumerate(row.loss_mask) if m]
        torch.stack(picked).sum().backward()
        expected += [x.item() for x in picked]
    assert ours.tolist() == pytest.approx(expected, abs=2e-5)
    assert relative(mine, gradients(policy)) < 1e-4


def test_padding_and_microbatching_do_not_change_the_gradient(
    pebble: Base, tuned: Callable[..., Policy]
) -> None:
    policy = tuned(pebble)
    policy.logprobs(collate(ROWS, pebble.pad_id))[0].sum().backward()
    whole = gradients(policy)
    for members in microbatches([len(r.ids) for r in ROWS], 8):
        policy.logprobs(collate([ROWS[i] for i in members], 77))[0].sum().backward()
    assert relative(gradients(policy), whole) < 1e-5


def test_untrained_tokens_get_no_gradient(pebble: Base, tuned: Callable[..., Policy]) -> None:
    policy = tuned(pebble)
    first = Row([10, 20, 30, 40, 50], [0, 0, 1, 0, 0])
    changed = Row([10, 20, 30, 99, 98], [0, 0, 1, 0, 0])  # differs only after the trained token
    policy.logprobs(collate([first], 0))[0].sum().backward()
    one = gradients(policy)
    policy.logprobs(collate([changed], 0))[0].sum().backward()
    assert relative(gradients(policy), one) < 1e-6


def test_the_reference_is_the_base_when_starting_from_one(
    pebble: Base, tuned: Callable[..., Policy]
) -> None:
    batch = collate(ROWS, pebble.pad_id)
    policy = Policy(pebble, settings())
    plain, _ = policy.logprobs(batch)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1)
    moved, _ = policy.logprobs(batch)
    with policy.as_reference():
        reference, _ = policy.logprobs(batch)
    assert not torch.allclose(moved, plain)
    torch.testing.assert_close(reference, plain, rtol=0, atol=0)
    assert not reference.requires_grad


def test_the_reference_is_a_frozen_copy_when_starting_from_an_adapter(
    pebble: Base, tuned: Callable[..., Policy], tmp_path: Path
) -> None:
    batch = collate(ROWS, pebble.pad_id)
    first = tuned(pebble)
    started, _ = first.logprobs(batch)
    save_file(first.adapter_state(), tmp_path / "adapter_model.safetensors")
    first.model.unload()
    policy = Policy(pebble, settings(), tmp_path)
    torch.testing.assert_close(policy.logprobs(batch)[0], started, rtol=0, atol=1e-6)
    trained = len(policy.parameters())
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1)
    with policy.as_reference():
        torch.testing.assert_close(policy.logprobs(batch)[0], started, rtol=0, atol=1e-6)
    assert not torch.allclose(policy.logprobs(batch)[0], started)
    assert len(policy.parameters()) == trained, "the reference copy must not be trained"


def test_an_adapter_that_does_not_fit_is_refused_by_name(
    pebble: Base, tuned: Callable[..., Policy], tmp_path: Path
) -> None:
    state = tuned(pebble).adapter_state()
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
    policy.model.train()
    policy.logprobs(collate(ROWS, 0))[0].sum().backward()
    plain = gradients(policy)
    again = tuned(load_base(PEBBLE, torch.device("cpu"), "float32"), gradient_checkpointing=True)
    again.model.train()
    assert again.base.model.is_activation_checkpointing
    again.logprobs(collate(ROWS, 0))[0].sum().backward()
    assert relative(gradients(again), plain) < 1e-6


def test_adapters_are_float32_even_on_a_bfloat16_base() -> None:
    base = load_base(PEBBLE, torch.device("cpu"), "bfloat16")
    assert base.model.dtype == torch.bfloat16
    policy = Policy(base, settings())
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert policy.logprobs(collate(ROWS, 0))[0].dtype == torch.float32


def test_lora_settings_reach_the_adapter(pebble: Base) -> None:
    policy = Policy(
        pebble, settings(lora_rank=3, lora_alpha=12, lora_dropout=0.25, lora_targets=["q_proj"])
    )
    config = policy.model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 12, 0.25)
    assert config.target_modules == {"q_proj"}
    assert {tuple(p.shape) for p in policy.parameters()} == {(3, 192), (192, 3)}


def test_a_folder_without_a_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailure) as caught:
        load_base(tmp_path, torch.device("cpu"), "auto")
    assert caught.value.kind == "config" and "config.json" in caught.value.hint


def settings(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "seed": 5,
        "lora_rank": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "lora_targets": "all-linear",
        "gradient_checkpointing": False,
    }
    return base | changes

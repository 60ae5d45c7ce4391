"""4-bit base weights, where bitsandbytes is installed (the extra nf4)."""

from typing import Any

import pytest
import torch
from loops import PEBBLE, go, make_run, metrics, push
from typed_settings import grpo_settings

from engine.core.files import read_json
from engine.home.run_dir import Home
from engine.worker.core.batch import Row
from engine.worker.network.policy import Base, Policy, load_base

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

CPU = torch.device("cpu")
IDS = [1, 5, 9, 2, 7, 30, 41, 3]


@pytest.fixture
def rounded() -> Base:
    return load_base(PEBBLE, CPU, "bfloat16", "nf4")


def test_the_projections_are_held_in_four_bits_and_the_logits_stay_near(
    rounded: Base, pebble: Base
) -> None:
    model: Any = rounded.network.model  # type: ignore[attr-defined]
    layer = model.model.layers[0].self_attn.q_proj.weight
    assert type(layer).__name__ == "Params4bit"
    assert layer.numel() * layer.element_size() == 192 * 192 // 2
    assert rounded.network.forward == "transformers" and rounded.network.why == "4-bit weights"
    ours, whole = rounded.network.logits(IDS, None), pebble.network.logits(IDS, None)
    assert 0 < float((ours - whole).norm() / whole.norm()) < 0.15


def test_gradients_reach_the_adapter_even_after_the_model_has_been_evaluated(
    rounded: Base,
) -> None:
    import bitsandbytes.functional as bnb

    settings: dict[str, Any] = {
        "seed": 1,
        "lora_rank": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "lora_targets": "all-linear",
        "gradient_checkpointing": False,
    }
    policy = Policy(rounded, grpo_settings(settings))
    rounded.network.logits(IDS, policy.adapter)  # in eval mode, without gradients
    batch = policy.collate([Row(IDS, [0, 0, 0, 1, 1, 1, 1, 1])])
    policy.logprobs(batch)[0].sum().backward()
    found = policy.adapter.gradients()
    b = {name: value for name, value in found.items() if "lora_B" in name}
    assert b and all(value.abs().max() > 0 for value in b.values())
    # The same with the rounded weights as an ordinary bfloat16 model.
    model: Any = rounded.network.model  # type: ignore[attr-defined]
    state = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit":
            weight = bnb.dequantize_4bit(module.weight.data, module.weight.quant_state)
            state[name.replace(".base_layer", "")] = weight
    decoded = _with_weights(state)
    again = Policy(decoded, grpo_settings(settings))
    again.logprobs(again.collate([Row(IDS, [0, 0, 0, 1, 1, 1, 1, 1])]))[0].sum().backward()
    expected = again.adapter.gradients()
    for name, value in b.items():
        error = float((value.float() - expected[name].float()).norm() / expected[name].norm())
        assert error < 0.1, name  # bfloat16 against bfloat16, multiplied in another order


def _with_weights(state: dict[str, torch.Tensor]) -> Base:
    """Pebble with other projections, in bfloat16, on transformers."""
    from engine.worker.network.hub_network import HubNetwork
    from engine.worker.network.policy import known_ids, load_transformers, stop_ids_of

    model, tokenizer = load_transformers(PEBBLE, CPU, "bfloat16")
    for name, weight in state.items():
        module = model.get_submodule(name)
        assert isinstance(module, torch.nn.Linear)
        module.weight.data.copy_(weight)
    network = HubNetwork(model, known_ids(model.config, tokenizer), "a test")
    return Base(network, tokenizer, stop_ids_of(model.config, tokenizer, PEBBLE), PEBBLE)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_a_run_on_four_bits_trains_and_says_so(home: Home, tmp_path: Any, algorithm: str) -> None:
    env = push(home, tmp_path / "sums")
    settings: dict[str, Any] = {"steps": 2, "eval_every": 2, "eval_rows": 4, "quantization": "nf4"}
    settings |= (
        {"batch_size": 4}
        if algorithm == "sft"
        else {"prompts_per_step": 2, "group_size": 4, "max_tokens": 8, "learning_rate": 1e-3}
    )
    run = make_run(home, env, algorithm, settings)
    assert go(run)["steps"] == 2
    manifest = read_json(run.manifest)
    assert manifest["quantization"] == "nf4" and manifest["precision"] == "bfloat16"
    assert any(line.get("grad_norm", 0) > 0 for line in metrics(run))

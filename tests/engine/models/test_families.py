"""What the layers of other families hold, read from the shapes of their weights alone."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import UserError
from engine.models import families, model_files
from tests import tiny_model

Shapes = dict[str, tuple[int, ...]]
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 24,
}


def write(folder: Path, shapes: Shapes, **changes: Any) -> model_files.ModelFacts:
    """A model folder with these weights; its facts."""
    tiny_model.write_model(folder, **changes)
    (folder / "model.safetensors").write_bytes(tiny_model.safetensors(shapes))
    return model_files.read_facts(folder)


def without_mlp(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if ".mlp." not in name}


def test_projections_that_are_stored_as_one_are_adapted_as_one(tmp_path: Path):
    shapes = tiny_model.shapes(tiny_model.config())
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            shapes.pop(f"{at}{name}.weight")
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            shapes.pop(f"{at}{name}.weight")
        shapes[f"{at}self_attn.qkv_proj.weight"] = (32 + 16 + 16, 32)
        shapes[f"{at}mlp.gate_up_proj.weight"] = (128, 32)
    facts = write(tmp_path, shapes, architectures=["Phi3ForCausalLM"], model_type="phi3")
    assert facts.targets == ["o_proj", "down_proj", "qkv_proj", "gate_up_proj"]
    assert facts.projection_shapes("qkv_proj") == ((32, 64), (32, 64))
    assert facts.adapter_params(4, ["qkv_proj", "gate_up_proj"]) == 2 * 4 * (32 + 64 + 32 + 128)
    assert facts.linear_params == 2 * (64 * 32 + 32 * 32 + 128 * 32 + 32 * 64)
    assert facts.attention_layers == 2


@pytest.mark.parametrize("stored", ["each by itself", "all in one"])
def test_experts_count_for_memory_in_full_and_for_work_by_share(tmp_path: Path, stored: str):
    config = tiny_model.config(**MIXTURE)
    shapes = without_mlp(tiny_model.shapes(config))
    attention = sum(prod(s) for n, s in shapes.items() if "_proj" in n)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp."
        shapes[at + "gate.weight"] = (8, 32)  # the router
        if stored == "all in one":
            shapes[at + "experts.gate_up_proj"] = (8, 32, 32)
            shapes[at + "experts.down_proj"] = (8, 32, 16)
            continue
        for expert in range(8):
            for name, shape in (("gate", (16, 32)), ("up", (16, 32)), ("down", (32, 16))):
                shapes[f"{at}experts.{expert}.{name}_proj.weight"] = shape
    facts = write(tmp_path, shapes, **MIXTURE)
    experts, router = 2 * 8 * 3 * 16 * 32, 2 * 8 * 32
    assert facts.params == sum(map(prod, shapes.values()))
    assert facts.linear_params == attention + router + experts // 4  # two of eight
    assert facts.dense_params == attention + router
    assert facts.intermediate == 2 * 16  # what one token runs through
    assert facts.targets == ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_layers_beyond_the_models_own_and_other_parts_are_left_out(tmp_path: Path):
    text = {
        key: value
        for key, value in tiny_model.config().items()
        if key not in ("architectures", "tie_word_embeddings")
    } | {"model_type": "gemma3_text"}
    shapes = {
        name.replace("model.", "model.language_model.", 1): shape
        for name, shape in tiny_model.shapes(tiny_model.config()).items()
    }
    plain = dict(shapes)
    shapes["model.vision_tower.encoder.layers.0.self_attn.q_proj.weight"] = (8, 8)
    shapes["model.language_model.layers.2.self_attn.q_proj.weight"] = (32, 32)
    shapes["mtp.layers.0.self_attn.q_proj.weight"] = (32, 32)
    tiny_model.write_model(tmp_path)
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(tiny_model.safetensors(shapes))
    facts = model_files.read_facts(tmp_path)
    assert (facts.hidden, facts.layers, facts.vocab, facts.tied) == (32, 2, 258, True)
    assert facts.projection_shapes("q_proj") == ((32, 32), (32, 32))
    assert facts.params == sum(map(prod, shapes.values())) > sum(map(prod, plain.values()))


def test_layers_without_attention_keep_no_keys_and_values(tmp_path: Path):
    shapes = tiny_model.shapes(tiny_model.config())
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        shapes.pop(f"model.layers.0.self_attn.{name}.weight")
    shapes["model.layers.0.linear_attn.in_proj_qkvz.weight"] = (96, 32)
    shapes["model.layers.0.linear_attn.conv1d.weight"] = (64, 1, 4)
    facts = write(tmp_path, shapes, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next")
    assert facts.attention_layers == 1
    assert facts.cached_numbers == 2 * 16
    assert facts.projection_shapes("q_proj") == ((32, 32),)
    assert facts.projection_shapes("in_proj_qkvz") == ((32, 96),)
    assert facts.projection_shapes("w1") == ()


def test_missing_layers_are_named(tmp_path: Path):
    shapes = tiny_model.shapes(tiny_model.config())
    with pytest.raises(UserError) as caught:
        write(
            tmp_path,
            {name: shape for name, shape in shapes.items() if ".layers.1." not in name},
            architectures=["Olmo3ForCausalLM"],
            model_type="olmo3",
        )
    assert "weights of 2 layers expected, 1 there" in caught.value.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "no attention layers"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "text_config"),
        ({"is_encoder_decoder": True}, "an encoder reads its prompt"),
        (
            {"architectures": ["NewForCausalLM"], "model_type": "from-next-year"},
            "knows no model_type",
        ),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "no adapter here fits"),
    ],
)
def test_what_is_refused_is_refused_with_the_reason(tmp_path: Path, changes: dict, reason: str):
    tiny_model.write_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_model.config(**changes)))
    with pytest.raises(UserError) as caught:
        model_files.read_facts(tmp_path)
    assert caught.value.code == "MODEL_UNSUPPORTED" and reason in caught.value.message


def test_a_width_is_what_one_token_runs_through():
    def width(**config: int) -> int:
        return families.active_width(config.get)

    assert width(intermediate_size=48) == 48
    assert width(intermediate_size=48, num_local_experts=8, num_experts_per_tok=2) == 96
    shared = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    assert width(moe_intermediate_size=16, **shared) == 48
    assert width() == 0


def test_keys_and_values_of_latent_attention_count_by_their_mean_size():
    def width(**config: int) -> int:
        return families.head_width(config.get)

    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    assert width(head_dim=64, v_head_dim=128, **latent) == (192 + 128) // 2
    assert width(head_dim=64) == 64
    assert width() == 0

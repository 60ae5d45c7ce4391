"""A tiny random model of every family that people train, as a folder with pebble's tokenizer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from loops import PEBBLE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 320,  # beyond the tokenizer's ids, as padded vocabularies are
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
SLIDING: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Family:
    """A row of the table of families.

    Attributes:
        models: what people know of it.
        model_type: of its configuration; of a composite model, that of the whole.
        changes: to SHAPE.
        vision: configuration of the other part; None for a model that only reads text.
    """

    models: str
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 3", "llama"),
    "llama-longrope": Family(
        "Llama with longrope",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 256,
                "factor": 2.0,
            }
        },
    ),
    "mistral": Family("Mistral", "mistral", {"sliding_window": None}),
    "mistral-sliding": Family("Mistral 7B 0.1", "mistral", {"sliding_window": 16}),
    "qwen2": Family("Qwen2, Qwen2.5", "qwen2"),
    "qwen3": Family("Qwen3", "qwen3"),
    "qwen3-moe": Family("Qwen3 MoE", "qwen3_moe", EXPERTS),
    "qwen3-next": Family(
        "Qwen3-Next", "qwen3_next", EXPERTS | LINEAR | {"shared_expert_intermediate_size": 24}
    ),
    "qwen3.5-text": Family("Qwen3.5 (text)", "qwen3_5_text", LINEAR),
    "qwen3.5": Family(
        "Qwen3.5",
        "qwen3_5",
        LINEAR,
        {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
    ),
    "gemma2": Family("Gemma 2", "gemma2", {"query_pre_attn_scalar": 8, "sliding_window": 16}),
    "gemma3-text": Family("Gemma 3 (text)", "gemma3_text", SLIDING | {"query_pre_attn_scalar": 8}),
    "gemma3": Family("Gemma 3", "gemma3", SLIDING | {"query_pre_attn_scalar": 8}, VISION),
    "gemma4-text": Family(
        "Gemma 4 (text)",
        "gemma4_text",
        SLIDING
        | {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
    "gemma4": Family(
        "Gemma 4",
        "gemma4",
        SLIDING
        | {
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": 5.0,
        },
        VISION,
    ),
    "qwen3-vl": Family(
        "Qwen3-VL",
        "qwen3_vl",
        {},
        {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
    ),
    "phi3": Family("Phi-3, Phi-4", "phi3", {"sliding_window": None, "pad_token_id": 0}),
    "smollm3": Family("SmolLM3", "smollm3", {"no_rope_layers": [1, 0], "pad_token_id": 0}),
    "olmo2": Family("OLMo 2", "olmo2"),
    "olmo3": Family("OLMo 3", "olmo3", SLIDING),
    "granite": Family(
        "Granite 3",
        "granite",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere2": Family(
        "Command R7B", "cohere2", SLIDING | {"logit_scale": 0.5, "tie_word_embeddings": True}
    ),
    "exaone4": Family("EXAONE 4", "exaone4", SLIDING),
    "exaone4-full": Family(
        "EXAONE 4 without sliding windows",
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "glm4": Family("GLM-4", "glm4", {"pad_token_id": 0}),
    "glm4-moe": Family(
        "GLM-4.5", "glm4_moe", EXPERTS | {"n_shared_experts": 1, "first_k_dense_replace": 1}
    ),
    "gpt-oss": Family("gpt-oss", "gpt_oss", EXPERTS | SLIDING | {"intermediate_size": 24}),
    "ministral3": Family("Ministral 3 (text)", "ministral3"),
    "mistral3": Family(
        "Ministral 3, Mistral Small 3",
        "mistral3",
        {},
        VISION | {"model_type": "pixtral", "head_dim": 8},
    ),
    "lfm2": Family(
        "LFM2",
        "lfm2",
        {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "block_ff_dim": 48,
        },
    ),
    "falcon-h1": Family(
        "Falcon-H1",
        "falcon_h1",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
            "mamba_d_conv": 4,
            "pad_token_id": 0,
        },
    ),
    "mixtral": Family("Mixtral", "mixtral", EXPERTS),
    "deepseek-v3": Family(
        "DeepSeek V3",
        "deepseek_v3",
        EXPERTS
        | {
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "llama4": Family(
        "Llama 4",
        "llama4_text",
        EXPERTS | {"intermediate_size_mlp": 48, "attention_chunk_size": 64, "moe_layers": [1]},
    ),
}


# Those of the daily tests: each stands for a kind of layer or of cache. The others are opt-in.
LEAN = ("qwen3.5", "gemma3", "gpt-oss", "falcon-h1")


def save(name: str, folder: Path) -> Path:
    """Write a random model of the family to `folder`; the same one each time."""
    family = FAMILIES[name]
    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    tokens = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.eos_token_id,
    }
    text = SHAPE | tokens | family.changes
    torch.manual_seed(4)
    if family.vision is None:
        config = AutoConfig.for_model(family.model_type, **text)
        model = AutoModelForCausalLM.from_config(config)
    else:
        config = AutoConfig.for_model(
            family.model_type,
            text_config=text
            if family.model_type != "mistral3"
            else text | {"model_type": "ministral3"},
            vision_config=family.vision,
            tie_word_embeddings=False,
            **tokens,
        )
        model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

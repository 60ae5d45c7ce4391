"""Model folders of a few kilobytes, written without torch: real headers, real tokenizer."""

import json
import struct
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- if message.role == 'assistant' -%}{%- generation -%}"
    "{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}{{- '\n' -}}"
    "{%- else -%}{{- message.content + '<|im_end|>\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}


def config(**changes: Any) -> dict[str, Any]:
    """config.json of a Qwen3 with 2 layers of width 32."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 258,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 257,
    } | changes


def shapes(facts: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model that `facts` (a config.json) describes."""
    hidden, inner, vocab = facts["hidden_size"], facts["intermediate_size"], facts["vocab_size"]
    query = facts["num_attention_heads"] * facts["head_dim"]
    key = facts["num_key_value_heads"] * facts["head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(facts["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {
            at + "input_layernorm.weight": (hidden,),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "self_attn.q_norm.weight": (facts["head_dim"],),
            at + "self_attn.k_norm.weight": (facts["head_dim"],),
            at + "self_attn.q_proj.weight": (query, hidden),
            at + "self_attn.k_proj.weight": (key, hidden),
            at + "self_attn.v_proj.weight": (key, hidden),
            at + "self_attn.o_proj.weight": (hidden, query),
            at + "mlp.gate_proj.weight": (inner, hidden),
            at + "mlp.up_proj.weight": (inner, hidden),
            at + "mlp.down_proj.weight": (hidden, inner),
        }
    if not facts["tie_word_embeddings"]:
        found["lm_head.weight"] = (vocab, hidden)
    return found


def safetensors(tensors: dict[str, tuple[int, ...]], dtype: str = "BF16") -> bytes:
    """A safetensors file of zeros."""
    header, start = {}, 0
    for name, shape in tensors.items():
        end = start + WIDTHS[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(start)


@cache
def tokenizer_json() -> str:
    """A byte-level tokenizer without merges: one token per byte, and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer.to_str()


def write_model(
    folder: Path, *, template: str = TEMPLATE, dtype: str = "BF16", **changes: Any
) -> dict[str, Any]:
    """Write a model folder; returns its config.json. `changes` go into that file."""
    facts = config(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "model.safetensors").write_bytes(safetensors(shapes(facts), dtype))
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return facts


def write_adapter(
    folder: Path, facts: dict[str, Any], *, rank: int = 4, targets: tuple[str, ...] = ("q_proj",)
) -> None:
    """Write a complete checkpoint with a LoRA in PEFT's format for the model `facts` describes."""
    folder.mkdir(parents=True, exist_ok=True)
    base = shapes(facts)
    tensors: dict[str, tuple[int, ...]] = {}
    for name, shape in base.items():
        if name.split(".")[-2] in targets:
            path = "base_model.model." + name.removesuffix("weight")
            tensors[path + "lora_A.weight"] = (rank, shape[1])
            tensors[path + "lora_B.weight"] = (shape[0], rank)
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors, "F32"))
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "MANIFEST.json").write_text("{}")

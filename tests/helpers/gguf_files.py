"""GGUF files of a few kilobytes, written with the package `gguf` as llama.cpp's converter does."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quantize

from engine.models.gguf.exporter import add_value
from tests import tiny_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # types of token
# The characters that stand for the 256 bytes in byte-level vocabularies, by their own rule: the
# printable ones for themselves, the others from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = [chr(byte) for byte in _PRINTABLE] + [chr(256 + i) for i in range(len(_OTHERS))]


@dataclass
class Words:
    """The tokenizer of a GGUF file."""

    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kind: str = "gpt2"
    rule: str = "qwen2"
    end: int = 257
    begin: int | None = None


def byte_words(rule: str = "qwen2") -> Words:
    """One token for each byte, two special ones, and one merge."""
    tokens = [*BYTES, "<|im_start|>", "<|im_end|>", "ab"]
    types = [NORMAL] * 256 + [CONTROL] * 2 + [NORMAL]
    return Words(tokens, types, ["a b"], rule=rule)


def config(**changes: Any) -> dict[str, Any]:
    """config.json of a Qwen3 with the vocabulary of `byte_words`."""
    return tiny_model.config(vocab_size=259) | changes


def write(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    kind: str = "F32",
    words: Words | None = None,
    leave_out: tuple[str, ...] = (),
    **changes: Any,
) -> Path:
    """Write a model as GGUF.

    Args:
        config: its config.json.
        tensors: its weights in float32, by transformers' names.
        kind: how matrices are stored; vectors are always F32.
        leave_out: keys and tensors that the file shall lack.
        changes: other values of keys, with "__" for ".".
    """
    architecture = config["model_type"]
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    writer = GGUFWriter(path, changed.pop("general.architecture", architecture))
    values = _sizes(architecture, config) | _words(words or byte_words()) | changed
    values["general.file_type"] = int(
        LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"]
    )
    for key, value in values.items():
        if key not in leave_out:
            add_value(writer, key, value)
    quantized = GGMLQuantizationType[kind]
    for name, array in tensors.items():
        gguf_name = _name(name)
        if gguf_name in leave_out:
            continue
        if architecture == "llama" and ".q_proj." in name:
            array = _pairs(array, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj." in name:
            array = _pairs(array, config["num_key_value_heads"])
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(gguf_name, np.ascontiguousarray(array, np.float32))
        else:
            data = quantize(np.ascontiguousarray(array, np.float32), quantized)
            writer.add_tensor(gguf_name, data, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_random(
    path: Path, *, kind: str = "F32", facts: dict[str, Any] | None = None, **more: Any
):
    """Write a random Qwen3, or what `facts` (a config.json) says, without torch."""
    described = facts or config()
    chance = np.random.default_rng(0)
    tensors = {
        name: chance.standard_normal(shape).astype(np.float32)
        for name, shape in tiny_model.shapes(described).items()
    }
    tensors |= more.pop("tensors", {})
    return write(path, described, tensors, kind=kind, **more)


def _sizes(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if config.get("head_dim"):
        found |= {
            "attention.key_length": config["head_dim"],
            "attention.value_length": config["head_dim"],
        }
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _words(words: Words) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokenizer.ggml.model": words.kind,
        "tokenizer.ggml.pre": words.rule,
        "tokenizer.ggml.tokens": words.tokens,
        "tokenizer.ggml.token_type": words.types,
        "tokenizer.ggml.eos_token_id": words.end,
        "tokenizer.chat_template": tiny_model.TEMPLATE,
    }
    if words.begin is not None:
        found["tokenizer.ggml.bos_token_id"] = words.begin
    if words.merges:
        found["tokenizer.ggml.merges"] = words.merges
    if words.scores:
        found["tokenizer.ggml.scores"] = words.scores
    return found


def _name(name: str) -> str:
    """GGUF's name of a tensor."""
    stem, _, ending = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{ending}"
    if not stem.startswith("model.layers."):
        return name  # GGUF's already
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{ending}"


def _pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head in llama.cpp's order: row i of the first half, row i of the second."""
    size = array.shape[0] // heads
    order = [
        head * size + half * (size // 2) + i
        for head in range(heads)
        for i in range(size // 2)
        for half in range(2)
    ]
    return array[order]

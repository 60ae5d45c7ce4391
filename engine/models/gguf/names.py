"""Names of architectures, tensors and keys in GGUF, and the same things' names in transformers.

Sources: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md) and the table of names in
the package `gguf`.
"""

import re

# GGUF architecture -> (transformers' architecture, model_type).
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Weights that every layer must have. transformers would fill a missing one with random numbers.
_LAYER_WEIGHTS = frozenset(
    f"{part}.weight"
    for part in (
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    )
)
_QUERY_KEY_VALUE_BIAS = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"})
LAYER_TENSORS = {
    "llama": (_LAYER_WEIGHTS, _LAYER_WEIGHTS | _QUERY_KEY_VALUE_BIAS | {"attn_output.bias"}),
    "qwen2": (_LAYER_WEIGHTS | _QUERY_KEY_VALUE_BIAS,),
    "qwen3": (_LAYER_WEIGHTS | {"attn_q_norm.weight", "attn_k_norm.weight"},),
}
# The keys of an architecture that are understood here or change nothing. Any other may change what
# the model computes.
KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "tensor_data_layout",
        "vocab_size",
    }
)
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # one number for each rotary frequency, which it is divided by

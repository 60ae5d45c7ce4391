"""A model's configuration as our own forward reads it: its sizes, and whether it is known."""

from dataclasses import dataclass
from typing import Any

from engine.worker.ops.fused_ops import Sizes

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, as every part that plans memory or work needs them.

    Attributes:
        kv: key and value heads.
        context: tokens that the model can read at once.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv: int
    head_dim: int
    vocab: int
    context: int

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """Read the sizes from a model's configuration; of a model with several parts, those of the
        text model."""
        config = config.get_text_config()
        heads = config.num_attention_heads
        # Each default is the usual one where a configuration leaves the field out.
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            heads=heads,
            kv=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab=config.vocab_size,
            context=int(getattr(config, "max_position_embeddings", None) or 4096),
        )


def sizes(config: Any) -> Sizes:
    """The sizes of a model's layers, on which the functions between its matrix products are tried
    (fused_ops.py)."""
    shape = Shape.of(config)
    return Sizes(
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv=shape.kv,
        head_dim=shape.head_dim,
        normed=config.model_type == "qwen3",  # of KNOWN the only one that normalises heads
    )


def unsupported(config: Any) -> str:
    """Why our own forward cannot run a model, such as "sliding-window attention"; "" if it can."""
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in KNOWN:
        return f"model_type {config.model_type}"
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        return "sliding-window attention"
    # Mistral's configuration has no layer_types, and slides wherever it has a window.
    if config.model_type == "mistral" and getattr(config, "sliding_window", None):
        return "sliding-window attention"
    if rope.get("rope_type", "default") not in STATIC_ROPE:
        return f"rope_type {rope.get('rope_type')}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"activation {config.hidden_act}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial rotary positions"
    return ""

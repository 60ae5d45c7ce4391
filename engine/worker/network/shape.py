"""A model's configuration as our own forward reads it: its sizes, and whether it is known."""

from dataclasses import dataclass
from typing import Any

from engine.models.families import OWN_FORWARD, active_width, head_width
from engine.worker.ops.fused_ops import Sizes

STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, for every part that plans memory or work.

    Attributes:
        intermediate: width of the MLP; in a mixture of experts, the width of all experts that one
            token runs through together.
        kv_heads: number of key and value heads.
        context: tokens that the model can read at once.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int

    @classmethod
    def from_config(cls, config: Any) -> "Shape":
        """Read the sizes from `config`, a model's configuration. A model with several parts, such
        as one that also sees pictures, gives the sizes of its text model."""
        config = config.get_text_config()
        heads = config.num_attention_heads

        def field(name: str) -> Any:
            """The configuration's field `name`; None if it has none. `active_width` and
            `head_width` (families.py) read the fields of any family through this function."""
            return getattr(config, name, None)

        # Each default is the usual one where a configuration leaves the field out.
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            # In a mixture of experts, the width of the experts that one token runs through.
            intermediate=active_width(field) or 4 * config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_width(field) or config.hidden_size // heads,
            vocab=config.vocab_size,
            context=int(getattr(config, "max_position_embeddings", None) or 4096),
        )


@dataclass(frozen=True)
class Multipliers:
    """Constants that some families multiply with; 1 in all others.

    Attributes:
        embedding: factor of the embeddings, which the first layer reads.
        residual: factor of the outputs of attention and MLP.
        angles: factor of cos and sin, and so of queries and of keys. Attention's scores get its
            square beside the usual factor 1 / sqrt(head_dim).
        logits: the logits are divided by this number.
    """

    embedding: float = 1.0
    residual: float = 1.0
    angles: float = 1.0
    logits: float = 1.0

    @classmethod
    def from_config(cls, config: Any) -> "Multipliers":
        """Read the constants from a model's configuration. Of the families known here only Granite
        has them (all four); for any other each is 1."""
        usual = Shape.from_config(config).head_dim ** -0.5  # factor of attention's scores
        attention = float(getattr(config, "attention_multiplier", None) or usual)
        return cls(
            embedding=float(getattr(config, "embedding_multiplier", None) or 1.0),
            residual=float(getattr(config, "residual_multiplier", None) or 1.0),
            # Queries and keys both get this factor, so the scores get its square.
            angles=(attention / usual) ** 0.5,
            logits=float(getattr(config, "logits_scaling", None) or 1.0),
        )


def is_rotated(config: Any, layer: int) -> bool:
    """Whether the layer with number `layer`, from 0, rotates its queries and keys by their
    positions (RoPE). SmolLM3 leaves some layers out: its list `no_rope_layers`, despite the name,
    has a 0 for those and a 1 for all others."""
    flags = getattr(config, "no_rope_layers", None)
    return not flags or bool(flags[layer])


def layer_sizes(config: Any) -> Sizes:
    """Read the sizes of a model's layers from its configuration. `fused_ops.choose` takes them: it
    tries norms, rotations and gates on tensors of these sizes."""
    shape = Shape.from_config(config)
    return Sizes(
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        normed=config.model_type in ("exaone4", "qwen3"),  # they normalise each head by itself
    )


def unsupported(config: Any) -> str:
    """Return the reason why our own forward cannot run a model of this configuration, such as
    "sliding-window attention"; "" if our forward can."""
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in OWN_FORWARD:
        return f"model_type {config.model_type}"
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        return "sliding-window attention"
    # These families have no `layer_types` in their configuration, or use the sliding window in
    # every layer as soon as the configuration names one.
    slides = config.model_type in ("exaone4", "mistral", "phi3")
    if slides and getattr(config, "sliding_window", None):
        return "sliding-window attention"
    if rope.get("rope_type", "default") not in STATIC_ROPE:
        return f"rope_type {rope.get('rope_type')}"
    if getattr(config, "hidden_act", "silu") != "silu":
        return f"activation {config.hidden_act}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial rotary positions"
    return ""

"""What is known of model families: which are refused and why, and which of a model's matrices can
carry a LoRA adapter.

Any family that transformers loads as a causal language model can be trained. The parts of a model
are read from its config.json and the headers of its weights, so this module holds only what those
two do not say.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from engine.core.files import JsonObject
from engine.records.settings import ANY_MLP, KNOWN_PROJECTIONS

# The families that this project's own forward pass computes (engine/worker/network/decoder.py), by
# model_type. Other families, and models with a part that it lacks, run through transformers.
OWN_FORWARD = tuple("exaone4 granite llama mistral olmo2 phi3 qwen2 qwen3 smollm3".split())

# Why a family is refused, by model_type.
_NO_ATTENTION = "it has no attention layers, and its recurrence is trained nowhere here"
_IN_ENCODER = "an encoder reads its prompt; only decoder-only models are trained"
REFUSED = {
    "mamba": _NO_ATTENTION,
    "mamba2": _NO_ATTENTION,
    "falcon_mamba": _NO_ATTENTION,
    "rwkv": _NO_ATTENTION,
    "xlstm": _NO_ATTENTION,
    "recurrent_gemma": "its recurrent state is kept outside the cache, so what is sampled would "
    "not be what is trained",
    "minimax": "it samples with a cache of its own alone",
    "bart": _IN_ENCODER,
    "mbart": _IN_ENCODER,
    "t5gemma": _IN_ENCODER,
    "diffusion_gemma": "it writes by diffusion, not token by token",
}
# How class names end: of a causal language model, of the first generation of these, and of a model
# that holds other parts (such as vision) beside a causal language model.
_CAUSAL = "ForCausalLM"
_FIRST_GENERATION = "LMHeadModel"
_COMPOSITE = "ForConditionalGeneration"

# Sizes that config.json may leave out, because they are the defaults of the family's class in
# transformers, by model_type of the text model.
_DEFAULTS = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    }
}

# Projections that have a known name but can carry no adapter, by model_type: PEFT refuses them,
# because the layer's fast path reads their weights directly and would ignore the adapter.
WITHOUT_ADAPTER = {
    "falcon_h1": ("out_proj",),
    "bamba": ("out_proj",),
    "jamba": ("out_proj", "in_proj"),
    "granitemoehybrid": ("out_proj",),
    "nemotron_h": ("out_proj",),
    "zamba2": ("out_proj",),
}

# Modules that get no adapter: experts, and parts of a model other than the layers that read text.
# The pattern must match the whole name of a module, as PEFT's `exclude_modules` does.
NOT_ADAPTED = (
    r"(.*\.)?(experts|vision_tower|vision_model|visual|vision_encoder|audio_tower|audio_model"
    r"|audio_encoder|multi_modal_projector|embed_vision|embed_audio|mtp)\..*"
)
_LAYER = re.compile(r"^(?P<before>.*?)\b(?:layers|h|blocks)\.(?P<number>\d+)\.(?P<path>.+)$")
_EXPERTS = re.compile(r"\bexperts\b")
# The keys under which a config.json says how many experts there are, through how many of them a
# token runs, how wide they are, and how wide or how many the experts are that every token uses.
_EXPERT_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_k",
)
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_intermediate_size")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")
_KEYS_AND_VALUES = frozenset(("k_proj", "qkv_proj", "query_key_value", "kv_b_proj"))

# Returns the value of a key in a model's config.json, or None if the file lacks the key.
Lookup = Callable[[str], Any]


@dataclass(frozen=True)
class Projection:
    """A projection that can carry an adapter: its name in a layer, such as "q_proj", and its
    (inputs, outputs) in each layer that has it."""

    name: str
    shapes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LayerFacts:
    """What the layers of a model hold, from the shapes of their weights.

    Attributes:
        projections: the projections that can carry an adapter, in the order of KNOWN_PROJECTIONS.
        active_params: parameters of the matrices that one token runs through; of the experts, only
            those that a token is routed to count.
        linear_params: parameters of all matrices except the experts'; these matrices can be stored
            in 4 bits.
        attention_layers: number of layers that keep keys and values.
        layers: number of layers that have any weights.
    """

    projections: tuple[Projection, ...]
    active_params: int
    linear_params: int
    attention_layers: int
    layers: int


def text_part(config: Mapping[str, Any]) -> JsonObject:
    """Return the configuration of the part of a model that reads text.

    `config` is that of the whole model. If the model has several parts, the values in its
    `text_config` take precedence. Values missing in both are the family's defaults.
    """
    text = config.get("text_config")
    merged = dict(config) | text if isinstance(text, dict) else dict(config)
    return _DEFAULTS.get(str(merged.get("model_type")), {}) | merged


def refusal(config: Mapping[str, Any], architecture: str) -> str:
    """Explain why a model with this config.json cannot be trained, e.g. "it writes by diffusion,
    not token by token". Returns "" if it can.

    `architecture` is the class that the config names, or "" if it names none.
    """
    text_type = str(text_part(config).get("model_type") or "")
    # The type of the whole model differs from that of its text part if it has several parts.
    model_types = [text_type, str(config.get("model_type") or "")]
    for model_type in model_types:
        if model_type in REFUSED:
            return REFUSED[model_type]
    if config.get("is_encoder_decoder"):
        return _IN_ENCODER
    if architecture.endswith(_FIRST_GENERATION):  # such as GPT2LMHeadModel
        return "models of this generation store projections in ways that no adapter here fits"
    if not _has_language_model(config, architecture):
        return "it is no causal language model, nor one that holds such a model (text_config)"
    if not any(_transformers_knows(model_type) for model_type in model_types if model_type):
        return f"the transformers installed here knows no model_type {text_type or 'none'}"
    return ""


def _has_language_model(config: Mapping[str, Any], architecture: str) -> bool:
    """Tell whether a model of the class `architecture` is a causal language model, or has one as a
    part, which `config` (the model's config.json) then describes under "text_config"."""
    if architecture.endswith(_CAUSAL):
        return True
    return architecture.endswith(_COMPOSITE) and isinstance(config.get("text_config"), dict)


@cache
def _transformers_knows(model_type: str) -> bool:
    """Tell whether the installed transformers knows a family, without importing the package: it has
    a folder per family. True if transformers is not installed, as on a server that trains
    elsewhere."""
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return True
    package = Path(spec.submodule_search_locations[0])
    folder = model_type.replace("-", "_")
    # A model with several parts has one folder, in which its text model (gemma3_text) lies too.
    folders = (folder, folder.removesuffix("_text"))
    return any(package.joinpath("models", name).is_dir() for name in folders)


def read_layers(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], layers: int
) -> LayerFacts:
    """Describe what the first `layers` layers of the text model hold.

    Weights of further layers (which predict tokens further ahead) and of other parts of the model
    are left out, because transformers does not load them.

    Args:
        shapes: the shapes of all weights by name; that of a matrix is (outputs, inputs).
        config: the configuration of the text model, as `text_part` returns it.
    """
    weights = list(_layer_weights(shapes, layers))
    expert_params = sum(prod(weight.shape) for weight in weights if weight.is_of_experts)
    matrices = [weight for weight in weights if weight.is_matrix]
    linear_params = sum(prod(matrix.shape) for matrix in matrices)
    without_adapter = _without_adapter(config, has_experts=expert_params > 0)
    attention_matrices = [matrix for matrix in matrices if matrix.projection in _KEYS_AND_VALUES]
    return LayerFacts(
        projections=_projections(matrices, without_adapter),
        # A token runs through all the other matrices, but only through a share of the experts.
        active_params=linear_params + round(expert_params * expert_share(config.get)),
        linear_params=linear_params,
        attention_layers=_count_layers(attention_matrices),
        layers=_count_layers(weights),
    )


def _count_layers(weights: Sequence["_LayerWeight"]) -> int:
    """Count the layers that have at least one of these weights."""
    return len({weight.layer for weight in weights})


def _without_adapter(config: Mapping[str, Any], *, has_experts: bool) -> tuple[str, ...]:
    """Return the names of the projections that can carry no adapter in a model with this `config`.

    `has_experts` says whether the model's layers hold weights of experts.
    """
    projections = WITHOUT_ADAPTER.get(str(config.get("model_type")), ())
    if has_experts:
        # If a model has experts, PEFT takes the names of MLP projections for the experts' fused
        # weights, even in dense layers and shared experts. So only attention carries adapters.
        return (*projections, *ANY_MLP)
    return projections


@dataclass(frozen=True)
class _LayerWeight:
    """A weight of a layer.

    Attributes:
        layer: the layer's number.
        path: the weight's name within the layer, such as "self_attn.q_proj.weight".
    """

    layer: int
    path: str
    shape: tuple[int, ...]

    @property
    def projection(self) -> str:
        """The name of the module that has the weight, such as "q_proj"."""
        return self.path.removesuffix(".weight").rpartition(".")[2]

    @property
    def is_of_experts(self) -> bool:
        """Whether the weight holds matrices of experts; biases of experts do not count."""
        return _is_of_experts(self.path, self.shape) and len(self.shape) > 1

    @property
    def is_matrix(self) -> bool:
        """Whether the weight is the matrix of a projection: no norm, bias, convolution or
        expert."""
        is_two_dimensional = len(self.shape) == 2 and self.path.endswith(".weight")
        return is_two_dimensional and not _is_of_experts(self.path, self.shape)


def _layer_weights(shapes: Mapping[str, tuple[int, ...]], layers: int) -> Iterator[_LayerWeight]:
    """Yield the weights of the first `layers` layers of the part that reads text, sorted by
    name."""
    for name, shape in sorted(shapes.items()):
        match = _LAYER.match(name)
        # "before": what stands before the layer's number, such as the name of a vision part.
        if match is None or int(match["number"]) >= layers or _in_other_part(match["before"]):
            continue
        yield _LayerWeight(int(match["number"]), match["path"], shape)


def _projections(
    matrices: Sequence[_LayerWeight], without_adapter: Collection[str]
) -> tuple[Projection, ...]:
    """Return the projections that can carry an adapter, in the order of KNOWN_PROJECTIONS.

    `without_adapter` names the projections of this family that cannot carry one.
    """
    shapes_of: dict[str, list[tuple[int, int]]] = {}  # (inputs, outputs) by projection
    for matrix in matrices:
        if matrix.projection in KNOWN_PROJECTIONS and matrix.projection not in without_adapter:
            outputs, inputs = matrix.shape
            shapes_of.setdefault(matrix.projection, []).append((inputs, outputs))
    return tuple(
        Projection(name, tuple(shapes_of[name])) for name in KNOWN_PROJECTIONS if name in shapes_of
    )


def _is_of_experts(path: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a weight of a layer belongs to experts: its name says so, or it has three
    dimensions because it holds the matrices of all experts."""
    # The kernel of a convolution has three dimensions too, but then one of the first two is 1, or
    # the name says conv1d.
    is_fused = len(shape) == 3 and shape[0] > 1 and shape[1] > 1
    return bool(_EXPERTS.search(path)) or (is_fused and not path.endswith("conv1d.weight"))


def _in_other_part(prefix: str) -> bool:
    """Tell whether a weight belongs to a part of the model that does not read text. `prefix` is the
    weight's name up to its layer's number, such as "model.vision_tower.encoder."."""
    # The pattern asks for at least a dot after the part's name; x stands for any name in the part.
    return re.fullmatch(NOT_ADAPTED, prefix + "x") is not None


def expert_share(lookup: Lookup) -> float:
    """Return the share of the experts that one token runs through, or 1 if the configuration gives
    no numbers of experts. `lookup` returns the value of a key in config.json."""
    count = _first_size(lookup, _EXPERT_COUNT)
    per_token = _first_size(lookup, _EXPERTS_PER_TOKEN)
    if not count or not per_token:
        return 1.0
    return min(1.0, per_token / count)


def active_width(lookup: Lookup) -> int:
    """Return the width of the MLP's hidden layer that one token runs through, or 0 if config.json
    does not give it. `lookup` returns the value of a key in that file, None if it lacks the key.

    In a model with experts this is the larger of two widths: that of all experts together that one
    token runs through, and that of the layers without experts.
    """
    dense = _first_size(lookup, ("intermediate_size", "n_inner", "ffn_dim", "block_ff_dim"))
    experts_per_token = _first_size(lookup, _EXPERTS_PER_TOKEN)
    if not _first_size(lookup, _EXPERT_COUNT) or not experts_per_token:  # no experts
        return dense
    expert = _first_size(lookup, _EXPERT_WIDTH) or dense
    # Shared experts, which every token runs through: their width together, or their number.
    shared = _first_size(lookup, _SHARED_WIDTH) or expert * _first_size(lookup, _SHARED_EXPERTS)
    return max(dense, experts_per_token * expert + shared)


def head_width(lookup: Lookup) -> int:
    """Return the length of a head's key or value vector, or 0 if config.json does not give it.
    `lookup` returns the value of a key in that file, None if it lacks the key.

    In latent attention (DeepSeek) keys and values differ in length; the result is their mean.
    """
    latent_width = _first_size(lookup, ("kv_lora_rank",))
    value_width = _first_size(lookup, ("v_head_dim",))
    if latent_width and value_width:
        # A key has a part without positions and one with rotary positions.
        plain_width = _first_size(lookup, ("qk_nope_head_dim",))
        rotary_width = _first_size(lookup, ("qk_rope_head_dim",))
        return (plain_width + rotary_width + value_width) // 2
    return _first_size(lookup, ("head_dim",))


def _first_size(lookup: Lookup, names: tuple[str, ...]) -> int:
    """Return the first positive integer that config.json has under one of `names`, or 0 if it has
    none. `lookup` returns the value of a key in that file, None if it lacks the key."""
    for name in names:
        number = lookup(name)
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            return number
    return 0

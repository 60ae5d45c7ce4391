"""Reads facts about a model folder from config.json and safetensors headers, without torch.

A safetensors file starts with the length of its header (eight bytes, little endian) and a JSON
header with the name, dtype, shape and place of every tensor. So the parameter count is exact, and a
truncated file is recognised before anything loads it (format: the safetensors README).
"""

import json
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import JsonObject, open_file
from engine.models import families
from engine.models.families import LayerFacts, Projection, text_part
from engine.models.reasoning import has_marks

HEADER = ".header"  # ending of a file with only a weight file's header, fetched before the weights

_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header, in 8 bytes
_DEFAULT_CONTEXT = 2048  # tokens, assumed if config.json names no max_position_embeddings
_MAX_HEADER = 100_000_000  # the limit of the safetensors library itself
_DAMAGED_HINT = "Fetch the file again; it should come from a finished download."
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SUPPORTED_HINT = (
    "Choose a decoder-only model that transformers loads by itself, such as a Qwen3 or a Llama."
)
# How the names of the embedding's weights end, and those of the output layer's weights.
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "embed_in.weight", "wte.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
# Other names that some families use for a size in config.json.
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}


@dataclass(frozen=True)
class AdapterFacts:
    """The shape of a LoRA: its rank, its alpha, and the projections it changes, in our order."""

    rank: int
    alpha: int
    targets: tuple[str, ...]


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder-only model.

    Attributes:
        architecture: class name in config.json.
        hidden, layers, heads, kv_heads, head_dim, vocab: as in config.json.
        intermediate: width of the MLP; with experts, of all experts that one token runs through.
        tied: whether the output layer shares the embedding's weights.
        params: number of parameters, from the tensor shapes; a tied output layer counts once.
        max_positions: longest context in tokens.
        dtype: type of the stored weights ("float32", "bfloat16", "float16").
        weight_bytes: bytes of all tensors.
        thinking: whether the chat template can switch a think block on and off.
        inside: what the layers hold, read from the shapes of their weights. None if these were not
            read; then the model counts as a dense decoder of these sizes.
        family: model_type of the part that reads text.
        always_thinks: whether the chat template has marks of reasoning and no switch for it.
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    params: int
    max_positions: int
    dtype: str
    weight_bytes: int
    thinking: bool = False
    inside: LayerFacts | None = None
    family: str = ""
    always_thinks: bool = False

    @property
    def head_params(self) -> int:
        """Parameters of the output layer, which is computed only for tokens that need logits."""
        return self.vocab * self.hidden

    @property
    def linear_params(self) -> int:
        """Parameters of the layers' matrices that one token runs through. Of the experts, only the
        share that a token is routed to counts."""
        if self.inside is not None:  # counted from the shapes of the stored weights
            return self.inside.active_params
        # Query and output have `heads` heads, key and value have `kv_heads`.
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate  # gate, up and down
        return self.layers * (attention + mlp)

    @property
    def dense_params(self) -> int:
        """Parameters of all matrices of the layers except the experts'."""
        return self.linear_params if self.inside is None else self.inside.linear_params

    @property
    def attention_layers(self) -> int:
        """Number of layers that keep the keys and values of every token."""
        return self.layers if self.inside is None else self.inside.attention_layers

    @property
    def attention_width(self) -> int:
        """Numbers in the queries of one token, summed over all layers with attention."""
        return self.attention_layers * self.heads * self.head_dim

    @property
    def cached_numbers(self) -> int:
        """Numbers in the keys and values of one token, summed over all layers that keep them."""
        return 2 * self.attention_layers * self.kv_heads * self.head_dim

    @property
    def own_forward(self) -> bool:
        """Whether the project's own forward pass (engine/worker/network) can compute this
        family."""
        return not self.family or self.family in families.OWN_FORWARD

    @cached_property
    def projections(self) -> tuple[Projection, ...]:
        """The projections that can carry a LoRA adapter, in the order of the settings."""
        if self.inside is not None:  # read from the shapes of the weights
            return self.inside.projections
        query_width = self.heads * self.head_dim
        key_width = self.kv_heads * self.head_dim  # also the width of the values
        shapes = {  # (inputs, outputs)
            "q_proj": (self.hidden, query_width),
            "k_proj": (self.hidden, key_width),
            "v_proj": (self.hidden, key_width),
            "o_proj": (query_width, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }
        return tuple(Projection(name, (shape,) * self.layers) for name, shape in shapes.items())

    @property
    def targets(self) -> list[str]:
        """Names of the projections that can carry a LoRA adapter."""
        return [projection.name for projection in self.projections]

    def projection_shapes(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return (inputs, outputs) of the projection `name`, such as "q_proj", in each layer that
        has it. The tuple is empty if no layer has it."""
        shapes = {projection.name: projection.shapes for projection in self.projections}
        return shapes.get(name, ())

    def adapter_params(self, rank: int, targets: list[str] | tuple[str, ...]) -> int:
        """Parameters of a LoRA with this rank on the projections `targets` of every layer: for each
        projection rank x (inputs + outputs). A name that no layer has adds nothing."""
        return rank * sum(self._projection_sizes.get(name, 0) for name in targets)

    @cached_property
    def _projection_sizes(self) -> dict[str, int]:
        """Inputs + outputs of each projection, summed over the layers that have it."""
        return {
            projection.name: sum(map(sum, projection.shapes)) for projection in self.projections
        }


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header. `size` is in bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int


def unsupported(reason: str, hint: str) -> UserError:
    """Return the error for a model that cannot be used here because of `reason`."""
    return UserError("MODEL_UNSUPPORTED", reason, hint=hint, field="model")


def parse_header(raw: bytes, name: str, file_size: int | None = None) -> dict[str, Tensor]:
    """Parse the first bytes of a safetensors file into its tensors by name.

    Args:
        raw: the length and the header; more bytes may follow.
        name: name of the file, for error messages.
        file_size: bytes of the whole file, which must hold every tensor; None to skip this check.

    Raises UserError MODEL_UNSUPPORTED for anything that is not a complete, well-formed file.
    """
    data_start = _LENGTH_BYTES + header_length(raw, name)
    if len(raw) < data_start:
        raise unsupported(f"{name} ends inside its header", _DAMAGED_HINT)
    try:
        tensors, data_bytes = _parse_entries(raw[_LENGTH_BYTES:data_start])
    # ValueError: no JSON, or a wrong number. KeyError: an entry lacks a key. TypeError: a value of
    # another type. AttributeError: no JSON object. RecursionError: nested too deeply.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{name} has a header that cannot be read ({error})"
        raise unsupported(reason, _DAMAGED_HINT) from error
    needed_bytes = data_start + data_bytes
    if file_size is not None and file_size < needed_bytes:
        raise unsupported(
            f"{name} is cut short: {file_size} of {needed_bytes} bytes are there", _DAMAGED_HINT
        )
    return tensors


def _parse_entries(header_json: bytes) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a header by name, and how many bytes of values must follow the
    header."""
    header = json.loads(header_json)
    # The entry "__metadata__" does not describe a tensor.
    entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
    tensors = {key: _parse_tensor(entry) for key, entry in entries.items()}
    data_bytes = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    return tensors, data_bytes


def header_length(raw: bytes, name: str) -> int:
    """Return the length of the header in bytes, from the first eight bytes of a safetensors file.

    `raw` holds these bytes, `name` is the file's name for an error. Raises UserError
    MODEL_UNSUPPORTED if `raw` is too short or the length impossible.
    """
    length = 0  # impossible: kept, and so refused, if `raw` is too short
    if len(raw) >= _LENGTH_BYTES:
        [length] = struct.unpack("<Q", raw[:_LENGTH_BYTES])  # little endian
    if not 2 <= length <= _MAX_HEADER:  # the shortest JSON object is {}
        raise unsupported(f"{name} is not a safetensors file", "Only safetensors weights are read.")
    return length


def _parse_tensor(entry: JsonObject) -> Tensor:
    """Parse one entry of a header. Raises KeyError, TypeError or ValueError if the entry has
    another form or, for a known dtype, its shape does not fit its bytes."""
    first_byte, end_byte = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    item_bytes = _DTYPE_BYTES.get(entry["dtype"])
    if item_bytes is not None and end_byte - first_byte != item_bytes * prod(shape):
        raise ValueError(f"shape {list(shape)} does not match its {end_byte - first_byte} bytes")
    return Tensor(str(entry["dtype"]), shape, int(end_byte) - int(first_byte))


def read_header(path: Path) -> dict[str, Tensor]:
    """Read the tensors of the safetensors file at `path`, by name; cached until the file changes.

    Raises UserError MODEL_UNSUPPORTED for a damaged file.
    """
    stat = path.stat()
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _read_header(path: Path, size: int, _mtime: int) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file of `size` bytes, by name. `_mtime`, when the file last
    changed, only belongs to the cache key, so that a changed file is read again."""
    with open_file(path) as file:
        length = file.read(_LENGTH_BYTES)
        raw = length + file.read(header_length(length, path.name))
    return parse_header(raw, path.name, size)


def weight_files(folder: Path) -> list[str]:
    """Return the names of a model's weight files, downloaded or not: the shards in its index, or
    the single file. Raises UserError MODEL_UNSUPPORTED if there are none."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return shards(load_json(index), index.name)
    file = folder / "model.safetensors"
    header_file = folder / ("model.safetensors" + HEADER)
    if file.is_file() or header_file.is_file():
        return ["model.safetensors"]
    pickles = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
    raise no_safetensors(str(folder), pickles)


def shards(index: JsonObject, name: str) -> list[str]:
    """Return the distinct file names in a shard index, sorted.

    `name` is the name of the index file, for the error. Raises UserError MODEL_UNSUPPORTED if the
    index names no file, or one outside its folder.
    """
    file_by_tensor = index.get("weight_map")
    files = sorted(set(file_by_tensor.values())) if isinstance(file_by_tensor, dict) else []
    # A file name with a slash could lead out of the folder.
    are_names = all(
        isinstance(file, str) and "/" not in file and "\\" not in file for file in files
    )
    if not files or not are_names:
        raise unsupported(f"{name} does not list weight files", "Fetch the model again.")
    return files


def no_safetensors(where: str, names: list[str]) -> UserError:
    """Return the error for `where`, a folder or repository without safetensors weights. It mentions
    pickled weights if there are some among its files, `names`."""
    pickled = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if pickled:
        return unsupported(
            f"{where} holds only pickled weights ({pickled[0]}), which can run code when loaded",
            "Use a safetensors version of the model, or convert it with "
            "model.save_pretrained(folder, safe_serialization=True).",
        )
    return unsupported(
        f"{where} holds no model.safetensors",
        "Point `model` at a folder written by save_pretrained.",
    )


def load_json(path: Path) -> JsonObject:
    """Read a JSON object from a file of a model folder.

    Raises UserError MODEL_UNSUPPORTED if the file is missing or damaged, or holds no JSON object.
    """
    try:
        with open_file(path) as file:
            value = json.loads(file.read())
    except FileNotFoundError as error:
        raise unsupported(
            f"{path.parent} has no {path.name}",
            "Point `model` at a folder written by save_pretrained.",
        ) from error
    # ValueError: no UTF-8 or no JSON. OSError: the file cannot be read. RecursionError: nested too
    # deeply.
    except (ValueError, OSError, RecursionError) as error:
        raise unsupported(f"{path} cannot be read: {error}", "Fetch the file again.") from error
    if not isinstance(value, dict):
        raise unsupported(f"{path} is not a JSON object", "Fetch the file again.")
    return value


def read_facts(folder: Path) -> ModelFacts:
    """Read the facts of the model in `folder`. Raises UserError MODEL_UNSUPPORTED with the reason
    if the model cannot be used."""
    config = load_json(folder / "config.json")
    check_config(config, str(folder))
    names = weight_files(folder)
    template = check_text_files(folder)  # the chat template
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors.update(_stored_header(folder, name))
    return facts_from(config, tensors, template)


def check_text_files(folder: Path) -> str:
    """Check that a folder has a tokenizer.json and a chat template; return the template.

    Raises UserError MODEL_UNSUPPORTED if one of them is missing.
    """
    if not (folder / "tokenizer.json").is_file():
        raise unsupported(
            f"{folder} has no tokenizer.json",
            "Save the tokenizer beside the model: tokenizer.save_pretrained(folder).",
        )
    return chat_template(folder)


def _stored_header(folder: Path, name: str) -> dict[str, Tensor]:
    """Read the tensors of a weight file by name, from the file itself or from its separate header
    file. Raises UserError MODEL_UNSUPPORTED if neither is there."""
    if (folder / name).is_file():
        return read_header(folder / name)
    if (folder / (name + HEADER)).is_file():
        with open_file(folder / (name + HEADER)) as file:
            return parse_header(file.read(), name)
    raise unsupported(f"{folder} misses the weight file {name}", "Fetch the model again.")


def check_config(config: JsonObject, where: str) -> None:
    """Refuse a model whose config.json shows that it cannot be trained here.

    `where` names the model in the error: its folder or hub id. Raises UserError MODEL_UNSUPPORTED
    if it needs its own code, is quantized, or is of a family that is not trained (`families.py`).
    """
    if config.get("auto_map"):
        raise unsupported(
            f"{where} needs its own Python code to load (auto_map in config.json)",
            "Code from a model repository is never run here. " + _SUPPORTED_HINT,
        )
    if config.get("quantization_config"):
        raise unsupported(
            f"{where} is quantized", "Use the unquantized weights (float32, bfloat16 or float16)."
        )
    architecture = _architecture(config)
    reason = families.refusal(config, architecture)
    if reason:
        shown_name = architecture or config.get("model_type") or "none named in config.json"
        raise unsupported(f"{where} has the architecture {shown_name}: {reason}", _SUPPORTED_HINT)


def _architecture(config: JsonObject) -> str:
    """Return the first class name under "architectures" of config.json, or "" if there is none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def facts_from(config: JsonObject, tensors: dict[str, Tensor], template: str) -> ModelFacts:
    """Derive the facts of a model from its config.json, the tensors of all its weight files and its
    chat template. If the model has several parts, such as text and vision, the facts describe the
    part that reads text; only `params` and `weight_bytes` count all parts.

    Raises UserError MODEL_UNSUPPORTED if the config is incomplete, if the tensors contradict it, or
    if the model has no projection for an adapter.
    """
    text = text_part(config)
    hidden = _positive_int(text, "hidden_size")
    heads = _positive_int(text, "num_attention_heads")
    layers = _positive_int(text, "num_hidden_layers")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    has_switch = "enable_thinking" in template  # the variable that switches the think block
    facts = ModelFacts(
        architecture=_architecture(config),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_positive_int(text, "num_key_value_heads", default=heads),
        # If the config lacks one of the next two widths (0), the usual width is assumed.
        head_dim=families.head_width(text.get) or max(1, hidden // heads),
        intermediate=families.active_width(text.get) or 4 * hidden,
        vocab=_positive_int(text, "vocab_size"),
        tied=_is_tied(config, tensors),
        params=_count_params(config, tensors),
        max_positions=_positive_int(text, "max_position_embeddings", default=_DEFAULT_CONTEXT),
        dtype=_main_dtype(tensors),
        weight_bytes=sum(tensor.size for tensor in tensors.values()),
        thinking=has_switch,
        inside=families.read_layers(shapes, text, layers),
        family=str(text.get("model_type") or ""),
        always_thinks=has_marks(template) and not has_switch,  # marks of a think block
    )
    _check_shapes(facts, tensors)
    return facts


def _positive_int(config: JsonObject, key: str, default: int = 0) -> int:
    """Return the positive integer at `key` of config.json, or at a family's other name for it.

    Returns `default` if the config has none of these names. Raises UserError MODEL_UNSUPPORTED if
    the value is no positive integer, or is missing and `default` is 0 (no default).
    """
    names = (key, *_OTHER_NAMES.get(key, ()))
    values = [config[name] for name in names if config.get(name) is not None]
    value = values[0] if values else default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        stored = value if values else None  # None: missing, not the default of 0
        raise unsupported(f"config.json has {key} = {stored!r}", "It must be a positive integer.")
    return value


def _is_tied(config: JsonObject, tensors: dict[str, Tensor]) -> bool:
    """Tell whether the output layer shares the embedding's weights.

    `tie_word_embeddings` in config.json decides: first that of the whole model, then that of its
    text part. If both are missing, the weights are shared unless the files hold an output layer.
    """
    tied = config.get("tie_word_embeddings", text_part(config).get("tie_word_embeddings"))
    if isinstance(tied, bool):
        return tied
    return not any(name.endswith(_HEADS) for name in tensors)


def _count_params(config: JsonObject, tensors: dict[str, Tensor]) -> int:
    """Count the parameters of all tensors.

    An output layer that shares the embedding's weights is not counted, even if it is stored.
    """
    tied = _is_tied(config, tensors)
    return sum(
        prod(tensor.shape)
        for name, tensor in tensors.items()
        if not (tied and name.endswith(_HEADS))
    )


def _main_dtype(tensors: dict[str, Tensor]) -> str:
    """Return the dtype of most bytes of the weights: "float32", "float16" or "bfloat16". Raises
    UserError MODEL_UNSUPPORTED if that is another dtype, or if there are no weights."""
    bytes_by_dtype: dict[str, int] = {}
    for tensor in tensors.values():
        bytes_by_dtype[tensor.dtype] = bytes_by_dtype.get(tensor.dtype, 0) + tensor.size
    main_dtype = max(bytes_by_dtype, key=lambda dtype: bytes_by_dtype[dtype], default="")
    if main_dtype not in _DTYPE_NAMES:
        raise unsupported(
            f"the weights are stored as {main_dtype or 'nothing'}",
            "Use the unquantized weights (float32, bfloat16 or float16).",
        )
    return _DTYPE_NAMES[main_dtype]


def _check_shapes(facts: ModelFacts, tensors: dict[str, Tensor]) -> None:
    """Raise UserError MODEL_UNSUPPORTED unless the weights have the sizes in config.json, and at
    least one projection has a name that is known here."""
    for name_endings, shape in _expected_shapes(facts).items():
        _require_weight(tensors, name_endings, shape)
    assert facts.inside is not None  # `facts_from`, the only caller, sets what the layers hold
    if facts.inside.layers != facts.layers:
        raise _mismatch(f"weights of {facts.layers} layers expected, {facts.inside.layers} there")
    if not facts.targets:
        raise unsupported(
            f"no projection of its layers has a name that is known here ({facts.architecture})",
            "Use a model of another family.",
        )


def _require_weight(
    tensors: dict[str, Tensor], name_endings: tuple[str, ...], shape: tuple[int, int]
) -> None:
    """Raise UserError MODEL_UNSUPPORTED unless a weight whose name has one of these endings has
    this shape."""
    shapes = {name: tensor.shape for name, tensor in tensors.items() if name.endswith(name_endings)}
    if shape not in shapes.values():
        name = next(iter(shapes), name_endings[0])  # the wrong one, or the one that is missing
        actual = list(shapes[name]) if shapes else "missing"
        raise _mismatch(f"{name} should be {list(shape)}, is {actual}")


def _expected_shapes(facts: ModelFacts) -> dict[tuple[str, ...], tuple[int, int]]:
    """Return the shapes (outputs, inputs) that stored weights must have, by the endings that the
    weight's name may have."""
    expected: dict[tuple[str, ...], tuple[int, int]] = {_EMBEDDINGS: (facts.vocab, facts.hidden)}
    if facts.own_forward:  # of other families the names of the layers are not known
        name, heads = _last_query_projection(facts)
        expected[(name,)] = (heads * facts.head_dim, facts.hidden)
    if not facts.tied:
        expected[_HEADS] = (facts.vocab, facts.hidden)
    return expected


def _last_query_projection(facts: ModelFacts) -> tuple[str, int]:
    """Return the name of the weight that makes the last layer's queries, and for how many heads it
    makes a vector (a query; in a fused matrix also a key or value)."""
    prefix = f"model.layers.{facts.layers - 1}.self_attn"
    if "qkv_proj" in facts.targets:  # queries, keys and values in one matrix
        return f"{prefix}.qkv_proj.weight", facts.heads + 2 * facts.kv_heads
    return f"{prefix}.q_proj.weight", facts.heads


def _mismatch(difference: str) -> UserError:
    """Return the error for a config.json that contradicts the weights; `difference` says how."""
    return unsupported(
        f"config.json and weights disagree: {difference}",
        "Fetch config.json and the weights of the same version.",
    )


def chat_template(folder: Path) -> str:
    """Read the chat template of a model folder. Raises UserError MODEL_UNSUPPORTED if it has
    none."""
    template = _chat_templates(folder).get("default", "")
    if not template:
        raise unsupported(
            f"{folder} has no chat template, so prompts cannot be built",
            "Use the instruct or chat version of the model, or add chat_template.jinja.",
        )
    return template


def tool_template(folder: Path) -> str:
    """Read the separate template for conversations with tools, or "" if the model has none."""
    return _chat_templates(folder).get("tool_use", "")


def _chat_templates(folder: Path) -> dict[str, str]:
    """Read the chat templates of a model folder, by name; {} if it has none.

    The first of these files with a template counts: chat_template.jinja, chat_template.json,
    tokenizer_config.json. A single template has the name "default".
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text("utf-8")}
    for name in ("chat_template.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        templates = _templates_by_name(load_json(folder / name).get("chat_template"))
        if templates.get("default"):
            return {str(key): text for key, text in templates.items() if isinstance(text, str)}
    return {}


def _templates_by_name(stored: object) -> dict[Any, Any]:
    """Return the templates in a value of `chat_template`, by name. The value is one text, a list of
    objects such as {"name": ..., "template": ...}, or an object of templates; otherwise {}."""
    if isinstance(stored, str):
        return {"default": stored}
    if isinstance(stored, list):
        objects = [item for item in stored if isinstance(item, dict)]
        return {item.get("name"): item.get("template") for item in objects}
    return stored if isinstance(stored, dict) else {}

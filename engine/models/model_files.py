"""What a model folder is, read from config.json and safetensors headers: no torch, no weights.

A safetensors file starts with eight bytes (length of the header, little endian) and a JSON header
that names every tensor with dtype, shape and place, so the parameter count is exact and a
truncated file is seen before anything loads it (format: the safetensors README).
"""

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import JsonObject, open_file

# Architectures whose projections carry the names in PROJECTIONS and whose forward pass the worker
# is tested on or which share that layout exactly.
ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
)

HEADER = ".header"  # beside a weight file's name: its header, fetched before the weights are

_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2}
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER = 100_000_000  # the limit of the safetensors library itself
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_USE_OTHER = "Choose a model with one of these architectures: " + ", ".join(ARCHITECTURES) + "."


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
        hidden, layers, heads, kv_heads, head_dim, intermediate, vocab: as in config.json.
        tied: whether the output layer shares the embedding's weights.
        params: parameters, exact from the tensor shapes, a tied output layer counted once.
        max_positions: longest context in tokens.
        dtype: of the stored weights ("float32", "bfloat16", "float16").
        weight_bytes: bytes of all tensors.
        thinking: whether the chat template can switch a think block on and off.
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

    @property
    def head_params(self) -> int:
        """Parameters of the output layer, which is multiplied only where a logit is needed."""
        return self.vocab * self.hidden

    @property
    def linear_params(self) -> int:
        """Parameters of the layers' seven projections, the part every token is multiplied with."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def projection(self, name: str) -> tuple[int, int]:
        """(inputs, outputs) of the projection `name` in each layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key),
            "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }[name]

    def adapter_params(self, rank: int, targets: list[str] | tuple[str, ...]) -> int:
        """Parameters of a LoRA of `rank` on `targets`: rank x (inputs + outputs) per projection."""
        per_layer = sum(sum(self.projection(name)) for name in targets)
        return self.layers * rank * per_layer


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header; `size` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int


def unsupported(what: str, hint: str) -> UserError:
    return UserError("MODEL_UNSUPPORTED", what, hint=hint, field="model")


def parse_header(raw: bytes, name: str, file_size: int | None = None) -> dict[str, Tensor]:
    """Tensors of a safetensors file from its first bytes (8 + header).

    Raises UserError MODEL_UNSUPPORTED for anything that is not a whole, well-formed file.
    """
    hint = "Fetch the file again; it should come from a finished download."
    length = header_length(raw, name)
    if len(raw) < 8 + length:
        raise unsupported(f"{name} ends inside its header", hint)
    try:
        header = json.loads(raw[8 : 8 + length])
        named = {key: value for key, value in header.items() if key != "__metadata__"}
        entries = {key: _tensor(value) for key, value in named.items()}
        end = max((int(value["data_offsets"][1]) for value in named.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unsupported(f"{name} has a header that cannot be read ({error})", hint) from error
    if file_size is not None and file_size < 8 + length + end:
        raise unsupported(
            f"{name} is cut short: {file_size} of {8 + length + end} bytes are there", hint
        )
    return entries


def header_length(raw: bytes, name: str) -> int:
    """Length of the header that follows the first eight bytes."""
    length = struct.unpack("<Q", raw[:8])[0] if len(raw) >= 8 else 0
    if not 2 <= length <= _MAX_HEADER:
        raise unsupported(f"{name} is not a safetensors file", "Only safetensors weights are read.")
    return length


def _tensor(value: JsonObject) -> Tensor:
    start, end = value["data_offsets"]
    shape = tuple(int(size) for size in value["shape"])
    width = _DTYPE_BYTES.get(value["dtype"])
    if width is not None and end - start != width * prod(shape):
        raise ValueError(f"shape {list(shape)} does not match its {end - start} bytes")
    return Tensor(str(value["dtype"]), shape, int(end) - int(start))


def read_header(path: Path) -> dict[str, Tensor]:
    """Tensors of the safetensors file at `path`."""
    stat = path.stat()
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _read_header(path: Path, size: int, _mtime: int) -> dict[str, Tensor]:
    with open_file(path) as file:
        first = file.read(8)
        raw = first + file.read(header_length(first, path.name))
    return parse_header(raw, path.name, size)


def weight_files(folder: Path) -> list[str]:
    """Names of the weight files a folder declares: the shards of its index, or the single file.

    Raises UserError MODEL_UNSUPPORTED when there are none or only pickles.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return shards(load_json(index), index.name)
    if any((folder / ("model.safetensors" + end)).is_file() for end in ("", HEADER)):
        return ["model.safetensors"]
    names = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
    raise no_safetensors(str(folder), names)


def shards(index: JsonObject, name: str) -> list[str]:
    """Distinct file names of a shard index, each a plain name inside the folder."""
    mapping = index.get("weight_map")
    files = sorted(set(mapping.values())) if isinstance(mapping, dict) else []
    if not files or any(not isinstance(file, str) or "/" in file or "\\" in file for file in files):
        raise unsupported(f"{name} does not list weight files", "Fetch the model again.")
    return files


def no_safetensors(where: str, names: list[str]) -> UserError:
    """The refusal of a folder or repository without safetensors weights."""
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
    """A JSON object of a model folder; UserError MODEL_UNSUPPORTED when it is none."""
    try:
        with open_file(path) as file:
            value = json.loads(file.read())
    except FileNotFoundError as error:
        raise unsupported(
            f"{path.parent} has no {path.name}",
            "Point `model` at a folder written by save_pretrained.",
        ) from error
    except (ValueError, OSError, RecursionError) as error:
        raise unsupported(f"{path} cannot be read: {error}", "Fetch the file again.") from error
    if not isinstance(value, dict):
        raise unsupported(f"{path} is not a JSON object", "Fetch the file again.")
    return value


def read_facts(folder: Path) -> ModelFacts:
    """Facts of the model in `folder`. Raises UserError MODEL_UNSUPPORTED with the reason."""
    config = load_json(folder / "config.json")
    check_config(config, str(folder))
    names = weight_files(folder)
    template = check_text_files(folder)
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors.update(_stored_header(folder, name))
    return facts_from(config, tensors, template)


def check_text_files(folder: Path) -> str:
    """The chat template; refuses a folder without one or without a tokenizer."""
    if not (folder / "tokenizer.json").is_file():
        raise unsupported(
            f"{folder} has no tokenizer.json",
            "Save the tokenizer beside the model: tokenizer.save_pretrained(folder).",
        )
    return chat_template(folder)


def _stored_header(folder: Path, name: str) -> dict[str, Tensor]:
    """Tensors of a weight file, or of its header alone where the file is yet to be fetched."""
    if (folder / name).is_file():
        return read_header(folder / name)
    if (folder / (name + HEADER)).is_file():
        with open_file(folder / (name + HEADER)) as file:
            return parse_header(file.read(), name)
    raise unsupported(f"{folder} misses the weight file {name}", "Fetch the model again.")


def check_config(config: JsonObject, where: str) -> None:
    """Refuse what cannot be trained here, before any weights are looked at."""
    if config.get("auto_map"):
        raise unsupported(
            f"{where} needs its own Python code to load (auto_map in config.json)",
            "Code from a model repository is never run here. " + _USE_OTHER,
        )
    if config.get("quantization_config"):
        raise unsupported(
            f"{where} is quantized", "Use the unquantized weights (float32, bfloat16 or float16)."
        )
    architecture = _architecture(config)
    if architecture not in ARCHITECTURES:
        named = architecture or config.get("model_type") or "none named in config.json"
        raise unsupported(f"{where} has the architecture {named}", _USE_OTHER)


def _architecture(config: JsonObject) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def facts_from(config: JsonObject, tensors: dict[str, Tensor], template: str) -> ModelFacts:
    """Facts from a parsed config.json, the tensors of all weight files and the chat template."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    facts = ModelFacts(
        architecture=_architecture(config),
        hidden=hidden,
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        intermediate=_size(config, "intermediate_size"),
        vocab=_size(config, "vocab_size"),
        tied=_tied(config, tensors),
        params=_count(config, tensors),
        max_positions=_size(config, "max_position_embeddings", 2048),
        dtype=_dtype(tensors),
        weight_bytes=sum(tensor.size for tensor in tensors.values()),
        thinking="enable_thinking" in template,
    )
    _check_shapes(facts, tensors)
    return facts


def _size(config: JsonObject, key: str, default: int = 0) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise unsupported(f"config.json has {key} = {value!r}", "It must be a positive integer.")
    return value


def _tied(config: JsonObject, tensors: dict[str, Tensor]) -> bool:
    """As config.json says; where it is silent, a stored output layer means untied."""
    tied = config.get("tie_word_embeddings")
    return tied if isinstance(tied, bool) else "lm_head.weight" not in tensors


def _count(config: JsonObject, tensors: dict[str, Tensor]) -> int:
    tied = _tied(config, tensors)
    return sum(
        prod(tensor.shape)
        for name, tensor in tensors.items()
        if not (tied and name == "lm_head.weight")
    )


def _dtype(tensors: dict[str, Tensor]) -> str:
    """The type that most bytes of the weights have. Raises UserError MODEL_UNSUPPORTED."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size
    main = max(sizes, key=lambda dtype: sizes[dtype], default="")
    if main not in _DTYPE_NAMES:
        raise unsupported(
            f"the weights are stored as {main or 'nothing'}",
            "Use the unquantized weights (float32, bfloat16 or float16).",
        )
    return _DTYPE_NAMES[main]


def _check_shapes(facts: ModelFacts, tensors: dict[str, Tensor]) -> None:
    """The embedding and the last layer must be there and as large as config.json says."""
    query = (facts.heads * facts.head_dim, facts.hidden)
    expected = {
        "model.embed_tokens.weight": (facts.vocab, facts.hidden),
        f"model.layers.{facts.layers - 1}.self_attn.q_proj.weight": query,
    }
    if not facts.tied:
        expected["lm_head.weight"] = (facts.vocab, facts.hidden)
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape:
            has = list(tensor.shape) if tensor else "missing"
            raise unsupported(
                f"config.json and weights disagree: {name} should be {list(shape)}, is {has}",
                "Fetch config.json and the weights of the same version.",
            )


def chat_template(folder: Path) -> str:
    """The chat template of a model folder. Raises UserError MODEL_UNSUPPORTED without one."""
    template = _chat_templates(folder).get("default", "")
    if not template:
        raise unsupported(
            f"{folder} has no chat template, so prompts cannot be built",
            "Use the instruct or chat version of the model, or add chat_template.jinja.",
        )
    return template


def tool_template(folder: Path) -> str:
    """The template for conversations with tools, "" where the model has no other one for them."""
    return _chat_templates(folder).get("tool_use", "")


def _chat_templates(folder: Path) -> dict[str, str]:
    """The templates of a model folder by name, from the first file that holds one."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text("utf-8")}
    for name in ("chat_template.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            continue
        stored = load_json(folder / name).get("chat_template")
        if isinstance(stored, list):  # several, each with its name
            stored = {
                item.get("name"): item.get("template") for item in stored if isinstance(item, dict)
            }
        elif isinstance(stored, str):
            stored = {"default": stored}
        if isinstance(stored, dict) and stored.get("default"):
            return {str(key): text for key, text in stored.items() if isinstance(text, str)}
    return {}

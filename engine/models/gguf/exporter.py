"""Turn a model folder into a GGUF file, with weights of the kind f16 or q8_0 (blocks of 32 numbers
of 8 bits). Matrices are stored so, vectors as float32.

The file holds the vocabulary, the rule that cuts words and the chat template, so that llama.cpp and
what is built on it ask the model as it was trained. A model whose tokenizer or positions GGUF has
no name for is refused with what is missing.

Runs in the process that merged the model: it needs the package `gguf` and numpy. Memory stays at
one tensor.

Sources: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md), and the order of rows in
llama.cpp's convert_hf_to_gguf.py.
"""

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from engine.core.files import JsonObject, sync_folder
from engine.models import model_files
from engine.models.gguf import names, vocabulary
from engine.models.gguf.vocabulary import NotExportable
from engine.models.model_files import ModelFacts

KINDS = ("f16", "q8_0")
_ARCHITECTURES = {model: kind for kind, (model, _) in names.ARCHITECTURES.items()}
_ARCHITECTURES["MistralForCausalLM"] = "llama"
_LENGTH_BYTES = 8  # before the header of a safetensors file: its length
_TOP_NAMES = {name: gguf for gguf, name in names.TOP_NAMES.items()}
_LAYER_NAMES = {name: gguf for gguf, name in names.LAYER_NAMES.items()}


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor of a safetensors file.

    Attributes:
        dtype: its type in that file, such as "BF16".
        shape: as [outputs, inputs], or [size].
        first_byte: where its values begin in the file.
        reordered_heads: the number of heads by which GGUF reorders its rows; 0 if it does not.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    first_byte: int
    reordered_heads: int = 0


def export_gguf(folder: Path, file: Path, kind: str) -> None:
    """Write the model in `folder` as the GGUF file `file`, which appears complete or not at all.

    `kind`: how the weights are stored, one of KINDS. Raises NotExportable if GGUF has no name for a
    part of the model, UserError MODEL_UNSUPPORTED if the folder holds no whole model.
    """
    facts = model_files.read_facts(folder)
    config = model_files.load_json(folder / "config.json")
    architecture = _gguf_architecture(facts)
    tensors = list(_stored_tensors(folder, facts, architecture))
    metadata = _sizes(config, facts, architecture) | vocabulary.read(folder, facts.vocab)
    rope_factors = _rope_factors(config, facts)
    unfinished = file.with_name(f".{file.name}.aside")  # renamed to `file` when it is complete
    writer = GGUFWriter(unfinished, architecture)
    try:
        _add_metadata(writer, metadata, kind)
        _write_tensors(writer, tensors, rope_factors, kind)
        writer.flush()
        writer.close()
        os.replace(unfinished, file)
        sync_folder(file.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _gguf_architecture(facts: ModelFacts) -> str:
    """GGUF's name of the model's architecture. Raises NotExportable if it has none."""
    architecture = _ARCHITECTURES.get(facts.architecture)
    if architecture is None:
        raise NotExportable(f"its architecture is {facts.architecture}")
    return architecture


def _add_metadata(writer: GGUFWriter, metadata: JsonObject, kind: str) -> None:
    """Add the values by their keys, and the file's type; `kind` is one of KINDS."""
    for key, value in metadata.items():
        add_value(writer, key, value)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])


def _write_tensors(
    writer: GGUFWriter,
    tensors: Sequence[_StoredTensor],
    rope_factors: np.ndarray | None,
    kind: str,
) -> None:
    """Write the header, the metadata that the writer has, and all tensors; `kind` is one of KINDS.

    In the file the descriptions of all tensors come first, then their values in the same order.
    """
    for tensor in tensors:
        name, storage = _gguf_name(tensor.name), _storage(tensor.shape, kind)
        _describe_tensor(writer, name, tensor.shape, storage)
    if rope_factors is not None:
        shape = rope_factors.shape
        _describe_tensor(writer, names.ROPE_FACTORS, shape, GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()  # the descriptions of the tensors
    for tensor in tensors:
        storage = _storage(tensor.shape, kind)
        writer.write_tensor_data(gguf.quantize(_read(tensor), storage))
    if rope_factors is not None:
        writer.write_tensor_data(rope_factors)


def _sizes(config: JsonObject, facts: ModelFacts, architecture: str) -> JsonObject:
    """The sizes of the model and the scaling of its rotary positions, under GGUF's keys.

    Raises NotExportable for a scaling or a window that GGUF has no key for.
    """
    # A config.json has `rope_parameters`. An older one has `rope_scaling`, whose kind is called
    # `type`, and `rope_theta` (the base of the frequencies) beside it, not in it.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sizes: JsonObject = {
        "block_count": facts.layers,
        "context_length": facts.max_positions,
        "embedding_length": facts.hidden,
        "feed_forward_length": facts.intermediate,
        "attention.head_count": facts.heads,
        "attention.head_count_kv": facts.kv_heads,
        "attention.key_length": facts.head_dim,
        "attention.value_length": facts.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "rope.dimension_count": facts.head_dim,
        "rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        "vocab_size": facts.vocab,
    }
    sizes |= _rope_scaling(rope, facts.max_positions)
    # A window: how far back attention goes. Some models name one and do not use it.
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise NotExportable(f"it looks back {config['sliding_window']} tokens only")
    return {f"{architecture}.{key}": value for key, value in sizes.items()}


def _rope_scaling(rope: JsonObject, max_positions: int) -> JsonObject:
    """The scaling of the rotary positions, under GGUF's keys; {} if it needs no key.

    `rope` is the part of config.json that has it. Raises NotExportable for an unknown scaling.
    """
    scaling = rope.get("rope_type", rope.get("type", "default"))  # "type": the older key
    if scaling in ("default", "llama3"):  # Llama 3's is a tensor of the file: `_rope_factors`
        return {}
    if scaling not in ("linear", "yarn"):
        raise NotExportable(f"its rotary positions are scaled by {scaling!r}")
    keys = {"rope.scaling.type": scaling, "rope.scaling.factor": float(rope["factor"])}
    if scaling == "yarn":
        original = rope.get("original_max_position_embeddings", max_positions)
        keys["rope.scaling.original_context_length"] = int(original)
    return keys


def _rope_factors(config: JsonObject, facts: ModelFacts) -> np.ndarray | None:
    """The number by which Llama 3's scaling divides each rotary frequency; None for other models.

    The formula is that of transformers' modeling_rope_utils for Llama 3.1.
    """
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    frequency_count = facts.head_dim // 2
    exponents = np.arange(frequency_count) / frequency_count
    wavelengths = 2 * np.pi * float(rope["rope_theta"]) ** exponents
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    # 0 for long waves, whose frequency is divided by `factor`; 1 for short ones, which stay.
    unscaled_share = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    scale = (1 - unscaled_share) / float(rope["factor"]) + unscaled_share
    return (1.0 / scale).astype(np.float32)


def _stored_tensors(folder: Path, facts: ModelFacts, architecture: str) -> Iterator[_StoredTensor]:
    """Yield the tensors of a model folder in the form in which the GGUF file stores them.

    An output layer that shares the weights of the embedding is left out. For the `architecture`
    "llama" the query and key projections are marked to be reordered, by their number of heads.
    """
    # The projections whose rows GGUF stores in another order, with their number of heads.
    heads_by_projection: dict[str, int] = {}
    if architecture == "llama":
        heads_by_projection = {"q_proj": facts.heads, "k_proj": facts.kv_heads}
    for file_name in model_files.weight_files(folder):
        for tensor in _tensors_of_file(folder / file_name):
            if tensor.name == "lm_head.weight" and facts.tied:
                continue
            projection = tensor.name.split(".")[-2]  # such as "q_proj" of "...q_proj.weight"
            heads = heads_by_projection.get(projection, 0)  # 0: the order stays
            yield replace(tensor, reordered_heads=heads)


def _tensors_of_file(path: Path) -> Iterator[_StoredTensor]:
    """The tensors of a safetensors file: it holds the length of its header, the header as JSON,
    then the values, whose places the header counts from its own end."""
    with open(path, "rb") as file:
        [header_bytes] = struct.unpack("<Q", file.read(_LENGTH_BYTES))
        header: JsonObject = json.loads(file.read(header_bytes))
    for name, entry in header.items():
        if name == "__metadata__":  # no tensor
            continue
        yield _StoredTensor(
            file=path,
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            first_byte=_LENGTH_BYTES + header_bytes + entry["data_offsets"][0],
        )


def _gguf_name(name: str) -> str:
    """GGUF's name of a tensor, such as "blk.3.attn_q.weight" for
    "model.layers.3.self_attn.q_proj.weight". Raises NotExportable if it has none."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    prefix, _, layer_and_path = name.partition("model.layers.")
    layer, _, path = layer_and_path.partition(".")
    projection, _, ending = path.rpartition(".")
    if prefix or projection not in _LAYER_NAMES:  # a prefix: of another part, or of no layer at all
        raise NotExportable(f"GGUF has no name for the tensor {name}")
    return f"blk.{layer}.{_LAYER_NAMES[projection]}.{ending}"


def _storage(shape: tuple[int, ...], kind: str) -> GGMLQuantizationType:
    """The type in which a tensor of this shape is stored: float32 for a vector, float16 where a row
    does not divide into the blocks of the type of `kind` (one of KINDS), and else that type."""
    if len(shape) == 1:
        return GGMLQuantizationType.F32
    wanted = GGMLQuantizationType[kind.upper()]
    numbers_per_block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return GGMLQuantizationType.F16 if shape[-1] % numbers_per_block else wanted


def _describe_tensor(
    writer: GGUFWriter, name: str, shape: tuple[int, ...], storage: GGMLQuantizationType
) -> None:
    """Add the description of a tensor, whose values are written later as the type `storage`. To the
    writer the tensor is one of plain bytes, since numpy has no quantized types."""
    bytes_shape = gguf.quant_shape_to_byte_shape(shape, storage)
    size = int(np.prod(bytes_shape))
    writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), size, raw_dtype=storage)


def _read(tensor: _StoredTensor) -> np.ndarray:
    """The values of a tensor in float32, its rows in GGUF's order.

    Raises NotExportable if they are stored in another type than F32, F16 and BF16.
    """
    # numpy has no bfloat16: the two bytes of a value are read as they are, and widened below.
    numpy_types = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    if tensor.dtype not in numpy_types:
        raise NotExportable(f"the tensor {tensor.name} is stored as {tensor.dtype}")
    values = np.fromfile(
        tensor.file,
        dtype=numpy_types[tensor.dtype],
        count=int(np.prod(tensor.shape)),
        offset=tensor.first_byte,
    ).reshape(tensor.shape)
    if tensor.dtype == "BF16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    values = values.astype(np.float32)
    if tensor.reordered_heads:
        values = _reordered_rows(values, tensor.reordered_heads)
    return values


def _reordered_rows(values: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a projection, which come in transformers' order, in GGUF's order.

    Rotary positions turn two rows of a head together: these stand half a head apart in
    transformers, and side by side in GGUF.
    """
    pairs_per_head = values.shape[0] // heads // 2
    by_half = values.reshape(heads, 2, pairs_per_head, *values.shape[1:])
    return np.ascontiguousarray(by_half.swapaxes(1, 2).reshape(values.shape))


def add_value(writer: GGUFWriter, key: str, value: object) -> None:
    """Add one value to the metadata of a GGUF file under `key`.

    A text, a truth value, an integer, a float or a list is written; any other value is left out.
    """
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):  # before int, because a bool is an int as well
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)

"""Turns a model folder into a GGUF file with weights of the kind f16, or q8_0 (blocks of 32 numbers
of 8 bits each). Matrices are stored in that kind, vectors as float32.

The file holds the vocabulary, the rule that cuts text into words and the chat template, so that
llama.cpp and programs built on it prompt the model as it was trained. A model with a tokenizer or
positions that GGUF has no name for is refused, with a message that says what is missing.

This code runs in the process that merged the model: it needs the package `gguf` and numpy. It holds
one tensor in memory at a time.

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
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header, in 8 bytes
_TOP_NAMES = {name: gguf for gguf, name in names.TOP_NAMES.items()}
_LAYER_NAMES = {name: gguf for gguf, name in names.LAYER_NAMES.items()}


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor of a safetensors file.

    Attributes:
        dtype: the type of its values in that file, such as "BF16".
        shape: (outputs, inputs) of a matrix, or (size,) of a vector.
        first_byte: where its values begin in the file, in bytes.
        reordered_heads: the number of attention heads, if GGUF stores the tensor's rows in another
            order within each head; 0 if the order stays.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    first_byte: int
    reordered_heads: int = 0


def export_gguf(folder: Path, file: Path, kind: str) -> None:
    """Write the model in `folder` as the GGUF file `file`, which appears complete or not at all.

    `kind` is how the weights are stored, one of KINDS. Raises NotExportable if GGUF has no name for
    a part of the model, UserError MODEL_UNSUPPORTED if the folder holds no complete model.
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
    """Return GGUF's name of the model's architecture. Raises NotExportable if GGUF has none."""
    architecture = _ARCHITECTURES.get(facts.architecture)
    if architecture is None:
        raise NotExportable(f"its architecture is {facts.architecture}")
    return architecture


def _add_metadata(writer: GGUFWriter, metadata: JsonObject, kind: str) -> None:
    """Add the metadata, and the file type that follows from `kind` (one of KINDS), to the GGUF
    file."""
    for key, value in metadata.items():
        add_value(writer, key, value)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])


def _write_tensors(
    writer: GGUFWriter,
    tensors: Sequence[_StoredTensor],
    rope_factors: np.ndarray | None,
    kind: str,
) -> None:
    """Write the header, the metadata that was added to the writer, and all tensors.

    `kind` is one of KINDS. The file holds the descriptions of all tensors first, then their values
    in the same order.
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
        writer.write_tensor_data(gguf.quantize(_values_of(tensor), storage))
    if rope_factors is not None:
        writer.write_tensor_data(rope_factors)


def _sizes(config: JsonObject, facts: ModelFacts, architecture: str) -> JsonObject:
    """Return the sizes of the model and the scaling of its rotary positions, under GGUF's keys.

    Raises NotExportable if GGUF has no key for the scaling, or the model attends to a sliding
    window.
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
    # A sliding window limits how far back attention reaches. Some models name one without using it.
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise NotExportable(f"it looks back {config['sliding_window']} tokens only")
    return {f"{architecture}.{key}": value for key, value in sizes.items()}


def _rope_scaling(rope: JsonObject, max_positions: int) -> JsonObject:
    """Return the scaling of the rotary positions under GGUF's keys, or {} if none is needed.

    `rope` is the part of config.json that describes the positions. Raises NotExportable for an
    unknown scaling.
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
    """Return the number by which Llama 3's scaling divides each rotary frequency, shape [head_dim /
    2]. Returns None for models without this scaling.

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
    """Yield the tensors of a model folder with the order of rows that the GGUF file needs.

    An output layer that shares the weights of the embedding is left out. For the `architecture`
    "llama", the query and key projections get their number of heads, by which their rows are
    reordered.
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
    """Yield the tensors that a safetensors file describes in its header.

    The file holds the length of the header, the header as JSON, then the values. The header counts
    the places of the values from its own end.
    """
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
    """Return GGUF's name of a tensor, e.g. "blk.3.attn_q.weight" for
    "model.layers.3.self_attn.q_proj.weight". Raises NotExportable if GGUF has none."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    prefix, _, layer_and_path = name.partition("model.layers.")
    layer, _, path = layer_and_path.partition(".")
    projection, _, ending = path.rpartition(".")
    # A prefix means that the tensor belongs to another part of the model, or to no layer.
    if prefix or projection not in _LAYER_NAMES:
        raise NotExportable(f"GGUF has no name for the tensor {name}")
    return f"blk.{layer}.{_LAYER_NAMES[projection]}.{ending}"


def _storage(shape: tuple[int, ...], kind: str) -> GGMLQuantizationType:
    """Return the type in which GGUF stores a tensor of this shape.

    A vector is float32. A matrix has the type of `kind` (one of KINDS), or float16 if its rows
    cannot be divided into blocks of that type.
    """
    if len(shape) == 1:
        return GGMLQuantizationType.F32
    wanted = GGMLQuantizationType[kind.upper()]
    numbers_per_block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return GGMLQuantizationType.F16 if shape[-1] % numbers_per_block else wanted


def _describe_tensor(
    writer: GGUFWriter, name: str, shape: tuple[int, ...], storage: GGMLQuantizationType
) -> None:
    """Add the description of a tensor whose values are written later in the type `storage`.

    The writer is told that the tensor consists of bytes, because numpy has no quantized types.
    """
    bytes_shape = gguf.quant_shape_to_byte_shape(shape, storage)
    size = int(np.prod(bytes_shape))
    writer.add_tensor_info(name, bytes_shape, np.dtype(np.uint8), size, raw_dtype=storage)


def _values_of(tensor: _StoredTensor) -> np.ndarray:
    """Return the values of a tensor in float32, with its rows in GGUF's order.

    Raises NotExportable if the file stores them in a type other than F32, F16 and BF16.
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
    """Reorder the rows of a projection from transformers' order to GGUF's.

    Rotary positions rotate two rows of a head together. In transformers these two stand half a head
    apart, in GGUF side by side.
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

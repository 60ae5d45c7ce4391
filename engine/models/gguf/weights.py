"""Checks the tensors of a GGUF file and writes them as a safetensors file.

Quantized weights are stored as float16, whose rounding error is far below that of any quantization;
other weights keep their type.
"""

import json
import os
import struct
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.files import JsonObject
from engine.models.gguf import names
from engine.models.gguf.tokenizer import NotImportable

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor

_SHOWN_TENSORS = 3  # how many tensors a message names
_MAX_FLOAT16 = 65504.0  # the largest finite number
_BFLOAT16_EXPONENT = 0x7F80  # the bits of the exponent, which are all ones in NaN and infinity


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the new safetensors file.

    Attributes:
        source: the tensor in the GGUF file.
        name: the tensor's name in transformers.
        dtype: its type in the new file: F32, F16 or BF16.
        shape: its shape in transformers: (outputs, inputs), or (size,).
        reordered_heads: the number of attention heads, if GGUF stores the tensor's rows in another
            order within each head; 0 if the order stays.
    """

    source: "ReaderTensor"
    name: str
    dtype: str
    shape: tuple[int, ...]
    reordered_heads: int = 0


def stored_tensors(reader: "GGUFReader", config: JsonObject) -> list[StoredTensor]:
    """Return the tensors to write, in the order of the GGUF file.

    Raises NotImportable if a tensor is unknown, missing, or of another shape than `config` (the
    content of config.json) demands.
    """
    # The factors of the rotary positions are no weight here: they become a part of config.json.
    tensors = [tensor for tensor in reader.tensors if tensor.name != names.ROPE_FACTORS]
    stored = [_stored_tensor(tensor, config) for tensor in tensors]
    _require_layers(config, _names_by_layer(tensor.name for tensor in tensors))
    _require_shapes(config, stored)
    return stored


def _names_by_layer(tensor_names: Iterable[str]) -> dict[int, set[str]]:
    """Return GGUF's names of the tensors in each layer, by the layer's number.

    The names lack that number: "blk.3.attn_q.weight" becomes "attn_q.weight" of layer 3.
    """
    names_by_layer: dict[int, set[str]] = {}
    for name in tensor_names:
        if name not in names.TOP_NAMES:
            layer, part, ending = _layer_name(name)
            names_by_layer.setdefault(int(layer), set()).add(f"{part}.{ending}")
    return names_by_layer


def _layer_name(name: str) -> tuple[str, str, str]:
    """Split GGUF's name of a layer's tensor, e.g. "blk.3.attn_q.weight" into ("3", "attn_q",
    "weight"). Raises NotImportable for any other name."""
    match = names.LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in names.LAYER_NAMES:
        raise NotImportable(f"the tensor {name} is unknown")
    return match[1], match[2], match[3]


def _stored_tensor(tensor: "ReaderTensor", config: JsonObject) -> StoredTensor:
    """Give a tensor of the GGUF file the name, type and shape for the safetensors file. Raises
    NotImportable if transformers has no name for it."""
    shape = tuple(int(size) for size in tensor.shape[::-1])  # GGUF names the inputs first
    dtype = _dtype(tensor)
    if tensor.name in names.TOP_NAMES:
        return StoredTensor(tensor, names.TOP_NAMES[tensor.name], dtype, shape)
    layer, part, ending = _layer_name(tensor.name)
    name = f"model.layers.{layer}.{names.LAYER_NAMES[part]}.{ending}"
    reordered_heads = _reordered_heads(config, part)
    return StoredTensor(tensor, name, dtype, shape, reordered_heads=reordered_heads)


def _require_layers(config: JsonObject, tensors_of_layer: dict[int, set[str]]) -> None:
    """Raise NotImportable unless every layer has exactly the tensors of its architecture.

    `tensors_of_layer` maps a layer's number to GGUF's names of its tensors without that number,
    such as "attn_q.weight".
    """
    # One set of names, or two (without and with biases) if the architecture allows both.
    choices = names.LAYER_TENSORS[config["model_type"]]
    first_layer = tensors_of_layer.get(0, set())

    def difference(choice: AbstractSet[str]) -> int:
        """Count the tensors that only one of this choice and the first layer has."""
        return len(choice ^ first_layer)

    # With biases, if the first layer has some.
    required = min(choices, key=difference)
    layers = range(config["num_hidden_layers"])
    for layer in layers:
        _require_layer(layer, tensors_of_layer.get(layer, set()), required, config["model_type"])
    if beyond := sorted(set(tensors_of_layer) - set(layers)):
        raise NotImportable(f"it has a layer {beyond[0]} beyond its block_count")


def _require_layer(
    layer: int, actual: AbstractSet[str], required: AbstractSet[str], model_type: str
) -> None:
    """Raise NotImportable unless layer number `layer` has exactly the required tensors.

    `actual` are the names of the tensors it has, `required` those of the architecture `model_type`.
    """
    if missing := required - actual:
        raise NotImportable(f"layer {layer} has no {_first_names(missing)}")
    if unknown := actual - required:
        raise NotImportable(
            f"layer {layer} has {_first_names(unknown)}, which the architecture {model_type} "
            "has not"
        )


def _first_names(tensors: AbstractSet[str]) -> str:
    """Return the alphabetically first few names of the tensors, as a text for a message."""
    return ", ".join(sorted(tensors)[:_SHOWN_TENSORS])


def _require_shapes(config: JsonObject, stored: list[StoredTensor]) -> None:
    """Raise NotImportable if a tensor has another shape than the sizes in `config` demand, or if
    the norm after the last layer is missing."""
    shapes = _matrix_shapes(config)
    for tensor in stored:
        module = tensor.name.split(".")[-2]  # such as "q_proj" of "...q_proj.weight"
        # Every module that is not in `shapes` is a norm of the hidden state.
        shape = shapes.get(module, (config["hidden_size"],))
        if tensor.name.endswith(".bias"):
            shape = shape[:1]  # a bias has one value per output of its matrix
        if tensor.shape != shape:
            raise NotImportable(
                f"the tensor {tensor.source.name} is {list(tensor.shape)}, "
                f"the sizes say {list(shape)}"
            )
    if "model.norm.weight" not in {tensor.name for tensor in stored}:
        raise NotImportable("the file has no tensor output_norm.weight")


def _matrix_shapes(config: JsonObject) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the weights must have, by the names of their modules in transformers:
    (outputs, inputs) for a matrix, (length,) for the norms of queries and keys."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    inner = config["intermediate_size"]  # width of the MLP
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    return {
        "embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "q_norm": (config["head_dim"],),
        "k_norm": (config["head_dim"],),
    }


def _reordered_heads(config: JsonObject, part: str) -> int:
    """Return the number of attention heads of a projection whose rows GGUF stores in another order
    than transformers, or 0 if the order is the same. `part` is GGUF's name of the projection."""
    # Rotary positions rotate two rows together. In models of the type llama, llama.cpp puts these
    # two side by side; in all others they stand half a head apart, as in transformers.
    if config["model_type"] != "llama":
        return 0
    counts = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return counts.get(part, 0)


def _dtype(tensor: "ReaderTensor") -> str:
    """Return the type that a tensor gets in the safetensors file: F32, BF16 or F16."""
    gguf_type = tensor.tensor_type.name
    return gguf_type if gguf_type in ("F32", "BF16") else "F16"


def write(path: Path, stored: list[StoredTensor]) -> None:
    """Write the tensors to the safetensors file `path`, one after the other.

    Raises NotImportable if a weight is not finite or too large for its type.
    """
    header = _header(stored)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in stored:
            file.write(_array(tensor).tobytes())
        file.flush()
        os.fsync(file.fileno())


def _header(stored: list[StoredTensor]) -> bytes:
    """Make the header of a safetensors file: the type, shape and place of each tensor, as JSON.

    `stored` are the tensors in the order of their values. A place is a pair of byte offsets (start,
    end) counted from the end of the header. Spaces pad the header to a multiple of 8 bytes.
    """
    entries: JsonObject = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in stored:
        bytes_per_number = 4 if tensor.dtype == "F32" else 2  # the other types have 16 bits
        end = offset + prod(tensor.shape) * bytes_per_number
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8)  # the data must begin at a multiple of 8


def _array(stored: StoredTensor) -> "np.ndarray":
    """Return the values of a tensor as they are written to the safetensors file.

    Raises NotImportable if a value is NaN, infinite, or too large for float16 (if the tensor
    becomes float16), or if the GGUF file stores the tensor in an unknown type.
    """
    import numpy as np  # noqa: PLC0415  only in the importing process

    source = stored.source
    if stored.dtype == "BF16":  # two bytes per number, which numpy has no type for
        array = np.frombuffer(source.data.tobytes(), dtype=np.uint16).reshape(stored.shape)
        # All bits of the exponent are set in NaN and infinity alone.
        is_finite = (array & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT
    else:
        array = _dequantized(source).reshape(stored.shape)
        is_finite = np.isfinite(array)
    if not is_finite.all():
        raise NotImportable(f"the tensor {source.name} holds NaN or infinity")
    if stored.dtype == "F16":
        array = _as_float16(array, source.name)
    if stored.reordered_heads:
        array = _original_rows(array, stored.reordered_heads)
    return np.ascontiguousarray(array)


def _as_float16(array: "np.ndarray", name: str) -> "np.ndarray":
    """Convert the values of the tensor `name` to float16. Raises NotImportable if one is too
    large."""
    if abs(array).max() > _MAX_FLOAT16:
        raise NotImportable(f"the tensor {name} has values beyond float16")
    return array.astype("float16")


def _dequantized(tensor: "ReaderTensor") -> "np.ndarray":
    """Convert the values of a tensor of the GGUF file to float32. Raises NotImportable if the
    package `gguf` cannot convert its type."""
    from gguf import dequantize  # noqa: PLC0415  only in the importing process

    try:
        return dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise NotImportable(
            f"the tensor {tensor.name} is stored as {tensor.tensor_type.name}, which cannot be "
            "turned back"
        ) from error


def _original_rows(array: "np.ndarray", heads: int) -> "np.ndarray":
    """Reorder the rows of a projection from llama.cpp's order to transformers'.

    Rotary positions rotate two rows of a head together. In llama.cpp these two stand side by side,
    in transformers half a head apart.
    """
    pairs_per_head = array.shape[0] // heads // 2
    by_pair = array.reshape(heads, pairs_per_head, 2, *array.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(array.shape)

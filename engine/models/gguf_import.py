"""Turn a GGUF file into a model folder:
`python -P -m engine.models.gguf_import FILE FOLDER SOURCE LICENSE`.

The folder gets config.json, model.safetensors, tokenizer.json, tokenizer_config.json,
generation_config.json and chat_template.jinja, so everything else here treats it as any other model
folder, and model.json with SOURCE and LICENSE. Only architectures whose weights and tokenizer can
be restored exactly are taken; anything else is refused with the name of what is missing.

Runs in a process of its own, with the interpreter of the workers: it needs the package `gguf` and
numpy. Memory stays at one tensor, because weights are written one after the other.

Sources: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md), and the order of rows in
llama.cpp's convert_hf_to_gguf.py.
"""

import hashlib
import json
import os
import re
import shutil
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.errors import UserError
from engine.models import gguf_tokenizer, model_files, model_origin
from engine.models.gguf_tokenizer import NotImportable
from engine.models.model_origin import ModelOrigin

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor

ERROR_STATUS = 3  # exit status after a refusal; the reason is on stdout as {"error": ...}
# GGUF architecture -> (transformers' architecture, model_type).
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
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
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# The factors of Llama 3.1 and 3.2 (their config.json), which GGUF stores as one number per
# frequency; `factor` is found by trying.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3_FACTORS = (8.0, 16.0, 32.0)
_MAX_FLOAT16 = 65504.0


@dataclass(frozen=True)
class _Stored:
    """A tensor of the new safetensors file.

    Attributes:
        source: the tensor in the GGUF file.
        name: its name in transformers.
        dtype: its type in the file: F32, F16 or BF16.
        shape: as transformers has it: (outputs, inputs), or (size,).
        heads: number of heads by which rows were reordered for GGUF; 0 if they were not.
    """

    source: "ReaderTensor"
    name: str
    dtype: str
    shape: tuple[int, ...]
    heads: int = 0


def import_gguf(file: Path, folder: Path, source: str = "", license_name: str = "") -> None:
    """Write the model of the GGUF file `file` to `folder`, which must not exist.

    The folder appears complete or not at all. Weights that were quantized are stored as float16,
    whose rounding is far below that of any quantization; the others keep their type.

    Args:
        source: where the file came from, for model.json; "" for its path.
        license_name: for model.json; "" for what the file says.

    Raises:
        NotImportable: the file is damaged, or something is missing or unknown.
    """
    # Imported late, so that control processes can read this module's names without numpy.
    from gguf import GGUFReader, LlamaFileType  # noqa: PLC0415

    try:
        reader = GGUFReader(file)
    except (ValueError, KeyError, IndexError, OSError, OverflowError, struct.error) as error:
        raise NotImportable(f"{file.name} is no complete GGUF file ({error})") from error
    values = _Metadata(reader)
    file_type = int(values.number("general.file_type", -1))
    config = _config(values, reader)
    stored = _stored_tensors(reader, config)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.aside")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        gguf_tokenizer.write(aside, values)
        _write_json(aside / "config.json", config)
        end_tokens = {config["eos_token_id"], values.number("tokenizer.ggml.eot_token_id", -1)}
        _write_json(
            aside / "generation_config.json",
            {"bos_token_id": config["bos_token_id"], "eos_token_id": sorted(end_tokens - {-1})},
        )
        _write_weights(aside / "model.safetensors", stored)
        origin = ModelOrigin(
            source=source or str(file),
            sha256=_sha256(file),
            file_type=LlamaFileType(file_type).name if file_type >= 0 else "",
            license=license_name or values.text("general.license", ""),
        )
        origin.write(aside / model_origin.FILE)
        try:
            model_files.read_facts(aside)  # what every user of the folder will read
        except UserError as error:
            raise NotImportable(str(error)) from error
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class _Metadata:
    """The key-value part of a GGUF file."""

    def __init__(self, reader: "GGUFReader") -> None:
        self._fields = reader.fields

    def get(self, key: str) -> Any:
        """The value of `key`: a number, text, truth value or list; None if the file lacks it."""
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def number(self, key: str, default: float | None = None) -> Any:
        """The number at `key`. Raises NotImportable if it is missing and there is no default."""
        value = self.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if default is None:
            raise NotImportable(f"the file has no {key}")
        return default

    def text(self, key: str, default: str | None = None) -> str:
        """The text at `key`. Raises NotImportable if it is missing and there is no default."""
        value = self.get(key)
        if isinstance(value, str):
            return value
        if default is None:
            raise NotImportable(f"the file has no {key}")
        return default


def _config(values: _Metadata, reader: "GGUFReader") -> dict[str, Any]:
    """transformers' config.json for the model.

    Raises NotImportable if the architecture is none of `ARCHITECTURES` or a size is missing.
    """
    kind = values.text("general.architecture")
    if kind not in ARCHITECTURES:
        raise NotImportable(
            f"its architecture is {kind}; taken are {', '.join(ARCHITECTURES)}, others as "
            "safetensors folders"
        )
    if values.number(f"{kind}.expert_count", 0):
        raise NotImportable("it is a mixture of experts, which GGUF files are not taken of")
    architecture, model_type = ARCHITECTURES[kind]
    heads = values.number(f"{kind}.attention.head_count")
    hidden = values.number(f"{kind}.embedding_length")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise NotImportable("the file has no tensor token_embd.weight")
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": values.number(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.number(f"{kind}.attention.head_count_kv", heads),
        "head_dim": values.number(f"{kind}.attention.key_length", hidden // heads),
        "intermediate_size": values.number(f"{kind}.feed_forward_length"),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": values.number(f"{kind}.context_length"),
        # float32 in the file: 1e-6 is stored as 9.99999997e-07.
        "rms_norm_eps": float(f"{values.number(f'{kind}.attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors and kind == "llama",
        "bos_token_id": values.number("tokenizer.ggml.bos_token_id", -1),
        "eos_token_id": values.number("tokenizer.ggml.eos_token_id"),
        "rope_parameters": _rope(values, kind, tensors.get(_ROPE_FACTORS)),
        "dtype": "float16",
    }
    if config["bos_token_id"] == -1:
        config["bos_token_id"] = None
    return config


def _rope(values: _Metadata, kind: str, factors: "ReaderTensor | None") -> dict[str, Any]:
    """transformers' rope_parameters. Raises NotImportable for a scaling that is not known."""
    theta = float(values.number(f"{kind}.rope.freq_base", 10000.0))
    scaling = values.text(f"{kind}.rope.scaling.type", "none")
    if factors is not None:
        return {"rope_theta": theta, **_llama3_rope(theta, factors.data)}
    if scaling == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    scale = float(values.number(f"{kind}.rope.scaling.factor"))
    if scaling == "linear":
        return {"rope_theta": theta, "rope_type": "linear", "factor": scale}
    if scaling == "yarn":
        original = values.number(f"{kind}.rope.scaling.original_context_length")
        return {
            "rope_theta": theta,
            "rope_type": "yarn",
            "factor": scale,
            "original_max_position_embeddings": original,
        }
    raise NotImportable(f"its rotary positions are scaled by {scaling!r}, which is not known here")


def _llama3_rope(theta: float, factors: "np.ndarray") -> dict[str, Any]:
    """The parameters of Llama 3's scaling that give the stored `factors`, one per frequency.

    Raises NotImportable if none does.
    """
    import numpy as np  # noqa: PLC0415  only in the importing process

    size = len(factors)
    wavelengths = 2 * np.pi * theta ** (np.arange(size) / size)
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    original = _LLAMA3_ROPE["original_max_position_embeddings"]
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    for factor in _LLAMA3_FACTORS:
        # Frequencies are divided by a factor that goes from `factor` (long waves) to 1 (short).
        if np.allclose(factors, 1.0 / ((1 - smooth) / factor + smooth), rtol=1e-3):
            return {**_LLAMA3_ROPE, "factor": factor}
    raise NotImportable(f"{_ROPE_FACTORS} holds factors that are not those of Llama 3")


def _stored_tensors(reader: "GGUFReader", config: dict[str, Any]) -> list[_Stored]:
    """The tensors to write, in the order of the file.

    Raises NotImportable if one is unknown, or if a layer lacks one that another layer has.
    """
    stored: list[_Stored] = []
    layers_with: dict[str, set[int]] = {}
    for tensor in reader.tensors:
        if tensor.name == _ROPE_FACTORS:
            continue
        shape = tuple(int(size) for size in tensor.shape[::-1])  # GGUF names the inputs first
        match = _LAYER_TENSOR.fullmatch(tensor.name)
        if tensor.name in _TOP_NAMES:
            stored.append(_Stored(tensor, _TOP_NAMES[tensor.name], _dtype(tensor), shape))
            continue
        if match is None or match[2] not in _LAYER_NAMES:
            raise NotImportable(f"the tensor {tensor.name} is unknown")
        layers_with.setdefault(f"{match[2]}.{match[3]}", set()).add(int(match[1]))
        name = f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
        heads = _reordered_heads(config, match[2])
        stored.append(_Stored(tensor, name, _dtype(tensor), shape, heads))
    every_layer = set(range(config["num_hidden_layers"]))
    for name, layers in layers_with.items():
        if layers != every_layer:
            missing = sorted(every_layer - layers)
            raise NotImportable(f"layers {missing[:5]} have no {name}")
    return stored


def _reordered_heads(config: dict[str, Any], part: str) -> int:
    """The number of heads by which llama.cpp reordered the rows of a layer's `part`; 0 if it did
    not. Only the llama architecture rotates neighbouring rows there, halves here."""
    if config["model_type"] != "llama":
        return 0
    counts = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return counts.get(part, 0)


def _dtype(tensor: "ReaderTensor") -> str:
    """The type in which a tensor is stored."""
    kind = tensor.tensor_type.name
    return kind if kind in ("F32", "BF16") else "F16"


def _write_weights(path: Path, stored: list[_Stored]) -> None:
    """Write a safetensors file, one tensor after the other.

    Raises NotImportable if a weight is not finite or does not fit its type.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for each in stored:
        size = _elements(each.shape) * (4 if each.dtype == "F32" else 2)
        offsets = [offset, offset + size]
        header[each.name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": offsets}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data must begin at a multiple of 8
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in map(_array, stored):
            file.write(memoryview(array).cast("B"))
        file.flush()
        os.fsync(file.fileno())


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _array(stored: _Stored) -> "np.ndarray":
    """The values of a tensor as they are written. Raises NotImportable as `_write_weights` does."""
    import numpy as np  # noqa: PLC0415  only in the importing process
    from gguf import dequantize  # noqa: PLC0415

    source = stored.source
    if stored.dtype == "BF16":  # two bytes per number, which numpy has no type for
        array = np.frombuffer(source.data.tobytes(), dtype=np.uint16).reshape(stored.shape)
    else:
        array = dequantize(source.data, source.tensor_type).reshape(stored.shape)
        if not np.isfinite(array).all():
            raise NotImportable(f"the tensor {source.name} holds NaN or infinity")
        if stored.dtype == "F16":
            if np.abs(array).max() > _MAX_FLOAT16:
                raise NotImportable(f"the tensor {source.name} has values beyond float16")
            array = array.astype(np.float16)
    if stored.heads:
        array = _original_rows(array, stored.heads)
    return np.ascontiguousarray(array)


def _original_rows(array: "np.ndarray", heads: int) -> "np.ndarray":
    """Undo llama.cpp's order of rows: it puts the rows that rotate together next to each other,
    transformers half a head apart."""
    pairs = array.shape[0] // heads // 2
    by_pair = array.reshape(heads, pairs, 2, *array.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(array.shape)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(file: str, folder: str, source: str, license_name: str) -> int:
    """Import a file and print one line of JSON: {}, or {"error": reason} after a refusal.

    Returns the exit status: 0, or `ERROR_STATUS` after a refusal.
    """
    reason = ""
    try:
        import_gguf(Path(file), Path(folder), source, license_name)
    except ImportError as error:
        reason = f"the package {error.name} is not installed"
    except (NotImportable, OSError) as error:
        reason = str(error)
    sys.stdout.write(json.dumps({"error": reason} if reason else {}) + "\n")
    return ERROR_STATUS if reason else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5]))

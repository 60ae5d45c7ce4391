"""Turns a GGUF file into a model folder: `python -P -m engine.models.gguf.importer FILE FOLDER
SOURCE LICENSE`.

The folder gets config.json, model.safetensors, tokenizer.json, tokenizer_config.json,
generation_config.json and chat_template.jinja, so that the rest of the code can treat it like any
other model folder, and model.json with SOURCE and LICENSE. A file is refused, with a message that
says why, unless its weights and tokenizer can be restored exactly.

This code runs in a process of its own with the interpreter of the workers, because it needs the
package `gguf` and numpy. It writes one tensor after the other and holds only that one in memory.

Sources: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md), and the order of rows in
llama.cpp's convert_hf_to_gguf.py.
"""

import hashlib
import json
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.errors import UserError
from engine.core.files import JsonObject, sync_folder
from engine.models import model_files
from engine.models.gguf import names, tokenizer, weights
from engine.models.gguf.tokenizer import NotImportable
from engine.records import model_origin
from engine.records.model_origin import ModelOrigin

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor

ERROR_STATUS = 3  # exit status after a refusal; the reason is on stdout as {"error": ...}
_NO_FILE_TYPE = -1  # stands for a file that does not name the type of its weights
# The position scaling of Llama 3.1 and 3.2, from their config.json. A GGUF file stores only the
# resulting number per frequency, so each known `factor` is tried until one gives these numbers.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3_FACTORS = (8.0, 16.0, 32.0)


def import_gguf(file: Path, folder: Path, source: str = "", license_name: str = "") -> None:
    """Write the model of the GGUF file `file` to `folder`, which must not exist and appears
    complete or not at all.

    `source` and `license_name` are written to model.json. An empty `source` stands for the file's
    path, an empty `license_name` for the license that the file names. Raises NotImportable if the
    file is damaged, or something in it is missing or unknown.
    """
    reader = _open_gguf(file)
    values = _Metadata(reader)
    _require_whole_model(values)
    file_type = int(values.number("general.file_type", default=_NO_FILE_TYPE))
    config = _config(values, reader)
    stored = weights.stored_tensors(reader, config)
    unfinished = _empty_folder_beside(folder)
    try:
        _write_model(unfinished, values, config, stored)
        origin = ModelOrigin(
            source=source or str(file),
            sha256=_sha256(file),
            file_type=_file_type_name(file_type),
            license=license_name or values.text("general.license", default=""),
        )
        origin.write(unfinished / model_origin.FILE)
        _require_usable(unfinished)
        _move_into_place(unfinished, folder)
    finally:  # after a failure; otherwise it has become `folder`
        shutil.rmtree(unfinished, ignore_errors=True)


def _empty_folder_beside(folder: Path) -> Path:
    """Create an empty folder beside `folder`, in which the model is written before it is
    renamed."""
    # The name is always the same, so that an import removes what a killed import left behind.
    unfinished = folder.with_name(f".{folder.name}.aside")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def _write_model(
    folder: Path, values: "_Metadata", config: JsonObject, stored: list[weights.StoredTensor]
) -> None:
    """Write the files of the model to `folder`.

    Args:
        values: the metadata of the GGUF file, which holds the tokenizer too.
        config: the content of the model's config.json.
        stored: the model's tensors.
    """
    tokenizer.write(folder, values)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config, values))
    weights.write(folder / "model.safetensors", stored)


def _file_type_name(file_type: int) -> str:
    """Return llama.cpp's name of a file type, such as "MOSTLY_Q8_0", or "" for `_NO_FILE_TYPE`."""
    # Imported late, so that control processes can read this module's names without numpy.
    from gguf import LlamaFileType  # noqa: PLC0415

    return LlamaFileType(file_type).name if file_type >= 0 else ""


def _move_into_place(finished: Path, folder: Path) -> None:
    """Rename the folder `finished` to `folder`, so that not even a power failure leaves half a
    model."""
    sync_folder(finished)
    os.replace(finished, folder)
    sync_folder(folder.parent)


def _open_gguf(file: Path) -> "GGUFReader":
    """Open the GGUF file for reading. Raises NotImportable if the file is damaged or big-endian."""
    # Imported late, so that control processes can read this module's names without numpy.
    from gguf import GGUFReader  # noqa: PLC0415

    try:
        reader = GGUFReader(file)
    # All that the package raises for a file that is cut short or of another kind.
    except (ValueError, KeyError, IndexError, OSError, OverflowError, struct.error) as error:
        raise NotImportable(f"{file.name} is no complete GGUF file ({error})") from error
    if reader.byte_order == "S":  # swapped
        raise NotImportable("its bytes are in the order of another kind of machine (big-endian)")
    return reader


def _require_usable(folder: Path) -> None:
    """Raise NotImportable if the rest of the code could not use the model in `folder`, because the
    facts of the model (its sizes and parts) cannot be read."""
    try:
        model_files.read_facts(folder)
    except UserError as error:
        raise NotImportable(str(error)) from error


class _Metadata:
    """The metadata of a GGUF file: values by their keys, such as "general.architecture"."""

    def __init__(self, reader: "GGUFReader") -> None:
        """Take the metadata of the file that `reader` has opened; values are decoded when they are
        asked for."""
        self._fields = reader.fields

    def get(self, key: str) -> Any:
        """Return the value of `key` (a number, string, bool or list), or None if the file lacks the
        key.

        Raises NotImportable if the value cannot be decoded.
        """
        field = self._fields.get(key)
        try:
            return None if field is None else field.contents()
        except (ValueError, IndexError, TypeError) as error:  # ValueError: also text without UTF-8
            raise NotImportable(f"{key} cannot be read ({error})") from error

    def names(self) -> list[str]:
        """Return the keys of all values."""
        return list(self._fields)

    def number(self, key: str, default: float | None = None) -> Any:
        """Return the number at `key`, or `default` if the file has no such key.

        Raises NotImportable if the value is no number, or if the key is missing and `default` is
        None.
        """
        value = self.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        if value is not None:
            raise NotImportable(f"{key} is not one number")
        if default is None:
            raise NotImportable(f"the file has no {key}")
        return default

    def text(self, key: str, default: str | None = None) -> str:
        """Return the text at `key`, or `default` if the file has no text there. Raises
        NotImportable if `default` is None as well."""
        value = self.get(key)
        if isinstance(value, str):
            return value
        if default is None:
            raise NotImportable(f"the file has no {key}")
        return default


def _require_whole_model(values: _Metadata) -> None:
    """Raise NotImportable if the file holds something other than a model, such as an adapter, or
    only a part of a model."""
    kind = values.text("general.type", default="model")
    if kind != "model":
        raise NotImportable(f"it holds no model but {kind!r}")
    if values.number("split.count", default=0) > 1:
        raise NotImportable(
            "it is one of several parts; join them first with llama.cpp's llama-gguf-split --merge"
        )


def _config(values: _Metadata, reader: "GGUFReader") -> JsonObject:
    """Make transformers' config.json for the model.

    Raises NotImportable if the file lacks a value, or has one that is not known here, such as an
    architecture beyond those of `names.ARCHITECTURES`.
    """
    kind = values.text("general.architecture")
    _require_known(values, kind)
    architecture, model_type = names.ARCHITECTURES[kind]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    sizes = _sizes(values, kind, tensors.get("token_embd.weight"))
    first_token = values.number("tokenizer.ggml.bos_token_id", default=-1)  # -1: it names none
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        **sizes,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in tensors,
        # Qwen's architectures say by themselves whether they have biases.
        "attention_bias": "blk.0.attn_q.bias" in tensors and kind == "llama",
        "bos_token_id": None if first_token == -1 else first_token,
        "eos_token_id": values.number("tokenizer.ggml.eos_token_id"),
        "rope_parameters": _rope(values, kind, tensors.get(names.ROPE_FACTORS)),
        "dtype": "float16",
    }
    _require_embedding_of_tokens(values, sizes["vocab_size"])
    return config


def _sizes(values: _Metadata, kind: str, embedding: "ReaderTensor | None") -> JsonObject:
    """Return the sizes of the model by their names in transformers' config.json.

    `kind` is the architecture. `embedding` is the tensor token_embd.weight, or None if the file
    lacks it. Raises NotImportable if that tensor or a size is missing.
    """
    heads = values.number(f"{kind}.attention.head_count")
    hidden = values.number(f"{kind}.embedding_length")
    # max: a damaged file may say 0 heads.
    head_dim = _head_dim(values, kind, usual=hidden // max(heads, 1))
    if embedding is None:
        raise NotImportable("the file has no tensor token_embd.weight")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": values.number(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.number(f"{kind}.attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "intermediate_size": values.number(f"{kind}.feed_forward_length"),
        "vocab_size": int(embedding.shape[1]),
        "max_position_embeddings": values.number(f"{kind}.context_length"),
        # Rounded to 6 digits, because the file's float32 turns 1e-6 into 9.99999997e-07.
        "rms_norm_eps": float(f"{values.number(f'{kind}.attention.layer_norm_rms_epsilon'):.6g}"),
    }


def _head_dim(values: _Metadata, kind: str, usual: int) -> int:
    """Return the size of an attention head: the length of its keys, or `usual` if the file has
    none.

    `kind` is the architecture. Raises NotImportable if the head's values or rotary positions have
    another size.
    """
    head_dim = values.number(f"{kind}.attention.key_length", default=usual)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.number(f"{kind}.{key}", default=head_dim) != head_dim:
            raise NotImportable(f"{kind}.{key} differs from the size of a head, {head_dim}")
    return head_dim


def _require_embedding_of_tokens(values: _Metadata, rows: int) -> None:
    """Raise NotImportable if the file has more tokens than `rows`, the rows of its embedding
    matrix."""
    token_count = len(values.get("tokenizer.ggml.tokens") or [])
    if token_count > rows:
        raise NotImportable(f"{token_count} tokens have {rows} rows in token_embd.weight")


def _generation_config(config: JsonObject, values: _Metadata) -> JsonObject:
    """Make transformers' generation_config.json, which names the tokens that begin and end an
    answer."""
    end_of_turn = values.number("tokenizer.ggml.eot_token_id", default=-1)
    end_tokens = {config["eos_token_id"], end_of_turn} - {-1}  # -1: the file names none
    return {"bos_token_id": config["bos_token_id"], "eos_token_id": sorted(end_tokens)}


def _require_known(values: _Metadata, kind: str) -> None:
    """Raise NotImportable unless the architecture `kind` and every value that the file sets for it
    are known here, and the model is no mixture of experts."""
    if kind not in names.ARCHITECTURES:
        raise NotImportable(
            f"its architecture is {kind}; taken are {', '.join(names.ARCHITECTURES)}, others as "
            "safetensors folders"
        )
    if values.number(f"{kind}.expert_count", default=0):
        raise NotImportable("it is a mixture of experts, which GGUF files are not taken of")
    known = {f"{kind}.{key}" for key in names.KEYS}
    unknown = [key for key in values.names() if key.startswith(f"{kind}.") and key not in known]
    if unknown:
        raise NotImportable(f"the file sets {', '.join(sorted(unknown)[:3])}, not known here")


def _rope(values: _Metadata, kind: str, factors: "ReaderTensor | None") -> JsonObject:
    """Make transformers' rope_parameters (the settings of rotary positions) from the file's values.

    Args:
        kind: GGUF's name of the architecture, with which the keys begin.
        factors: the tensor in which a file stores Llama 3's scaling; None if there is none.

    Raises NotImportable for an unknown scaling.
    """
    theta = float(values.number(f"{kind}.rope.freq_base", default=10000.0))
    scaling = values.text(f"{kind}.rope.scaling.type", default="none")
    if factors is not None:
        return {"rope_theta": theta, **_llama3_rope(theta, factors.data)}
    if scaling == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    if scaling not in ("linear", "yarn"):
        raise NotImportable(
            f"its rotary positions are scaled by {scaling!r}, which is not known here"
        )
    factor = float(values.number(f"{kind}.rope.scaling.factor"))
    if scaling == "linear":
        return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
    original = values.number(f"{kind}.rope.scaling.original_context_length")
    return {
        "rope_theta": theta,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }


def _llama3_rope(theta: float, factors: "np.ndarray") -> JsonObject:
    """Find the parameters of Llama 3's scaling that give the stored `factors`, one per frequency.

    `theta` is the base of the rotary frequencies. Models differ only in the parameter `factor`.
    Raises NotImportable if no value in `_LLAMA3_FACTORS` gives these factors.
    """
    import numpy as np  # noqa: PLC0415  only in the importing process

    frequency_count = len(factors)
    wavelengths = 2 * np.pi * theta ** (np.arange(frequency_count) / frequency_count)
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    original = _LLAMA3_ROPE["original_max_position_embeddings"]
    # 0 for long waves, whose frequency is divided by `factor`; 1 for short ones, which stay.
    unscaled_share = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    for factor in _LLAMA3_FACTORS:
        scale = (1 - unscaled_share) / factor + unscaled_share
        if np.allclose(factors, 1.0 / scale, rtol=1e-3):
            return {**_LLAMA3_ROPE, "factor": factor}
    raise NotImportable(f"{names.ROPE_FACTORS} holds factors that are not those of Llama 3")


def _write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(file: str, folder: str, source: str, license_name: str) -> int:
    """Import a file and print one line of JSON: {}, or {"error": reason} if the file is refused.

    Returns the exit status: 0, or `ERROR_STATUS` if the file is refused.
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

"""A model folder written as GGUF is the model that is read back, or is refused by name."""

import json
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
from gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, Words
from tokenizers import Tokenizer

from engine.models import catalog
from engine.models.gguf import exporter, importer
from engine.models.gguf.vocabulary import NotExportable
from tests import tiny_model

HEAD_NORMS = tuple(f"blk.{i}.attn_{part}_norm.weight" for i in range(2) for part in "qk")
LLAMA = gguf_files.config(architectures=["LlamaForCausalLM"], model_type="llama")
TEXTS = ["12 + 345 = ?", "it's\n\n  caf\u00e9 😀", "<|im_start|>user\nab<|im_end|>"]


def folder_of(path: Path, **changes: Any) -> Path:
    """A model folder, made of a GGUF file of our tests' own writer."""
    path.mkdir()
    file = gguf_files.write_random(path / "x.gguf", **changes)
    importer.import_gguf(file, path / "model")
    return path / "model"


@pytest.mark.parametrize("rule", ["qwen2", "llama-bpe", "smollm", "gpt-2", "llama"])
def test_what_is_written_and_read_back_is_the_same_model(tmp_path: Path, rule: str):
    words = gguf_files.byte_words(rule)
    if rule == "llama":
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokens += ["\u2581", "a", "b", "ab", "\u2581a"]
        types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 5
        scores = [0.0] * 259 + [-5.0, -6.0, -7.0, -1.0, -2.0]
        words = Words(tokens, types, scores=scores, kind="llama", rule="default", end=2, begin=1)
    facts = LLAMA | {"vocab_size": len(words.tokens)}
    first = folder_of(
        tmp_path / "first", kind="F16", facts=facts, words=words, leave_out=HEAD_NORMS
    )
    exporter.export_gguf(first, tmp_path / "out.gguf", "f16")
    importer.import_gguf(tmp_path / "out.gguf", tmp_path / "second")
    weights = [folder / "model.safetensors" for folder in (first, tmp_path / "second")]
    assert tensors(weights[0]) == tensors(weights[1])
    assert config(first) == config(tmp_path / "second")
    read = [Tokenizer.from_file(str(file.with_name("tokenizer.json"))) for file in weights]
    for text in [*TEXTS, " ab a b"]:
        assert read[0].encode(text).ids == read[1].encode(text).ids
    for name in ("chat_template.jinja", "generation_config.json"):
        assert (first / name).read_text() == (tmp_path / "second" / name).read_text()


def tensors(file: Path) -> dict[str, bytes]:
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, end = (start + place for place in entry["data_offsets"])
            found[name + str(entry["shape"])] = raw[first:end]
    return found


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_llama_3_keeps_its_frequencies(tmp_path: Path):
    folder = folder_of(tmp_path / "first", facts=LLAMA, leave_out=HEAD_NORMS)
    scaled = {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    change(folder / "config.json", rope_parameters=scaled)
    exporter.export_gguf(folder, tmp_path / "out.gguf", "f16")
    importer.import_gguf(tmp_path / "out.gguf", tmp_path / "second")
    assert config(tmp_path / "second")["rope_parameters"] == scaled


def test_eight_bits_are_close_and_half_as_large(tmp_path: Path):
    pebble = catalog.BUILTIN["pebble"]
    sizes = {}
    for kind in exporter.KINDS:
        exporter.export_gguf(pebble, tmp_path / f"{kind}.gguf", kind)
        sizes[kind] = (tmp_path / f"{kind}.gguf").stat().st_size
        importer.import_gguf(tmp_path / f"{kind}.gguf", tmp_path / kind)
    assert sizes["q8_0"] < 0.6 * sizes["f16"]
    read = {kind: tensors(tmp_path / kind / "model.safetensors") for kind in exporter.KINDS}
    for name, exact in read["f16"].items():
        dtype = np.float32 if "norm" in name else np.float16
        values, near = (np.frombuffer(raw, dtype) for raw in (exact, read["q8_0"][name]))
        assert np.abs(values - near).max() <= np.abs(values).max() / 127


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("file", "values", "reason"),
    [
        ("config.json", {"rope_parameters": {"rope_type": "longrope"}}, "scaled by 'longrope'"),
        ("config.json", {"sliding_window": 64}, "looks back 64 tokens"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, "no name for the rule"),
        ("tokenizer.json", {"normalizer": {"type": "NFKC"}}, "no name for the rule"),
        ("tokenizer.json", {"model": {"type": "Unigram"}}, "Unigram, not BPE"),
    ],
)
def test_what_gguf_has_no_name_for_is_refused_by_name(
    tmp_path: Path, file: str, values: dict[str, Any], reason: str
):
    folder = folder_of(tmp_path / "first")
    change(folder / file, **values)
    with pytest.raises(NotExportable, match=reason):
        exporter.export_gguf(folder, tmp_path / "out.gguf", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_an_id_beyond_the_embedding_is_refused(tmp_path: Path):
    tiny_model.write_model(tmp_path / "model", vocab_size=100)
    with pytest.raises(NotExportable, match="its embedding 100 rows"):
        exporter.export_gguf(tmp_path / "model", tmp_path / "out.gguf", "f16")

"""A GGUF file becomes a whole model folder, or is refused with the name of what is wrong."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
from gguf_files import byte_words

from engine.models import model_files
from engine.models.gguf import importer
from engine.models.gguf.tokenizer import NotImportable
from engine.records import model_origin
from tests import tiny_model

# What `tiny_model` writes for Qwen3 alone.
HEAD_NORMS = tuple(f"blk.{i}.attn_{part}_norm.weight" for i in range(2) for part in "qk")


def read_values(folder: Path) -> dict[str, Any]:
    """The numbers of a safetensors file, float32, by name."""
    raw = (folder / "model.safetensors").read_bytes()
    [length] = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, end = (8 + length + place for place in entry["data_offsets"])
        data = raw[first:end]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            kind = {"F32": np.float32, "F16": np.float16}[entry["dtype"]]
            values = np.frombuffer(data, kind).astype(np.float32)
        found[name] = values.reshape(entry["shape"])
    return found


def test_every_weight_comes_back_under_its_own_name(tmp_path: Path):
    file = gguf_files.write_random(tmp_path / "x.gguf")
    importer.import_gguf(file, tmp_path / "out")
    values = read_values(tmp_path / "out")
    chance = np.random.default_rng(0)
    expected = {
        name: chance.standard_normal(shape).astype(np.float32)
        for name, shape in tiny_model.shapes(gguf_files.config()).items()
    }
    assert values.keys() == expected.keys()
    assert all((values[name] == array).all() for name, array in expected.items())


def test_the_folder_says_what_it_is_and_where_it_came_from(tmp_path: Path):
    file = gguf_files.write_random(tmp_path / "x.gguf", kind="Q8_0", general__license="mit")
    importer.import_gguf(file, tmp_path / "out")
    facts = model_files.read_facts(tmp_path / "out")
    assert (facts.layers, facts.hidden, facts.vocab, facts.tied) == (2, 32, 259, True)
    assert (facts.architecture, facts.dtype) == ("Qwen3ForCausalLM", "float16")
    origin = model_origin.read(tmp_path / "out")
    assert origin is not None
    assert origin.sentence() == f"{file}, dequantized from Q8_0; license mit"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.gguf"]


def test_a_file_of_unquantized_weights_is_not_called_dequantized(tmp_path: Path):
    for kind in ("F32", "F16", "BF16"):
        file = gguf_files.write_random(tmp_path / f"{kind}.gguf", kind=kind)
        importer.import_gguf(file, tmp_path / kind)
        origin = model_origin.read(tmp_path / kind)
        assert origin is not None and origin.sentence() == str(file)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_frequencies_of_llama_3_are_recognised(tmp_path: Path, factor: float):
    """Counted as in "Llama 3.1" of transformers' modeling_rope_utils, one by one."""
    theta, size, original = 500000.0, 64, 8192
    factors = []
    for i in range(size // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / size)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    facts = llama(head_dim=size, rope_parameters={"rope_theta": theta})
    tensors = {"rope_freqs.weight": np.array(factors, np.float32)}
    file = gguf_files.write_random(
        tmp_path / "x.gguf", facts=facts, tensors=tensors, leave_out=HEAD_NORMS
    )
    importer.import_gguf(file, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == {
        "rope_theta": theta,
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


def llama(**changes: Any) -> dict[str, Any]:
    return gguf_files.config(architectures=["LlamaForCausalLM"], model_type="llama", **changes)


REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("no template", {"leave_out": ("tokenizer.chat_template",)}, "no chat template"),
    ("architecture", {"general__architecture": "gemma3"}, "its architecture is gemma3"),
    ("experts", {"qwen3__expert_count": 8}, "mixture of experts"),
    ("word rule", {"words": byte_words("tekken")}, "cuts words by the rule 'tekken'"),
    ("no word rule", {"leave_out": ("tokenizer.ggml.pre",)}, "does not name"),
    ("no merges", {"leave_out": ("tokenizer.ggml.merges",)}, "no merges"),
    ("no tokens", {"leave_out": ("tokenizer.ggml.tokens",)}, "no tokens"),
    ("merges", {"tokenizer__ggml__merges": ["a c"]}, "makes 'ac', which is no token"),
    ("half a merge", {"tokenizer__ggml__merges": ["ab"]}, "'ab' is no merge"),
    ("no end", {"leave_out": ("tokenizer.ggml.eos_token_id",)}, "eos_token_id"),
    ("kind of tokenizer", {"tokenizer__ggml__model": "t5"}, "its tokenizer is 't5'"),
    ("twice", {"tokenizer__ggml__tokens": ["a"] * 259}, "twice"),
    ("types", {"tokenizer__ggml__token_type": [1, 1]}, "259 tokens have 2 types"),
    ("size", {"leave_out": ("qwen3.block_count",)}, "no qwen3.block_count"),
    ("heads per layer", {"qwen3__attention__head_count_kv": [1, 1]}, "is not one number"),
    ("unknown key", {"qwen3__attention__sliding_window": 128}, "qwen3.attention.sliding_window"),
    ("rope", {"qwen3__rope__scaling__type": "longrope"}, "scaled by 'longrope'"),
    ("part of a head", {"qwen3__rope__dimension_count": 8}, "rope.dimension_count differs"),
    ("parts", {"split__count": 3}, "one of several parts"),
    ("adapter", {"general__type": "adapter"}, "holds no model but 'adapter'"),
    ("no embedding", {"leave_out": ("token_embd.weight",)}, "token_embd.weight"),
    ("no last norm", {"leave_out": ("output_norm.weight",)}, "output_norm.weight"),
    ("no norm", {"leave_out": ("blk.1.attn_q_norm.weight",)}, "layer 1 has no attn_q_norm.weight"),
    ("no part", {"leave_out": ("blk.0.ffn_down.weight",)}, "layer 0 has no ffn_down.weight"),
    ("more layers", {"qwen3__block_count": 1}, "a layer 1 beyond its block_count"),
    ("fewer layers", {"qwen3__block_count": 3}, "layer 2 has no"),
    (
        "unknown tensor",
        {"tensors": {"blk.0.attn_sinks.weight": np.ones(4)}},
        "attn_sinks.weight is unknown",
    ),
    (
        "a bias it should not have",
        {"tensors": {"model.layers.0.self_attn.q_proj.bias": np.ones(32)}},
        "layer 0 has attn_q.bias",
    ),
    (
        "shape",
        {"tensors": {"model.layers.1.mlp.up_proj.weight": np.ones((32, 32))}},
        r"blk.1.ffn_up.weight is \[32, 32\], the sizes say \[64, 32\]",
    ),
    (
        "NaN",
        {"tensors": {"model.norm.weight": np.full(32, np.nan)}},
        "output_norm.weight holds NaN",
    ),
    (
        "NaN in bfloat16",
        {"kind": "BF16", "tensors": {"model.embed_tokens.weight": np.full((259, 32), np.inf)}},
        "token_embd.weight holds NaN",
    ),
    (
        "infinity in float16",
        {"kind": "F16", "tensors": {"model.embed_tokens.weight": np.full((259, 32), 1e5)}},
        "holds NaN or infinity",
    ),
]


@pytest.mark.parametrize(
    ("changes", "reason"), [each[1:] for each in REFUSALS], ids=[each[0] for each in REFUSALS]
)
def test_what_cannot_be_restored_exactly_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
):
    with np.errstate(all="ignore"):
        file = gguf_files.write_random(tmp_path / "x.gguf", **changes)
    with pytest.raises(NotImportable, match=reason):
        importer.import_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]


def test_a_qwen2_without_its_biases_is_refused(tmp_path: Path):
    """transformers would fill them with random numbers."""
    facts = gguf_files.config(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    file = gguf_files.write_random(tmp_path / "x.gguf", facts=facts, leave_out=HEAD_NORMS)
    with pytest.raises(NotImportable, match=r"layer 0 has no attn_k\.bias"):
        importer.import_gguf(file, tmp_path / "out")


@pytest.mark.timeout(60)
def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path):
    whole = gguf_files.write_random(tmp_path / "whole.gguf").read_bytes()
    for size in [0, 3, 8, 20, 24, *range(100, len(whole), len(whole) // 23), len(whole) - 1]:
        file = tmp_path / "cut.gguf"
        file.write_bytes(whole[:size])
        with pytest.raises(NotImportable):
            importer.import_gguf(file, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.timeout(60)
def test_a_damaged_file_is_refused_or_gives_a_whole_folder(tmp_path: Path):
    """Single bytes of the header changed: no other error than the refusal may come."""
    whole = bytearray(gguf_files.write_random(tmp_path / "whole.gguf").read_bytes())
    chance = np.random.default_rng(4)
    file = tmp_path / "damaged.gguf"
    refused = 0
    for place in [*range(4, 24), *(int(at) for at in chance.integers(24, 1500, 40))]:
        damaged = whole.copy()
        damaged[place] ^= 1 << int(chance.integers(0, 8))
        file.write_bytes(damaged)
        try:
            importer.import_gguf(file, tmp_path / f"out{place}")
        except NotImportable:
            refused += 1
    assert refused > 20


def test_what_a_killed_import_left_is_cleared_away(tmp_path: Path):
    (tmp_path / ".out.aside").mkdir()
    (tmp_path / ".out.aside" / "model.safetensors").write_bytes(b"half")
    file = gguf_files.write_random(tmp_path / "x.gguf")
    importer.import_gguf(file, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.gguf"]


def test_the_program_says_its_reason_in_one_line_of_json(tmp_path: Path, capsys):
    (tmp_path / "x.gguf").write_bytes(b"not one")
    status = importer.main(str(tmp_path / "x.gguf"), str(tmp_path / "out"), "", "")
    assert status == importer.ERROR_STATUS
    assert "no complete GGUF file" in json.loads(capsys.readouterr().out)["error"]

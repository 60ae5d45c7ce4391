"""A model written as GGUF and imported computes what it computed before."""

from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from tiny_decoders import tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.models.gguf import importer

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

IDS = torch.tensor([[3, 1, 4, 1, 5, 92, 65, 35, 89, 79, 3, 23, 84, 62, 64, 33]])
SHAPE: dict[str, Any] = {"vocab_size": 259, "intermediate_size": 64}
LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
# Largest difference of a logit, over their spread: what was quantized is rounded to float16 once
# more.
ALLOWED = {"F32": 0.0, "F16": 0.0, "BF16": 0.0, "Q8_0": 0.02, "Q4_0": 0.02}


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits[0]


def rounded(matrix: torch.Tensor, kind: str) -> torch.Tensor:
    """The numbers that the storage `kind` can hold."""
    if kind in ("F16", "BF16"):
        return matrix.to({"F16": torch.float16, "BF16": torch.bfloat16}[kind]).float()
    quantized = GGMLQuantizationType[kind]
    return torch.from_numpy(dequantize(quantize(matrix.numpy(), quantized), quantized))


def written(path: Path, model: PreTrainedModel, kind: str, **more: Any) -> Path:
    """The model as a GGUF file."""
    tensors = {name: value.float().numpy() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    if config["rope_parameters"]["rope_type"] == "llama3":
        # What transformers divides the frequencies by, seen from its own result.
        size = model.config.head_dim
        plain = 1 / LLAMA3["rope_theta"] ** (torch.arange(0, size, 2) / size)
        scaled = model.model.rotary_emb.inv_freq  # type: ignore[union-attr]
        tensors["rope_freqs.weight"] = (plain / scaled).numpy()
    return gguf_files.write(path, config, tensors, kind=kind, **more)


@pytest.mark.parametrize("kind", list(ALLOWED))
@pytest.mark.parametrize("name", list(MODELS))
def test_the_imported_model_says_what_the_original_says(tmp_path: Path, name: str, kind: str):
    family, changes = MODELS[name]
    model = tiny(family, **SHAPE | changes)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # vectors are stored as F32 in any case
            parameter.data = rounded(parameter.data, kind)
    importer.import_gguf(written(tmp_path / "x.gguf", model, kind), tmp_path / "out")
    imported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = logits(model)
    gap = float((logits(imported) - expected).abs().max() / expected.std())
    assert gap <= ALLOWED[kind]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_quantized_weights_are_those_that_transformers_reads(tmp_path: Path, name: str, kind: str):
    family, changes = MODELS[name]
    if family == "qwen3":
        changes = {"head_dim": 128}  # transformers reads no other from such a file
    model = tiny(family, **SHAPE | changes)
    file = written(tmp_path / "x.gguf", model, kind)
    importer.import_gguf(file, tmp_path / "out")
    imported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    expected = logits(theirs)
    # Ours were rounded to float16 once more.
    assert float((logits(imported) - expected).abs().max() / expected.std()) < 0.02

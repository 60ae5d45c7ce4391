"""Our own forward against transformers, family by family, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from loops import PEBBLE
from reference import Plain
from tiny_decoders import EVERY, FAMILIES, VOCAB, own, spec, stir, tiny
from transformers import AutoConfig, AutoTokenizer

from engine.worker.core.batch import Row
from engine.worker.network import decoder, policy
from engine.worker.network.decoder import Decoder
from engine.worker.network.policy import load_base
from engine.worker.network.shape import unsupported
from engine.worker.ops.packing import pack

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

CPU = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % VOCAB for i in range(70)]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, grouped queries": ("llama", {}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, a key head each": ("llama", {"num_key_value_heads": 4}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama3 positions": ("llama", {"rope_parameters": LLAMA3}),
    "linear positions": ("llama", {"rope_parameters": LINEAR}),
    "yarn positions": ("qwen3", {"rope_parameters": YARN}),
    "mistral without a window": ("mistral", {}),
    "qwen2, biased queries": ("qwen2", {}),
    "qwen2, tied head": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3, normed heads": ("qwen3", {}),
    "qwen3, tied head": ("qwen3", {"tie_word_embeddings": True}),
}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(shape: str) -> None:
    family, changes = SHAPES[shape]
    model = tiny(family, **changes)
    assert unsupported(model.config) == ""
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0]
    ours = Decoder.from_transformers(model)
    assert distance(ours.logits(torch.tensor(IDS), ours.weights(None)), wanted) < 2e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_formulas_in_float64(family: str) -> None:
    model = tiny(family)
    exact = Plain(model)
    adapter = stir(own(model).network.new_adapter(spec(), 1))
    ours = own(tiny(family)).network
    assert distance(ours.logits(IDS, None), exact.logits(IDS)) < 2e-6
    moved = exact.logits(IDS, {k: v.double() for k, v in adapter.state().items()}, 7 / 3)
    theirs = ours.new_adapter(spec(), 1)
    theirs.load(adapter.state())
    assert distance(ours.logits(IDS, theirs), moved) < 2e-6
    assert distance(moved, exact.logits(IDS)) > 0.05


def test_positions_beyond_the_first_table_are_right_too() -> None:
    model = tiny("qwen3", max_position_embeddings=16)
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0]
    ours = Decoder.from_transformers(model)
    assert ours.rope(4)[0].shape[0] == 16
    assert distance(ours.logits(torch.tensor(IDS), ours.weights(None)), wanted) < 2e-6


def test_bfloat16_stays_within_what_loading_allows() -> None:
    model = tiny("qwen3").bfloat16()
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0].float()
    ours = Decoder.from_transformers(model)
    assert ours.dtype == torch.bfloat16
    gap = distance(ours.logits(torch.tensor(IDS), ours.weights(None)), wanted)
    assert gap < decoder.TOLERANCE[torch.bfloat16]


def test_the_transformers_model_is_emptied_as_its_layers_are_fused() -> None:
    model = tiny("qwen2")
    before = sum(p.numel() for n, p in model.named_parameters() if n.split(".")[-2] in EVERY)
    Decoder.from_transformers(model)
    left = sum(p.numel() for n, p in model.named_parameters() if n.endswith("_proj.weight"))
    assert before > 0 and left == 0


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a mistral with a window": ("mistral", {"sliding_window": 16}, "sliding-window attention"),
    "a qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        "sliding-window attention",
    ),
    "dynamic positions": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
        "rope_type dynamic",
    ),
    "another activation": ("llama", {"hidden_act": "gelu"}, "activation gelu"),
    "another architecture": ("gpt2", {"n_embd": 32, "n_head": 4}, "model_type gpt2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_forward_does_not_know_is_refused_with_the_reason(case: str) -> None:
    family, changes, reason = REFUSED[case]
    assert unsupported(AutoConfig.for_model(family, **changes)) == reason


def saved(folder: Path, family: str, **changes: Any) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    shape = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    tiny(family, **shape, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_a_known_family_runs_on_our_own_forward(tmp_path: Path, family: str) -> None:
    base = load_base(saved(tmp_path / "model", family), CPU, "float32")
    assert (base.network.forward, base.network.why) == ("own", "")


def test_a_model_with_a_window_falls_back_and_says_why(tmp_path: Path) -> None:
    base = load_base(saved(tmp_path / "model", "mistral", sliding_window=8), CPU, "float32")
    assert (base.network.forward, base.network.why) == ("transformers", "sliding-window attention")
    assert base.network.logits(IDS, None).shape[0] == len(IDS)


def test_a_forward_that_disagrees_with_transformers_is_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model", "qwen3")
    whole = load_base(folder, CPU, "float32").network.logits(IDS, None)

    class Wrong(Decoder):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.eps = 0.5

    loads: list[Any] = []
    load = policy.load_transformers

    def counted(*given: Any, **options: Any) -> Any:
        loads.append(given)
        return load(*given, **options)

    monkeypatch.setattr(policy, "Decoder", Wrong)
    monkeypatch.setattr(policy, "load_transformers", counted)
    base = load_base(folder, CPU, "float32")
    assert base.network.forward == "transformers" and len(loads) == 1
    assert base.network.why.startswith("logits differ from transformers' by ")
    # The refused decoder had emptied its model: the fallback must have a whole one.
    assert distance(base.network.logits(IDS, None), whole) < 2e-6


def test_prompts_ends_are_the_only_rows_the_head_reads() -> None:
    base = own(tiny("qwen3"))
    decoder_ = base.network.decoder  # pyright: ignore[reportAttributeAccessIssue]
    rows = [Row([5, 6, 7, 8], [0, 0, 1, 1], 2), Row([5, 6, 9], [0, 0, 1], 2)]
    batch = pack(rows)
    wanted = batch.source.unique()
    hidden = decoder_.hidden(batch, decoder_.weights(None), wanted)
    every = decoder_.hidden(batch, decoder_.weights(None))
    assert hidden.shape[0] == 2  # the prompt's end serves both answers
    assert distance(hidden, every[wanted]) < 2e-6

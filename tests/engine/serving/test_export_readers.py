"""Exports answer in readers that are not ours as the run answers here."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine.home.run_dir import Home
from engine.serving.export import export

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

PROMPTS = [f"What is {7 * i % 90 + 3} + {11 * i % 80 + 5}?" for i in range(50)]
LENGTH = 5  # tokens of an answer at most


def asked(model: PreTrainedModel, folder: Path) -> list[list[int]]:
    """Greedy answers in token ids, without what ends them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in PROMPTS:
        ids = prompt_ids(tokenizer, prompt)
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False)
        said = out[0, len(ids) :].tolist()
        end = tokenizer.eos_token_id
        answers.append(said[: said.index(end)] if end in said else said)
    return answers


def prompt_ids(tokenizer, prompt: str) -> list[int]:
    turns = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.fixture
def expected(home: Home, tuned: str, tmp_path: Path) -> list[list[int]]:
    """What the base with its adapter says, by peft. The adapter is random and changes answers."""
    weights = home.run(tuned).checkpoint(10) / "adapter_model.safetensors"
    chance = torch.Generator().manual_seed(3)
    random = {
        name: 0.6 * torch.randn(tensor.shape, generator=chance)
        for name, tensor in load_file(weights).items()
    }
    save_file(random, weights)
    folder = Path(export(home, f"{tuned}@step10", "adapter", str(tmp_path / "adapter"))["path"])
    base = Path(__file__).parents[3] / "engine" / "pebble"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = asked(model, base)
    answers = asked(PeftModel.from_pretrained(model, folder).eval(), base)
    assert answers != before
    return answers


def test_a_merged_export_answers_in_transformers_as_base_and_adapter_in_peft(
    home: Home, tuned: str, tmp_path: Path, expected: list[list[int]], monkeypatch
):
    real_merger(monkeypatch)
    folder = Path(export(home, f"{tuned}@step10", "merged", str(tmp_path / "merged"))["path"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    same = sum(a == b for a, b in zip(asked(model, folder), expected, strict=True))
    assert same >= 49  # rounded to bfloat16, as the base is stored


def real_merger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HONESMITH_TEST_PROGRAMS", raising=False)


@pytest.mark.parametrize(
    ("kind", "enough"), [pytest.param("f16", 50, marks=pytest.mark.long), ("q8_0", 45)]
)
def test_a_gguf_export_answers_in_llama_cpp_as_the_run_does(
    home: Home,
    tuned: str,
    tmp_path: Path,
    expected: list[list[int]],
    kind: str,
    enough: int,
    record_property,
):
    xllamacpp = pytest.importorskip("xllamacpp")
    found = export(home, f"{tuned}@step10", f"gguf-{kind}", str(tmp_path / kind))
    [file] = Path(found["path"]).glob("*.gguf")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.warmup = 512, False
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "engine" / "pebble")
    same = 0
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        asked_for = {
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": LENGTH,
        }
        reply = server.handle_chat_completions(asked_for)
        same += reply["choices"][0]["message"]["content"] == tokenizer.decode(answer)
    del server
    record_property("said", f"{kind}: {same} of {len(PROMPTS)} answers equal in llama.cpp")
    assert same >= enough, same

"""Every family that people train: SFT and GRPO, stopped and resumed, exported, merged and served.

What each test saw is held against `tests/families.json`, from which docs/models.md is made
(RECORD_FAMILIES=1 writes it again).
"""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import go, go_until, make_run, metrics, push
from peft import PeftModel
from tiny_families import FAMILIES, LEAN, save

from engine.core.files import read_object, write_json
from engine.home.run_dir import Home, RunDir
from engine.models import catalog
from engine.serving.export import export
from engine.worker.core.batch import Row
from engine.worker.evaluation.prior_skills import PriorSkills
from engine.worker.network.adapter import LoraSpec, read_adapter
from engine.worker.network.policy import Base, load_base, load_transformers
from engine.worker.network.sampler import SamplerNeeds, SamplingParams
from engine.worker.serving.merge import merge
from engine.worker.serving.own_models import OwnModels

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

RECORDED = Path(__file__).resolve().parents[2] / "families.json"
CPU = torch.device("cpu")
# Rewards of a random model's answers must differ, or there is nothing to learn from.
ENVIRONMENT = '''
from envs import Score, SingleTurnEnv, Task

class Sums(SingleTurnEnv):
    """One-digit sums, scored by what the answer's letters add up to."""

    def tasks(self):
        pairs = [(a, b) for a in range(1, 5) for b in range(1, 5)]
        return [
            Task(f"{a}+{b}", f"What is {a} + {b}?", answer=f"{a + b}",
                 split="heldout" if (a + b) % 4 == 0 else "train")
            for a, b in pairs
        ]

    def score(self, task, completion):
        return Score(sum(map(ord, completion)) % 11 / 10)

def load_environment():
    return Sums()
'''
COMMON: dict[str, Any] = {
    "steps": 2,
    "eval_every": 2,
    "eval_rows": 2,
    "save_every": 1,
    "learning_rate": 2e-3,
    "lora_rank": 2,
    "seed": 3,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": COMMON | {"batch_size": 4},
    "grpo": COMMON | {"prompts_per_step": 2, "group_size": 4, "max_tokens": 8},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in LEAN else [pytest.mark.families]) for n in FAMILIES]
)
def test_a_family_trains_resumes_is_exported_and_answers(
    name: str, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A random model answers questions about kept skills at full length, which takes most of a run.
    monkeypatch.setattr(PriorSkills, "evaluate", lambda self, when: None)
    model = save(name, tmp_path / "model")
    env_id = push(home, tmp_path / "sums", ENVIRONMENT)
    seen: dict[str, str] = {}
    for algorithm, settings in SETTINGS.items():
        run = make_run(home, env_id, algorithm, settings, model=str(model), run_id=algorithm)
        go_until(run, 1)
        go(run)
        assert [line["step"] for line in metrics(run)] == [0, 1, 2]
        assert _moved(run)
        seen[algorithm] = "yes"
    base = load_base(model, CPU, "float32")
    seen["path"] = base.network.forward
    reference = catalog.resolve_model(home, "grpo")
    assert reference.adapter is not None
    _sampled_tokens_are_the_trained_ones(base, reference.adapter)
    export(home, "grpo", "adapter", str(tmp_path / "adapter"))
    _peft_reads_it(model, tmp_path / "adapter", base)
    merge(model, reference.adapter, tmp_path / "merged")
    assert catalog.resolve_model(home, str(tmp_path / "merged")).facts.params
    seen["export"] = "adapter, merged"
    served = OwnModels(model, "base", "cpu", thinking=False)
    served.add("tuned", reference.adapter)
    with served.speaking_as("tuned") as sampler:
        assert list(sampler.stream([5, 6, 7], SamplingParams(4, 0.0)))
    seen["deploy"] = "yes"
    seen["targets"] = ", ".join(reference.facts.targets)
    _hold_against_the_table(name, seen)


def _moved(run: RunDir) -> bool:
    """Whether every factor B of the last checkpoint has left the zeros that it starts from."""
    folder = run.latest_checkpoint()
    assert folder is not None
    state = read_adapter(folder)
    return all(bool(tensor.any()) for key, tensor in state.items() if "lora_B" in key)


def _sampled_tokens_are_the_trained_ones(base: Base, folder: Path) -> None:
    """Prompts of several lengths at once, several answers each: the sampler's log-probabilities
    are those that training computes of the same tokens."""
    network = base.network
    adapter = network.new_adapter(LoraSpec.from_folder(folder), seed=0)
    adapter.load(read_adapter(folder))
    sampler = network.sampler(SamplerNeeds(base.pad_id, [], lambda ids: ""))
    sampler.load(adapter)
    prompts = [list(range(5, 26)), [30, 31, 32], [40, 41, 42, 43, 44, 45, 46]]
    groups = sampler.generate(prompts, 3, SamplingParams(12, 1.0, seed=2))
    rows = [
        Row(prompt + each.ids, [0] * len(prompt) + [1] * len(each.ids))
        for prompt, group in zip(prompts, groups, strict=True)
        for each in group
    ]
    with torch.no_grad():
        trained, _ = network.logprobs(network.collate(rows), adapter)
    sampled = torch.tensor([x for group in groups for each in group for x in each.logprobs])
    torch.testing.assert_close(trained, sampled, rtol=0, atol=1e-4)
    network.drop_adapter(adapter)


def _peft_reads_it(model: Path, folder: Path, base: Base) -> None:
    """PEFT by itself, on transformers' model, says what the run's policy says."""
    ids = list(range(5, 26))
    adapter = base.network.new_adapter(LoraSpec.from_folder(folder), seed=0)
    adapter.load(read_adapter(folder))
    expected = base.network.logits(ids, adapter)
    base.network.drop_adapter(adapter)
    plain, _ = load_transformers(model, CPU, "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT only warns of weights that it did not find
        warnings.filterwarnings("ignore", category=FutureWarning)
        read = PeftModel.from_pretrained(plain, str(folder)).eval()
    with torch.no_grad():
        logits = read(input_ids=torch.tensor([ids])).logits[0].float()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
    before = expected - base.network.logits(ids, None)
    assert before.abs().max() > 1e-3  # the adapter says something


def _hold_against_the_table(name: str, seen: dict[str, str]) -> None:
    """The family's row of the table is what was seen."""
    family = FAMILIES[name]
    seen = {"models": family.models, "model_type": family.model_type} | seen
    if os.environ.get("RECORD_FAMILIES"):
        write_json(RECORDED, read_object(RECORDED) | {name: seen})
    assert read_object(RECORDED)[name] == seen

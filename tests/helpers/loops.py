"""A small environment and the run folders to train on it inside the test's own process."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from run_configs import ESTIMATE
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from engine.core import hardware
from engine.core.files import read_json, write_json
from engine.environments import env_facts, registry
from engine.environments.push import push_env
from engine.home.run_dir import Home, RunDir
from engine.models import catalog
from engine.settings import resolution, teachers
from engine.worker import training
from engine.worker.core.job import Job, Stopped
from engine.worker.distill import train as train_distill
from engine.worker.dpo import train as train_dpo
from engine.worker.grpo import train as train_grpo
from engine.worker.network.adapter import CONFIG, PREFIX, WEIGHTS, LoraSpec
from engine.worker.sft import train as train_sft

ENVIRONMENT = '''
from envs import Score, SingleTurnEnv, Task

class Sums(SingleTurnEnv):
    """One-digit sums, some of which pebble answers in another style than the one asked for."""

    def tasks(self):
        pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
        return [
            Task(f"{a}+{b}", f"What is {a} + {b}?", answer=f"{a + b}",
                 split="heldout" if (a + 2 * b) % 4 == 0 else "train",
                 metadata={"rejected": f"{a} + {b} = {a + b}"})
            for a, b in pairs
        ]

    def score(self, task, completion):
        right = completion == task.answer
        return Score(float(right), success=right, metrics={"short": float(len(completion) < 4)})

def load_environment():
    return Sums()
'''

# One right answer for each row of rows.json beside it.
ROWS_ENVIRONMENT = """
import json
from pathlib import Path
from envs import Score, SingleTurnEnv, Task

ROWS = json.loads((Path(__file__).parent / "rows.json").read_text())

class Rows(SingleTurnEnv):
    def tasks(self):
        return [Task(**row) for row in ROWS]

    def score(self, task, completion):
        right = completion.strip() == task.answer_text
        return Score(float(right), success=right)

def load_environment():
    return Rows()
"""

PEBBLE = Path(__file__).resolve().parents[2] / "engine" / "pebble"
FIXED = {
    "time",
    "tokens_per_s",
    "sample_s",
    "reward_s",
    "export_s",
    "teacher_s",
    "train_s",
    "mfu",
    "peak_memory",
}


# How many questions of what pebble could do before each run is asked, and what of it is replayed,
# unless its settings say: with the defaults such answers are nine tenths of a short run's time.
FEW_QUESTIONS: dict[str, Any] = {"skill_rows": 4}
NO_REPLAY: dict[str, Any] = {"keep": 0}
# Four short steps of each loop, evaluated and saved twice.
SFT: dict[str, Any] = {
    "steps": 4,
    "batch_size": 8,
    "eval_every": 2,
    "eval_rows": 12,
    "save_every": 2,
    "learning_rate": 3e-3,
    "seed": 3,
}
GRPO: dict[str, Any] = {
    "steps": 4,
    "prompts_per_step": 6,
    "group_size": 4,
    "max_tokens": 20,
    "eval_every": 2,
    "eval_rows": 12,
    "save_every": 2,
    "learning_rate": 3e-3,
    "updates_per_batch": 2,
    "seed": 3,
}
DPO: dict[str, Any] = SFT | {"learning_rate": 1e-3}
DISTILL: dict[str, Any] = {
    "steps": 4,
    "prompts_per_step": 6,
    "group_size": 2,
    "max_tokens": 20,
    "eval_every": 2,
    "eval_rows": 12,
    "save_every": 2,
    "learning_rate": 3e-3,
    "seed": 3,
}
BASE = {"sft": SFT, "dpo": DPO, "grpo": GRPO, "distill": DISTILL}


def push(home: Home, folder: Path, source: str = ENVIRONMENT, name: str = "sums") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.py").write_text(source)
    return push_env(home, str(folder), name=name, roots=[folder]).env_id


def make_run(
    home: Home,
    env_id: str,
    algorithm: str,
    settings: dict[str, Any],
    *,
    model: str = "pebble",
    run_id: str = "sums-run-1",
) -> RunDir:
    """The folder submit would have made, for a loop that is called directly. A distillation gets
    the teacher of `save_teacher` where its settings name none. A setting that is None is left out,
    as is one that a user does not name."""
    replays = algorithm in ("sft", "grpo")
    settings = FEW_QUESTIONS | (NO_REPLAY if replays else {}) | settings
    settings = {name: value for name, value in settings.items() if value is not None}
    if algorithm == "distill":
        settings = settings if "teacher" in settings else settings | {"teacher": save_teacher(home)}
    record = registry.find_env(home, env_id)
    ref = catalog.resolve_model(home, model)
    resolved = resolution.resolve(
        algorithm,
        settings,
        model=ref.facts,
        env=env_facts.env_facts(home, record, ref.base_path),
        hardware=hardware.detect(home.root),
        inherited=ref.adapter_facts,
    )
    teacher = teachers.resolve_teacher(home, resolved.settings, ref)
    run = home.run(run_id)
    run.create()
    write_json(
        run.config,
        {
            "run_id": run_id,
            "kind": "train",
            "algorithm": algorithm,
            "env_id": record.env_id,
            "env_dir": str(record.dir),
            "model": model,
            "base": {"ref": ref.base_ref, "path": str(ref.base_path)},
            "start_adapter": str(ref.adapter) if ref.adapter else None,
            "settings": resolved.settings.model_dump(),
            "sources": resolved.sources,
            "note": "",
            "expect": "",
            "parent": "",
            "estimate": ESTIMATE,
            "device": "cpu",
        }
        | ({"teacher": teacher.entry.to_json()} if teacher else {}),
    )
    return run


def go(run: RunDir) -> dict[str, Any]:
    """Train in this process; returns the result record."""
    job: Job[Any] = Job(run.path)
    loops = {"sft": train_sft, "dpo": train_dpo, "grpo": train_grpo, "distill": train_distill}
    return loops[job.config.algorithm](job)


def go_until(run: RunDir, step: int, *, killed: bool = False) -> None:
    """Train in this process up to the line of `step`: then stopped as by a cancel, which leaves a
    checkpoint, or `killed`, which leaves none."""
    log = training.Training.log

    def end(self: training.Training, at: int, values: dict[str, Any], rollouts: Any = ()) -> None:
        log(self, at, values, rollouts)
        if at == step and killed:
            raise KeyboardInterrupt
        if at == step:
            self.job._stop.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.Training, "log", end)
        with pytest.raises(KeyboardInterrupt if killed else Stopped):
            go(run)


def metrics(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def rollouts(run: RunDir, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.rollouts(step).read_text().splitlines()]


def curve(run: RunDir) -> list[dict[str, Any]]:
    """Every metric that is not a clock."""
    return [{k: v for k, v in line.items() if k not in FIXED} for line in metrics(run)]


def weights(run: RunDir) -> str:
    """Digest of the last checkpoint's adapter."""
    folder = run.latest_checkpoint()
    assert folder is not None
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


def trace(run: RunDir) -> dict[str, Any]:
    """All a setting could have changed: weights, curves, evaluation rows, checkpoints, manifest."""
    manifest = read_json(run.manifest)
    return {
        "weights": weights(run),
        "curve": curve(run),
        "evals": sorted((p.name, p.read_text().count("\n")) for p in run.evals_dir.iterdir()),
        "checkpoints": sorted(p.name for p in run.checkpoints.glob("step_*")),
        "config": (run.latest_checkpoint() or run.path / "x")
        .joinpath("adapter_config.json")
        .read_text(),
        "manifest": {
            k: manifest[k] for k in ("precision", "reward_risk_accepted", "seed", "forward")
        },
    }


def save_teacher(home: Home) -> str:
    """The folder of an adapter on pebble that answers otherwise than pebble."""
    folder = home.root / "teacher"
    if folder.exists():
        return str(folder)
    folder.mkdir(parents=True)
    chance = torch.Generator().manual_seed(7)
    facts = catalog.resolve_model(home, "pebble").facts
    state = {}
    for layer in range(facts.layers):
        name = f"{PREFIX}model.layers.{layer}.self_attn.q_proj"
        for factor, shape in (("A", (4, facts.hidden)), ("B", (facts.hidden, 4))):
            tensor = 0.3 * torch.randn(shape, generator=chance)
            state[f"{name}.lora_{factor}.weight"] = tensor
    save_file(state, folder / WEIGHTS)
    write_json(folder / CONFIG, LoraSpec(4, 8.0, 0.0, ("q_proj",)).as_peft("pebble"))
    return str(folder)


def save_random_model(folder: Path) -> Path:
    torch.manual_seed(11)
    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    config = Qwen3Config(
        vocab_size=320,  # beyond the tokenizer's ids, as padded vocabularies are
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

"""Loss and gradients of ours against TRL's own, on the same batch: at most 1e-5 apart per tensor.

    .venv/bin/python -m benchmarks.parity [--shape small]

Runs in TRL's environment with our engine beside it. Both sides hold the same random adapter (no
zeros, so that every tensor has a gradient). SFT: one batch of conversations through
`SFTTrainer.compute_loss`. GRPO: the same completions of four prompts through
`GRPOTrainer._compute_loss`, against `learn` of our loop, which splits, shares prompts and
normalises as it does in a run; on the first update, and on the second after both adapters were
moved alike, where ratios differ from 1 and clipping acts. Temperature 0.8.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LIMIT = 1e-5
TEMPERATURE = 0.8
MAX_TOKENS = 24
# Between the updates every weight moves by about this: ratios then leave the clip range often.
MOVED = {"tiny": 0.02, "small": 0.006}
# Ours and what TRL calls the same: (loss, importance level, lower clip, upper clip there).
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (
        {"clip_low": 0.2, "clip_high": 0.28},
        {"loss_type": "grpo", "epsilon": 0.2, "epsilon_high": 0.28},
    ),
    "dapo": (
        {"clip_low": 0.2, "clip_high": 0.28},
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    ),
    "dr_grpo": (
        {"clip_low": 0.2, "clip_high": 0.28},
        {"loss_type": "dr_grpo", "epsilon": 0.2, "epsilon_high": 0.28},
    ),
    "gspo": (
        {"clip_low": 0.05, "clip_high": 0.06},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.05,
            "epsilon_high": 0.06,
        },
    ),
    "cispo": (
        {"clip_low": 0.2, "clip_high": 0.28},
        {"loss_type": "cispo", "epsilon": 0.2, "epsilon_high": 1.28},
    ),
    "dapo with kl": (
        {"clip_low": 0.2, "clip_high": 0.28, "kl_coef": 0.05},
        {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.05},
    ),
}
State = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description="Gradients of ours against TRL's.")
    parser.add_argument("--shape", default="tiny", choices=("tiny", "small"))
    parser.add_argument("--inputs", default="", help="the folder of models and rows, once made")
    asked = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        return in_peer_environment(asked.shape)
    from safetensors.torch import load_file  # noqa: F401 - fails early, before anything is loaded

    quiet()
    made = Path(asked.inputs)
    rows = [sft(made, asked.shape), *grpo(made, asked.shape)]
    print(table(rows))
    worst = max(row["worst"] for row in rows)
    print(f"largest relative difference {worst:.1e}: {'pass' if worst <= LIMIT else 'MISS'}")
    return int(worst > LIMIT)


def quiet() -> None:
    """Keep the libraries' progress bars and notes out of the table."""
    import datasets  # pyright: ignore[reportMissingImports]
    import transformers

    warnings.filterwarnings("ignore")
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


def in_peer_environment(shape: str) -> int:
    """Run this again where TRL is; the exit status is that run's."""
    import subprocess

    from benchmarks import bench, peer

    python, made = peer.ensure_venv(), bench.ensure_inputs()
    command = [str(python), "-m", "benchmarks.parity", "--shape", shape, "--inputs", str(made)]
    env = os.environ | {"PYTHONPATH": str(peer.ROOT), "GOMP_SPINCOUNT": "10000"}
    return subprocess.run(command, cwd=peer.ROOT, env=env, check=False).returncode


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| loss | ours | TRL's | difference | largest gradient difference | of tensor |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['ours']:.7f} | {row['theirs']:.7f} | {row['loss']:.1e} "
            f"| {row['gradient']:.1e} | {row['tensor']} |"
        )
    return "\n".join(lines)


def compared(
    name: str, ours: tuple[float, State], theirs: tuple[float, State], *, loss: bool = True
) -> dict[str, Any]:
    """One line: the losses, and the tensor whose gradients differ most, by relative norm.

    Raises ValueError when the two sides do not have the same tensors.
    """
    (loss_a, a), (loss_b, b) = ours, theirs
    if a.keys() != b.keys():
        raise ValueError(f"tensors differ: {sorted(a.keys() ^ b.keys())[:4]}")
    gaps = {key: float((a[key] - b[key]).norm() / b[key].norm()) for key in b}
    tensor = max(gaps, key=lambda key: gaps[key])
    gap = abs(loss_a - loss_b) / max(abs(loss_b), 1e-2) if loss else 0.0
    return {
        "name": name,
        "ours": loss_a,
        "theirs": loss_b,
        "loss": gap,
        "gradient": gaps[tensor],
        "tensor": tensor.removeprefix("base_model.model.model."),
        "worst": max(gap, gaps[tensor]),
    }


class Ours:
    """Our policy, and its gradients under PEFT's names."""

    def __init__(self, model: Path, settings: Any) -> None:
        import torch

        from engine.worker.network.policy import Policy, load_base

        self.base = load_base(model, torch.device("cpu"), "float32")
        self.policy = Policy(self.base, settings)

    def load(self, state: State) -> None:
        self.policy.adapter.load(state)

    def gradients(self) -> State:
        """The gradients, cleared afterwards. Their names are read off by standing them in the
        weights' place for a moment."""
        import torch

        adapter = self.policy.adapter
        weights = adapter.state()
        with torch.no_grad():
            for parameter in adapter.parameters():
                assert parameter.grad is not None
                parameter.copy_(parameter.grad)
        state = adapter.state()
        adapter.load(weights)
        adapter.clear_gradients()
        return state


def random_state(like: State, seed: int, scale: float = 0.02) -> State:
    """Normal weights for every tensor of an adapter."""
    import torch

    chance = torch.Generator().manual_seed(seed)
    return {k: scale * torch.randn(v.shape, generator=chance) for k, v in sorted(like.items())}


def their_gradients(model: Any) -> State:
    """The gradients of a PEFT model under its saved names, cleared afterwards."""
    tensors = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            tensors[name.replace(".default", "")] = parameter.grad.detach().clone()
            parameter.grad = None
    return tensors


def settings_of(**more: Any) -> Any:
    """The settings that an update of GRPO reads; the others are left out."""
    from benchmarks.cases import ALPHA, RANK
    from engine.records.settings import PROJECTIONS, GRPOSettings

    given = {
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "lora_targets": list(PROJECTIONS),
        "gradient_checkpointing": False,
        "seed": 0,
        "temperature": TEMPERATURE,
        "tis_cap": 2.0,
        "kl_coef": 0.0,
        "max_tokens": MAX_TOKENS,
        "updates_per_batch": 2,
        **more,
    }
    return GRPOSettings.model_construct(**given)


def lora() -> Any:
    from peft import LoraConfig

    from benchmarks.cases import PEER_LORA

    return LoraConfig(**PEER_LORA)


def trainer_arguments(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_steps": 1,
    }


def sft(made: Path, shape: str) -> dict[str, Any]:
    """Eight conversations of different lengths as one batch."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import set_peft_model_state_dict
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    from engine.worker.core.batch import Row
    from engine.worker.rollouts.renderer import Renderer
    from engine.worker.update.losses import cross_entropy

    model, facts = made / "models" / shape, facts_of(made, "sft-tiny")
    tokenizer = AutoTokenizer.from_pretrained(model)
    render = Renderer(tokenizer, [tokenizer.eos_token_id])
    rendered = [render.rows(row["messages"], (), "assistant")[0] for row in facts["rows"][:8]]
    own = Ours(model, settings_of())
    state = random_state(own.policy.adapter.state(), 1)
    own.load(state)
    rows = [Row(each.ids, each.loss_mask) for each in rendered]
    supervised, loss = sum(sum(row.loss_mask) for row in rows), 0.0
    for members in own.policy.split(rows, 600):  # several microbatches, as in a run
        logprobs, _ = own.policy.logprobs(own.policy.collate([rows[i] for i in members]))
        part = cross_entropy(logprobs, supervised).sum()
        part.backward()
        loss += part.item()
    ours = (loss, own.gradients())

    examples = [
        {
            "input_ids": list(row.ids),
            "labels": [i if on else -100 for i, on in zip(row.ids, row.loss_mask, strict=True)],
        }
        for row in rows
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
            args=SFTConfig(**trainer_arguments(folder), max_length=4096),
            train_dataset=Dataset.from_list(examples),
            processing_class=tokenizer,
            peft_config=lora(),
        )
    set_peft_model_state_dict(trainer.model, state)
    trainer.model.train()
    theirs = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    theirs.backward()
    return compared("SFT", ours, (theirs.item(), their_gradients(trainer.model)))


def facts_of(made: Path, case: str) -> dict[str, Any]:
    return json.loads((made / "cases" / case / "facts.json").read_text())


def play(own: Ours, prompts: Sequence[list[int]], vocab: int) -> list[Any]:
    """Groups of eight made-up completions with made-up rewards; in the last group all are equal.

    The sampler's log-probabilities are the policy's own, so that the correction for a sampler
    that differs is 1 on the first update, as it is for TRL, which has none without vLLM.
    """
    import random

    from engine.worker.core.batch import Row
    from engine.worker.core.trajectory import Completion, Group, Trajectory
    from engine.worker.rollouts.advantages import assign

    chance, groups = random.Random(5), []
    for number, prompt in enumerate(prompts):
        members = []
        for _ in range(8):
            ids = [chance.randrange(3, vocab) for _ in range(chance.randint(4, MAX_TOKENS))]
            trajectory = Trajectory(f"task-{number}", [], list(prompt))
            row = Row(prompt + ids, [0] * len(prompt) + [1] * len(ids))
            logprobs, _ = own.policy.logprobs(own.policy.collate([row]), TEMPERATURE)
            trajectory.add_completion(Completion(ids, logprobs.detach().tolist(), True))
            trajectory.reward = 1.0 if number == len(prompts) - 1 else chance.random()
            members.append(trajectory)
        groups.append(Group(f"task-{number}", members))
    assign(groups, "group_norm")
    return groups


class Caught:
    """Stands where `update` expects the training run: keeps each update's gradients and moves the
    adapter to where it is told instead of stepping."""

    def __init__(self, own: Ours, moved: State) -> None:
        self.policy = own.policy
        self.meter = SimpleNamespace(
            count_microbatch=lambda rows: None
        )  # counts work, changes none
        self.updates: list[tuple[float, State]] = []
        self._own, self._moved = own, moved

    def within_memory(self, step: int, budget: int, batch_pass: Any) -> Any:
        return batch_pass.run(budget)

    def optimizer_step(self, step: int, pending: Any) -> tuple[Any, float, float]:
        sums = pending.read()
        self.updates.append((pending.loss_of(sums), self._own.gradients()))
        self._own.load(self._moved)
        return sums, 0.0, 0.0


def grpo(made: Path, shape: str) -> list[dict[str, Any]]:
    """Every loss TRL has too, on its first and second update of one batch."""
    from transformers import AutoTokenizer

    from engine.worker.grpo import update

    model, facts = made / "models" / shape, facts_of(made, "grpo-tiny")
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                row["messages"], tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )
        for row in facts["rows"][:4]
    ]
    own = Ours(model, settings_of())
    state = random_state(own.policy.adapter.state(), 2)
    noise = random_state(state, 3, scale=MOVED[shape])
    moved = {key: state[key] + noise[key] for key in state}
    own.load(state)
    groups = play(own, prompts, len(tokenizer))
    out = []
    for name, (of_ours, of_theirs) in LOSSES.items():
        own.load(state)
        settings = settings_of(loss=name.split()[0], **of_ours)
        caught = Caught(own, moved)
        # Of both updates; the first clips nothing.
        measured = update(caught, settings, groups, 1, 2048)  # pyright: ignore[reportArgumentType]
        clipped = measured["clip_share"] or 0.0
        if not 0.005 < clipped < 0.45:
            raise ValueError(f"{name}: {clipped:.1%} of the tokens are clipped, which tests little")
        theirs = their_updates(model, tokenizer, of_theirs, groups, state, moved)
        for number, (a, b) in enumerate(zip(caught.updates, theirs, strict=True), 1):
            acts = f" ({2 * clipped:.0%} clipped)" if number == 2 else ""
            out.append(compared(f"{name}, update {number}{acts}", a, b))
    return out


def their_updates(
    model: Path,
    tokenizer: Any,
    options: dict[str, Any],
    groups: Sequence[Any],
    state: State,
    moved: State,
) -> list[tuple[float, State]]:
    """Loss and gradients of `_compute_loss` at `state`, and at `moved` with the log-probabilities
    of `state` as the old ones."""
    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import set_peft_model_state_dict
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    members = [trajectory for group in groups for trajectory in group.members]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
            args=GRPOConfig(
                **trainer_arguments(folder),
                per_device_train_batch_size=len(members),
                num_generations=8,
                max_completion_length=MAX_TOKENS,
                temperature=TEMPERATURE,
                **options,
            ),
            train_dataset=Dataset.from_list([{"prompt": "x"}] * len(groups)),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            processing_class=tokenizer,
            peft_config=lora(),
        )
    trainer.current_gradient_accumulation_steps = 1
    inputs = padded(members, tokenizer.pad_token_id)
    whole = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    trainer.model.train()

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            width = inputs["completion_ids"].shape[1]
            return trainer._get_per_token_logps_and_entropies(trainer.model, whole, mask, width)[0]

    set_peft_model_state_dict(trainer.model, state)
    with trainer.model.disable_adapter():
        inputs["ref_per_token_logps"] = logprobs()
    old, updates = logprobs(), []
    for weights in (state, moved):
        set_peft_model_state_dict(trainer.model, weights)
        loss = trainer._compute_loss(trainer.model, inputs | {"old_per_token_logps": old})
        loss.backward()
        updates.append((loss.item(), their_gradients(trainer.model)))
    return updates


def padded(members: Sequence[Any], pad: int) -> dict[str, Any]:
    """TRL's tensors: prompts padded on the left, completions on the right."""
    import torch

    def block(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), pad)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for position, row in enumerate(rows):
            where = slice(width - len(row), width) if left else slice(0, len(row))
            ids[position, where] = torch.tensor(row)
            mask[position, where] = 1
        return ids, mask

    prompts, prompt_mask = block([t.prompt_ids for t in members], True)
    completions, completion_mask = block([t.ids for t in members], False)
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": completions,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([t.advantage for t in members]),
        "num_items_in_batch": completion_mask.sum(),
    }


if __name__ == "__main__":
    sys.exit(main())

"""What a step of SFT does to the adapter, against the formulas in float64."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from loops import curve, go, go_until, make_run, push, weights
from reference import Plain, Tensors, apart, gradients, leaves
from tiny_decoders import EVERY, FAMILIES, LORA, VOCAB, own, policy_on, tiny
from typed_settings import grpo_settings

from engine.environments.indexed import build
from engine.environments.push import push_env
from engine.home.run_dir import Home
from engine.records.lines.event import read_events
from engine.worker import sft
from engine.worker.core.batch import Row
from engine.worker.network.policy import Policy
from engine.worker.update.losses import cross_entropy
from engine.worker.update.schedule import apply_step, make_optimizer, rate
from engine.worker.update.supervised import SupervisedPass

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

CLOSE = 1e-5


def some_rows(seed: int, count: int = 6) -> list[Row]:
    """Rows of very different lengths, trained in patches."""
    chance = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = [2, 31, 7, 12, 3, 20][number % 6]
        ids = torch.randint(0, VOCAB, (length,), generator=chance).tolist()
        mask = (torch.rand(length - 2, generator=chance) < 0.5).int().tolist()
        rows.append(Row(ids, [0, *mask, 1]))
    return rows


def backward(policy: Policy, rows: Sequence[Row], budget: int = 10**6) -> float:
    """The loss of a batch, as the loop computes it."""
    supervised = sum(sum(row.loss_mask) for row in rows)
    loss = 0.0
    for members in policy.split(rows, budget):
        values, _ = policy.logprobs(policy.collate([rows[i] for i in members]))
        part = cross_entropy(values, supervised).sum()
        part.backward()
        loss += part.item()
    return loss


def exactly(model: Plain, policy: Policy, rows: Sequence[Row]) -> tuple[float, Tensors]:
    leaf = leaves(policy.adapter.state())
    scale = policy.adapter.spec.scale
    values = [model.logprobs(r.ids, r.loss_mask, leaf, scale, vocab=VOCAB)[0] for r in rows]
    loss = reference.cross_entropy(values)
    loss.backward()
    return float(loss.detach()), gradients(leaf)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_loss_and_gradient_are_the_formulas(family: str, targets: Any) -> None:
    model = tiny(family)
    exact = Plain(model)
    policy = policy_on(own(model), lora_targets=targets)
    rows = some_rows(1)
    loss, slopes = exactly(exact, policy, rows)
    assert backward(policy, rows) == pytest.approx(loss, rel=1e-6)
    assert apart(policy.adapter.gradients(), slopes) < CLOSE


@examples(deadline=None, max_examples=4)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 120))
def test_any_batch_in_any_microbatches_has_the_loss_and_gradient_of_the_formula(
    seed: int, budget: int
) -> None:
    model = tiny("qwen3", seed=seed)
    exact = Plain(model)
    policy = policy_on(own(model), seed=seed)
    rows = some_rows(seed)
    loss, slopes = exactly(exact, policy, rows)
    assert backward(policy, rows, budget) == pytest.approx(loss, rel=1e-6)
    assert apart(policy.adapter.gradients(), slopes) < CLOSE


def test_every_token_counts_alike_however_the_batch_is_cut() -> None:
    # Row lengths differ widely, so a mean over rows or microbatches would be another number.
    model = tiny("qwen3")
    policy = policy_on(own(model))
    rows = some_rows(2)
    found = []
    for budget in (10**6, 60, 1):
        loss = backward(policy, rows, budget)
        found.append((loss, {k: v.clone() for k, v in policy.adapter.gradients().items()}))
        policy.adapter.clear_gradients()
    for loss, slopes in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert apart(slopes, found[0][1]) < CLOSE
    each = [backward(policy, [row]) for row in rows]
    counts = [sum(row.loss_mask) for row in rows]
    weighted = sum(a * b for a, b in zip(each, counts, strict=True)) / sum(counts)
    assert found[0][0] == pytest.approx(weighted, rel=1e-6)
    assert abs(found[0][0] - sum(each) / len(each)) > 1e-3


def test_at_the_start_only_b_moves_because_b_is_zero() -> None:
    policy = Policy(own(tiny("qwen3")), grpo_settings(LORA))
    backward(policy, some_rows(3))
    for name, slope in policy.adapter.gradients().items():
        assert bool(slope.any()) is ("lora_B" in name), name


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_steps_follow_adamw_with_decay_clipping_warmup_and_schedule(schedule: str) -> None:
    plan = {
        "learning_rate": 0.01,
        "lr_schedule": schedule,
        "warmup_ratio": 0.4,
        "weight_decay": 0.2,
    }
    exact_rates = {
        "constant": [0.005, 0.01, 0.01, 0.01, 0.01],
        "linear": [0.005, 0.01, 0.01, 0.01 * 2 / 3, 0.01 / 3],
        "cosine": [0.005, 0.01, 0.01] + [0.005 * (1 + math.cos(math.pi * i / 3)) for i in (1, 2)],
    }[schedule]
    policy = policy_on(own(tiny("qwen3")))
    optimizer = make_optimizer(policy.parameters(), grpo_settings(plan))
    oracle = reference.AdamW(policy.adapter.state(), weight_decay=0.2, max_grad_norm=0.05)
    for step in range(1, 6):
        backward(policy, some_rows(step))
        found = {k: v.clone() for k, v in policy.adapter.gradients().items()}
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in found.values()))
        lr = rate(step, 5, grpo_settings(plan))
        assert lr == pytest.approx(exact_rates[step - 1])
        assert apply_step(optimizer, policy.adapter, lr, 0.05) == pytest.approx(norm, rel=1e-5)
        assert norm > 0.05, "clipping must be at work"
        oracle.step(found, exact_rates[step - 1])
        assert not any(g.any() for g in policy.adapter.gradients().values())
    assert apart(policy.adapter.state(), oracle.weights) < 2e-6


def test_the_adapter_file_holds_each_projections_own_weights(tmp_path: Path) -> None:
    from peft import PeftModel

    from engine.worker.network.adapter import save_adapter

    policy = policy_on(own(tiny("qwen2")))
    save_adapter(policy.adapter, tmp_path, "tiny")
    peft = PeftModel.from_pretrained(tiny("qwen2"), str(tmp_path))
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        theirs = peft(torch.tensor([ids])).logits[0]
    ours = policy.base.network.logits(ids, policy.adapter)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    shapes = {n.split(".")[-3]: tuple(t.shape) for n, t in policy.adapter.state().items()}
    assert set(shapes) == set(EVERY)


# -- the loop ----------------------------------------------------------------------------------

RUN: dict[str, Any] = {
    "steps": 2,
    "batch_size": 8,
    "eval_every": 2,
    "eval_rows": 2,
    "save_every": 2,
    "learning_rate": 3e-3,
    "lora_dropout": 0.1,
    "seed": 3,
}
GRPO: dict[str, Any] = {
    "steps": 2,
    "prompts_per_step": 3,
    "group_size": 4,
    "max_tokens": 12,
    "eval_every": 2,
    "eval_rows": 2,
    "save_every": 1,
    "learning_rate": 3e-3,
    "updates_per_batch": 2,
    "kl_coef": 0.2,
    "lora_dropout": 0.1,
    "seed": 3,
}


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


def test_each_epoch_sees_every_row_once_and_a_resumed_run_the_same_ones() -> None:
    epochs = [
        [i for step in range(first, first + 3) for i in sft.rows_of_step(step, 10, 4, 7)]
        for first in (1, 4)
    ]
    assert [sorted(e) for e in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert [len(sft.rows_of_step(s, 10, 4, 7)) for s in (1, 2, 3)] == [4, 4, 2]
    assert sft.rows_of_step(5, 10, 4, 7) == epochs[1][4:8]
    assert sft.rows_of_step(1, 10, 4, 8) != epochs[0][:4]


def test_data_that_stay_where_they_are_train_like_stored_ones(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(60)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    runs = []
    for name, copied_bytes, rendered_first in [("s", 10**9, 10**9), ("l", 10, 10**9), ("d", 10, 5)]:
        monkeypatch.setattr(build, "COPIED_BYTES", copied_bytes)
        monkeypatch.setattr(sft, "RENDERED_FIRST", rendered_first)
        env_id = push_env(home, tmp_path / "data", name=name).env_id
        run = make_run(home, env_id, "sft", {"steps": 3, "batch_size": 4}, run_id=f"{name}-run-1")
        go(run)
        runs.append(run)
    stored, early, late = (curve(run) for run in runs)
    assert stored == early == late and len(stored) == 4  # step 0 too
    (said,) = (e.message for e in read_events(runs[2].events) if e.event == "data")
    assert said.startswith("30 rows, each read when it is trained on")


def test_grpo_with_dropout_and_kl_to_a_start_adapter_resumes_to_the_same_bits(
    home: Home, env_id: str
) -> None:
    first = make_run(home, env_id, "sft", RUN)
    go(first)
    runs = [
        make_run(home, env_id, "grpo", GRPO, model="sums-run-1", run_id=f"again-{i}")
        for i in range(2)
    ]
    go(runs[0])
    go_until(runs[1], 1)
    go(runs[1])
    assert curve(runs[1]) == curve(runs[0])
    assert weights(runs[1]) == weights(runs[0])
    divergence = [line["kl"] for line in curve(runs[0])[1:]]
    assert all(math.isfinite(x) for x in divergence) and divergence[-1] > 0


def test_the_same_seed_gives_the_same_sft_with_dropout_and_another_does_not(
    home: Home, env_id: str
) -> None:
    found = []
    for number, seed in enumerate((3, 3, 4)):
        run = make_run(home, env_id, "sft", RUN | {"seed": seed}, run_id=f"seed-{number}")
        go(run)
        found.append((curve(run), weights(run)))
    assert found[0] == found[1]
    assert found[0][1] != found[2][1]


def test_rows_together_and_rows_one_by_one_make_the_same_run(home: Home, env_id: str) -> None:
    runs = []
    for packing in (True, False):
        settings = RUN | {"lora_dropout": 0.0, "packing": packing}
        runs.append(make_run(home, env_id, "sft", settings, run_id=f"packing-{packing}".lower()))
        go(runs[-1])
    together, alone = (curve(run) for run in runs)
    for one, other in zip(together[1:], alone[1:], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert together[1]["microbatches"] < alone[1]["microbatches"]


def test_a_step_asks_for_its_loss_once_however_many_microbatches_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each question would make the host wait for a GPU."""
    policy, rows = policy_on(own(tiny("qwen3"))), some_rows(3)
    asked: list[str] = []
    for name in ("item", "tolist"):
        plain = getattr(torch.Tensor, name)

        def question(self: torch.Tensor, plain: Any = plain, name: str = name) -> Any:
            if self.requires_grad or self.is_floating_point():
                asked.append(name)
            return plain(self)

        monkeypatch.setattr(torch.Tensor, name, question)
    loss, microbatches = SupervisedPass(policy, rows, packing=False).run(10**6).read()
    assert microbatches == len(rows) and asked == ["tolist"]
    assert loss == pytest.approx(backward(policy, rows), rel=1e-5)

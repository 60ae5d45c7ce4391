"""What a step of DPO does to the adapter, against the formula in float64; and its whole runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import DPO, SFT, curve, go, go_until, make_run, metrics, push, weights
from reference import Plain, Tensors, apart, gradients, leaves
from tiny_decoders import FAMILIES, VOCAB, own, policy_on, tiny

from engine.environments.indexed import build
from engine.environments.push import push_env
from engine.home.run_dir import Home
from engine.records.lines.event import read_events
from engine.worker import dpo
from engine.worker.network.policy import Policy
from engine.worker.rollouts.renderer import Rendered
from engine.worker.update.preference import Pair, PreferencePass, dpo_loss, make_pair

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

BETA = 0.3


def some_pairs(seed: int, count: int = 4) -> list[Pair]:
    """Pairs with prompts and answers of very different lengths; two answers begin alike."""
    chance = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(0, VOCAB, (length,), generator=chance).tolist()

    pairs = []
    for number in range(count):
        prompt = draw([9, 2, 17, 4][number % 4])
        start = draw(number % 2)
        answers = [prompt + start + draw(1 + (number * 5 + side * 3) % 11) for side in (0, 1)]
        masks = [[0] * len(prompt) + [1] * (len(ids) - len(prompt)) for ids in answers]
        better, worse = (Rendered(i, m) for i, m in zip(answers, masks, strict=True))
        pair = make_pair(str(number), better, worse, 64)
        assert pair is not None
        pairs.append(pair)
    return pairs


def exactly(
    model: Plain, policy: Policy, pairs: list[Pair], sft_weight: float
) -> tuple[float, Tensors]:
    """The loss as the papers write it, and its gradient."""
    leaf = leaves(policy.adapter.state())
    scale = policy.adapter.spec.scale
    loss = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        gains = []
        for row in pair.rows:
            # From the first answer token on: also what both answers share.
            mask = [0] * (pair.chosen.prefix_len - 1) + [1] * (len(row.ids) - row.prefix_len + 1)
            by_policy, _ = model.logprobs(row.ids, mask, leaf, scale, vocab=VOCAB)
            by_base, _ = model.logprobs(row.ids, mask, vocab=VOCAB)
            gains.append(by_policy.sum() - by_base.sum())
        margin = BETA * (gains[0] - gains[1])
        loss = loss + torch.log1p(torch.exp(-margin)) / len(pairs)
        better = pair.chosen
        own_tokens, _ = model.logprobs(better.ids, better.loss_mask, leaf, scale, vocab=VOCAB)
        loss = loss - sft_weight * own_tokens.mean() / len(pairs)
    loss.backward()
    return float(loss.detach()), gradients(leaf)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("budget", "sft_weight"), [(10**6, 0.0), (40, 0.7), (1, 0.0), (1, 2.0)])
def test_loss_and_gradient_are_those_of_the_papers_however_the_pairs_are_split(
    family: str, budget: int, sft_weight: float
) -> None:
    model = tiny(family)
    exact = Plain(model)
    policy = policy_on(own(model))
    pairs = some_pairs(3)
    loss, slopes = exactly(exact, policy, pairs, sft_weight)
    step = PreferencePass(policy, pairs, BETA, sft_weight)
    sums = step.run(budget).read()
    assert sums.loss == pytest.approx(loss, rel=1e-5)
    assert apart(policy.adapter.gradients(), slopes) < 3e-5
    assert step.is_finest(budget) is (sums.microbatches == len(pairs))
    assert (sums.microbatches > 1) is (budget < 10**6)


def test_a_pair_at_the_start_costs_ln_2_and_hand_computed_gains_what_the_formula_says() -> None:
    at_start = dpo_loss(torch.zeros(1), torch.zeros(1), 0.1, 1)
    assert float(at_start) == pytest.approx(math.log(2))
    # beta (2 - -1) = 0.3: -log sigmoid(0.3) = log(1 + exp(-0.3)), halved by two pairs in the batch.
    gained = dpo_loss(torch.tensor([2.0]), torch.tensor([-1.0]), 0.1, 2)
    assert float(gained) == pytest.approx(0.554355 / 2, abs=1e-6)
    lost = dpo_loss(torch.tensor([-1.0]), torch.tensor([2.0]), 0.1, 1)
    assert float(lost) == pytest.approx(0.854355, abs=1e-6)


def test_only_what_the_answers_do_not_share_is_trained() -> None:
    chosen = Rendered([5, 6, 7, 1, 2], [0, 0, 1, 1, 1])
    rejected = Rendered([5, 6, 7, 3], [0, 0, 1, 1])
    pair = make_pair("a", chosen, rejected, 64)
    assert pair is not None
    assert pair.chosen.prefix_len == pair.rejected.prefix_len == 3
    assert pair.chosen.loss_mask == [0, 0, 0, 1, 1] and pair.rejected.loss_mask == [0, 0, 0, 1]
    assert pair.trained_tokens == 3
    assert make_pair("a", chosen, rejected, 3) is None  # the cut leaves equal beginnings
    assert make_pair("a", chosen, chosen, 64) is None


# -- the loop ----------------------------------------------------------------------------------


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


def test_the_loss_starts_at_ln_2_and_falls_on_pairs_that_are_held_out(
    home: Home, env_id: str
) -> None:
    run = make_run(home, env_id, "dpo", DPO | {"steps": 8, "eval_every": 8, "beta": 0.2})
    go(run)
    lines = metrics(run)
    assert lines[0]["heldout_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[1]["preference_accuracy"] == 0.0
    assert lines[-1]["preference_accuracy"] == 1.0
    assert lines[-1]["chosen_reward"] > lines[-1]["rejected_reward"]
    assert lines[-1]["heldout_loss"] < 0.6


def test_the_reference_is_the_adapter_that_the_run_started_from(home: Home, env_id: str) -> None:
    first = make_run(home, env_id, "sft", SFT)
    go(first)
    second = make_run(
        home, env_id, "dpo", DPO | {"steps": 1}, model="sums-run-1", run_id="sums-run-2"
    )
    go(second)
    assert metrics(second)[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics(second)[0]["heldout_success"] == metrics(first)[-1]["heldout_success"]


def test_pairs_alone_without_a_scorer_are_measured_by_their_loss(
    home: Home, tmp_path: Path
) -> None:
    rows = "\n".join(
        f'{{"prompt": "What is {a} + {b}?", "chosen": "{a + b}", '
        f'"rejected": "{a} + {b} = {a + b}", "split": "{"heldout" if a > 6 else "train"}"}}'
        for a in range(1, 10)
        for b in range(1, 10)
    )
    folder = tmp_path / "pairs"
    (folder / "datasets").mkdir(parents=True)
    (folder / "datasets" / "rows.jsonl").write_text(rows)
    source = (
        "from pathlib import Path\n"
        "from envs.dataset import DatasetEnv, data_files\n"
        "def load_environment():\n"
        "    return DatasetEnv(*data_files(Path(__file__).parent))\n"
    )
    env = push(home, folder, source, "pairs")
    run = make_run(home, env, "dpo", DPO | {"steps": 12, "eval_every": 6, "eval_rows": 27})
    result: dict[str, Any] = go(run)
    assert result["verdict"] == "better"
    assert "heldout_success" not in metrics(run)[-1]
    assert metrics(run)[-1]["heldout_loss"] < metrics(run)[0]["heldout_loss"]


def test_preferences_that_stay_where_they_are_train_like_stored_ones(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(60)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    runs = []
    for name, copied_bytes, rendered_first in [("s", 10**9, 10**9), ("l", 10, 10**9), ("d", 10, 5)]:
        monkeypatch.setattr(build, "COPIED_BYTES", copied_bytes)
        monkeypatch.setattr(dpo, "RENDERED_FIRST", rendered_first)
        pushed = push_env(home, tmp_path / "data", name=name)
        assert pushed.kind == "preference"
        assert pushed.next[0].arguments["algorithm"] == "dpo"
        settings = {"steps": 3, "batch_size": 4}
        run = make_run(home, pushed.env_id, "dpo", settings, run_id=f"{name}-run-1")
        go(run)
        runs.append(run)
    stored, early, late = (curve(run) for run in runs)
    assert stored == early == late and len(stored) == 4  # step 0 too
    (said,) = (e.message for e in read_events(runs[2].events) if e.event == "data")
    assert said == "30 pairs, each read when it is trained on"


def test_a_resumed_run_of_pairs_has_the_same_bits_with_dropout_and_a_start_adapter(
    home: Home, env_id: str
) -> None:
    go(make_run(home, env_id, "sft", SFT | {"steps": 1}))
    settings = DPO | {"lora_dropout": 0.1}
    runs = [
        make_run(home, env_id, "dpo", settings, model="sums-run-1", run_id=f"again-{i}")
        for i in range(2)
    ]
    go(runs[0])
    go_until(runs[1], 3)
    go(runs[1])
    assert curve(runs[1]) == curve(runs[0])
    assert weights(runs[1]) == weights(runs[0])

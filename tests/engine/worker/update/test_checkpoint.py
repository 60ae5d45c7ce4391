"""Checkpoints are complete or absent, and restoring one restores everything."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typed_settings import grpo_settings

from engine.home.owner_marks import write_pinned
from engine.home.run_dir import Home, RunDir
from engine.worker.core.batch import Row
from engine.worker.core.failures import WorkerFailure
from engine.worker.network.adapter import WEIGHTS
from engine.worker.network.policy import Base, Policy, load_base, load_transformers
from engine.worker.update import checkpoint
from engine.worker.update.schedule import apply_step, make_optimizer

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

ADAM = {"learning_rate": 0.01, "weight_decay": 0.1}
ROWS = [Row([10, 20, 30, 40], [0, 1, 1, 1])]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = Home.locate(tmp_path).run("a-sft-1")
    run.create()
    return run


def save_first(run: RunDir, policy: Policy, base_weights: dict[str, str] | None = None) -> Path:
    """A checkpoint of step 1 with a fresh optimizer."""
    return checkpoint.save(
        run,
        policy,
        make_optimizer(policy.parameters(), grpo_settings(ADAM)),
        checkpoint.Progress(1, {}),
        base_ref="pebble",
        base_weights=base_weights,
    )


def step(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    (-policy.logprobs(policy.collate(ROWS))[0].mean()).backward()
    apply_step(optimizer, policy.adapter, 0.01, 1.0)


def test_training_on_from_a_checkpoint_is_bit_equal(
    pebble: Base, tuned: Callable[[Base], Policy], run: RunDir
) -> None:
    policy = tuned(pebble)
    optimizer = make_optimizer(policy.parameters(), grpo_settings(ADAM))
    for _ in range(2):
        step(policy, optimizer)
    checkpoint.save(
        run, policy, optimizer, checkpoint.Progress(2, {"silent": 3}), base_ref="pebble"
    )
    for _ in range(2):
        step(policy, optimizer)

    again = tuned(load_base(pebble.path, torch.device("cpu"), "float32"))
    fresh = make_optimizer(again.parameters(), grpo_settings(ADAM))
    folder = run.latest_checkpoint()
    assert folder is not None
    progress = checkpoint.restore(folder, again, fresh)
    assert (progress.step, progress.state) == (2, {"silent": 3})
    for _ in range(2):
        step(again, fresh)
    for a, b in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_peft_itself_reads_a_checkpoint_to_the_same_logits(
    pebble: Base, tuned: Callable[[Base], Policy], run: RunDir
) -> None:
    from peft import PeftModel

    policy = tuned(pebble)
    wanted = pebble.network.logits([10, 20, 30], policy.adapter)
    optimizer = make_optimizer(policy.parameters(), grpo_settings(ADAM))
    folder = checkpoint.save(run, policy, optimizer, checkpoint.Progress(1, {}), base_ref="pebble")
    plain, _ = load_transformers(pebble.path, torch.device("cpu"), "float32")
    loaded = PeftModel.from_pretrained(plain, str(folder))
    logits = loaded(input_ids=torch.tensor([[10, 20, 30]])).logits[0]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)


def test_a_folder_without_a_manifest_is_no_checkpoint(
    pebble: Base, tuned: Callable[[Base], Policy], run: RunDir
) -> None:
    policy = tuned(pebble)
    optimizer = make_optimizer(policy.parameters(), grpo_settings(ADAM))
    checkpoint.save(run, policy, optimizer, checkpoint.Progress(1, {}), base_ref="pebble")
    half = run.checkpoint(2)
    half.mkdir()
    (half / WEIGHTS).write_bytes(b"half")
    assert run.latest_checkpoint() == run.checkpoint(1)
    saved = checkpoint.save(run, policy, optimizer, checkpoint.Progress(2, {}), base_ref="pebble")
    checkpoint.verify(saved)


def test_what_a_kill_while_saving_left_is_cleared_away(
    pebble: Base, tuned: Callable[[Base], Policy], run: RunDir
) -> None:
    torn = run.checkpoints / ".step_000002.12345"
    torn.mkdir(parents=True)
    (torn / WEIGHTS).write_bytes(b"half")
    policy = tuned(pebble)
    optimizer = make_optimizer(policy.parameters(), grpo_settings(ADAM))
    checkpoint.save(run, policy, optimizer, checkpoint.Progress(3, {}), base_ref="pebble")
    assert [p.name for p in run.checkpoints.iterdir()] == ["step_000003"]


def test_one_flipped_bit_is_found(
    pebble: Base, tuned: Callable[[Base], Policy], run: RunDir
) -> None:
    folder = save_first(run, tuned(pebble))
    weights = bytearray((folder / WEIGHTS).read_bytes())
    weights[-5] ^= 1
    (folder / WEIGHTS).write_bytes(bytes(weights))
    with pytest.raises(WorkerFailure, match="damaged"):
        checkpoint.verify(folder)


def test_pruning_keeps_the_last_and_the_pinned(run: RunDir) -> None:
    for number in (5, 10, 15, 20):
        folder = run.checkpoint(number)
        folder.mkdir(parents=True)
        (folder / checkpoint.MANIFEST).write_text("{}")
    checkpoint.prune(run, keep=2, protected={5})
    assert sorted(p.name for p in run.checkpoints.glob("step_*")) == [
        "step_000005",
        "step_000015",
        "step_000020",
    ]


def test_best_points_at_a_step_and_moves(run: RunDir) -> None:
    for number in (5, 10):
        folder = run.checkpoint(number)
        folder.mkdir(parents=True)
        (folder / checkpoint.MANIFEST).write_text("{}")
        checkpoint.mark_best(run, number)
        assert run.resolve_checkpoint("best") == run.checkpoint(number)


def test_an_adapter_is_never_put_on_other_weights_than_it_was_trained_on(
    pebble: Base, tuned: Callable[[Base], Policy], run: RunDir
) -> None:
    folder = save_first(run, tuned(pebble), {"model.safetensors": "aa"})
    checkpoint.require_base(folder, {"model.safetensors": "aa"})
    with pytest.raises(WorkerFailure, match="other weights") as caught:
        checkpoint.require_base(folder, {"model.safetensors": "bb"})
    assert caught.value.kind == "config"


def test_an_adapter_from_elsewhere_says_nothing_about_its_base(tmp_path: Path) -> None:
    checkpoint.require_base(tmp_path, {"model.safetensors": "bb"})


def test_a_pinned_checkpoint_outlives_pruning(home):
    run = home.run("a-sft-1")
    run.create()
    for step in range(1, 6):
        run.checkpoint(step).mkdir()
        (run.checkpoint(step) / checkpoint.MANIFEST).write_text("{}")
    write_pinned(run, {2})
    checkpoint.prune(run, keep=1, protected={4})
    assert run.checkpoint_steps() == [2, 4, 5]

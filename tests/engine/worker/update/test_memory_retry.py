"""A step that runs out of memory is done again in smaller microbatches, with the same update."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import curve, go, make_run, metrics, push

from engine.home.run_dir import Home, RunDir
from engine.worker.core.failures import WorkerFailure, explain
from engine.worker.network.policy import Policy
from engine.worker.update import memory_retry
from engine.worker.update.memory_retry import MemoryRetry

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {"steps": 3, "batch_size": 24, "eval_every": 3, "eval_rows": 6, "save_every": 1},
    "grpo": {
        "steps": 3,
        "prompts_per_step": 6,
        "group_size": 4,
        "max_tokens": 20,
        "eval_every": 3,
        "eval_rows": 6,
        "save_every": 1,
        "updates_per_batch": 2,
        "temperature": 1.5,
    },
}


@pytest.fixture
def env_id(home: Home, tmp_path) -> str:
    return push(home, tmp_path / "sums")


def train(home: Home, env_id: str, algorithm: str, run_id: str) -> RunDir:
    settings = SETTINGS[algorithm] | {"seed": 3, "learning_rate": 1e-3}
    run = make_run(home, env_id, algorithm, settings, run_id=run_id)
    go(run)
    return run


def scarce(monkeypatch: pytest.MonkeyPatch, holds: int, *, skip: int = 0) -> None:
    """Memory that runs out above `holds` tokens at once, after `skip` passes that had room.

    What is too big fails late in the backward pass, when gradients have been left behind.
    """
    plain, passes = Policy.logprobs, [0]

    def logprobs(self: Policy, batch: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, batch, *args, **kwargs)
        passes[0] += 1
        if passes[0] > skip and batch.ids.numel() > holds:
            found[0].sum().backward()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return found

    monkeypatch.setattr(Policy, "logprobs", logprobs)


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.events.read_text().splitlines()]
    return [event for event in found if event["event"] == name]


@pytest.mark.parametrize(
    ("algorithm", "budget", "holds"),
    [("sft", 512, 260), pytest.param("grpo", 160, 96, marks=pytest.mark.long)],
)
def test_memory_that_runs_out_halves_the_microbatch_and_leaves_the_update(
    home, env_id, monkeypatch, algorithm, budget, holds
):
    wanted = curve(train(home, env_id, algorithm, "whole-1"))
    monkeypatch.setattr(f"engine.worker.{algorithm}.microbatch_tokens", lambda *_, **__: budget)
    scarce(monkeypatch, holds)
    run = train(home, env_id, algorithm, "scarce-1")
    told = events(run, "memory")
    assert [event["microbatch_tokens"] for event in told] == [budget // 2]  # once for the run
    assert "out of memory" in told[0]["evidence"] and told[0]["step"] == 1
    passes = [line["microbatches"] for line in metrics(run)[1:]]
    whole = [line["microbatches"] for line in wanted[1:]]
    assert all(ours > its for ours, its in zip(passes, whole, strict=True))
    for ours, its in zip(curve(run), wanted, strict=True):
        for name in ("loss", "grad_norm", "reward_mean", "heldout_loss", "entropy", "clip_share"):
            if name in its:
                assert ours[name] == pytest.approx(its[name], rel=1e-3, abs=1e-5), name


def test_memory_that_runs_out_in_a_later_pass_keeps_what_the_first_one_saw(
    home, env_id, monkeypatch
):
    wanted = curve(train(home, env_id, "grpo", "whole-1"))
    monkeypatch.setattr("engine.worker.grpo.microbatch_tokens", lambda *_, **__: 100_000)
    scarce(monkeypatch, 96, skip=1)  # the first pass over the first batch has room
    monkeypatch.setattr(memory_retry, "MAX_HALVINGS", 12)
    run = train(home, env_id, "grpo", "scarce-1")
    assert [event["step"] for event in events(run, "memory")][:2] == [1, 1]
    for ours, its in zip(curve(run), wanted, strict=True):
        for name in ("grad_norm", "reward_mean", "entropy", "clip_share"):
            if name in its:
                assert ours[name] == pytest.approx(its[name], rel=1e-3, abs=1e-5), name


def test_a_resumed_run_keeps_the_smaller_microbatches(home, env_id, monkeypatch):
    monkeypatch.setattr("engine.worker.sft.microbatch_tokens", lambda *_, **__: 512)
    with monkeypatch.context() as patch:
        scarce(patch, 260)
        run = train(home, env_id, "sft", "scarce-1")
    before = [line.get("microbatches") for line in metrics(run)]
    state = json.loads((run.checkpoint(2) / "trainer_state.json").read_text())
    assert state[memory_retry.HALVINGS_KEY] == 1
    for name in ("MANIFEST.json", "trainer_state.json"):
        (run.checkpoint(3) / name).unlink()
    go(run)  # with all the memory in the world
    assert [line.get("microbatches") for line in metrics(run)] == before
    assert len(events(run, "memory")) == 1


def test_memory_that_never_suffices_is_a_failure_of_kind_oom_with_a_hint(home, env_id, monkeypatch):
    # So many that after all halvings rows still share a microbatch.
    monkeypatch.setattr("engine.worker.sft.microbatch_tokens", lambda *_, **__: 1 << 16)
    scarce(monkeypatch, 0)
    with pytest.raises(WorkerFailure) as caught:
        train(home, env_id, "sft", "scarce-1")
    record = explain(caught.value)
    assert record.kind == "oom" and f"{memory_retry.MAX_HALVINGS} halvings" in record.message
    assert "out of memory" in record.evidence and "max_length" in str(record.hint)
    assert len(events(home.run("scarce-1"), "memory")) == memory_retry.MAX_HALVINGS


class Pass:
    """Does nothing but `attempt`; every row goes alone at `finest` tokens."""

    def __init__(self, attempt: Callable[[int], None], finest: int = 0) -> None:
        self.attempt = attempt
        self.finest = finest

    def run(self, token_limit: int) -> None:
        self.attempt(token_limit)

    def is_finest(self, token_limit: int) -> bool:
        return token_limit <= self.finest


def retry(budget: int, tell: Callable[..., None] = lambda *_: None) -> MemoryRetry:
    return MemoryRetry(budget, {}, clear_gradients=lambda: None, report=tell)


def test_halving_ends_after_so_many_times_and_where_every_row_goes_alone():
    asked: list[int] = []

    def attempt(tokens: int) -> None:
        asked.append(tokens)
        raise MemoryError

    with pytest.raises(WorkerFailure, match=f"{memory_retry.MAX_HALVINGS} halvings"):
        retry(640).run(Pass(attempt))
    assert asked == [640, 320, 160, 80, 40, 20]
    asked.clear()
    with pytest.raises(WorkerFailure, match="alone"):
        retry(640).run(Pass(attempt, finest=160))
    assert asked == [640, 320, 160]


def test_another_fault_is_not_taken_for_a_lack_of_memory():
    def attempt(tokens: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        retry(64, tell=lambda *_: pytest.fail("told")).run(Pass(attempt))


def test_chance_is_drawn_again_as_it_was():
    drawn: list[torch.Tensor] = []

    def attempt(tokens: int) -> None:
        drawn.append(torch.rand(4))
        if tokens > 32:
            raise MemoryError

    retry(128).run(Pass(attempt))
    assert len(drawn) == 3 and torch.equal(drawn[0], drawn[2])


def test_a_real_allocation_that_fails_on_this_machine_is_of_kind_oom():
    code = (
        "import torch; from engine.worker.core.failures import explain\n"
        "try: torch.empty(10**15)\n"
        "except Exception as error: print(explain(error).kind)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "oom", done.stderr

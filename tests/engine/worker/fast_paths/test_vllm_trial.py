"""vLLM tried as a run uses it; a thread of the test answers in its place, with planted faults."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from threaded_vllm import ThreadedVllm

from engine.home.run_dir import Home
from engine.machine.fast_paths.results import PathResult
from engine.machine.install import vllm_env
from engine.machine.processes.vllm_process import Plan
from engine.worker.fast_paths import vllm_trial
from engine.worker.fast_paths.vllm_trial import try_vllm

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def set_up(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(vllm_env, "require_python", lambda home: Path("/vllm/python"))
    # Beside a stand-in that computes with transformers our sampler is faster.
    monkeypatch.setattr(vllm_trial, "SLOWER", 1000.0)
    monkeypatch.setattr(vllm_trial, "ROUNDS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for tiny products more would only wait for each other
    yield
    torch.set_num_threads(threads)


def tried(fault: str = "") -> tuple[PathResult, list[str]]:
    """The result with this fault planted, and what was done; the server sleeps like one on a
    GPU."""
    said: list[str] = []

    def start(plan: Plan, log: Path) -> ThreadedVllm:
        return ThreadedVllm(replace(plan, sleeps=True), log, fault)

    return try_vllm(CPU, said.append, start), said  # type: ignore[arg-type]


def test_a_server_that_does_everything_right_is_on_with_numbers_and_times():
    result, said = tried()
    assert result.state == "on", result.reason
    assert result.difference is not None and result.allowed == 1e-3
    assert result.difference < 1e-4 and result.speedup is not None
    assert said[1:] == [
        "start vLLM",
        "start vLLM",
        "sample from the base",
        "load adapter 1",
        "load adapter 2",
        "sleep",
        "wake up",
        "time both samplers",
    ]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("wrong", "of the base differ from our own forward's by 0.01 nats"),
        ("fails", "it does not start: vLLM ended before it was ready: ValueError: no kernel"),
        ("does not wake", "asked to wake up: it answered 500: cannot allocate memory"),
        ("keeps the old adapter", "it keeps the adapter that was loaded before"),
        ("ignores adapters", "of adapter 1 differ"),
    ],
)
def test_each_fault_switches_it_off_with_the_reason(fault: str, reason: str):
    result, _ = tried(fault)
    assert result.state == "off" and reason in result.reason
    if fault == "ignores adapters":
        assert result.reason.endswith("it answers as the base")


def test_a_server_that_is_slower_than_our_own_sampler_is_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_trial, "SLOWER", 1.1)
    result, _ = tried("slow")
    assert result.state == "off" and result.reason.startswith("slower: ")
    assert result.speedup is not None and result.speedup < 1


def test_a_swap_of_adapters_moves_the_numbers_far_beyond_rounding(tmp_path: Path):
    """Otherwise an adapter that never arrives would pass for one that did."""
    base = vllm_trial.make_model(tmp_path / "model", CPU)
    adapter = base.network.new_adapter(vllm_trial.LORA, seed=0)
    vllm_trial._fill_with_random_weights(adapter, 1)
    ids = list(range(5, 60))
    with torch.no_grad():
        spreads = [base.network.logits(ids, each).log_softmax(-1) for each in (adapter, None)]
    moved = float((spreads[0] - spreads[1]).abs().mean())
    allowed = max(vllm_trial.ALLOWED.values())
    assert moved > vllm_trial.TELLING * allowed


def test_without_vllm_nothing_is_tried(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setenv("HONESMITH_HOME", str(home.root))
    monkeypatch.delenv(vllm_env.OVERRIDE, raising=False)
    result = try_vllm(CPU, lambda _: None, partial(pytest.fail, "it was started"))
    assert result.state == "skipped" and "honesmith setup --vllm" in result.reason

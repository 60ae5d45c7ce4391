"""A fault is planted in a fast path of this machine: the self-check finds it, and a real run with
the fault still there leaves the path out, ends with the numbers of the plain way, and says so."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from loops import SFT, curve, go, make_run, push, weights

from engine.core.files import read_json
from engine.core.hardware import detect
from engine.evidence.report.html_report import report_markdown
from engine.home.rows import NewRun
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.fast_paths.results import DeviceResults, PathResult, identity_of, keep_results
from engine.worker.core import switched_off
from engine.worker.fast_paths import trials
from engine.worker.fast_paths.trial import try_path
from engine.worker.ops import causal

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]
CPU = torch.device("cpu")
PATH = "block_attention"
attended = causal.causal_attention
Attended = tuple[torch.Tensor, list[torch.Tensor]]


def wrong(qkv: torch.Tensor, kv_heads: int) -> Attended:
    out, saved = attended(qkv, kv_heads)
    return out * 1.05, saved


def raising(qkv: torch.Tensor, kv_heads: int) -> Attended:
    raise RuntimeError("no kernel image is available")


def slow(qkv: torch.Tensor, kv_heads: int) -> Attended:
    end = time.perf_counter() + 0.2
    while time.perf_counter() < end:
        pass
    return attended(qkv, kv_heads)


FAULTS: list[tuple[Callable[[torch.Tensor, int], Attended], str]] = [
    (wrong, "differs from the plain way"),
    (raising, "RuntimeError: no kernel image is available"),
    (slow, "slower: "),
]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """What a run switches off stays off in its process, which here is that of all tests."""
    with switched_off.everything_on():
        yield


def checked(home: Home) -> PathResult:
    """Try the path as `honesmith doctor --gpu` does, and keep the result in the home."""
    result = try_path(PATH, trials.TRIALS[PATH], CPU)
    identity = identity_of(detect().device, home)
    keep_results(home, DeviceResults(identity=identity, time=1.0, paths=(result,)))
    return result


def trained(home: Home, env_id: str) -> RunDir:
    """A run of SFT on pebble in this process, with a row as submit makes it."""
    with Store(home) as store:
        row = store.insert_run(NewRun("sums-sft", "train", "sft", env_id, "pebble"))
    run = make_run(home, env_id, "sft", SFT | {"steps": 2}, run_id=row.run_id)
    go(run)
    return run


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums")


def test_a_run_ends_with_the_reference_numbers_whatever_is_planted_in_a_kernel(
    home: Home, env_id: str, monkeypatch: pytest.MonkeyPatch
):
    with switched_off.without(PATH):
        reference = trained(home, env_id)
    monkeypatch.setattr(causal, "causal_attention", wrong)
    assert curve(trained(home, env_id)) != curve(reference)  # what a fault does that nobody finds
    for fault, reason in FAULTS:
        monkeypatch.setattr(causal, "causal_attention", fault)
        result = checked(home)
        assert result.state == "off" and reason in result.reason
        run = trained(home, env_id)
        assert curve(run) == curve(reference) and weights(run) == weights(reference)
        assert read_json(run.manifest)["switched_off"] == {PATH: result.reason}
        assert f"switched off on this device: {PATH}: {reason}" in run.events.read_text()
        assert f"{PATH}: {reason}" in report_markdown(home, run.id)

"""Sums over ranks, by processes of their own: right, wrong on one rank, and failing."""

from pathlib import Path

import pytest
import torch
from stand_ins import stand_in

from engine.machine.fast_paths.examine import ALL_GPUS
from engine.worker.fast_paths import collectives_trial
from engine.worker.fast_paths.collectives_trial import compare, try_collectives
from engine.worker.fast_paths.summing import exact_part, rounded_part

pytestmark = pytest.mark.timeout(60)
TWO = ["", ""]  # two ranks on the CPU


def nothing(_: str) -> None: ...


@pytest.mark.worker
def test_two_ranks_add_up_exactly_and_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collectives_trial, "SLOWER", 1000.0)
    monkeypatch.setattr(collectives_trial, "SUM_S", 300.0)  # on busy cores
    said: list[str] = []
    result = compare(TWO, "gloo", "gloo", said.append)
    assert result.state == "on", result.reason
    assert result.difference == 0.0 and result.speedup is not None
    assert said == ["add up through gloo", "add up through gloo"]


FAULTS = """
import json, sys
rank = int(sys.argv[2])
right = {"wrong": 0, "digest": "same", "seconds": 0.001}
print(json.dumps(right)) if rank == 0 else None
"""


@pytest.mark.parametrize(
    ("of_rank_1", "reason"),
    [
        ("right | {'wrong': 3}", "rank 1 got a wrong sum: 3 numbers of it are not exact"),
        ("right | {'digest': 'other'}", "rank 1 got another sum than rank 0"),
        ("sys.exit('NCCL error: unhandled system error')", "rank 1 ended with status 1: NCCL"),
    ],
)
def test_a_rank_that_is_wrong_switches_collectives_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, of_rank_1: str, reason: str
):
    script = tmp_path / "summing.py"
    script.write_text(FAULTS + f"if rank == 1:\n    print(json.dumps({of_rank_1}))\n")
    stand_in(monkeypatch, summing=script)
    result = compare(TWO, "nccl", "gloo", nothing)
    assert result.state == "off" and reason in result.reason


@pytest.mark.parametrize(
    ("seconds", "state"), [({"nccl": 0.5, "gloo": 0.1}, "off"), ({"nccl": 0.1, "gloo": 0.5}, "on")]
)
def test_what_is_slower_than_the_way_through_memory_is_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: dict[str, float], state: str
):
    script = tmp_path / "summing.py"
    script.write_text(
        f"import json, sys\nseconds = {seconds}[sys.argv[4]]\n"
        'print(json.dumps({"wrong": 0, "digest": "same", "seconds": seconds}))\n'
    )
    stand_in(monkeypatch, summing=script)
    assert compare(TWO, "nccl", "gloo", nothing).state == state


def test_one_gpu_has_nothing_to_add_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ALL_GPUS, "GPU-1")
    result = try_collectives(torch.device("cuda"), nothing)
    assert (result.state, result.reason) == ("skipped", "there is one GPU")


def test_integers_add_up_exactly_in_any_order_and_the_others_do_not():
    parts = [exact_part(1 << 12, rank, torch.device("cpu")) for rank in range(4)]
    assert torch.equal(sum(parts), sum(reversed(parts)))
    assert float(sum(parts).max()) > 2000 and not torch.equal(parts[0], parts[1])
    rounded = [rounded_part(1 << 12, rank, torch.device("cpu")) for rank in range(3)]
    assert not torch.equal(sum(rounded), sum(reversed(rounded)))

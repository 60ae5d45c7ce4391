"""What the measurements count, against counts made by hand and one by one."""

import json
import random
from pathlib import Path

import pytest
import torch

from engine.cost import flops
from engine.home.run_dir import RunDir
from engine.models.model_files import ModelFacts
from engine.worker.core.batch import Row
from engine.worker.ops.packing import pack
from engine.worker.update.meter import Meter, matrix_rate, peak_memory, sizes, totals

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]


def row(length: int, shared: int = 0, prompt: int = 1) -> Row:
    ids = [prompt] * max(shared, 1) + list(range(length - max(shared, 1)))
    mask = [0] * max(shared, 1) + [1] * (length - max(shared, 1))
    return Row(ids, mask, shared)


def test_a_row_runs_all_its_tokens_but_the_last_and_each_sees_those_before_it() -> None:
    # 4 tokens run; they see 1, 2, 3 and 4 tokens.
    assert sizes([row(5)], shared=True) == (4, 10, 4)
    assert sizes([row(5), row(3)], shared=True) == (6, 13, 6)


def test_a_prompt_in_common_is_counted_once_where_it_runs_once() -> None:
    # Prompt of 3, answers of 4: 3 + 2 x 3 tokens run (the last of each does not); the prompt's see
    # 1 + 2 + 3, each answer's 4 + 5 + 6.
    rows = [row(7, shared=3), row(7, shared=3)]
    assert sizes(rows, shared=True) == (3 + 3 + 3, 6 + 15 + 15, 8)
    assert sizes(rows, shared=False) == (12, 2 * 21, 8)
    other = [row(7, shared=3), row(7, shared=3, prompt=2)]
    assert sizes(other, shared=True) == sizes(other, shared=False)


def test_the_tokens_counted_are_the_tokens_packed() -> None:
    chance = random.Random(5)
    for _ in range(50):
        rows = []
        for prompt in range(chance.randint(1, 4)):
            shared = chance.choice([0, chance.randint(1, 9)])
            for _ in range(chance.randint(1, 5)):
                rows.append(row(max(shared, 1) + chance.randint(1, 9), shared, prompt))
        assert sizes(rows, shared=True)[0] == pack(rows).ids.numel()


def test_the_operations_of_an_update_are_those_of_the_formula() -> None:
    model = ModelFacts("x", 8, 2, 2, 1, 4, 16, 32, True, 0, 64, "float32", 0)
    # Per layer: q 8 x 8, k and v 8 x 4 each, o 8 x 8, three of the MLP 8 x 16.
    linear = 2 * (64 + 32 + 32 + 64 + 3 * 128)
    assert model.linear_params == linear
    counted = flops.update_operations(model, 100, tokens=10, pairs=55, scored=7)
    attention = 3 * (2 * 2 * 2 * 4 * 55) * 2  # scores and values, forward and twice backward
    assert counted == 10 * (4 * linear + 6 * 100) + attention + 4 * 32 * 8 * 7


def test_the_matrix_rate_is_one_that_this_machine_reaches() -> None:
    rate = matrix_rate(torch.device("cpu"), torch.float32)
    assert 1e8 < rate < 1e14


def test_a_step_above_the_measured_rate_is_the_measure_from_then_on() -> None:
    meter = Meter.__new__(Meter)  # of a machine that was busy while it was measured
    meter.device, meter.matrix_flops, meter._counted_operations = torch.device("cpu"), 1e6, 0.0
    meter.telemetry = None

    def share(operations: float) -> float:
        meter._counted_operations = operations
        return meter.step(1.0)["mfu"]

    assert [share(5e5), share(4e6), share(1e6)] == [0.5, 1.0, 0.25]
    assert meter.matrix_flops == 4e6


def test_peak_memory_grows_by_what_is_held_and_does_not_shrink() -> None:
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(50_000_000)  # 200 MB
    grown = peak_memory(torch.device("cpu"))
    del held
    assert grown >= before
    assert grown > 200_000_000
    # The kernel counts pages in batches, so that its figure is good to some hundred kilobytes.
    assert peak_memory(torch.device("cpu")) > grown - 2_000_000


def test_totals_are_over_all_attempts_and_weighted_by_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "x-1")
    run.path.mkdir(parents=True)
    lines = [
        {"step": 0, "heldout_success": 0.5},
        {"step": 1, "train_s": 1.0, "mfu": 0.2, "peak_memory": 9, "tokens_per_s": 10.0},
        {"step": 2, "train_s": 3.0, "mfu": 0.6, "peak_memory": 7, "tokens_per_s": 30.0},
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert totals(run) == {
        "seconds": {"train_s": 4.0},
        "tokens_per_s": 20.0,
        "mfu": pytest.approx((0.2 * 1 + 0.6 * 3) / 4),
        "peak_memory": 9,
    }
    run.metrics.write_text("")
    assert totals(run) == {}

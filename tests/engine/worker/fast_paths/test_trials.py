"""Each path of this machine is tried for real, and its switch changes how a worker computes."""

from pathlib import Path

import pytest
import torch
from loops import SFT, go, make_run, push

from engine.core.files import read_json
from engine.core.hardware import detect
from engine.home.run_dir import Home
from engine.machine.fast_paths.catalogue import FAST_PATHS
from engine.machine.fast_paths.results import DeviceResults, PathResult, identity_of, keep_results
from engine.worker.core import switched_off
from engine.worker.core.failures import WorkerFailure
from engine.worker.fast_paths import trials
from engine.worker.fast_paths.__main__ import IN_PARTS
from engine.worker.fast_paths.trial import try_path
from engine.worker.network.policy import load_base, pick_dtype
from engine.worker.ops import fused_ops, matmul
from engine.worker.ops.attention import Attention
from engine.worker.ops.packing import Layout
from engine.worker.ranks.collective import backend_of

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")
# Those that a CPU can compute too, whatever they are for.
COMPUTABLE = [
    "bfloat16",
    "flash_attention",
    "decode_graph",
    "transformers_graph",
    "float32_head",
    "shared_prompt",
    "onednn_products",
    "block_attention",
    "training",
]


@pytest.mark.parametrize("name", COMPUTABLE)
def test_the_numbers_of_a_path_agree_with_the_plain_way(name: str):
    result = try_path(name, trials.TRIALS[name], CPU)
    assert result.difference is not None or result.state == "skipped", result.reason
    assert "differs" not in result.reason


def test_every_path_of_the_catalogue_has_a_trial():
    assert {*trials.TRIALS, *IN_PARTS} == set(FAST_PATHS)
    assert not set(trials.TRIALS) & set(IN_PARTS)


def test_a_wrong_kernel_is_caught_where_a_run_would_use_it(monkeypatch: pytest.MonkeyPatch):
    attended = trials.Attention.__call__

    def wrong(self: Attention, qkv: torch.Tensor) -> torch.Tensor:
        out = attended(self, qkv)
        return out * 1.01 if self.by_blocks else out

    monkeypatch.setattr(trials.Attention, "__call__", wrong)
    result = try_path("block_attention", trials.TRIALS["block_attention"], CPU)
    assert result.state == "off" and "differs from the plain way" in result.reason


def test_switches_change_what_is_computed_with():
    layout = Layout((8,), (4, 4), owners=(0, 0))
    cuda = torch.device("cuda")
    with switched_off.everything_on():
        assert Attention(layout, 4, 2, CPU, torch.float32).by_blocks
        assert pick_dtype("auto", cuda) == torch.bfloat16
        assert (backend_of(cuda), backend_of(CPU)) == ("nccl", "gloo")
        assert trials.group_rows(CPU)[0].prefix_len > 0
        why = dict.fromkeys(FAST_PATHS, "it differed")
        switched_off.switch_off(why | {"of a later version": "unknown"})
        assert switched_off.reasons() == why
        assert not Attention(layout, 4, 2, CPU, torch.float32).by_blocks
        assert pick_dtype("auto", cuda) == torch.float32
        assert trials.group_rows(CPU)[0].prefix_len == 0
        assert matmul._onednn() is None
        assert backend_of(cuda) == "gloo"
        choice = fused_ops.choose(fused_ops.Sizes(8, 8, 2, 1, 4, True), torch.float32, cuda)
        assert (choice.functions.name, choice.why) == ("torch", "it differed")


def test_four_bits_that_do_not_work_are_refused_with_the_reason(random_model: Path):
    with switched_off.everything_on():
        switched_off.switch_off({"four_bits": "it differed"})
        with pytest.raises(WorkerFailure, match="does not work on this device") as raised:
            load_base(random_model, CPU, "float32", quantization="nf4")
        assert raised.value.evidence == "it differed"


def test_a_run_leaves_out_what_does_not_work_and_says_so(home: Home, tmp_path: Path):
    off = PathResult(name="block_attention", state="off", reason="it differed")
    identity = identity_of(detect().device, home)
    keep_results(home, DeviceResults(identity=identity, time=1.0, paths=(off,)))
    run = make_run(home, push(home, tmp_path / "sums"), "sft", SFT)
    with switched_off.everything_on():
        go(run)
    assert read_json(run.manifest)["switched_off"] == {"block_attention": "it differed"}
    assert "switched off on this device: block_attention: it differed" in run.events.read_text()

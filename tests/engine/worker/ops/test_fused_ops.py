"""What stands between matrix products: every set of functions against float64 formulas or against
torch's, how one is chosen, and what happens when it fails."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import PEBBLE, go, make_run, push

from engine.core.files import read_json
from engine.home.run_dir import Home
from engine.worker.network import policy
from engine.worker.network.policy import load_base
from engine.worker.ops import compiled, fused_ops
from engine.worker.ops.fused_ops import (
    COMPILE_FROM_STEPS,
    KERNELS,
    TORCH,
    Choice,
    LayerFunctions,
    Sizes,
)
from engine.worker.ops.kernels import AddNorm, HeadLayout, HeadsRope, Norm, SwiGLU

ROOT = Path(__file__).resolve().parents[4]
HELPERS = ROOT / "tests" / "helpers"
CPU, GPU = torch.device("cpu"), torch.device("cuda")
EPS = 1e-3
SIZES = Sizes(hidden=12, intermediate=20, heads=4, kv_heads=2, head_dim=6, normed=True)
SETS = {"torch": TORCH, "formulas": LayerFunctions("formulas", *compiled.FUNCTIONS)}
WRONG = replace(TORCH, name="wrong", gate=lambda gate_up: 1.1 * TORCH.gate(gate_up))

Function = Callable[..., Sequence[torch.Tensor]]


def compare(ours: Function, formula: Function, inputs: Sequence[torch.Tensor]) -> None:
    """Values, and gradients of every input, of a random projection of the outputs."""
    mine = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().clone().requires_grad_() for x in inputs]
    got, wanted = ours(*mine), formula(*exact)
    slopes = [torch.randn(w.shape) for w in wanted]
    torch.autograd.backward(got, slopes)
    torch.autograd.backward(wanted, [slope.double() for slope in slopes])
    for g, w in zip(
        [*got, *(x.grad for x in mine)], [*wanted, *(x.grad for x in exact)], strict=True
    ):
        assert g is not None and w is not None
        assert (g.double() - w).norm() < 2e-6 * w.norm()


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight.double()


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


@pytest.mark.parametrize("hidden", [1, 8, 37])
@pytest.mark.parametrize("functions", SETS.values(), ids=SETS)
def test_norms_and_the_gate_are_their_formulas(functions: LayerFunctions, hidden: int) -> None:
    torch.manual_seed(hidden)
    weight, x, delta = torch.randn(hidden), torch.randn(9, hidden), torch.randn(9, hidden)
    compare(lambda x: [Norm.apply(x, weight, EPS, functions)], lambda x: [rms(x, weight)], [x])
    compare(
        lambda x, delta: AddNorm.apply(x, delta, weight, EPS, functions),
        lambda x, delta: [x + delta, rms(x + delta, weight)],
        [x, delta],
    )
    number = fused_ops.Eps(EPS, torch.full((1,), EPS))
    plain = functions.plain_norm(x, weight, number)
    assert (plain - rms(x.double(), weight)).norm() < 2e-6 * plain.norm()
    compare(
        lambda both: [SwiGLU.apply(both, functions)],
        lambda both: [both[:, :hidden] * torch.sigmoid(both[:, :hidden]) * both[:, hidden:]],
        [torch.randn(9, 2 * hidden)],
    )


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("heads, kv, dim", [(4, 2, 6), (3, 1, 10), (2, 2, 2)])
@pytest.mark.parametrize("functions", SETS.values(), ids=SETS)
def test_queries_and_keys_turn_and_values_stay(
    functions: LayerFunctions, heads: int, kv: int, dim: int, normed: bool
) -> None:
    torch.manual_seed(dim)
    q, k = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    angles = torch.rand(9, 1, dim // 2)
    cos, sin = angles.cos(), angles.sin()
    x = torch.randn(9, (heads + 2 * kv) * dim)

    def formula(x: torch.Tensor) -> list[torch.Tensor]:
        parts = list(x.view(9, -1, dim).split([heads, kv, kv], 1))
        for i, weight in enumerate((q, k)):
            normal = parts[i] if weight is None else rms(parts[i], weight)
            parts[i] = turned(normal, cos.double(), sin.double())
        return [torch.cat(parts, 1).flatten(1)]

    def ours(x: torch.Tensor) -> list[torch.Tensor]:
        return [HeadsRope.apply(1 * x, q, k, cos, sin, HeadLayout(heads, kv, EPS), functions)]

    compare(ours, formula, [x])
    every = x.clone().view(9, -1, dim)
    both = (
        fused_ops.norm_weight_per_head(q, k, heads, kv) if q is not None and k is not None else None
    )
    number = fused_ops.Eps(EPS, torch.full((1,), EPS))
    functions.plain_apply_rope(every, both, heads, kv, torch.cat([cos, cos], -1), sin, number)
    (wanted,) = formula(x.double())
    assert (every.flatten(1) - wanted).norm() < 2e-6 * wanted.norm()


# -- choosing


def test_a_cpu_always_takes_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("", "torch", "liger", "compiled"):
        monkeypatch.setenv(KERNELS, asked)
        choice = fused_ops.choose(SIZES, torch.float32, CPU, 10**6)
        assert choice.functions is TORCH and choice.why == ""


def test_a_gpu_takes_what_is_installed_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(
        fused_ops, "try_functions", lambda make, *_: tried.append(make) or Choice(WRONG)
    )
    installed = {"liger_kernel": False}
    monkeypatch.setattr(fused_ops, "find_spec", lambda name: installed[name] or None)

    def chosen(asked: str, steps: int = 0) -> tuple[str, int]:
        monkeypatch.setenv(KERNELS, asked)
        tried.clear()
        choice = fused_ops.choose(SIZES, torch.bfloat16, GPU, steps)
        return choice.functions.name, len(tried)

    assert chosen("") == ("torch", 0)
    assert chosen("liger") == ("wrong", 1), "asked for by name it is tried, and a failure is told"
    assert chosen("compiled", COMPILE_FROM_STEPS - 1) == ("torch", 0)
    assert chosen("compiled", COMPILE_FROM_STEPS) == ("wrong", 1)
    assert tried == [fused_ops.compiled_functions]
    installed["liger_kernel"] = True
    assert chosen("") == ("wrong", 1) and chosen("torch") == ("torch", 0)
    monkeypatch.setenv(KERNELS, "ligre")
    said = fused_ops.choose(SIZES, torch.bfloat16, GPU)
    assert said == Choice(TORCH, f"{KERNELS}=ligre is none of torch, liger, compiled")


def test_a_set_that_fails_or_differs_is_left_alone() -> None:
    def absent() -> LayerFunctions:
        raise ModuleNotFoundError("No module named 'triton'\nmore")

    def broken(*_: Any) -> Any:
        raise RuntimeError("no C compiler")

    nan = replace(TORCH, name="nan", norm_gradient=lambda kept, weight, dy: dy / 0.0 * 0.0)
    later = replace(TORCH, name="later", apply_rope_gradient=broken)
    made = {"wrong": WRONG, "nan": nan, "later": later, "torch": TORCH}
    said = {
        name: fused_ops.try_functions(lambda each=each: each, SIZES, torch.float32, CPU)
        for name, each in made.items()
    }
    assert all(choice.functions is TORCH for choice in said.values())
    assert said["wrong"].why == "wrong: gate differs from torch's by 1.0e-01"
    assert said["nan"].why == "nan: norm_gradient differs from torch's by nan"
    assert said["later"].why == "RuntimeError: no C compiler"
    assert said["torch"].why == ""
    choice = fused_ops.try_functions(absent, SIZES, torch.float32, CPU)
    assert choice == Choice(TORCH, "ModuleNotFoundError: No module named 'triton' more")


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_a_set_whose_logits_are_not_transformers_is_dropped_at_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fused_ops, "choose", lambda *_: Choice(WRONG))
    kept = tmp_path / "comparisons.json"
    network = load_base(PEBBLE, CPU, "float32", comparisons_file=kept).network
    assert (network.forward, network.why, network.kernels) == ("own", "", "torch")
    assert network.kernels_why.startswith("wrong: logits differ from transformers' by ")
    assert isinstance(network, policy.DecoderNetwork) and network.decoder.functions is TORCH
    # What was kept is that torch's agree; of the others nothing is known, so they are compared.
    again = load_base(PEBBLE, CPU, "float32", comparisons_file=kept).network
    assert again.kernels_why == network.kernels_why
    monkeypatch.setattr(fused_ops, "choose", lambda *_: Choice(replace(TORCH, name="other")))
    assert load_base(PEBBLE, CPU, "float32").network.kernels == "other"


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_a_run_says_what_it_used_and_what_it_could_not_use(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(home, push(home, tmp_path / "env"), "grpo", _GRPO)
    seen: list[int] = []

    def choose(_sizes: Any, _dtype: Any, _device: Any, steps: int) -> Choice:
        seen.append(steps)
        return Choice(TORCH, "RuntimeError: no C compiler")

    monkeypatch.setattr(fused_ops, "choose", choose)
    go(run)
    assert seen == [1]
    manifest = read_json(run.manifest)
    assert manifest["kernels"] == {"kind": "torch", "why": "RuntimeError: no C compiler"}
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    (told,) = [event for event in events if event["event"] == "kernels"]
    assert "no C compiler" in told["message"]


_GRPO = {
    "steps": 1,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_tokens": 12,
    "eval_rows": 4,
    "learning_rate": 1e-3,
}


# -- the compiler and Liger, in processes of their own: neither leaves one as it was


def script(*arguments: str, **variables: str) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT), str(HELPERS)])
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths} | variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


GRAPHS = """
import json, torch
from collections import Counter
from engine.worker.ops import compiled, fused_ops
made = Counter()

def counted(graph, examples):
    made[tuple(str(node.target) for node in graph.graph.nodes)] += 1
    return graph.forward

compiled.BACKEND = counted
functions = fused_ops.compiled_functions()
sizes = fused_ops.Sizes(12, 20, 4, 2, 6, True)
apart = {}
for rows in range(2, 42, 2):
    mine = fused_ops.results_by_function(functions, sizes, rows, torch.float32, torch.device("cpu"))
    exact = fused_ops.results_by_function(
        fused_ops.TORCH, sizes, rows, torch.float32, torch.device("cpu")
    )
    for name in exact:
        for a, b in zip(mine[name], exact[name], strict=True):
            apart[name] = max(apart.get(name, 0), float((a - b).norm() / b.norm()))

def failing(graph, examples):
    raise RuntimeError("no C compiler")

compiled.BACKEND = failing
facts = sizes, torch.float32, torch.device("cpu")
said = fused_ops.try_functions(fused_ops.compiled_functions, *facts)
compiled.tolerate_failures()
later = fused_ops.largest_difference(fused_ops.compiled_functions(), *facts)[0]
print(json.dumps({
    "graphs": sum(made.values()),
    "functions": len(apart),
    "apart": apart,
    "said": said.why,
    "used": said.functions.name,
    "later": later,
}))
"""


@pytest.mark.worker
@pytest.mark.timeout(60)
def test_twenty_lengths_of_batches_make_two_graphs_of_each_function() -> None:
    found = script("-c", GRAPHS)
    assert found["functions"] == 11
    assert found["graphs"] <= 2 * found["functions"], found
    assert max(found["apart"].values()) < 2e-6, found["apart"]
    assert found["used"] == "torch" and "no C compiler" in found["said"]
    assert found["later"] < 2e-6, "what fails after the trial runs as it is written"


interpreted = pytest.mark.skipif(
    find_spec("triton") is None or find_spec("liger_kernel") is None,
    reason="needs triton and liger-kernel (285 MB): pip install -e '.[gpu]'",
)


def liger(part: str) -> dict[str, Any]:
    return script(str(HELPERS / "liger_numbers.py"), part, TRITON_INTERPRET="1")


@interpreted
@pytest.mark.worker
@pytest.mark.timeout(60)
def test_ligers_functions_have_torchs_numbers_at_odd_sizes_too() -> None:
    found = liger("functions")
    assert found["float32"] < 1e-5 and found["float16"] < 4e-3, found


@interpreted
@pytest.mark.worker
@pytest.mark.timeout(60)
def test_ligers_other_kernel_for_many_rows_has_torchs_numbers() -> None:
    assert liger("rows")["rows"] < 1e-5


@interpreted
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.worker
@pytest.mark.timeout(60)
def test_a_decoder_on_liger_has_the_loss_and_gradients_of_torchs(family: str) -> None:
    found = liger(family)
    assert found["loss"] < 1e-5 and found["sampled"] < 1e-5, found
    assert max(found[kind] for kind in ("gradients", "checkpointed", "dropout")) < 1e-4, found
    assert found["twice"] == 0.0, "a kernel wrote over what was kept for the backward pass"

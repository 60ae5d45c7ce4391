"""How far Liger's kernels are from torch's functions, by Triton's interpreter; one line of JSON.

    TRITON_INTERPRET=1 PYTHONPATH=. python tests/helpers/liger_numbers.py PART

PART: functions, rows, or a family of models: llama, qwen2, qwen3.

Run with triton and liger-kernel installed. Functions on random shapes, odd ones too; then whole
small decoders: rows with a shared prompt and rows alone, with and without recomputing, dropout, a
second backward pass over the same graph (kernels that write over what was saved would show), and
the logits of the sampler's own forward. numpy knows no bfloat16, so float16 stands for both.
"""

import json
import random
import sys
from typing import Any

import torch
from interpreted_liger import interpreted
from tiny_decoders import VOCAB, own, spec, stir, tiny

from engine.worker.core.batch import Row
from engine.worker.network.decode_forward import Forward
from engine.worker.ops import fused_ops
from engine.worker.ops.fused_ops import TORCH, LayerFunctions, Sizes

CPU = torch.device("cpu")
PROMPT = [5, 9, 2, 44, 17]
ROWS = [
    Row([*PROMPT, 3, 4, 8], [0] * 5 + [1, 1, 1], 5),
    Row([*PROMPT, 31], [0] * 5 + [1], 5),
    Row([*PROMPT, 12, 13, 14, 15, 16, 18], [0] * 5 + [1, 0, 1, 1, 0, 1], 5),
    Row([7, 7, 23, 40, 1, 60], [0, 1, 1, 0, 1, 1]),
]


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def functions(liger: LayerFunctions, dtype: torch.dtype) -> float:
    """The largest distance of any function's results, over random sizes."""
    chance, worst = random.Random(0), 0.0
    for normed in (True, False, True, False):
        heads, kv = chance.choice([(4, 2), (3, 1), (5, 5), (6, 3)])
        sizes = Sizes(
            chance.randrange(3, 90),  # of one number alone a norm has no gradient but rounding
            chance.randrange(1, 90),
            heads,
            kv,
            2 * chance.randrange(1, 20),
            normed,
        )
        for rows in (1, chance.randrange(2, 40)):
            mine = fused_ops.results_by_function(liger, sizes, rows, dtype, CPU)
            exact = fused_ops.results_by_function(TORCH, sizes, rows, dtype, CPU)
            for name, wanted in exact.items():
                for got, each in zip(mine[name], wanted, strict=True):
                    worst = max(worst, apart(got, each))
    return worst


def many_rows(liger: LayerFunctions) -> float:
    """Norms of 32,768 rows, from where on Liger has another kernel."""
    torch.manual_seed(0)
    x, dy, weight = torch.randn(32_768, 8), torch.randn(32_768, 8), torch.randn(8)
    y, saved = liger.norm(x, weight, 1e-6)
    wanted, exact = TORCH.norm(x, weight, 1e-6)
    back = liger.norm_gradient(saved, weight, dy)
    return max(apart(y, wanted), apart(back, TORCH.norm_gradient(exact, weight, dy)))


def model(family: str, liger: LayerFunctions) -> dict[str, float]:
    network: Any = own(tiny(family)).network
    adapter = stir(network.new_adapter(spec(dropout=0.25), 1))

    def trained(use: LayerFunctions, twice: bool = False, **options: Any) -> Any:
        network.decoder.functions = use
        torch.manual_seed(3)
        values, _ = network.logprobs(network.collate(ROWS), adapter, **options)
        loss = (values * torch.linspace(0.5, 2.0, len(values))).sum()
        if twice:
            loss.backward(retain_graph=True)
            adapter.clear_gradients()
        loss.backward()
        found = {name: slope.clone() for name, slope in adapter.gradients().items()}
        adapter.clear_gradients()
        return loss.detach(), found

    def worst(mine: Any, other: Any) -> float:
        return max(apart(mine[1][name], other[1][name]) for name in other[1])

    def sampled(use: LayerFunctions) -> torch.Tensor:
        network.decoder.functions = use
        forward = Forward(network.decoder, network.decoder.weights(adapter), VOCAB, 32)
        with torch.inference_mode():
            return forward.read([PROMPT, PROMPT[:3], [1, 2, 3, 4, 5, 6, 7]])[1]

    exact, mine = trained(TORCH), trained(liger)
    return {
        "loss": apart(mine[0], exact[0]),
        "gradients": worst(mine, exact),
        "checkpointed": worst(trained(liger, checkpointing=True), trained(TORCH)),
        "dropout": worst(trained(liger, training=True), trained(TORCH, training=True)),
        "twice": worst(trained(liger, twice=True), mine),
        "sampled": apart(sampled(liger), sampled(TORCH)),
    }


def numbers(part: str) -> dict[str, float]:
    liger = interpreted()
    if part == "functions":
        kinds = torch.float32, torch.float16
        return {str(kind).removeprefix("torch."): functions(liger, kind) for kind in kinds}
    return {"rows": many_rows(liger)} if part == "rows" else model(part, liger)


if __name__ == "__main__":
    print(json.dumps(numbers(sys.argv[1])))

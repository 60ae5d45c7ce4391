"""Results of comparing our own forward with transformers', so that they need not be compared again.

A file in the home, keyed by everything that could change the result: the model's files, the number
format, the libraries and our own sources. The rotary positions that transformers computed are kept
with it.
"""

import contextlib
import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine.core.files import read_object, write_json
from engine.worker.network.decoder import Rope

SOURCES = (
    "ops/attention.py",
    "ops/causal.py",
    "ops/compiled.py",
    "network/decoder.py",
    "ops/kernels.py",
    "ops/liger.py",
    "ops/packing.py",
    "ops/fused_ops.py",
    "ops/matmul.py",
    "network/shape.py",
    "network/weights.py",
)


def recall(file: Path | None, model: Path, dtype: torch.dtype, kernels: str) -> Rope | None:
    """Rotary positions of a model whose logits are known to agree; None if that is not known.

    Args:
        file: where results are kept; None for nowhere.
        model: the model's folder.
        kernels: names the functions between the products.
    """
    if file is None:
        return None
    stored: Any = read_object(file).get(_key(model, dtype, kernels))
    try:
        return Rope(tuple(map(float, stored["inverse_frequencies"])), float(stored["scale"]))
    except (TypeError, KeyError, ValueError):  # not compared yet, or not by us
        return None


def remember(
    file: Path | None,
    model: Path,
    dtype: torch.dtype,
    kernels: str,
    rope: Rope,
    difference: float,
) -> None:
    """Keep that the logits differ by no more than `difference`, which is within tolerance.

    `rope` is kept with it; the other arguments are those of `recall`. Nothing is kept without a
    file or in a home that cannot be written to.
    """
    if file is None:
        return
    entry = {
        "inverse_frequencies": list(rope.inverse_frequencies),
        "scale": rope.scale,
        "difference": difference,
    }
    # A home that cannot be written to merely compares again.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, read_object(file) | {_key(model, dtype, kernels): entry})


def _key(model: Path, dtype: torch.dtype, kernels: str) -> str:
    """A hash of everything that could change the result of a comparison."""
    files = sorted([*model.glob("*.safetensors"), *model.glob("*.json")])
    facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    libraries = [torch.__version__, version("transformers")]
    named = repr((str(model.resolve()), facts, libraries, str(dtype), kernels, _sources()))
    return hashlib.sha256(named.encode()).hexdigest()


@cache
def _sources() -> str:
    """A hash of the sources of our own forward."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parents[1] / name).read_bytes())
    return digest.hexdigest()

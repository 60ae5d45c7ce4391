"""Results of comparing our own forward with transformers', kept so that no comparison is made
twice.

They stand in a file of the home folder, under a key of everything that could change the result: the
model's files, the number format, the libraries and our own sources. The rotary positions that
transformers computed are kept with each result.
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
    "ops/low_rank.py",
    "ops/norms.py",
    "ops/packing.py",
    "ops/fused_ops.py",
    "ops/matmul.py",
    "network/shape.py",
    "network/weights.py",
)


CPU = torch.device("cpu")


def recall(
    file: Path | None, model: Path, dtype: torch.dtype, kernels: str, device: torch.device = CPU
) -> Rope | None:
    """Look up an earlier comparison of our forward with transformers' for this model. Returns the
    rotary positions that transformers computed then; None if no comparison is stored. Only
    comparisons whose logits agreed are stored, so a result means that our forward may be used.

    Args:
        file: where results are kept; None if nowhere.
        model: the model's folder.
        dtype: the number format of the weights.
        kernels: the name of the set of functions between the matrix products (fused_ops.py).
        device: where our forward ran; a result holds for all GPUs of the same product name.
    """
    if file is None:
        return None
    stored: Any = read_object(file).get(_comparison_key(model, dtype, kernels, device))
    try:
        return Rope(tuple(map(float, stored["inverse_frequencies"])), float(stored["scale"]))
    # TypeError: `stored` is None, because no comparison is stored under this key.
    # KeyError, ValueError: an entry that `remember` did not write.
    except (TypeError, KeyError, ValueError):
        return None


def remember(
    file: Path | None,
    model: Path,
    dtype: torch.dtype,
    kernels: str,
    rope: Rope,
    difference: float,
    device: torch.device = CPU,
) -> None:
    """Store that our logits agree with transformers' on this model, so that `recall` finds the
    result. Nothing is stored if `file` is None or cannot be written.

    Args:
        file, model, dtype, kernels, device: see `recall`.
        rope: the rotary positions that transformers computed.
        difference: how far the logits differ, relative to transformers'; stored for information.
    """
    if file is None:
        return
    entry = {
        "inverse_frequencies": list(rope.inverse_frequencies),
        "scale": rope.scale,
        "difference": difference,
    }
    # If the file cannot be written, the next load compares again.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(
            file, read_object(file) | {_comparison_key(model, dtype, kernels, device): entry}
        )


def _comparison_key(model: Path, dtype: torch.dtype, kernels: str, device: torch.device) -> str:
    """Make the key of a comparison in the file: a SHA-256 of everything that could change the
    result. That is the model's files (by name, size and time of change), the libraries, the number
    format, the set of functions (its name `kernels`), the kind of GPU, and our own sources."""
    files = sorted([*model.glob("*.safetensors"), *model.glob("*.json")])
    file_facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    libraries = [torch.__version__, version("transformers")]
    if device.type != "cpu":  # each GPU model has kernels that round differently
        libraries.append(torch.cuda.get_device_name(device))
    folder = str(model.resolve())
    facts = repr((folder, file_facts, libraries, str(dtype), kernels, _source_hash()))
    return hashlib.sha256(facts.encode()).hexdigest()


@cache
def _source_hash() -> str:
    """A SHA-256 of the source files of our own forward (SOURCES, relative to engine/worker). It
    changes when they do, so that a changed forward is compared anew."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parents[1] / name).read_bytes())
    return digest.hexdigest()

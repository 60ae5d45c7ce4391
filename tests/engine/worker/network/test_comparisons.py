"""The comparison with transformers is made once, and again whenever its answer could change."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.worker.network import comparisons
from engine.worker.network.decoder import Rope
from engine.worker.network.policy import load_base
from engine.worker.ops import attention
from engine.worker.ops.attention import Attention

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

CPU = torch.device("cpu")
IDS = [5, 9, 2, 30, 7, 7, 1]


def test_what_is_read_without_transformers_gives_the_same_logits(
    random_model: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "comparisons.json"
    first = load_base(random_model, CPU, "float32", comparisons_file=kept)
    (entry,) = json.loads(kept.read_text()).values()
    assert entry["difference"] < 1e-5
    again = load_base(random_model, CPU, "float32", comparisons_file=kept)
    assert again.network.forward == "own"
    assert torch.equal(first.network.logits(IDS, None), again.network.logits(IDS, None))
    assert (again.vocab, again.stop_ids) == (first.vocab, first.stop_ids)


def test_other_weights_number_formats_and_kernels_are_compared_anew(
    random_model: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "comparisons.json"
    load_base(random_model, CPU, "float32", comparisons_file=kept)
    assert comparisons.recall(kept, random_model, torch.float32, "torch") is not None
    assert comparisons.recall(kept, random_model, torch.bfloat16, "torch") is None
    assert comparisons.recall(kept, random_model, torch.float32, "liger 0.8.5") is None
    weights = random_model / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert comparisons.recall(kept, random_model, torch.float32, "torch") is None


def test_a_comparison_holds_for_gpus_of_one_model(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gpu = tmp_path / "comparisons.json", torch.device("cuda")
    rope = Rope((1.0, 0.1), 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    comparisons.remember(kept, random_model, torch.bfloat16, "torch", rope, 1e-3, gpu)
    assert comparisons.recall(kept, random_model, torch.bfloat16, "torch", gpu) == rope
    assert comparisons.recall(kept, random_model, torch.bfloat16, "torch") is None  # on a CPU
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    assert comparisons.recall(kept, random_model, torch.bfloat16, "torch", gpu) is None


def test_rows_that_share_a_prompt_are_compared_too(
    random_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that is right on whole rows alone would train GRPO on wrong numbers."""
    plain = Attention._attended_suffixes

    def wrong(self: Attention, *given: Any) -> torch.Tensor:
        return plain(self, *given) * 1.5

    monkeypatch.setattr(attention, "_fits_blocks", lambda *given: False)
    assert load_base(random_model, CPU, "float32").network.forward == "own"
    monkeypatch.setattr(Attention, "_attended_suffixes", wrong)
    base = load_base(random_model, CPU, "float32")
    assert base.network.forward == "transformers" and "differ" in base.network.why


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', "{"])
def test_a_damaged_record_means_comparing_again(
    content: str, random_model: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "comparisons.json"
    kept.write_text(content)
    assert load_base(random_model, CPU, "float32", comparisons_file=kept).network.forward == "own"
    assert comparisons.recall(kept, random_model, torch.float32, "torch") is not None


def test_a_known_model_loads_without_transformers_model_classes(
    random_model: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "comparisons.json"
    load_base(random_model, CPU, "float32", comparisons_file=kept)
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from engine.worker.grpo import train\n"
        "from engine.worker.network.policy import load_base\n"
        f"load_base(Path({str(random_model)!r}), torch.device('cpu'), 'float32',"
        f" comparisons_file=Path({str(kept)!r}))\n"
        "dear = {'peft', 'torch._dynamo', 'transformers.modeling_utils'} & set(sys.modules)\n"
        "sys.exit(repr(dear) if dear else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_module_that_the_forward_computes_with_is_part_of_its_version():
    root = Path(comparisons.__file__).parents[1]
    found: set[Path] = set()
    to_read = [root / "network/decoder.py"]
    while to_read:
        path = to_read.pop()
        if path not in found:
            found.add(path)
            to_read += modules_imported(path, root)
    names = {str(path.relative_to(root)) for path in found}
    # An adapter is none of the forward that is compared: the base alone is.
    computed = {name for name in names if name.startswith(("ops/", "network/"))}
    assert computed - {"network/adapter.py"} == set(comparisons.SOURCES)


def modules_imported(path: Path, root: Path) -> list[Path]:
    """The files of the worker's ops and network that a module imports."""
    paths = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            place = node.module.removeprefix("engine.worker.").replace(".", "/")
            names = [place, *(f"{place}/{alias.name}" for alias in node.names)]
            paths += [root / f"{name}.py" for name in names]
    return [path for path in paths if path.is_file()]

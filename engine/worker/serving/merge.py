"""Merges an adapter into its base: `python -P -m engine.worker.serving.merge CONFIG.json`.

CONFIG.json holds `base_path`, `adapter`, `out`, and `gguf`: the name of a GGUF file that is written
to `out` instead of a model folder, such as "x.q8_0.gguf", or "". The adapter is merged in float32,
and the result is then rounded to the base's own type, because merging in bfloat16 loses most of a
small update. Before anything is kept, the logits of the merged model are compared with those of
base + adapter.

The program prints one JSON line: `{"path", "files", "max_logit_gap"}` or `{"error"}`.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.worker.core.runtime import prepare

prepare()

import torch

from engine.core.errors import UserError
from engine.core.files import read_json
from engine.models.families import text_part
from engine.models.gguf.vocabulary import NotExportable
from engine.worker.core.failures import WorkerFailure
from engine.worker.network.adapter import LoraSpec, read_adapter
from engine.worker.network.hub_network import HubNetwork
from engine.worker.network.policy import known_ids, load_transformers, pick_device, stop_ids_of
from engine.worker.rollouts.renderer import Renderer
from envs.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
ALLOWED_GAP = 1e-3  # the largest difference between logits that rounding explains


def merge(base_path: Path, adapter: Path, out: Path) -> float:
    """Merge the adapter into the base and write the result to the folder `out`, which must not
    exist. The merged model is first compared with base + adapter on one short prompt. Returns the
    largest difference between their logits.

    Raises:
        WorkerFailure: the adapter does not fit the base, or that difference is too large.
    """
    config = text_part(read_json(base_path / "config.json"))
    # The base's number format; older models call the key torch_dtype.
    saved_dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    model, tokenizer = load_transformers(base_path, pick_device("cpu"), precision="float32")
    network = HubNetwork(
        model, vocab=known_ids(model.config, tokenizer), why="exported by transformers"
    )
    renderer = Renderer(tokenizer, stop_ids_of(model.config, tokenizer, base_path))
    ids = renderer.prompt([{"role": "user", "content": "Add 2, 3."}])  # any text would do
    merged, gap = _merge_and_compare(network, adapter, ids)
    _check_gap(gap)
    _write_model(merged, getattr(torch, saved_dtype), tokenizer, out)
    return gap


def _merge_and_compare(network: HubNetwork, adapter: Path, ids: list[int]) -> tuple[Any, float]:
    """Merge the adapter in the folder `adapter` into the network's model. Returns (the merged
    model, the largest difference of its logits from those of base + adapter on the prompt
    `ids`)."""
    # Any seed: the initial weights are replaced at once.
    loaded_adapter = network.new_adapter(LoraSpec.from_folder(adapter), seed=0)
    loaded_adapter.load(read_adapter(adapter))
    expected_logits = network.logits(ids, loaded_adapter)
    with torch.no_grad():
        merged = network.peft.merge_and_unload(safe_merge=True)  # raises if a weight is not finite
        logits = merged(input_ids=torch.tensor([ids])).logits[0]  # the batch has one row
        gap = float((logits - expected_logits).abs().max())
    return merged, gap


def _check_gap(gap: float) -> None:
    """Raise WorkerFailure if `gap`, the largest difference between the logits of the merged model
    and of base + adapter, is more than rounding explains."""
    if gap > ALLOWED_GAP:
        raise WorkerFailure(
            "infra",
            "The merged model does not say what base and adapter say.",
            evidence=str(gap),
        )


def _write_model(
    model: Any, dtype: torch.dtype, tokenizer: "PreTrainedTokenizerBase", out: Path
) -> None:
    """Write the model, rounded to `dtype`, with its tokenizer to the folder `out`. It is written
    under another name and then renamed, so that `out` is complete or absent."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    model.to(dtype).save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    os.replace(temporary, out)


def merge_to_gguf(base_path: Path, adapter: Path, out: Path, name: str) -> float:
    """Merge as `merge` does, but write the result as the GGUF file `name` in the folder `out`. The
    name ends in .f16.gguf or .q8_0.gguf, which says how weights are stored.

    Besides the errors of `merge`, raises NotExportable if GGUF cannot hold the model, and
    ImportError if the package gguf is missing.
    """
    # Imported here, because it needs the package gguf, which not everyone has. Imported before
    # merging, so that a missing package is not found only after minutes.
    from engine.models.gguf.exporter import export_gguf  # noqa: PLC0415

    temporary = out.with_name(f".{out.name}.merged")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        gap = merge(base_path, adapter, temporary / "model")
        (temporary / "gguf").mkdir()
        weight_format = name.split(".")[-2]  # f16 or q8_0
        export_gguf(temporary / "model", temporary / "gguf" / name, weight_format)
        os.replace(temporary / "gguf", out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return gap


def main(config_file: Path) -> int:
    """Merge the adapter that the JSON file `config_file` names, and print one line of JSON:
    `{"path", "files", "max_logit_gap"}` or `{"error"}`. Returns the exit status: 0, or 3 after an
    error."""
    config = read_json(config_file)
    out = Path(config["out"])
    try:
        gap = _merge_into_folder(config, out)
    except ImportError as error:
        hint = f"{sys.executable} -m pip install 'gguf>=0.17,<1'"
        _print_line({"error": f"no package {error.name}: {hint}"})
        return 3
    except (WorkerFailure, UserError, NotExportable, OSError) as error:
        _print_line({"error": str(error)})
        return 3
    files = sorted(path.name for path in out.iterdir())
    _print_line({"path": str(out), "files": files, "max_logit_gap": gap})
    return 0


def _merge_into_folder(config: JsonObject, out: Path) -> float:
    """Merge the adapter that the config names into its base, and write the result to the folder
    `out`: a GGUF file if the config names one (`gguf`), and otherwise a model folder's files.
    Returns the largest difference between the logits of the merged model and of base + adapter."""
    base_path, adapter = Path(config["base_path"]), Path(config["adapter"])
    gguf_name = config["gguf"]
    if gguf_name:
        return merge_to_gguf(base_path, adapter, out, gguf_name)
    return merge(base_path, adapter, out)


def _print_line(content: JsonObject) -> None:
    """Print an object as one line of JSON, which the parent process reads."""
    sys.stdout.write(json.dumps(content) + "\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""A base that is a tuned copy of a model of this machine is told by its weights."""

from pathlib import Path

from engine.core.files import read_json, write_json
from engine.evidence.bases.lookalikes import lookalikes
from engine.home.hashes import fingerprint, weight_hashes
from engine.home.run_dir import Home
from engine.records.model_origin import ModelOrigin
from tests import tiny_model


def others(home: Home, folder: Path, ref: str = "") -> list[str]:
    named = lookalikes(home, ref or str(folder), folder, weight_hashes(home, folder), "sums-sft-1")
    return [f"{other.ref} {other.weights}" for other in named]


def test_a27_a_tuned_copy_of_a_model_of_this_machine_is_named_with_both_weights(
    home: Home, tmp_path: Path
):
    known, copy = home.models / "known", tmp_path / "copy"
    for folder in (known, copy):
        tiny_model.write_model(folder)
    ModelOrigin(source="a file", sha256="").write(known / "model.json")
    assert others(home, copy) == []  # the same weights: it is the model
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    named = f"known {fingerprint(weight_hashes(home, known))}"
    assert others(home, copy) == [named]
    # What the configuration says of the program that wrote it is no difference.
    config = read_json(copy / "config.json")
    write_json(copy / "config.json", config | {"transformers_version": "99", "dtype": "float32"})
    assert others(home, copy) == [named]
    # A model that is public under its own name is what its name says.
    assert others(home, copy, ref="ada/known-instruct") == []
    tokenizer = read_json(copy / "tokenizer.json")
    tokenizer["model"]["vocab"] = {"another": 0}
    write_json(copy / "tokenizer.json", tokenizer)
    assert others(home, copy) == []

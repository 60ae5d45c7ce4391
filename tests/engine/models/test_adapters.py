"""An adapter is a model by its folder or hub id, on the base it was made for and on no other."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.home import hashes
from engine.home.run_dir import Home
from engine.models import catalog
from engine.models.model_files import AdapterFacts
from engine.records.manifest import (
    Choice,
    EnvironmentUsed,
    MachineUsed,
    Manifest,
    ModelUsed,
    SamplingUsed,
)
from engine.runs.submit.run_folder import RunFiles, write_folder
from engine.serving.export import export
from tests import tiny_model


@pytest.fixture(autouse=True)
def no_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model.write_model(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    folder = tmp_path / "adapter"
    tiny_model.write_adapter(folder, tiny_model.config(), targets=("q_proj", "down_proj"))
    describe(folder, base_model_name_or_path=str(base))
    return folder


def describe(folder: Path, **changes: Any) -> None:
    """Change adapter_config.json; None takes a key away."""
    config = read_json(folder / "adapter_config.json") | changes
    kept = {key: value for key, value in config.items() if value is not None}
    write_json(folder / "adapter_config.json", kept)


def refusal(home: Home, ref: object) -> UserError:
    with pytest.raises(UserError) as caught:
        catalog.resolve_model(home, str(ref))
    return caught.value


def test_an_adapter_by_its_folder_brings_rank_alpha_targets_and_base(
    home: Home, base: Path, adapter: Path
):
    model = catalog.resolve_model(home, str(adapter))
    assert (model.kind, model.adapter, model.run_id) == ("adapter", adapter, "")
    assert (model.base_ref, model.base_path) == (str(base), base)
    assert model.adapter_facts == AdapterFacts(4, 8, ("q_proj", "down_proj"))
    described = catalog.describe(home, str(adapter))
    assert (described["base"], described["lora_rank"]) == (str(base), 4)


def test_an_adapter_in_a_local_hub_cache_is_a_model_by_its_hub_id(
    home: Home, adapter: Path, tmp_path: Path
):
    snapshot = tmp_path / "hub" / "models--ada--sums-lora" / "snapshots" / ("0" * 40)
    shutil.copytree(adapter, snapshot)
    model = catalog.resolve_model(home, "ada/sums-lora")
    assert (model.kind, model.ref, model.adapter) == ("adapter", "ada/sums-lora", snapshot)


def test_what_a_run_keeps_of_it_no_longer_changes_with_it(home: Home, adapter: Path):
    run = home.run("sums-sft-1")
    (adapter / "notes").mkdir()
    write_folder(run, RunFiles({}, start_adapter=adapter))
    kept = run.start_adapter / "adapter_model.safetensors"
    before = kept.read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(b"other")
    assert kept.read_bytes() == before
    # By the first, which says what weights the base had, the trainer looks once more.
    assert sorted(path.name for path in run.start_adapter.iterdir()) == [
        "MANIFEST.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_distillation_keeps_a_copy_of_its_teachers_adapter(home: Home, adapter: Path):
    run = home.run("sums-distill-1")
    entry = {"kind": "local", "ref": "arith-grpo-7", "base_path": "/x", "adapter": str(adapter)}
    write_folder(run, RunFiles({"teacher": entry}, teacher_adapter=adapter))
    assert read_json(run.config)["teacher"] == entry | {"adapter": str(run.teacher_adapter)}
    assert (run.teacher_adapter / "adapter_model.safetensors").is_file()
    # Among what is deleted and sealed with the adapters of an evaluation.
    assert run.teacher_adapter.parent == run.model_adapter(0).parent


def test_an_export_of_one_home_goes_on_in_another(home: Home, tuned: str, tmp_path: Path):
    write_manifest(home, tuned, hashes.weight_hashes(home, catalog.BUILTIN["pebble"]))
    found = export(home, f"{tuned}@step10", "adapter", str(tmp_path / "out"))
    again = export(home, f"{tuned}@step10", "adapter", str(tmp_path / "out"))
    assert "already" in again["summary"]
    shutil.move(found["path"], tmp_path / "moved")
    other = Home(tmp_path / "other")
    model = catalog.resolve_model(other, str(tmp_path / "moved"))
    assert (model.kind, model.base_ref) == ("adapter", "pebble")
    assert model.adapter_facts == AdapterFacts(1, 2, ("q_proj",))


def test_a_base_of_the_same_shape_with_other_weights_is_refused(
    home: Home, tuned: str, tmp_path: Path
):
    weights = hashes.weight_hashes(home, catalog.BUILTIN["pebble"])
    write_manifest(home, tuned, weights)
    found = export(home, f"{tuned}@step10", "adapter", str(tmp_path / "out"))
    assert catalog.resolve_model(home, found["path"]).base_ref == "pebble"
    origin = read_json(Path(found["path"]) / "honesmith.json")
    others = {"model.safetensors": "0" * 64}
    write_json(Path(found["path"]) / "honesmith.json", origin | {"base_weights": others})
    both = f"{'0' * 12} then, {hashes.shown(hashes.fingerprint(weights))} now"
    error = refusal(home, found["path"])
    assert error.code == "ADAPTER_MISMATCH" and "with other weights" in error.message
    assert both in error.message
    # The run itself, and with it whatever is served, exported or trained from it.
    write_manifest(home, tuned, others)
    assert both in refusal(home, f"{tuned}@step10").message
    with pytest.raises(UserError, match=both):
        export(home, f"{tuned}@step10", "adapter", str(tmp_path / "again"))


def test_a_checkpoint_named_by_its_folder_keeps_to_its_base(
    home: Home, adapter: Path, tmp_path: Path
):
    write_json(adapter / "MANIFEST.json", {"base_weights": {"model.safetensors": "0" * 64}})
    assert "000000000000 then" in refusal(home, adapter).message


def write_manifest(home: Home, run_id: str, files: dict[str, str]) -> None:
    """The manifest of a run whose base had these files."""
    choice = Choice(kind="torch", why="")
    Manifest(
        run_id=run_id,
        time=1.0,
        env=EnvironmentUsed(env_id="sums@0123456789ab", tasks_sha256=""),
        model=ModelUsed(ref="pebble", files=files, start_adapter=None),
        settings_sha256="",
        seed=0,
        parent="",
        note="",
        reward_risk_accepted=False,
        versions={},
        hardware=MachineUsed(device="cpu", threads=1, machine="x86_64", cores=2, ram=1),
        matrix_flops=1.0,
        quantization="none",
        precision="float32",
        forward=choice,
        kernels=choice,
        isolation="",
        eval_sampling=SamplingUsed(max_tokens=1, temperature=0, top_p=1, stop=[], seed=0),
    ).write(home.run(run_id).manifest)


def test_a_base_that_is_not_here_is_named_with_every_place_looked_at(home: Home, adapter: Path):
    describe(adapter, base_model_name_or_path="/nowhere/base")
    write_json(adapter / "honesmith.json", {"base": "smollm2"})
    error = refusal(home, adapter)
    assert error.code == "MODEL_NOT_FOUND"
    assert "smollm2: " in error.message and "/nowhere/base" in error.message
    assert "honesmith models add smollm2" in str(error.hint)


def test_an_adapter_on_an_adapter_is_refused(home: Home, adapter: Path, tmp_path: Path):
    shutil.copytree(adapter, tmp_path / "second")
    describe(tmp_path / "second", base_model_name_or_path=str(adapter))
    assert "is not here" in refusal(home, tmp_path / "second").message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"bias": "all"}, "bias all"),
        ({"lora_alpha": 8.5}, "no whole number"),
        ({"target_modules": ["q_proj", "lm_head"]}, "adapts lm_head"),
        ({"target_modules": None}, "no LoRA adapter"),
        ({"r": 8}, "does not fit its base"),
        ({"base_model_name_or_path": None}, "it names none"),
    ],
)
def test_an_adapter_that_cannot_go_on_here_is_refused_by_name(
    home: Home, adapter: Path, changes: dict[str, Any], reason: str
):
    describe(adapter, **changes)
    error = refusal(home, adapter)
    assert error.code in ("ADAPTER_MISMATCH", "MODEL_NOT_FOUND")
    assert reason in error.message and error.hint


def test_a_stranger_may_name_a_usable_adapter_and_learns_nothing_of_others(
    home: Home, adapter: Path
):
    catalog.check_in_sight(home, str(adapter))
    describe(adapter, base_model_name_or_path="/nowhere")
    with pytest.raises(UserError, match="no model is at"):
        catalog.check_in_sight(home, str(adapter))

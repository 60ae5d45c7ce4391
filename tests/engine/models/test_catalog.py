"""Model references: what each means, and what is said when one means nothing."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_configs import evaluate_config, train_config

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.home.run_dir import Home, RunDir
from engine.models import catalog
from engine.models.model_files import AdapterFacts
from tests import tiny_model


@pytest.fixture(autouse=True)
def no_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of whoever runs the tests stay out of sight, and nothing is fetched."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "shared-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model.write_model(tmp_path / "base")
    return tmp_path / "base"


def trained(home: Home, base: Path, run_id: str = "arith-sft-1", **config: Any) -> RunDir:
    """A run with checkpoints at steps 10 and 20, the first of them the best."""
    run = home.run(run_id)
    run.create()
    content = train_config(run_id, base={"ref": str(base), "path": str(base)}) | config
    write_json(run.config, content)
    facts = tiny_model.config()
    for step, rank in ((10, 4), (20, 4)):
        tiny_model.write_adapter(run.checkpoint(step), facts, rank=rank)
    run.best.symlink_to(run.checkpoint(10).name)
    return run


def refusal(home: Home, ref: str) -> UserError:
    with pytest.raises(UserError) as caught:
        catalog.resolve_model(home, ref)
    assert caught.value.hint and caught.value.field == "model"
    return caught.value


def test_the_built_in_model_needs_nothing(home: Home):
    ref = catalog.resolve_model(home, "pebble")
    assert (ref.kind, ref.base_ref, ref.adapter) == ("builtin", "pebble", None)
    assert 1_000_000 <= ref.facts.params <= 4_000_000
    assert ref.facts.head_dim in (32, 64) and ref.facts.thinking
    assert (ref.base_path / "model.safetensors").stat().st_size < 8_000_000


def test_a_path_means_the_folder_however_it_is_written(
    home: Home, base: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(base.parent)
    for written in (str(base), "./base", f"{base}/", f"../{base.parent.name}/base"):
        ref = catalog.resolve_model(home, written)
        assert (ref.kind, ref.base_path, ref.base_ref) == ("path", base, str(base))
        assert ref.facts.architecture == "Qwen3ForCausalLM"


def test_a_path_that_is_no_folder_is_not_taken_for_a_hub_id(home: Home, base: Path):
    assert "does not exist" in refusal(home, "/no/such/model").message
    assert "is a file" in refusal(home, f"{base}/config.json").message


def test_a_run_means_its_last_checkpoint_and_its_base(home: Home, base: Path):
    run = trained(home, base)
    ref = catalog.resolve_model(home, run.id)
    assert (ref.kind, ref.run_id, ref.base_path) == ("run", run.id, base)
    assert ref.adapter == run.checkpoint(20)
    assert ref.adapter_facts == AdapterFacts(4, 8, ("q_proj",))


def test_best_and_step_choose_a_checkpoint(home: Home, base: Path):
    run = trained(home, base)
    assert catalog.resolve_model(home, f"{run.id}@best").adapter == run.checkpoint(10)
    assert catalog.resolve_model(home, f"{run.id}@step20").adapter == run.checkpoint(20)
    said = refusal(home, f"{run.id}@step15")
    assert f"{run.id}@step10, {run.id}@step20" in said.hint
    assert "@best or @stepN" in refusal(home, f"{run.id}@newest").hint


def test_a_run_without_a_checkpoint_says_to_wait(home: Home, base: Path):
    run = trained(home, base)
    shutil.rmtree(run.checkpoints)
    assert "wait_run" in refusal(home, run.id).hint


def test_an_evaluation_is_no_model(home: Home, base: Path):
    run = home.run("arith-eval-1")
    run.create()
    write_json(run.config, evaluate_config(run.id))
    assert "no training run" in refusal(home, "arith-eval-1").message


def test_a_run_whose_base_is_gone_says_where_it_was(home: Home, base: Path):
    run = trained(home, base)
    shutil.rmtree(base)
    assert str(base) in refusal(home, run.id).message


def test_a_run_of_the_built_in_model_finds_it_where_it_is_installed_now(home: Home):
    run = home.run("old-sft-1")
    run.create()
    base = {"ref": "pebble", "path": "/old/place"}
    write_json(run.config, train_config(run.id, base=base))
    facts = catalog.resolve_model(home, "pebble").facts
    shape = tiny_model.config(
        hidden_size=facts.hidden,
        num_hidden_layers=facts.layers,
        num_attention_heads=facts.heads,
        num_key_value_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        intermediate_size=facts.intermediate,
    )
    tiny_model.write_adapter(run.checkpoint(5), shape)
    assert catalog.resolve_model(home, run.id).base_path == catalog.BUILTIN["pebble"]


def test_an_adapter_of_another_model_is_refused(home: Home, base: Path):
    run = trained(home, base)
    wider = tiny_model.config(hidden_size=48)
    tiny_model.write_adapter(run.checkpoint(20), wider)
    said = refusal(home, run.id)
    assert said.code == "ADAPTER_MISMATCH" and "[4, 32]" in said.message
    deeper = tiny_model.config(num_hidden_layers=3)
    tiny_model.write_adapter(run.checkpoint(20), deeper)
    assert "3 there" in refusal(home, run.id).message


def test_a_name_that_means_nothing_gets_the_nearest_ones(home: Home, base: Path):
    trained(home, base)
    assert "pebble" in refusal(home, "peble").hint
    assert "arith-sft-1" in refusal(home, "arith-sft-7").hint
    assert "ORG/NAME" in refusal(home, "qqqqqqq").hint
    assert refusal(home, "").code == "MODEL_NOT_FOUND"


def test_a_hub_id_that_is_nowhere_is_not_fetched_when_offline(home: Home):
    said = refusal(home, "org/model")
    assert said.code == "MODEL_NOT_FOUND" and "HF_HUB_OFFLINE" in said.message


def test_a_model_in_the_shared_cache_is_used_from_there(home: Home, tmp_path: Path):
    folder = tmp_path / "shared-cache" / "models--org--tiny"
    snapshot = folder / "snapshots" / "abcdef0123"
    tiny_model.write_model(snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abcdef0123")
    ref = catalog.resolve_model(home, "org/tiny")
    assert (ref.kind, ref.base_ref, ref.base_path) == ("hub", "org/tiny", snapshot)


def test_usable_models_are_those_that_need_no_download(home: Home, base: Path, tmp_path: Path):
    trained(home, base)
    folder = tmp_path / "shared-cache" / "models--org--tiny"
    tiny_model.write_model(folder / "snapshots" / "abcdef0123")
    broken = tmp_path / "shared-cache" / "models--org--gpt2" / "snapshots" / "abcdef0123"
    tiny_model.write_model(broken, architectures=["GPT2LMHeadModel"])
    listed = {model.ref: model for model in catalog.usable_models(home)}
    assert list(listed) == ["pebble", "org/tiny", "arith-sft-1"]
    run = listed["arith-sft-1"]
    assert (run.base, run.checkpoints, run.best) == (str(base), [10, 20], "step_000010")


@pytest.mark.parametrize("ref", ["x" * 100_000, "y" * 251, "/" + "z" * 300, "org/" + "n" * 260])
def test_a_name_longer_than_a_file_system_takes_is_no_model(home: Home, ref: str):
    with pytest.raises(UserError) as caught:
        catalog.resolve_model(home, ref)
    assert caught.value.code == "MODEL_NOT_FOUND"
    assert caught.value.hint
    assert len(caught.value.message) < 300


def test_a_name_with_a_nul_is_no_model(home: Home):
    with pytest.raises(UserError) as caught:
        catalog.resolve_model(home, "/tmp/a\0b")
    assert caught.value.code == "MODEL_NOT_FOUND"


def test_who_may_not_look_around_learns_nothing_from_a_path(
    home: Home, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes" / "private").mkdir(parents=True)
    (tmp_path / "notes" / "file").touch()
    os.mkfifo(tmp_path / "notes" / "private" / "config.json")
    refused = {}
    for ref in ("notes/private", "notes/file", "notes/none"):
        for written in (ref, f"./{ref}", str(tmp_path / ref)):
            with pytest.raises(UserError) as caught:
                # An id that is at no hub is refused where every id is.
                catalog.check_in_sight(home, written)
                catalog.resolve_model(home, written)
            said = caught.value.code, caught.value.message, caught.value.hint
            refused.setdefault(written[: -len(ref)], set()).add(str(said).replace(ref, "REF"))
    assert all(len(said) == 1 for said in refused.values()), refused
    for ref in (str(base), "./base", "pebble", "arith-sft-1@best", "org/model"):
        catalog.check_in_sight(home, ref)

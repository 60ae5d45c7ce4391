"""Exports appear whole or not at all, and overwrite nothing."""

from pathlib import Path

import pytest
from stand_ins import stand_in

from engine.core.errors import UserError
from engine.core.files import read_json
from engine.serving import export as exporting
from engine.serving.export import export

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def merger(monkeypatch):
    here = Path(__file__).parent
    stand_in(monkeypatch, merger=here.with_name("fake_export.py"))
    stand_in(monkeypatch, trainer=here.with_name("fake_trainer.py"))


def test_an_adapter_is_copied_as_a_peft_folder_that_names_its_base(home, tuned, tmp_path):
    target = tmp_path / "out" / "adapter"
    found = export(home, f"{tuned}@best", "adapter", str(target))
    assert found["state"] == "exported" and found["path"] == str(target)
    assert found["files"] == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "honesmith.json",
    ]
    source = home.run(tuned).checkpoint(5) / "adapter_model.safetensors"
    assert (target / "adapter_model.safetensors").read_bytes() == source.read_bytes()
    config = read_json(target / "adapter_config.json")
    assert Path(config["base_model_name_or_path"], "config.json").is_file()
    assert read_json(target / "honesmith.json")["checkpoint"] == "step_000005"
    assert sorted(path.name for path in target.parent.iterdir()) == ["adapter"]


def test_the_same_export_again_is_the_same_files(home, tuned):
    first = export(home, f"{tuned}@best")
    again = export(home, f"{tuned}@best")
    assert again["path"] == first["path"] and Path(first["path"]).parent == home.exports
    assert "already" in again["summary"]


@pytest.mark.parametrize("there", ["file", "folder", "other"])
def test_nothing_is_ever_overwritten(home, tuned, tmp_path, there):
    target = tmp_path / "out"
    if there == "file":
        target.write_text("mine")
    elif there == "folder":
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    else:
        export(home, f"{tuned}@step10", "adapter", str(target))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(UserError) as caught:
        export(home, f"{tuned}@best", "adapter", str(target))
    assert caught.value.code == "BAD_ARGUMENT" and str(target) in caught.value.message
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_an_empty_folder_may_be_filled(home, tuned, tmp_path):
    target = tmp_path / "empty"
    target.mkdir()
    assert export(home, f"{tuned}@best", "adapter", str(target))["state"] == "exported"


def test_a_merge_leaves_a_model_that_can_be_used_by_its_path(home, tuned, tmp_path):
    from engine.models import catalog

    found = export(home, f"{tuned}@best", "merged", str(tmp_path / "merged"))
    assert found["state"] == "exported" and "model.safetensors" in found["files"]
    assert catalog.resolve_model(home, found["path"]).facts.params > 0
    assert not list(home.cache.glob("exports/*"))


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_gguf_export_has_a_modelfile_and_a_card(home, tuned, tmp_path, kind):
    found = export(home, f"{tuned}@best", f"gguf-{kind}", str(tmp_path / "out"))
    name = f"{tuned}-best.{kind}.gguf"
    assert sorted(found["files"]) == sorted(["Modelfile", "README.md", "honesmith.json", name])
    assert f"FROM ./{name}" in (tmp_path / "out" / "Modelfile").read_text()
    assert tuned in (tmp_path / "out" / "README.md").read_text()
    again = export(home, f"{tuned}@best", f"gguf-{kind}", str(tmp_path / "out"))
    assert "already" in again["summary"]


def test_a_merge_that_outlasts_the_call_goes_on_and_is_handed_over_later(
    home, tuned, tmp_path, monkeypatch
):
    monkeypatch.setattr(exporting, "WAIT_S", 0.0)
    target = str(tmp_path / "merged")
    first = export(home, f"{tuned}@best", "merged", target)
    assert first["state"] == "exporting"
    assert first["next"][0]["arguments"]["path"] == target
    monkeypatch.setattr(exporting, "WAIT_S", 20.0)
    assert export(home, f"{tuned}@best", "merged", target)["state"] == "exported"


def test_a_merge_that_fails_leaves_nothing_and_shows_its_log(home, tuned, tmp_path):
    with pytest.raises(UserError) as caught:
        export(home, f"{tuned}@best", "merged", str(tmp_path / "broken"))
    assert caught.value.code == "DEPLOY_FAILED" and "adapter is damaged" in caught.value.hint
    assert list(tmp_path.glob("broken*")) == []


def test_what_cannot_be_exported_is_refused(home, tuned, tmp_path):
    (tmp_path / "file").write_text("")
    for arguments, code in (
        ((f"{tuned}@best", "gguf-q4"), "BAD_ARGUMENT"),
        (("pebble", "adapter"), "BAD_ARGUMENT"),
        (("nobody", "adapter"), "MODEL_NOT_FOUND"),
        ((f"{tuned}@best", "adapter", str(tmp_path / "file" / "below")), "BAD_ARGUMENT"),
    ):
        with pytest.raises(UserError) as caught:
            export(home, *arguments)
        assert caught.value.code == code and caught.value.hint


def test_an_export_is_not_put_where_agents_look(home, tuned, tmp_path):
    with pytest.raises(UserError, match="coding agents"):
        export(home, f"{tuned}@best", "adapter", str(tmp_path / ".claude" / "skills"))
    assert not (tmp_path / ".claude").exists()

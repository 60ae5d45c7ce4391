"""Which teachers are taken, and what is said of the others."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_configs import distill_settings

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.models import catalog
from engine.records.run_config import EndpointTeacher, LocalTeacher
from engine.settings import teachers

PEBBLE = catalog.BUILTIN["pebble"]
URL = "http://127.0.0.1:9/v1"


def resolve(home: Home, **changes: Any) -> teachers.ResolvedTeacher:
    student = catalog.resolve_model(home, "pebble")
    teacher = teachers.resolve_teacher(home, distill_settings(**changes), student)
    assert teacher is not None
    return teacher


def copied(folder: Path) -> Path:
    shutil.copytree(PEBBLE, folder)
    return folder


def test_a_model_of_the_same_tokens_teaches_whatever_its_template(
    home: Home, tmp_path: Path
) -> None:
    folder = copied(tmp_path / "other")
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    template = folder / "chat_template.jinja"
    if template.exists():
        template.write_text("{{ messages[0].content }}")
    else:
        config.write_text(json.dumps(settings | {"chat_template": "{{ messages[0].content }}"}))
    teacher = resolve(home, teacher=str(folder))
    assert teacher.entry == LocalTeacher(ref=str(folder), base_path=str(folder))
    assert teacher.model is not None and not teacher.shares_base


def test_a_teacher_with_other_tokens_is_refused_naming_both(home: Home, tmp_path: Path) -> None:
    folder = copied(tmp_path / "other")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError) as caught:
        resolve(home, teacher=str(folder))
    assert caught.value.code == "SETTING_INVALID"
    assert caught.value.field == "settings.teacher"
    assert str(folder) in caught.value.message and "pebble" in caught.value.message
    assert "2 of" in caught.value.message


def test_the_model_itself_and_one_that_is_not_here_teach_nothing(home: Home) -> None:
    with pytest.raises(UserError, match="is the model that is trained"):
        resolve(home, teacher="pebble")
    with pytest.raises(UserError) as caught:
        resolve(home, teacher="nobody-1")
    assert caught.value.code == "MODEL_NOT_FOUND"
    assert caught.value.field == "settings.teacher"


def test_a_url_is_an_endpoint_whose_key_must_be_set(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"teacher": f"{URL}/", "teacher_model": "big", "teacher_key_env": "TEACHER_API_KEY"}
    monkeypatch.delenv("TEACHER_API_KEY", raising=False)
    with pytest.raises(UserError, match="TEACHER_API_KEY is not set"):
        resolve(home, **given)
    monkeypatch.setenv("TEACHER_API_KEY", "sesame")
    teacher = resolve(home, **given)
    assert teacher.model is None
    assert teacher.entry == EndpointTeacher(url=URL, model="big", key_env="TEACHER_API_KEY")
    assert "sesame" not in teacher.entry.model_dump_json()


def test_an_endpoint_by_name_teaches_where_the_owner_wrote_it_and_it_costs_nothing(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"has no .endpoints.big") as caught:
        resolve(home, teacher="openai:big")
    assert (caught.value.code, caught.value.field) == ("MODEL_NOT_FOUND", "settings.teacher")
    table = f'[endpoints.big]\nurl = "{URL}"\nmodel = "big-1"\nkey_env = "BIG_KEY"\n'
    home.config_file.write_text(table)
    monkeypatch.delenv("BIG_KEY", raising=False)
    with pytest.raises(UserError, match="BIG_KEY is not set"):
        resolve(home, teacher="openai:big")
    (home.root / ".env").write_text("BIG_KEY=sesame\n")
    teacher = resolve(home, teacher="openai:big")
    assert teacher.entry == EndpointTeacher(url=URL, model="big-1", key_env="BIG_KEY")
    with pytest.raises(UserError, match=r"has it in config.toml") as caught:
        teachers.check_given({"teacher": "openai:big", "teacher_model": "other"})
    assert caught.value.code == "SETTING_NOT_APPLICABLE"
    home.config_file.write_text(table + "price_out = 2.0\n")
    with pytest.raises(UserError, match="neither counted nor capped") as caught:
        resolve(home, teacher="openai:big")
    assert caught.value.code == "SETTING_INVALID" and "curate" in str(caught.value.advice)

"""A run as a TOML file: model, algorithm, environment, settings; what is wrong, by its line."""

from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.settings import resolution


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_file_holds_model_algorithm_env_and_settings(tmp_path: Path):
    text = 'model = "pebble"\nalgorithm = "sft"\nenv = "sums"\n[settings]\nepochs = 2\n'
    read = resolution.load_toml(file(tmp_path, text))
    assert (read.model, read.algorithm, read.env) == ("pebble", "sft", "sums")
    assert (read.settings, read.then, read.vary) == ({"epochs": 2}, [], {})
    empty = resolution.load_toml(file(tmp_path, ""))
    assert (empty.model, empty.algorithm, empty.env, empty.settings) == ("pebble", "grpo", "", {})


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("model = 'a'\nmodel = 'b'\n", 2, "overwrite"),
        ("modle = 'a'\n", 1, "model"),
        ("\nhf_repo = 'x'\n", 2, "export"),
        ("steps = 3\n", 1, "[settings]"),
        ("[gpu]\ntype = 'H100'\n", 1, "device"),
        ("[settings]\nsteps = 3\n\n[wandb]\nproject = 'x'\n", 4, "logs of the run"),
        ("[settings]\n\nlearning_rate = nan\n", 3, "finite"),
        ("[settings]\nsteps = 3\n[settings.gpu]\ntype = 'x'\n", 3, "device"),
        ("[settings]\n'group_size' = 1\n", 2, "advantage"),
        ("algorithm = 'sft'\n[settings]\nsteps = 3\nepochs = 2\n", 3, "one of them"),
        ("settings = 3\n", 1, "table"),
        ("model = 3\n", 1, "model"),
        ("model = \n", 1, "TOML"),
        ("[[settings]]\nsteps = 3\n", 1, "table"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, word: str):
    with pytest.raises(UserError) as caught:
        resolution.load_toml(file(tmp_path, text))
    said = caught.value
    assert said.code in ("SETTING_UNKNOWN", "SETTING_INVALID")
    assert f":{line}:" in said.message or f"(at line {line}," in said.message
    assert word.lower() in (said.hint + said.message).lower()


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        resolution.load_toml(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"bytes\.toml"):
        resolution.load_toml(tmp_path / "bytes.toml")

"""The home and the run folder: paths, checkpoints, config.toml."""

import os
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.home.run_dir import Home
from engine.home.user_config import UserConfig


def complete(run, step: int) -> Path:
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    write_json(folder / "MANIFEST.json", {})
    return folder


def test_a_new_home_is_private_and_has_its_folders(tmp_path):
    home = Home.locate(tmp_path / "new" / "home")
    assert home.root.stat().st_mode & 0o777 == 0o700
    assert all(path.is_dir() for path in (home.envs, home.runs, home.deployments, home.cache))


def test_the_argument_beats_the_variable_and_both_beat_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HONESMITH_HOME", str(tmp_path / "variable"))
    assert Home.locate(tmp_path / "argument").root == tmp_path / "argument"
    assert Home.locate().root == tmp_path / "variable"
    monkeypatch.delenv("HONESMITH_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Home.locate().root.is_relative_to(tmp_path)


def test_a_home_that_is_a_file_is_refused_in_words(tmp_path):
    (tmp_path / "home").write_text("")
    with pytest.raises(UserError) as caught:
        Home.locate(tmp_path / "home")
    assert caught.value.code == "HOME_UNUSABLE" and "HONESMITH_HOME" in caught.value.hint


def test_a_run_folder_knows_its_home_and_its_names(home):
    run = home.run("arith-grpo-7")
    assert (run.home, run.id) == (home, "arith-grpo-7")
    assert run.rollouts(12) == run.path / "rollouts" / "step_000012.jsonl"
    assert run.evals(20) == run.path / "evals" / "step_000020.jsonl"
    assert run.model_evals(0) == run.path / "evals" / "model_0.jsonl"
    assert run.checkpoint(20) == run.path / "checkpoints" / "step_000020"
    assert run.log(2) == run.path / "logs" / "attempt_2.log"


def test_only_complete_checkpoints_count(home):
    run = home.run("r")
    assert run.latest_checkpoint() is None and run.resolve_checkpoint("best") is None
    complete(run, 5)
    complete(run, 20)
    run.checkpoint(40).mkdir()
    (run.checkpoints / ".step_000060").mkdir()
    assert run.checkpoint_steps() == [5, 20]
    assert run.latest_checkpoint() == run.checkpoint(20)
    assert run.resolve_checkpoint() == run.checkpoint(20)
    assert run.resolve_checkpoint("step5") == run.checkpoint(5)
    for name in ("step40", "step7", "final", "../x", "step-5"):
        assert run.resolve_checkpoint(name) is None


@pytest.mark.parametrize("kind", ["link", "file"])
def test_best_may_be_a_link_or_a_file_with_a_name(home, kind):
    run = home.run("r")
    complete(run, 5)
    complete(run, 20)
    if kind == "link":
        os.symlink("step_000005", run.best)
    else:
        run.best.write_text("step_000005\n")
    assert run.resolve_checkpoint("best") == run.checkpoint(5)


def test_best_that_points_nowhere_or_outside_is_none(home):
    run = home.run("r")
    complete(run, 5)
    os.symlink("step_000007", run.best)
    assert run.resolve_checkpoint("best") is None
    run.best.unlink()
    run.best.write_text("../../../secrets")
    assert run.resolve_checkpoint("best") is None


def test_steps_with_rollouts_and_evaluations_are_listed_in_order(home):
    run = home.run("r")
    run.create()
    for step in (20, 3, 100):
        run.rollouts(step).touch()
        run.evals(step).touch()
    run.model_evals(0).touch()
    (run.rollouts_dir / "step_x.jsonl").touch()
    assert run.rollout_steps() == [3, 20, 100] == run.eval_steps()
    assert home.run("none").rollout_steps() == []


def test_config_toml_is_optional_and_typed(home):
    assert home.user_config() == UserConfig()
    home.config_file.write_text(
        'gpu_hour_price = 2\nmax_gpu_hours_total = 40.5\nsandbox = "required"\nallow_root = true\n'
        'serve_with = "vllm"\n'
    )
    assert home.user_config() == UserConfig(2.0, 40.5, None, 10.0, "required", True, "vllm")
    home.config_file.write_text('key_secrets = ["JUDGE_API_KEY"]\nkey_network = true\n')
    assert home.user_config() == UserConfig(key_secrets=("JUDGE_API_KEY",), key_network=True)


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ("gpu_price = 2", "SETTING_UNKNOWN", "gpu_price"),
        ("gpu_hour_price = -1", "SETTING_INVALID", "gpu_hour_price"),
        ("gpu_hour_price = nan", "SETTING_INVALID", "gpu_hour_price"),
        ("gpu_hour_price = true", "SETTING_INVALID", "gpu_hour_price"),
        ('max_gpu_hours_total = "4"', "SETTING_INVALID", "max_gpu_hours_total"),
        ('sandbox = "maybe"', "SETTING_INVALID", "sandbox"),
        ("allow_root = 1", "SETTING_INVALID", "allow_root"),
        ('serve_with = "tgi"', "SETTING_INVALID", "serve_with"),
        ('key_secrets = "JUDGE_API_KEY"', "SETTING_INVALID", "key_secrets"),
        ("key_secrets = [1]", "SETTING_INVALID", "key_secrets"),
        ('key_network = "yes"', "SETTING_INVALID", "key_network"),
        ("= 4", "SETTING_INVALID", ""),
        ("x = " + "[" * 5000, "SETTING_INVALID", ""),
    ],
)
def test_a_wrong_config_toml_is_refused_by_name(home, text, code, field):
    home.config_file.write_text(text)
    with pytest.raises(UserError) as caught:
        home.user_config()
    assert (caught.value.code, caught.value.field) == (code, field)
    assert str(home.config_file) in caught.value.message

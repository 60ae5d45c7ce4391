"""A plan on the command line: further steps and varied settings, as options or in a TOML file."""

import json
from pathlib import Path

import pytest
from command_line import call, spy

from engine.home.run_dir import Home

GRPO = {"algorithm": "grpo", "settings": {"steps": 6}}
EVALUATION = {"algorithm": "evaluate", "rows": 40}


def test_steps_and_varied_settings_are_options_of_train(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    seen = spy(monkeypatch, "submit_train", {"run_id": "sums-plan-1"})
    last = tmp_path / "last.json"
    last.write_text(json.dumps([EVALUATION]))
    argv = ["train", "sums", "--algorithm", "sft", "--then", json.dumps(GRPO), "--then", str(last)]
    argv += ["--vary", "seed=1,2", "--vary", "loss_on=last, all"]
    argv += ["--vary", 'lora_targets=[["q_proj"], "attention"]']
    assert call(*argv).exit_code == 0
    assert seen[0]["then"] == [GRPO, EVALUATION]
    assert seen[0]["vary"] == {
        "seed": [1, 2],
        "loss_on": ["last", "all"],
        "lora_targets": [["q_proj"], "attention"],
    }


def test_a_file_holds_a_plan_and_options_change_it(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    seen = spy(monkeypatch, "submit_train", {"run_id": "sums-plan-1"})
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'env = "sums"\nalgorithm = "sft"\n[settings]\nsteps = 3\n[vary]\nseed = [1, 2]\n'
        '[[then]]\nalgorithm = "grpo"\n[then.settings]\nsteps = 6\n'
        '[[then]]\nalgorithm = "evaluate"\nrows = 40\n'
    )
    assert call("train", str(plan)).exit_code == 0
    assert call("train", str(plan), "--vary", "seed=4", "--then", json.dumps(GRPO)).exit_code == 0
    assert seen[0]["settings"] == {"steps": 3}
    assert (seen[0]["then"], seen[0]["vary"]) == ([GRPO, EVALUATION], {"seed": [1, 2]})
    assert (seen[1]["then"], seen[1]["vary"]) == ([GRPO], {"seed": [4]})


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("then = 3", "then is no list of tables"),
        ("then = [3]", "then is no list of tables"),
        ("vary = 3", "vary is not a table"),
    ],
)
def test_a_plan_of_another_form_is_refused_by_line(
    home: Home, tmp_path: Path, lines: str, text: str
):
    plan = tmp_path / "plan.toml"
    plan.write_text(f'env = "sums"\n{lines}\n')
    done = call("train", str(plan), "--json")
    assert done.exit_code == 2
    message = json.loads(done.stdout)["message"]
    assert "plan.toml:2" in message and text in message


@pytest.mark.parametrize(
    "argv", [["--then", "nothing.json"], ["--then", "{"], ["--vary", "seed"], ["--vary", "=1"]]
)
def test_an_option_that_cannot_be_read_is_refused(home: Home, argv: list[str]):
    assert call("train", "sums", *argv).exit_code == 2


@pytest.mark.parametrize(
    ("command", "verb"),
    [("train", "submit_train"), ("dry-run", "dry_run"), ("estimate", "estimate_cost")],
)
def test_the_same_files_are_trained_checked_and_estimated(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, verb: str
):
    seen = spy(monkeypatch, verb, {"run_id": "sums-plan-1"})
    base, more = tmp_path / "base.toml", tmp_path / "more.toml"
    base.write_text('env = "sums"\nalgorithm = "sft"\n[settings]\nlora_rank = 4\nepochs = 2\n')
    more.write_text("[settings]\nlora_rank = 8\n[[then]]\nalgorithm = 'evaluate'\n")
    argv = [command, str(base), str(more), "--set", "steps=5", "--max-gpu-hours", "0.5", "--json"]
    done = call(*argv)
    assert done.exit_code == 0, done.output
    asked = {name: seen[0][name] for name in ("env_id", "algorithm", "settings", "then")}
    assert asked == {
        "env_id": "sums",
        "algorithm": "sft",
        "settings": {"lora_rank": 8, "steps": 5},
        "then": [{"algorithm": "evaluate"}],
    }
    assert seen[0]["max_gpu_hours"] == 0.5
    changes = [entry["changes"] for entry in json.loads(done.stdout)["files"]]
    assert changes == [{}, {"settings.lora_rank": [4, 8]}, {"settings.epochs": [2, None]}]


def test_a_file_stands_beside_files_alone(home: Home, tmp_path: Path):
    (tmp_path / "plan.toml").write_text('env = "sums"\n')
    for names in (["sums", "more"], ["sums", str(tmp_path / "plan.toml")]):
        done = call("dry-run", *names, "--json")
        assert done.exit_code == 2 and "cannot stand here" in json.loads(done.stdout)["message"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--then", "[1]"], "something else than objects"),
        (["--then", "[" * 100_000], "cannot be read"),
        (["--vary", "seed=1,2", "--vary", "seed=3"], "seed is given twice"),
        (["--vary", "=1"], "NAME=VALUE"),
    ],
)
def test_what_is_no_plan_is_refused_before_it_is_submitted(
    home: Home, monkeypatch: pytest.MonkeyPatch, options: list[str], text: str
):
    seen = spy(monkeypatch, "submit_train", {"run_id": "sums-plan-1"})
    result = call("train", "sums", *options)
    assert result.exit_code != 0 and text in result.output and "INTERNAL" not in result.output
    assert seen == []

"""Two trainings side by side before either has a result."""

from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.evidence.compare.compare import compare_runs
from engine.home.run_dir import Home
from engine.runs.diff import diff

BASE = {"learning_rate": 1e-3, "group_size": 8, "steps": 100, "loss": "dapo", "seed": 0}
USER = dict.fromkeys(BASE, "user")


@pytest.fixture
def told(make_run):
    """told({...changes}) -> the id of a run that was queued with these settings."""

    def make(changes=None, sources=None, **more) -> str:
        settings = BASE | (changes or {})
        return make_run(settings=settings, sources=USER | (sources or {}), **more).id

    return make


def changed(reply) -> dict:
    return {row["name"]: (row["before"], row["after"]) for row in reply["changed"]}


def test_two_runs_differ_in_what_was_chosen_and_in_what_follows_from_it(home: Home, told):
    first = told(sources={"group_size": "recipe"})
    second = told({"learning_rate": 3e-3, "seed": 1, "group_size": 16}, {"group_size": "recipe"})
    reply = diff(home, first, second)
    assert changed(reply) == {"learning_rate": (1e-3, 3e-3), "seed": (0, 1)}
    assert reply["followed"] == [{"name": "group_size", "before": 8, "after": 16}]
    assert "learning_rate 0.001 -> 0.003" in reply["summary"] and "seed 0 -> 1" in reply["summary"]
    assert diff(home, first, first)["summary"] == f"{first} against {first}: nothing."


def test_how_long_to_train_is_one_change_however_it_was_said(home: Home, make_run):
    by_epochs = make_run(
        "sft", settings={"steps": 30, "epochs": 3}, sources={"epochs": "user", "steps": "recipe"}
    )
    by_steps = make_run(
        "sft", settings={"steps": 90, "epochs": None}, sources={"epochs": "recipe", "steps": "user"}
    )
    reply = diff(home, by_epochs.id, by_steps.id)
    assert changed(reply) == {"steps": (30, 90)}
    assert reply["followed"] == [{"name": "epochs", "before": 3, "after": None}]


def test_a_file_stands_for_the_run_that_it_would_make(bench, env, home: Home, tmp_path: Path):
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text(f'env = "{env}"\nalgorithm = "sft"\n[settings]\nsteps = 3\n')
    other.write_text(
        f'env = "{env}"\nalgorithm = "sft"\n[settings]\nsteps = 3\nlora_rank = 64\n'
        "[vary]\nseed = [1, 2]\n"
    )
    reply = diff(home, str(one), str(other))
    assert changed(reply)["lora_rank"][1] == 64 and changed(reply)["lora_rank"][0] != 64
    assert changed(reply)["vary"] == (None, {"seed": [1, 2]})
    assert reply["warnings"] == []
    elsewhere = tmp_path / "elsewhere.toml"
    elsewhere.write_text('env = "nowhere"\nalgorithm = "sft"\n[settings]\nsteps = 5\n')
    reply = diff(home, str(one), str(elsewhere))
    assert changed(reply) == {"env_id": (env, "nowhere"), "steps": (3, 5)}
    assert "only what the file gives" in reply["warnings"][0]


def test_a_file_and_a_run_are_compared_too(home: Home, told, tmp_path: Path):
    run = told()
    file = tmp_path / "run.toml"
    file.write_text('env = "nowhere"\n[settings]\nlearning_rate = 0.002\nseed = 0\n')
    assert changed(diff(home, run, str(file)))["learning_rate"] == (1e-3, 0.002)
    assert "seed" not in changed(diff(home, run, str(file)))


def test_what_is_no_training_is_refused(home: Home):
    with pytest.raises(UserError) as caught:
        diff(home, "nobody", "nobody")
    assert caught.value.code == "RUN_NOT_FOUND"


def test_runs_without_an_evaluation_are_compared_by_their_settings(home: Home, told):
    first, second = told(), told({"loss": "grpo"})
    reply = compare_runs(home, [first, second])
    assert reply["verdict"] == "unknown" and "loss dapo -> grpo" in reply["summary"]
    assert reply["differences"][second]["changed"] == [
        {"name": "loss", "before": "dapo", "after": "grpo"}
    ]
    assert reply["next"][0]["arguments"]["models"] == [first, second]

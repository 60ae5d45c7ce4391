"""A run once more: what the second has from the first, whatever the defaults are by then."""

import json

import pytest

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.environments.registry import find_env
from engine.evidence.stats.results import load_rows
from engine.runs import lifecycle
from engine.runs.rerun import rerun_request
from engine.runs.submit.requests import EvaluationRequest, TrainRequest
from engine.settings import setting_checks

pytestmark = pytest.mark.timeout(60)

GIVEN = {
    "sft": {"epochs": 2, "learning_rate": 1e-3, "lora_rank": 4, "seed": 7},
    "grpo": {"steps": 3, "prompts_per_step": 4, "group_size": 4, "max_tokens": 16, "seed": 7},
}


def config_of(bench, run_id: str) -> dict:
    return read_json(bench.home.run(run_id).config)


@pytest.mark.parametrize("algorithm", list(GIVEN))
def test_a_rerun_has_every_setting_of_the_first_run(busy, bench, env, algorithm):
    request = TrainRequest(env_id=env, algorithm=algorithm, settings=GIVEN[algorithm])
    first = lifecycle.submit(bench.home, request)["run_id"]
    again = lifecycle.submit(bench.home, rerun_request(bench.home, first, {}))["run_id"]
    before, after = config_of(bench, first), config_of(bench, again)
    assert again != first and after["parent"] == first
    same = {**before["settings"], "epochs": None}  # the steps they made are given instead
    assert {**after["settings"], "epochs": None} == same
    for name in ("env_id", "model", "algorithm", "base", "max_gpu_hours"):
        assert after[name] == before[name]
    # Defaults of the first run are given now: a newer version of them changes nothing.
    assert after["sources"]["lr_schedule"] == "user" != before["sources"]["lr_schedule"]


@pytest.mark.parametrize(
    ("algorithm", "settings", "heldout"),
    [
        *(("grpo", {"loss": loss}, 20) for loss in ("grpo", "dr_grpo", "dapo", "gspo", "cispo")),
        ("grpo", {}, 0),
        ("sft", {}, 0),
    ],
)
def test_what_only_follows_from_other_settings_or_the_environment_is_not_given_again(
    busy, bench, env, algorithm, settings, heldout
):
    tasks = find_env(bench.home, env).dir / "tasks.jsonl"
    rows = [row for row in load_rows(tasks) if heldout or row["split"] == "train"]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = tasks.with_name("env.json")
    write_json(facts, read_json(facts) | {"rows": {"train": 40, "heldout": heldout}})
    request = TrainRequest(env_id=env, algorithm=algorithm, settings={"steps": 2} | settings)
    first = lifecycle.submit(bench.home, request)["run_id"]
    again = lifecycle.submit(bench.home, rerun_request(bench.home, first, {}))["run_id"]
    assert config_of(bench, again)["settings"] == config_of(bench, first)["settings"]


def test_a_clip_that_a_loss_refuses_is_written_once_and_never_given_again(
    busy, bench, env, monkeypatch
):
    request = TrainRequest(env_id=env, algorithm="grpo", settings={"steps": 2, "loss": "gspo"})
    first = lifecycle.submit(bench.home, request)["run_id"]
    assert "clip_high" in rerun_request(bench.home, first, {}).settings
    monkeypatch.setitem(setting_checks.UNUSED_CLIPS, "gspo", [("clip_high", "why", "Leave it.")])
    again = rerun_request(bench.home, first, {})
    assert "clip_high" not in again.settings
    setting_checks.check_loss(again.settings)
    with pytest.raises(UserError, match="clip_high does not apply to loss = gspo, why"):
        setting_checks.check_loss({"loss": "gspo", "clip_high": 0.3})


def test_a_setting_can_be_changed_and_the_steps_follow_from_the_epochs(busy, bench, env):
    request = TrainRequest(env_id=env, algorithm="sft", settings=GIVEN["sft"] | {"batch_size": 4})
    first = lifecycle.submit(bench.home, request)["run_id"]
    steps = config_of(bench, first)["settings"]["steps"]
    changed = rerun_request(bench.home, first, {"batch_size": 2, "seed": 8})
    again = lifecycle.submit(bench.home, changed)["run_id"]
    settings = config_of(bench, again)["settings"]
    assert (settings["batch_size"], settings["seed"], settings["epochs"]) == (2, 8, 2)
    assert settings["steps"] == 2 * steps
    assert "steps" not in rerun_request(bench.home, first, {"epochs": 1}).settings
    shorter = rerun_request(bench.home, first, {"steps": 3})
    assert shorter.settings["steps"] == 3 and "epochs" not in shorter.settings


def test_an_evaluation_is_no_training_to_be_done_again(busy, bench, env):
    asked = EvaluationRequest(env_id=env, models=("pebble",), rows=4)
    run_id = lifecycle.submit_evaluation(bench.home, asked)["run_id"]
    with pytest.raises(UserError) as caught:
        rerun_request(bench.home, run_id, {})
    assert caught.value.code == "RUN_STATE" and "honesmith evaluate" in caught.value.hint
    with pytest.raises(UserError, match="nothing-9"):
        rerun_request(bench.home, "nothing-9", {})

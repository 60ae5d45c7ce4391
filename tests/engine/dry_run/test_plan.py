"""The dry run of a plan: every run's settings, time and money, one cap, refusals by step."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.dry_run.dry_run import dry_run_request
from engine.dry_run.report import shortened
from engine.home.run_dir import Home
from engine.runs.submit.plans import resolved_steps
from engine.runs.submit.requests import DryRunRequest, TrainRequest

pytestmark = pytest.mark.timeout(60)

SFT = {"steps": 3, "learning_rate": 1e-3, "lora_rank": 4, "keep": 0.2}
GRPO = {"algorithm": "grpo", "settings": {"steps": 2}}
EVALUATION = {"algorithm": "evaluate", "rows": 40}


def dry_run(home: Home, **arguments: Any) -> dict[str, Any]:
    defaults = {"env_id": "sums", "algorithm": "sft", "settings": SFT, "then": [GRPO, EVALUATION]}
    return dry_run_request(home, DryRunRequest(**(defaults | arguments)))


def failed(report: dict[str, Any]) -> dict[str, Any]:
    return next(entry for entry in report["checks"] if entry["status"] == "fail")


def test_a_plan_is_answered_step_by_step_with_its_total_and_its_one_cap(
    home: Home, add: Callable[..., str]
):
    home.config_file.write_text("gpu_hour_price = 3\n")
    env_id = add()
    report = dry_run(home, max_gpu_hours=1.5)
    first, second, last = report["steps"]
    assert (first["step"], first["algorithm"], first["env_id"]) == (1, "sft", env_id)
    assert first["settings"]["lora_rank"] == 4 and first["settings"]["steps"] == 3
    assert (second["algorithm"], second["model"]) == ("grpo", "the best of step 1")
    assert second["settings"]["lora_rank"] == 4, "inherited from the adapter of step 1"
    assert "a quarter of groups of 8 differ at 3.5 % success" in second["starts_from"]
    assert "starts_from" not in first
    assert (last["algorithm"], last["models"], last["tasks"]) == ("evaluate", 3, 40)
    for level in ("low", "likely", "high"):
        hours = sum(step["hours"][level] for step in report["steps"])
        assert report["total"]["hours"][level] == pytest.approx(hours, abs=3e-4)
        assert report["total"]["money"][level] == pytest.approx(3 * hours, abs=1e-3)
    assert report["total"]["max_gpu_hours"] == 1.5
    assert "3 runs" in report["summary"] and "one cap of 1.5 GPU-hours" in report["summary"]
    (call,) = report["next"]
    assert call["tool"] == "submit_train" and call["arguments"]["then"] == [GRPO, EVALUATION]
    assert not list(home.runs.glob("*"))


def test_the_submit_that_is_suggested_trains_with_the_settings_that_were_shown(
    home: Home, add: Callable[..., str]
):
    add()
    report = dry_run(home, then=[GRPO], vary={"seed": [1, 2]})
    steps = resolved_steps(home, TrainRequest(**report["next"][-1]["arguments"])).trainings
    assert [each.planned.step for each in steps] == [1, 2, 1, 2]
    shown: dict[int, dict[str, Any]] = {}
    for step, each in zip(report["steps"], steps, strict=True):
        settings = shown.setdefault(step["step"], step["settings"]) | step["settings"]
        assert settings == each.resolved.resolved.settings.model_dump()
        assert step["label"] == each.planned.label


@pytest.mark.parametrize(("heldout", "tasks"), [(40, 40), (500, 400)])
def test_the_evaluation_of_a_plan_asks_as_many_tasks_as_an_exam_and_says_which(
    home: Home, add: Callable[..., str], heldout: int, tasks: int
):
    add(heldout=heldout)
    report = dry_run(home, then=[{"algorithm": "evaluate"}])
    assert report["steps"][-1]["tasks"] == tasks
    (check,) = [entry for entry in report["checks"] if entry["name"] == "evaluation"]
    assert f"2 models on {tasks} tasks" in check["detail"]
    assert f"{tasks} tasks show a difference of" in check["detail"]
    part = "Asks 400 of 500 heldout tasks (rows=500 asks all)"
    assert (part in check["detail"]) == (heldout > tasks)


def test_a_plan_with_a_target_says_which_steps_it_skips(home: Home, add: Callable[..., str]):
    add()
    first, second, _ = dry_run(home, expect="90 %")["steps"]
    assert "skipped_if" not in first
    assert second["skipped_if"] == "the step before reaches 90 %; always=true in it: never"
    always = [GRPO | {"always": True}]
    assert "skipped_if" not in dry_run(home, expect="90 %", then=always)["steps"][1]
    assert "skipped_if" not in dry_run(home, expect="better")["steps"][1]


def test_runs_that_vary_show_what_differs_alone(home: Home, add: Callable[..., str]):
    add()
    report = dry_run(home, then=[], vary={"learning_rate": [1e-3, 1e-4], "seed": [1, 2]})
    settings = [step["settings"] for step in report["steps"]]
    assert len(settings[0]) > 20
    assert settings[1:] == [
        {"seed": 2},
        {"learning_rate": 1e-4},
        {"learning_rate": 1e-4, "seed": 2},
    ]
    assert len(json.dumps(report)) < 10_000


def test_the_short_reply_keeps_what_varies_and_drops_what_nobody_changes(
    home: Home, add: Callable[..., str]
):
    add()
    whole = dry_run(home, then=[], vary={"learning_rate": [1e-3, 1e-4], "seed": [1, 2]})
    short = shortened(whole)
    first, *others = short["steps"]
    assert first["settings"]["steps"] == 3 and "lora_targets" not in first["settings"]
    assert [step["settings"] for step in others] == [
        step["settings"] for step in whole["steps"][1:]
    ]
    assert len(json.dumps(short)) < 0.8 * len(json.dumps(whole))


@pytest.mark.parametrize(
    ("then", "step", "name", "code"),
    [
        ([{"algorithm": "grpo", "settings": {"group_size": 1}}], 2, "settings", "SETTING_INVALID"),
        ([{"algorithm": "grpo", "settings": {"lora_rank": 8}}], 2, "resolve", "SETTING_INVALID"),
        ([{"algorithm": "grpo", "env_id": "nowhere"}], 2, "env", "ENV_NOT_FOUND"),
        ([GRPO, {"algorithm": "sft", "settings": {"max_length": 8}}], 3, "data", "DATASET_INVALID"),
    ],
)
def test_a_refusal_names_its_step(
    home: Home, add: Callable[..., str], then: list[Any], step: int, name: str, code: str
):
    add()
    report = dry_run(home, then=then)
    entry = failed(report)
    assert (entry["step"], entry["name"], entry["code"]) == (step, name, code)
    assert "call" not in entry, "a change of a later step is none of the first step's arguments"
    assert report["summary"].startswith(f"Not ready: step {step}: {name}: ")
    assert (report["next"] == [] and report["total"].get("hours") is None) or name == "data"


def test_a_later_step_waits_for_one_that_cannot_make_its_model(home: Home, add: Callable[..., str]):
    add()
    report = dry_run(home, settings={"batch_size": 4000})
    entry = failed(report)
    assert (entry["step"], entry["name"]) == (1, "resolve")
    assert report["steps"][1]["settings"] == {} and report["total"] == {}
    assert [e["name"] for e in report["checks"] if e["status"] == "fail"] == ["resolve"]


def test_what_all_runs_take_together_is_held_against_the_one_cap(
    home: Home, add: Callable[..., str]
):
    add()
    likely = dry_run(home)["total"]["hours"]["likely"]
    report = dry_run(home, max_gpu_hours=likely / 2)
    entry = failed(report)
    assert (entry["name"], entry["code"]) == ("budget", "BUDGET") and "step" not in entry
    arguments = entry["call"]["arguments"]
    assert arguments["then"] == [GRPO, EVALUATION] and arguments["max_gpu_hours"] > likely / 2


def test_a_probe_is_of_the_first_step(home: Home, add: Callable[..., str]):
    add()
    report = dry_run(home, then=[GRPO], samples=4)
    (entry,) = [entry for entry in report["checks"] if entry["name"] == "probe"]
    assert (entry["step"], entry["status"]) == (1, "pass")
    assert report["probe"]["tasks"] == 4 and report["run_id"].startswith("sums-probe")

"""Evaluations are queued as runs of their own, with the tasks and limits that were asked for."""

from pathlib import Path
from typing import Any

import pytest
from run_configs import evaluate_config

from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.home.rows import NewRun
from engine.home.store import Store
from engine.runs import lifecycle
from engine.runs.submit.requests import EvaluationRequest

pytestmark = pytest.mark.timeout(60)


def test_an_evaluation_is_a_run_of_its_own_with_copies_of_its_models(busy, bench, env, tuned):
    said = lifecycle.submit_evaluation(
        bench.home,
        EvaluationRequest(env_id=env, models=["pebble", f"{tuned}@step10"], rows=500, attempts=2),
    )
    assert said["run_id"] == "sums-eval-1" and said["rows"] == 20
    assert any("20 rows" in warning for warning in said["warnings"])
    config = read_json(bench.home.run("sums-eval-1").config)
    base, adapted = config["models"]
    assert base["adapter"] is None and adapted["ref"] == f"{tuned}@step10"
    assert Path(adapted["adapter"]).is_relative_to(bench.home.run("sums-eval-1").path)
    assert config["settings"]["temperature"] == 1 and config["settings"]["max_length"] == 1024
    assert (config["split"], config["rows"], config["attempts"]) == ("heldout", 500, 2)


def test_an_evaluation_says_which_part_of_the_exam_it_asks_and_what_that_can_show(
    busy, bench, env, tuned
):
    def told(**arguments: Any) -> str:
        request = EvaluationRequest(env_id=env, **arguments)
        return lifecycle.submit_evaluation(bench.home, request)["summary"]

    part = told(models=["pebble", f"{tuned}@step10"], rows=12)
    assert "Asks 12 of 20 heldout tasks (rows=20 asks all); 12 tasks show a difference" in part
    whole = told(models=["pebble", f"{tuned}@step10"])
    assert "rows=" not in whole and "20 tasks show a difference of 3" in whole
    assert "show" not in told(models=["pebble"]), "nothing is compared"


def test_an_evaluation_may_ask_certain_tasks_of_the_split(busy, bench, env):
    request = EvaluationRequest(env_id=env, models=["pebble"], rows=3, task_indices="17, 2-5,4")
    reply = lifecycle.submit_evaluation(bench.home, request)
    config = read_json(bench.home.run(reply["run_id"]).config)
    assert config["task_indices"] == [2, 3, 4, 5, 17]
    assert reply["rows"] == config["rows"] == 5


def test_an_evaluation_that_cuts_the_reference_answers_names_the_number_that_would_do(
    busy, bench, env
):
    def warnings_with(max_tokens: int) -> list[str]:
        request = EvaluationRequest(
            env_id=env, models=["pebble"], rows=4, settings={"max_tokens": max_tokens}
        )
        return [
            w for w in lifecycle.submit_evaluation(bench.home, request)["warnings"] if "fit" in w
        ]

    (warning,) = warnings_with(1)
    assert "100% of the reference answers do not fit into max_tokens = 1" in warning
    assert "in the tokens of pebble" in warning
    enough = int(warning.split("max_tokens = ")[-1].split(" ")[0])
    assert warnings_with(enough) == []
    assert warnings_with(enough - 1) != []


@pytest.mark.parametrize("models", [["pebble"], ["pebble", "sums-sft-1@best"]])
def test_a_finished_evaluation_offers_to_compare_its_models_and_never_to_deploy_it(home, models):
    def prepare(run_id: str) -> None:
        home.run(run_id).create()
        write_json(home.run(run_id).config, evaluate_config(run_id, models=models))
        write_json(home.run(run_id).result, {"summary": "played"})

    with Store(home) as store:
        new = NewRun("sums-eval", "evaluate", "evaluate", "sums@0123456789ab", ", ".join(models))
        run_id = store.insert_run(new, prepare).run_id
        for before, state in (
            ("queued", "preparing"),
            ("preparing", "running"),
            ("running", "done"),
        ):
            store.set_state(run_id, state, only_from={before})
    calls = lifecycle.wait(home, run_id)["next"]
    assert calls[-1]["tool"] == "read_rollouts" and calls[-1]["arguments"]["run_id"] == run_id
    both = {"tool": "compare_runs", "arguments": {"ids": models, "env_id": "sums@0123456789ab"}}
    assert calls[:-1] == ([both] if len(models) > 1 else [])


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("BAD_ARGUMENT", {"models": []}),
        ("BAD_ARGUMENT", {"models": ["pebble"] * 2}),
        ("BAD_ARGUMENT", {"models": [str(n) for n in range(9)]}),
        ("BAD_ARGUMENT", {"models": ["pebble"], "split": "test"}),
        ("BAD_ARGUMENT", {"models": ["pebble"], "rows": 0}),
        ("BAD_ARGUMENT", {"models": ["pebble"], "attempts": 65}),
        ("MODEL_NOT_FOUND", {"models": ["nobody"]}),
        ("SETTING_UNKNOWN", {"models": ["pebble"], "settings": {"steps": 3}}),
        ("BAD_ARGUMENT", {"models": ["pebble"], "regrade": "x-1"}),
        ("BAD_ARGUMENT", {"models": ["pebble"], "task_indices": "20"}),
        ("BAD_ARGUMENT", {"models": ["pebble"], "task_indices": "5-3"}),
        ("BAD_ARGUMENT", {"models": ["pebble"], "task_indices": "1,,2"}),
        ("BAD_ARGUMENT", {"models": ["pebble"], "task_indices": "last"}),
        ("BAD_ARGUMENT", {"regrade": "x-1", "task_indices": "1"}),
        ("RUN_NOT_FOUND", {"regrade": "x-1"}),
    ],
)
def test_an_evaluation_that_cannot_run_is_refused(bench, env, code, arguments):
    with pytest.raises(UserError) as caught:
        lifecycle.submit_evaluation(bench.home, EvaluationRequest(env_id=env, **arguments))
    found = caught.value.code
    assert found == code or (code == "SETTING_UNKNOWN" and found == "SETTING_NOT_APPLICABLE")
    assert list(bench.home.runs.iterdir()) == []


def test_an_evaluation_in_other_words_asks_each_task_again_and_costs_as_much(busy, bench, env):
    def submitted(*perturb: str) -> tuple[dict, float]:
        request = EvaluationRequest(env_id=env, models=["pebble"], rows=5, perturb=perturb)
        reply = lifecycle.submit_evaluation(bench.home, request)
        run = bench.home.run(reply["run_id"])
        return read_json(run.config), bench.row(run).estimated_hours

    plain, hours = submitted()
    assert "perturb" not in plain
    two, hours_of_two = submitted("tools", "wording")
    assert two["perturb"] == ["wording", "tools"] and hours_of_two > hours
    assert submitted("all")[0]["perturb"] == ["wording", "system", "tools", "options"]


def test_unknown_other_words_are_refused_with_the_names_that_there_are(busy, bench, env):
    with pytest.raises(UserError) as caught:
        request = EvaluationRequest(env_id=env, models=["pebble"], perturb=["typos"])
        lifecycle.submit_evaluation(bench.home, request)
    assert caught.value.code == "BAD_ARGUMENT" and caught.value.field == "perturb"
    assert "wording, system, tools, options" in str(caught.value.hint)

"""A plan: several runs queued, capped, resumed and cancelled as one."""

import dataclasses
import os
import subprocess
import sys

import pytest

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import append_line, read_json, read_lines, write_json
from engine.core.hints import Call
from engine.cost import estimate
from engine.cost.estimate import estimate_cost
from engine.home.store import Store
from engine.machine.processes import launcher
from engine.runs import lifecycle, plan_status
from engine.runs.deletion import delete_run
from engine.runs.submit.requests import TrainRequest

pytestmark = pytest.mark.timeout(60)

SFT = {"steps": 3, "learning_rate": 1e-3, "lora_rank": 4}
GRPO = {"algorithm": "grpo", "settings": {"steps": 2}}
EVALUATION = {"algorithm": "evaluate", "rows": 4}
DEPLOY = {"tool": "deploy", "arguments": {"run_id": "sums-sft-1@best"}}
NAMES = ["sums-sft-1", "sums-grpo-1", "sums-eval-1"]


@pytest.fixture
def held(bench, env):
    """Trainers hold before their first step until the test takes the file away."""
    hold = bench.home.root / "hold"
    hold.touch()
    yield hold
    hold.unlink(missing_ok=True)
    for row in lifecycle.overview(bench.home, "runs")["runs"]:
        lifecycle.cancel(bench.home, row["run_id"])
        run = bench.home.run(row["run_id"])
        bench.until(lambda run=run: not launcher.is_alive(run), f"{run.id} is gone")


def plan(bench, env, **arguments) -> dict:
    defaults = {"env_id": env, "algorithm": "sft", "settings": SFT, "then": [GRPO, EVALUATION]}
    return lifecycle.submit(bench.home, TrainRequest(**(defaults | arguments)))


def waited(bench, plan_id: str = "sums-plan-1") -> dict:
    """The status of a plan that is over and of which no process is left."""
    status = lifecycle.wait(bench.home, plan_id, timeout_s=40)
    for row in rows_of(bench, plan_id):
        run = bench.home.run(row.run_id)
        bench.until(lambda run=run: not launcher.is_alive(run), f"{run.id} is gone")
    return status


def rows_of(bench, plan_id: str) -> list:
    with Store(bench.home) as store:
        return store.plan_runs(plan_id)


def refused(code: str, bench, env, **arguments) -> UserError:
    with pytest.raises(UserError) as caught:
        plan(bench, env, **arguments)
    assert caught.value.code == code and caught.value.hint
    assert lifecycle.overview(bench.home, "runs")["runs"] == []  # all or none
    return caught.value


def test_a_chain_is_queued_at_once_and_gets_done_without_anybody_waiting(bench, env):
    reply = plan(bench, env, max_gpu_hours=1)
    assert reply["run_id"] == "sums-plan-1" and "3 runs" in reply["summary"]
    assert [step["run_id"] for step in reply["steps"]] == NAMES
    assert [step.get("behind") for step in reply["steps"]] == [None, NAMES[:1], NAMES[:2]]
    hours = [step["gpu_hours"] for step in reply["steps"]]
    assert min(hours) > 0 and reply["estimate"]["gpu_hours"] == pytest.approx(sum(hours), abs=3e-4)
    first, second, last = (bench.home.run(name) for name in NAMES)
    bench.until_state(last, "done")
    second_config, last_config = second.read_config(), last.read_config()
    assert second_config.model == "sums-sft-1@best" and second_config.settings.lora_rank == 4
    assert last_config.model_refs == ["pebble", "sums-sft-1@best", "sums-grpo-1@best"]
    assert second_config.plan.step == 2 and last_config.max_gpu_hours == 1
    assert (second.start_adapter / "MANIFEST.json").is_file()
    assert first.read_config().plan.plan_id == "sums-plan-1"


def test_every_step_says_how_it_ended(bench, env):
    plan(bench, env, then=[GRPO])
    status = waited(bench)
    assert (status["state"], status["until_met"], status["kind"]) == ("done", True, "plan")
    assert [(step["run_id"], step["verdict"]) for step in status["steps"]] == [
        ("sums-sft-1", "better"),
        ("sums-grpo-1", "better"),
    ]
    assert status["summary"] == "sums-plan-1 is done: 2 of 2 runs done."
    assert status["next"][-1]["arguments"] == {"run_id": "sums-grpo-1@best"}


def test_the_end_of_a_plan_says_what_the_verdicts_warn_of_and_shows_every_alert(bench, env):
    plan(bench, env, then=[GRPO])
    done = waited(bench)
    cure = {"tool": "submit_train", "arguments": {"env_id": env, "settings": {"keep": 0.2}}}
    for name, lost in (("sums-sft-1", "upper"), ("sums-grpo-1", "reverse")):
        evidence = {"warnings": [f"Forgotten: {lost}."], "next": [DEPLOY, cure]}
        write_json(bench.home.run(name).result, {"verdict": "better", "evidence": evidence})
    append_line(bench.home.run("sums-sft-1").events, {"time": 1.0, "event": "alert", "id": "flat"})
    said = lifecycle.wait(bench.home, "sums-plan-1", timeout_s=0, cursor=done["cursor"])
    assert said["warnings"] == ["sums-sft-1: Forgotten: upper.", "sums-grpo-1: Forgotten: reverse."]
    assert [alert["id"] for alert in said["alerts"]] == ["flat"]
    assert said["next"][-1] == cure
    assert [call["tool"] for call in said["next"]] == ["read_rollouts", "deploy", "submit_train"]
    later = lifecycle.wait(bench.home, "sums-plan-1", timeout_s=0, cursor=said["cursor"])
    assert [alert["id"] for alert in later["alerts"]] == ["flat"]


def test_the_end_of_a_plan_says_once_what_became_of_the_skills_before(bench, env):
    plan(bench, env, then=[GRPO])
    done = waited(bench)
    fine, lost = "Kept skills: no clear loss.", "Forgotten since pebble: upper."
    kept = {"summary": fine, "against_base": {"summary": lost}}
    for name, warnings in (("sums-sft-1", []), ("sums-grpo-1", [lost])):
        evidence = {"kept_skills": kept, "warnings": warnings}
        write_json(bench.home.run(name).result, {"verdict": "better", "evidence": evidence})
    told = lifecycle.wait(bench.home, "sums-plan-1", timeout_s=0, cursor=done["cursor"])
    first, second = told["steps"]
    assert (first["kept_skills"], first["kept_since_base"]) == (fine, lost)
    assert second["kept_skills"] == fine and "kept_since_base" not in second
    assert told["warnings"] == [f"sums-grpo-1: {lost}"]


@pytest.mark.parametrize(
    ("verdict", "second"),
    [("better", "submit_train"), ("inconclusive", "diagnose"), ("worse", "diagnose")],
)
def test_a_plan_that_gained_nothing_leads_to_its_diagnosis(bench, env, verdict: str, second: str):
    plan(bench, env, then=[GRPO])
    done = waited(bench)
    evidence = {"next": [{"tool": "submit_train", "arguments": {"env_id": env}}]}
    write_json(bench.home.run("sums-grpo-1").result, {"verdict": verdict, "evidence": evidence})
    with Store(bench.home) as store:
        store.update_run("sums-grpo-1", only_in={"done"}, verdict=verdict)
    said = lifecycle.wait(bench.home, "sums-plan-1", timeout_s=0, cursor=done["cursor"])
    assert [call["tool"] for call in said["next"]] == ["read_rollouts", second]


def test_a_plan_says_whether_its_best_model_reaches_the_target(bench, env):
    plan(bench, env, then=[GRPO], expect="90 %")
    done = waited(bench)
    for name, value in (("sums-sft-1", 0.92), ("sums-grpo-1", 0.857)):
        after = {"value": value, "interval": [value - 0.05, value + 0.04]}
        evidence = {"metric": "success", "after": after, "as_expected": value >= 0.9}
        write_json(bench.home.run(name).result, {"verdict": "better", "evidence": evidence})
    said = lifecycle.wait(bench.home, "sums-plan-1", timeout_s=0, cursor=done["cursor"])
    assert said["target"].startswith("Target 90 %: reached, but not for sure, 92.0 %")
    assert said["target"].endswith("sums-sft-1@best.") and said["target"] in said["summary"]
    # The last step fell behind the one before it and misses the target: it is not served.
    assert "deploy" not in [call["tool"] for call in said["next"]]


def reached(bench, *names: str) -> None:
    """These runs will have reached the target of their plan when they are done."""
    after = {"value": 0.97, "interval": [0.93, 0.99]}
    evidence = {"metric": "success", "after": after, "as_expected": True, "next": [DEPLOY]}
    write_json(bench.home.root / "evidence.json", dict.fromkeys(names, evidence))


def test_a_plan_skips_what_comes_after_a_step_that_reached_the_target(bench, env):
    reached(bench, "sums-sft-1")
    plan(bench, env, then=[GRPO, GRPO, EVALUATION], expect="90 %")
    status = waited(bench)
    assert status["state"] == "done" and "2 of 4 runs done" in status["summary"]
    assert "sums-grpo-1, sums-grpo-2 skipped: not needed: sums-sft-1 reached" in status["summary"]
    assert [step["state"] for step in status["steps"]] == ["done", "skipped", "skipped", "done"]
    assert bench.home.run("sums-eval-1").read_config().model_refs == ["pebble", "sums-sft-1@best"]
    assert "read_logs" not in [call["tool"] for call in status["next"]], "nothing went wrong"
    # Whoever wants the step all the same resumes the plan.
    lifecycle.submit(bench.home, TrainRequest(resume="sums-plan-1"))
    states = [step["state"] for step in waited(bench)["steps"]]
    assert states == ["done", "done", "done", "done"]


@pytest.mark.parametrize(
    ("expect", "entry"), [("90 %", GRPO | {"always": True}), ("better", GRPO), ("", GRPO)]
)
def test_a_step_goes_on_where_it_is_asked_to_or_no_target_was_set(bench, env, expect, entry):
    reached(bench, "sums-sft-1")
    plan(bench, env, then=[entry], expect=expect)
    assert [step["state"] for step in waited(bench)["steps"]] == ["done", "done"]


def test_a_plan_warns_of_grpo_whose_start_solves_too_little(bench, env):
    plan(bench, env, then=[GRPO])
    waited(bench)
    with Store(bench.home) as store:
        sft, grpo = store.plan_runs("sums-plan-1")
    queued = dataclasses.replace(grpo, state="queued")
    for value, said in ((0.01, ["sums-grpo-1 starts from a model that solves 1.0 %"]), (0.2, [])):
        evidence = {"metric": "success", "after": {"value": value}}
        write_json(bench.home.run("sums-sft-1").result, {"evidence": evidence})
        warnings = plan_status._weak_start_warnings(bench.home, [sft, queued])
        assert [text[: len(said[0])] for text in warnings] == said if said else warnings == []
    assert plan_status._weak_start_warnings(bench.home, [sft, grpo]) == []  # it is done: too late


def test_a_chain_is_carried_out_once_for_each_combination(bench, env, held):
    reply = plan(bench, env, vary={"seed": [1, 2], "learning_rate": [1e-3, 1e-4]})
    steps = reply["steps"]
    assert len(steps) == 9
    labels = [step["label"] for step in steps[:-1:2]]
    assert labels[0] == "seed=1, learning_rate=0.001" and len(set(labels)) == 4
    configs = [bench.home.run(step["run_id"]).read_config() for step in steps]
    assert [config.settings.seed for config in configs[:-1]] == [1, 1, 1, 1, 2, 2, 2, 2]
    rates = [config.settings.learning_rate for config in configs[:-1:2]]
    assert rates == [1e-3, 1e-4, 1e-3, 1e-4]
    # Eight models and the start would be one too many: only the ends of the chains are asked.
    asked = [f"sums-grpo-{number}@best" for number in (1, 2, 3, 4)]
    assert configs[-1].model_refs == ["pebble", *asked]
    assert len(configs[-1].waits_for) == 4


def test_a_plan_is_cancelled_and_resumed_as_one(bench, env, held):
    plan(bench, env)
    bench.pids(bench.home.run("sums-sft-1"))
    reply = lifecycle.cancel(bench.home, "sums-plan-1", "another idea")
    assert reply["run_id"] == "sums-plan-1"
    for name in NAMES:
        row = bench.until_state(bench.home.run(name), "cancelled")
        assert row.reason == "another idea"
    status = lifecycle.status(bench.home, "sums-plan-1")
    assert status["state"] == "cancelled" and "another idea" in status["summary"]
    held.unlink()
    reply = lifecycle.submit(bench.home, TrainRequest(resume="sums-plan-1", max_gpu_hours=1.5))
    assert reply["run_id"] == "sums-plan-1" and reply["resumed_from"] == "sums-plan-1"
    assert lifecycle.wait(bench.home, "sums-plan-1", timeout_s=40)["state"] == "done"
    rows = rows_of(bench, "sums-plan-1")
    assert [(row.attempt, row.max_gpu_hours) for row in rows] == [(2, 1.5)] * 3
    with pytest.raises(UserError) as caught:
        lifecycle.submit(bench.home, TrainRequest(resume="sums-plan-1"))
    assert caught.value.code == "RUN_STATE"


def test_the_cap_is_that_of_the_whole(bench, env, held):
    plan(bench, env, max_gpu_hours=0.5)
    first = bench.home.run("sums-sft-1")
    bench.until_state(first, "running")
    with Store(bench.home) as store:  # as if a step before had taken what the plan may take
        store.update_run("sums-grpo-1", only_in={"queued"}, spent_hours=0.5)
    row = bench.until_state(first, "failed")
    assert row.reason_kind == "budget" and "of the plan sums-plan-1" in row.reason
    assert row.hint.call.arguments == {"resume": "sums-plan-1", "max_gpu_hours": 0.5}
    rows = rows_of(bench, "sums-plan-1")
    assert [row.state for row in rows] == ["failed"] * 3
    assert [row.reason_kind for row in rows] == ["budget", "awaited", "awaited"]


def test_what_a_plan_will_take_is_held_against_its_cap_before_anything_is_queued(bench, env):
    hours = plan(bench, env, request_id="x")["estimate"]["gpu_hours"]
    bench.until_state(bench.home.run("sums-eval-1"), "done")
    with pytest.raises(UserError) as caught:
        plan(bench, env, max_gpu_hours=hours / 2)
    assert caught.value.code == "BUDGET"
    arguments = caught.value.advice.call.arguments
    assert arguments["then"] == [GRPO, EVALUATION] and arguments["max_gpu_hours"] > hours / 2


def test_a_home_shows_its_plans_and_says_what_a_plan_is(bench, env, held):
    plan(bench, env)
    overview = lifecycle.overview(bench.home, "all")
    assert overview["next"][0]["arguments"] == {"run_id": "sums-plan-1"}
    assert {row["plan"] for row in overview["runs"]} == {"sums-plan-1"}
    with Store(bench.home) as store, pytest.raises(UserError) as caught:
        store.get_run("sums-plan-1")
    assert "is a plan" in caught.value.message and "sums-grpo-1" in caught.value.hint


def test_an_alert_of_any_run_ends_a_wait_for_news_and_is_diagnosed_first(bench, env, held):
    plan(bench, env)
    now = lifecycle.wait(bench.home, "sums-plan-1", timeout_s=0)
    first = bench.home.run("sums-sft-1")
    append_line(
        first.events, {"time": 1.0, "event": "alert", "id": "flat", "message": "it is flat"}
    )
    news = lifecycle.wait(bench.home, "sums-plan-1", until="news", cursor=now["cursor"])
    assert news["until_met"] and news["alerts"][0]["run_id"] == "sums-sft-1"
    assert [call["tool"] for call in news["next"]] == ["diagnose", "wait_run"]
    again = lifecycle.wait(
        bench.home, "sums-plan-1", until="news", timeout_s=0, cursor=news["cursor"]
    )
    assert not again["until_met"] and again["alerts"] == []
    # Whoever has no cursor has seen no alert yet.
    for look in (
        lifecycle.wait(bench.home, "sums-plan-1", timeout_s=0),
        lifecycle.status(bench.home, "sums-plan-1"),
    ):
        assert [alert["message"] for alert in look["alerts"]] == ["it is flat"]
        assert look["next"][0]["arguments"] == {"run_id": "sums-sft-1"}


def test_the_first_step_of_any_run_and_an_evaluation_are_waited_for(bench, env, held):
    plan(bench, env)
    early = lifecycle.wait(bench.home, "sums-plan-1", until="first_step", timeout_s=0)
    assert not early["until_met"]
    now = lifecycle.wait(bench.home, "sums-plan-1", timeout_s=0)
    held.unlink()
    late = lifecycle.wait(bench.home, "sums-plan-1", until="first_step", timeout_s=30)
    assert late["until_met"]
    event = {"time": 1.0, "event": "evaluated", "step": 3, "heldout_success": 0.5}
    append_line(bench.home.run("sums-sft-1").events, event)
    arguments = {"until": "next_eval", "timeout_s": 0}
    since = lifecycle.wait(bench.home, "sums-plan-1", cursor=now["cursor"], **arguments)
    assert since["until_met"]
    assert lifecycle.wait(bench.home, "sums-plan-1", **arguments)["until_met"], "it is not skipped"


def test_a_wait_reports_how_far_the_whole_is(bench, env, held):
    plan(bench, env)
    told: list[dict] = []

    def hear(report: dict) -> None:
        told.append(report)
        held.unlink(missing_ok=True)  # the runs go on once the first report is there

    lifecycle.wait(bench.home, "sums-plan-1", timeout_s=40, on_progress=hear)
    shares = [report["step"] for report in told]
    assert told and told[0]["total_steps"] == 3 and shares == sorted(shares)
    assert {report["run_id"] for report in told} == {"sums-plan-1"}


def test_the_same_request_is_the_same_plan(bench, env, held):
    first = plan(bench, env, request_id="try-1")
    again = plan(bench, env, request_id="try-1")
    assert again["run_id"] == first["run_id"] and len(rows_of(bench, first["run_id"])) == 3
    assert any("before" in warning for warning in again["warnings"])
    with pytest.raises(UserError) as caught:
        plan(bench, env, request_id="try-1", then=[GRPO])
    assert caught.value.code == "REQUEST_CONFLICT"


def test_a_plan_is_resumed_only_where_each_of_its_runs_could_be(bench, env, held):
    plan(bench, env)
    lifecycle.cancel(bench.home, "sums-plan-1")
    for name in NAMES:
        bench.until_state(bench.home.run(name), "cancelled")
    bench.home.config_file.write_text("max_gpu_hours_total = 0.0000001\n")
    with Store(bench.home) as store:
        store.update_run(NAMES[0], only_in={"cancelled"}, spent_hours=0.1)
    assert resume_refused(bench, "BUDGET")
    bench.home.config_file.unlink()
    delete_run(bench.home, NAMES[1])
    assert "sums-grpo-1 were deleted" in resume_refused(bench, "RUN_STATE")
    assert [row.state for row in rows_of(bench, "sums-plan-1")] == ["cancelled"] * 3


def resume_refused(bench, code: str) -> str:
    with pytest.raises(UserError) as caught:
        lifecycle.submit(bench.home, TrainRequest(resume="sums-plan-1"))
    assert caught.value.code == code and caught.value.hint
    return caught.value.message


def test_a_resumed_plan_tells_of_what_is_still_ahead_and_once_for_a_request(bench, env, held):
    whole = plan(bench, env)["estimate"]["gpu_hours"]
    held.unlink()
    bench.until_state(bench.home.run(NAMES[0]), "done")
    lifecycle.cancel(bench.home, "sums-plan-1")
    bench.until_state(bench.home.run(NAMES[1]), "cancelled", "done")
    held.touch()
    request = TrainRequest(resume="sums-plan-1", request_id="go-on")
    reply = lifecycle.submit(bench.home, request)
    assert reply["state"] == "running" and " of 3 to go" in reply["summary"]
    assert 0 < reply["estimate"]["gpu_hours"] < whole
    events = read_lines(bench.home.run(NAMES[2]).events)[0]
    assert events[-1]["event"] == "resumed_by_request" and events[-1]["attempt"] == 2
    again = lifecycle.submit(bench.home, request)
    assert "answered before" in again["warnings"][0]
    assert rows_of(bench, "sums-plan-1")[2].attempt == 2


def test_millions_of_combinations_are_refused_at_once(bench, env):
    many = list(range(40_000))
    vary = {"seed": many, "steps": many, "eval_rows": many, "lora_rank": many}
    assert "runs; it may have 16" in refused("BAD_ARGUMENT", bench, env, vary=vary).message


def test_only_the_first_step_is_compared_with_a_parent_or_with_earlier_runs(bench, env):
    plan(bench, env, then=[])
    bench.until_state(bench.home.run("sums-sft-1"), "done")
    reply = plan(bench, env, then=[GRPO], parent="sums-sft-1")
    assert any("the same as sums-sft-1" in warning for warning in reply["warnings"])
    parents = [bench.home.run(step["run_id"]).read_config().parent for step in reply["steps"]]
    assert parents == ["sums-sft-1", ""]
    bench.until_state(bench.home.run("sums-grpo-1"), "done")


def test_a_plan_that_is_done_is_not_offered_to_be_resumed(bench, env):
    plan(bench, env, then=[GRPO])
    done = lifecycle.wait(bench.home, "sums-plan-1", timeout_s=40)
    cancelled = lifecycle.cancel(bench.home, "sums-plan-1")
    assert cancelled["state"] == "done" and cancelled["next"] == done["next"]


@pytest.mark.parametrize(
    ("then", "vary", "text"),
    [
        ([{"settings": {}}], {}, "names no algorithm"),
        ([{"algorithm": "grpo", "steps": 3}], {}, "no key 'steps'"),
        ([{"algorithm": "grpo", "settings": 3}], {}, "settings = 3"),
        ([EVALUATION, GRPO], {}, "only the last step"),
        ([EVALUATION | {"rows": 0}], {}, "rows"),
        ([EVALUATION | {"perturb": ["typos"]}], {}, "typos"),
        ([GRPO], {"seed": 3}, "no list"),
        ([GRPO], {"seed": [1, 1]}, "different values"),
        ([GRPO], {"seed": list(range(9))}, "18 runs; it may have 16"),
        ([GRPO, EVALUATION], {"seed": list(range(8))}, "17 runs"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_its_fault(bench, env, then, vary, text: str):
    assert text in refused("BAD_ARGUMENT", bench, env, then=then, vary=vary).message


def test_a_fault_in_a_later_step_names_it_and_queues_nothing(bench, env):
    wrong = {"algorithm": "grpo", "settings": {"group_sise": 4}}
    error = refused("SETTING_UNKNOWN", bench, env, then=[wrong])
    assert error.message.startswith("step 2: ") and error.field == "then[0].settings.group_sise"
    assert "group_size" in error.hint
    submit = Call("submit_train", {"env_id": env, "settings": SFT, "then": [wrong]})
    assert error.of_call(submit).advice.call is None, "the settings of step 1 are not at fault"
    other_rank = {"algorithm": "grpo", "settings": {"lora_rank": 8}}
    assert "lora_rank" in refused("SETTING_INVALID", bench, env, then=[other_rank]).message
    refused("ENV_NOT_FOUND", bench, env, then=[EVALUATION | {"env_id": "nobody"}])


def test_what_all_runs_write_must_fit_onto_the_disk(bench, env, monkeypatch):
    need = estimate_cost(bench.home, env, "pebble", "sft", SFT)["disk_bytes"]
    machine = hardware.detect(bench.home.root)
    free = estimate.DISK_RESERVE + int(1.5 * need)
    changed = dataclasses.replace(machine, disk_free=free)
    monkeypatch.setattr(hardware, "detect", lambda _root=None: changed)
    twice = {"then": [], "vary": {"seed": [1, 2]}}
    assert "the runs of the plan" in refused("DISK_FULL", bench, env, **twice).message
    assert plan(bench, env, then=[], vary={"seed": [1]})["run_id"] == "sums-plan-1"
    bench.until_state(bench.home.run("sums-sft-1"), "done")


def test_a_plan_survives_the_death_of_everything_at_once(bench, env, held):
    plan(bench, env)
    first = bench.home.run("sums-sft-1")
    bench.kill(*bench.pids(first))
    bench.until(lambda: not launcher.is_alive(first), "nothing lives")
    held.unlink()
    assert lifecycle.wait(bench.home, "sums-plan-1", timeout_s=40)["state"] == "done"


_SUBMITTER = """
import os, sys
from pathlib import Path
from engine.home import store_runs
from engine.home.run_dir import Home
from engine.runs import lifecycle, plan_status
from engine.runs.submit.requests import TrainRequest

insert = store_runs.RunTable._insert_queued
def dying(self, new, run_id, number):
    if new.algorithm == sys.argv[3]:
        os.kill(os.getpid(), 9)
    insert(self, new, run_id, number)

store_runs.RunTable._insert_queued = dying
then = [{"algorithm": "grpo", "settings": {"steps": 2}}, {"algorithm": "evaluate", "rows": 4}]
request = TrainRequest(env_id=sys.argv[2], algorithm="sft", settings={"steps": 3}, then=then)
lifecycle.submit(Home(Path(sys.argv[1])), request)
"""


@pytest.mark.parametrize("at", [pytest.param("sft", marks=pytest.mark.long), "grpo", "evaluate"])
def test_a_submit_that_is_killed_half_way_leaves_no_half_plan(bench, env, at: str):
    command = [sys.executable, "-c", _SUBMITTER, str(bench.home.root), env, at]
    killed = subprocess.run(command, capture_output=True, timeout=50, check=False)
    assert killed.returncode == -9, killed.stderr
    assert lifecycle.overview(bench.home, "runs")["runs"] == []
    reply = plan(bench, env, then=[GRPO])
    assert reply["run_id"] == "sums-plan-1"
    assert lifecycle.wait(bench.home, reply["run_id"], timeout_s=40)["state"] == "done"


def test_a_lost_database_still_knows_the_plan(bench, env, held):
    plan(bench, env)
    first = bench.home.run("sums-sft-1")
    bench.kill(*bench.pids(first))
    bench.until(lambda: not launcher.is_alive(first), "nothing lives")
    before = rows_of(bench, "sums-plan-1")
    for name in NAMES:  # as on a disk that keeps times by the second
        os.utime(bench.home.run(name).config, (1_700_000_000, 1_700_000_000))
    for suffix in ("", "-wal", "-shm"):
        bench.home.db.with_name(bench.home.db.name + suffix).unlink(missing_ok=True)
    rows = rows_of(bench, "sums-plan-1")
    assert [row.run_id for row in rows] == NAMES
    assert [row.estimated_hours for row in rows] == [row.estimated_hours for row in before]
    held.unlink()
    assert lifecycle.wait(bench.home, "sums-plan-1", timeout_s=40)["state"] == "done"


def test_a_wait_for_news_returns_when_a_step_has_ended_and_says_only_that(bench, env, held):
    plan(bench, env)
    now = lifecycle.wait(bench.home, "sums-plan-1", timeout_s=0)
    assert len(now["steps"]) == 3 and not now["until_met"]
    held.unlink()
    news = lifecycle.wait(
        bench.home, "sums-plan-1", until="news", timeout_s=30, cursor=now["cursor"]
    )
    assert news["until_met"]
    assert "sums-sft-1" in [step["run_id"] for step in news["steps"] if step["state"] == "done"]
    whole = lifecycle.wait(bench.home, "sums-plan-1", timeout_s=40, cursor=news["cursor"])
    assert whole["state"] == "done" and len(whole["steps"]) == 3
    with pytest.raises(UserError) as caught:
        lifecycle.wait(bench.home, "sums-plan-1", timeout_s=0, cursor="7.1.x_1")
    assert caught.value.code == "BAD_CURSOR"


def test_the_steps_of_a_plan_carry_its_contamination_report(bench, env, held):
    plan(bench, env)
    for name in NAMES:
        report = read_json(bench.home.run(name).contamination)
        assert {source["env_id"] for source in report["sources"]} == {env}


def test_a_seed_that_fails_does_not_fail_the_joint_evaluation_of_the_others(bench, env, held):
    request = TrainRequest(
        env_id=env, algorithm="sft", settings=SFT, then=[EVALUATION], vary={"seed": [1, 2, 3]}
    )
    plan_id = lifecycle.submit(bench.home, request)["run_id"]
    lifecycle.cancel(bench.home, "sums-sft-2", "enough")
    held.unlink()
    status = lifecycle.wait(bench.home, plan_id, timeout_s=40)
    evaluation = bench.home.run("sums-eval-1")
    assert bench.row(evaluation).state == "done"
    config = evaluation.read_config()
    assert config.model_refs == ["pebble", "sums-sft-1@best", "sums-sft-3@best"]
    assert config.missing_models == ["sums-sft-2@best"]
    assert status["steps"][-1]["missing_models"] == ["sums-sft-2@best"]
    warnings = lifecycle.status(bench.home, evaluation.id)["warnings"]
    assert any("sums-sft-2@best" in warning for warning in warnings)


def test_where_no_seed_gets_done_the_joint_evaluation_fails(bench, env, held):
    request = TrainRequest(
        env_id=env, algorithm="sft", settings=SFT, then=[EVALUATION], vary={"seed": [1, 2]}
    )
    plan_id = lifecycle.submit(bench.home, request)["run_id"]
    for run_id in ("sums-sft-2", "sums-sft-1"):
        lifecycle.cancel(bench.home, run_id, "enough")
    lifecycle.wait(bench.home, plan_id, timeout_s=40)
    row = bench.until_state(bench.home.run("sums-eval-1"), "failed")
    assert row.reason_kind == "awaited" and "enough" in row.reason


def test_the_evaluation_of_a_plan_may_ask_in_other_words(bench, env, held):
    asked = EVALUATION | {"perturb": ["tools", "wording"]}
    last = plan(bench, env, then=[asked])["steps"][-1]
    assert bench.home.run(last["run_id"]).read_config().perturb == ["wording", "tools"]

"""What a wait tells a client: no more than it needs for its next move."""

from mcp_server.api.after_wait import after_wait, essential

LEVEL = {"value": 0.9, "interval": [0.8, 0.95], "tasks": 40}
COUNTS = {"attempts": 40, "errors": 0, "value_with_errors": 0.9}


def test_speed_memory_and_counts_without_failed_scores_are_left_out():
    whole = {
        "run_id": "r",
        "metrics": {"loss": 0.1, "heldout_success": 0.9, "time": 1.0, "mfu": 0.2, "train_s": 3.0},
        "result": {
            "steps": 8,
            "measured": {"tokens_per_s": 400.0},
            "evidence": {"before": LEVEL | COUNTS, "after": LEVEL | COUNTS | {"errors": 2}},
        },
    }
    short = essential(whole)
    assert short["metrics"] == {"loss": 0.1, "heldout_success": 0.9}
    assert short["result"]["steps"] == 8 and "measured" not in short["result"]
    assert short["result"]["evidence"]["before"] == LEVEL
    assert short["result"]["evidence"]["after"]["attempts"] == 40  # scores failed: all counts stay
    assert "measured" in whole["result"]  # the status itself is unchanged


def test_the_steps_of_a_plan_are_shortened_too():
    step = {"run_id": "r", "verdict": "better", "before": LEVEL | COUNTS, "after": LEVEL | COUNTS}
    short = essential({"kind": "plan", "steps": [step, {"run_id": "e", "state": "queued"}]})
    assert short["steps"][0] == step | {"before": LEVEL, "after": LEVEL}
    assert short["steps"][1] == {"run_id": "e", "state": "queued"}


def test_metrics_in_detail_and_troubles_that_are_none_are_left_out_and_four_digits_are_kept():
    metrics = {"step": 140, "reward_mean": 0.961484375, "tokens": 9, "group_std_p90": 0.3157}
    metrics |= {"truncated_share": 0.0, "reward_errors": 0.25, "lr": 0.00029999999}
    short = essential({"run_id": "r", "metrics": metrics})
    assert short["metrics"] == {
        "step": 140,
        "reward_mean": 0.9615,
        "reward_errors": 0.25,
        "lr": 0.0003,
    }


def test_a_run_that_is_done_shows_the_number_to_report_and_no_third_one():
    number = {"value": 0.76, "curve": {"value": 0.86}}
    status = {"state": "done", "metrics": {"heldout_success": 0.83}, "heldout": {"half": "select"}}
    assert essential(status | {"report_this": number}) == {"state": "done", "report_this": number}
    assert essential(status) == status, "nothing to report: the metrics are all there is"
    assert "metrics" in essential(status | {"report_this": number, "state": "running"})


def test_at_the_end_of_a_run_each_number_stands_once():
    number = {"value": 0.815, "tasks": 200, "curve": {"value": 0.845}}
    after = {"step": 28, "value": 0.815, "interval": [0.75, 0.86], "tasks": 200}
    evidence = {"before": {"value": 0.675}, "after": after, "p": 0.01}
    result = {"best_step": 28, "best_score": 0.84500001, "evidence": evidence}
    status = {"state": "done", "report_this": number, "result": result}
    short = essential(status)["result"]
    left = evidence | {"after": {"step": 28, "value": 0.815}}
    assert short == {"best_step": 28, "evidence": left}
    # A number of another evaluation, on more tasks, is another number: both stay.
    larger = essential(status | {"report_this": number | {"tasks": 400}})["result"]
    assert larger["evidence"]["after"] == after
    # The last metrics of an evaluation are those of its last model.
    models = {"models": [{"ref": "pebble", "success": 0.5}]}
    judged = {"state": "done", "result": models, "metrics": {"heldout_success": 0.5}}
    assert essential(judged) == {"state": "done", "result": models}


def test_hours_of_a_forecast_that_stand_beside_it_are_left_out():
    hours = {"low": 0.1, "likely": 0.2, "high": 0.4}
    forecast = {"spent_hours": 0.1, "left_hours": hours, "total_hours": hours, "basis": "measured"}
    short = essential({"state": "running", "spent_hours": 0.1, "forecast": forecast})
    assert short["forecast"] == {"left_hours": hours, "basis": "measured"}
    assert short["spent_hours"] == 0.1


def test_of_equal_alerts_of_a_run_the_newest_is_shown_with_how_often_it_came():
    def alert(run_id: str, name: str, step: int) -> dict[str, object]:
        return {"run_id": run_id, "time": 9.5, "event": "alert", "id": name, "step": step}

    alerts = [alert("a", "kl", 5), alert("a", "flat", 6), alert("b", "kl", 7), alert("a", "kl", 8)]
    assert essential({"kind": "plan", "alerts": alerts})["alerts"] == [
        {"run_id": "a", "id": "flat", "step": 6},
        {"run_id": "b", "id": "kl", "step": 7},
        {"run_id": "a", "id": "kl", "step": 8, "times": 2},
    ]


def test_news_without_an_alert_is_a_passed_target_and_no_reason_to_diagnose():
    news = {"state": "running", "until_met": True, "cursor": "7"}
    assert [call["tool"] for call in after_wait("r", "news", news)] == ["wait_run"]
    alerted = news | {"alerts": [{"id": "kl"}]}
    assert after_wait("r", "news", alerted)[0]["tool"] == "diagnose"


def test_once_its_target_is_passed_a_run_is_offered_to_be_stopped():
    status = {"state": "running", "target": "90 %; best so far 0.94", "cursor": "7"}
    assert [call["tool"] for call in after_wait("r", "end", status)] == ["wait_run"]
    stop, wait_again = after_wait("r", "end", status | {"target_passed": True})
    arguments = {"run_id": "r", "reason": "target passed"}
    assert stop == {"tool": "cancel_run", "arguments": arguments}
    assert wait_again["tool"] == "wait_run" and wait_again["arguments"]["cursor"] == "7"

"""What a wait tells a client: no more than it needs for its next move."""

from mcp_server.api.after_wait import essential

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

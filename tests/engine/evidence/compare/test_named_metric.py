"""Models judged by a named metric of the environment."""

import pytest

from engine.core.errors import UserError
from engine.evidence.compare.compare import compare_runs
from engine.evidence.verdict.verdict import run_verdict

SETTINGS = {"max_tokens": 64, "temperature": 1.0, "top_p": 1.0, "stop": [], "thinking": False}


@pytest.fixture
def evaluation(make_run, rows):
    """evaluation({"pebble": [0.1, None, ...]}) -> an evaluation in which each model's answers have
    this metric `form`; None stands for an answer without it."""

    def make(values: dict[str, list[float | None]]):
        run = make_run(
            "evaluate",
            kind="evaluate",
            env_id="arith@0123456789ab",
            models=[{"ref": ref} for ref in values],
            attempts=1,
            settings=SETTINGS,
        )
        for index, of_model in enumerate(values.values()):
            lines = []
            for n, value in enumerate(of_model):
                metrics = {} if value is None else {"form": value}
                lines.append(rows.eval(f"t{n}", True) | {"metrics": metrics})
            run.model_evals(index, lines)
        return run.finish()

    return make


def test_a_metric_has_a_verdict_of_its_own(home, evaluation):
    run = evaluation({"pebble": [0.0] * 60, "tuned": [1.0] * 40 + [0.0] * 20})
    assert compare_runs(home, [run.id])["comparisons"][0]["difference"] == 0
    result = compare_runs(home, [run.id], metric="form")
    assert (result["verdict"], result["metric"]) == ("better", "form")
    assert "form went from 0 to 0.667 on 60 tasks" in result["summary"]
    (comparison,) = result["comparisons"]
    assert comparison["metric"] == "form"


def test_an_answer_without_the_metric_is_absent_and_not_0(home, evaluation):
    few = [0.65] * 20 + [None] * 100
    run = evaluation({"pebble": few, "tuned": [0.75] * 20 + [None] * 100})
    result = compare_runs(home, [run.id], metric="form")
    assert [arm["value"] for arm in result["arms"]] == [0.65, 0.75]
    assert [arm["tasks"] for arm in result["arms"]] == [20, 20]


def test_a_metric_that_no_answer_has_is_refused_with_those_there_are(home, evaluation):
    run = evaluation({"pebble": [1.0], "tuned": [0.0]})
    with pytest.raises(UserError) as caught:
        compare_runs(home, [run.id], metric="style")
    assert caught.value.field == "metric" and "Known: form." in str(caught.value.hint)


def test_an_evaluation_gives_each_metric_its_interval_and_the_tasks_that_have_it(home, evaluation):
    run = evaluation({"pebble": [0.5, 0.7, 0.6, 0.8] * 5 + [None] * 80})
    (model,) = run_verdict(home.run(run.id)).to_json()["models"]
    form = model["metrics"]["form"]
    assert (form["value"], form["n"]) == (0.65, 20)
    low, high = form["interval"]
    assert 0.55 < low < 0.65 < high < 0.75
    assert model["tasks"] == 100


def test_a_change_far_above_the_smallest_detectable_gap_says_what_that_gap_is(home, evaluation):
    run = evaluation({"pebble": [0.0] * 90 + [1.0] * 10, "tuned": [1.0] * 100})
    (comparison,) = compare_runs(home, [run.id], metric="form")["comparisons"]
    assert comparison["difference"] > 2 * comparison["smallest_detectable_gap"]
    assert "far larger" in comparison["smallest_detectable_gap_is"]
    near = evaluation({"pebble": [0.0, 1.0] * 50, "other": [0.0, 1.0] * 48 + [1.0] * 4})
    (comparison,) = compare_runs(home, [near.id], metric="form")["comparisons"]
    assert comparison["smallest_detectable_gap_is"] == "measured from the noise of these 100 tasks"

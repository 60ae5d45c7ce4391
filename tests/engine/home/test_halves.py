"""Which half of the held-out tasks a number speaks of, said wherever one is read."""

import pytest
from answered import answer, push, training

from engine.core.files import append_line
from engine.evidence.report.html_report import write_report
from engine.home.halves import choosing, scores_in_words
from engine.home.run_dir import Home, RunDir
from engine.runs import lifecycle
from engine.runs.reading import logs, rollouts
from engine.runs.reading.rollout_pages import RolloutQuery


@pytest.fixture
def run(home: Home, tmp_path) -> RunDir:
    """A run of 7 held-out tasks with two exams and an answer of each half."""
    env_id = push(home, tmp_path / "env")
    rows = [answer("9+1", "10", 1.0, half="select"), answer("9+2", "11", 1.0, half="report")]
    run = training(home, env_id, algorithm="sft", evals={0: rows, 2: rows})
    append_line(run.events, {"time": 0.0, "event": "started", "heldout_tasks": 7, "total_steps": 2})
    for step, success in ((0, 0.25), (2, 0.75)):
        append_line(run.metrics, {"step": step, "time": step, "heldout_success": success})
    return run


@pytest.mark.parametrize(("total", "tasks"), [(7, 4), (8, 4), (1, 1)])
def test_the_half_that_chooses_is_the_larger_one(run: RunDir, total: int, tasks: int):
    append_line(
        run.events, {"time": 0.0, "event": "started", "heldout_tasks": total}
    )  # of a later attempt
    exam = choosing(run)
    assert exam and (exam.half, exam.tasks, exam.of) == ("select", tasks, total)
    assert f"{tasks} of {total} held-out tasks that choose" in exam.about


def test_a_run_without_an_exam_says_nothing_of_halves(run: RunDir):
    run.events.unlink()
    assert choosing(run) is None and scores_in_words({}, None) == ""


def test_a_run_whose_halves_are_unequal_says_how_many_choose(run: RunDir):
    more = {"heldout_tasks": 10, "heldout_choose": 7}
    append_line(run.events, {"time": 0.0, "event": "started"} | more)
    exam = choosing(run)
    assert exam and exam.tasks == 7
    assert exam.about.endswith("the verdict is read on the other 3")


def test_scores_are_said_with_the_tasks_they_are_of(run: RunDir):
    scores = {"heldout_success": 0.775, "heldout_loss": 1.2345, "step": 4, "heldout_x": 1.0}
    said = "success 77.5 %, loss 1.23 on the 4 held-out tasks that choose"
    assert scores_in_words(scores, choosing(run)) == said


def test_status_curves_answers_and_the_report_say_which_half(home: Home, run: RunDir):
    assert lifecycle.status(home, run.id)["heldout"]["tasks"] == 4
    page = logs.read_logs(home, run.id).to_json()
    half = choosing(run)
    assert half and page["heldout"]["about"] == half.about
    assert "(heldout_*: 4 of 7 tasks, which choose)" in page["summary"]
    assert "heldout" not in logs.read_logs(home, run.id, keys=["loss"]).to_json()
    answers = rollouts.read_rollouts(home, RolloutQuery(run.id)).to_json()
    assert answers["rollouts"]
    assert {item["half"] for item in answers["rollouts"]} <= {"select", "report"}
    assert "choose the checkpoint" in answers["about"]["half"]
    assert "(4 of 7, which the curves below are of)" in write_report(home, run.id).read_text()


def test_the_number_of_looks_is_explained_where_it_stands(home: Home, run: RunDir):
    found = lifecycle.overview(home, "envs")
    assert found["envs"][0]["exam_use"] and "used to choose" in found["about"]["exam_use"]
    assert "about" not in lifecycle.overview(home, "runs")

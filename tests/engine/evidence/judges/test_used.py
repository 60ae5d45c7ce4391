"""Who graded the answers of runs."""

import pytest

from engine.evidence.judges.used import judges_of, other_judges_warnings
from engine.home.run_dir import Home, RunDir
from engine.records.manifest import BasesAsked, JudgeUsed

REF = "model:grader@best"


@pytest.fixture
def evaluation(home: Home):
    """evaluation("a", "1234") -> the folder of an evaluation whose judge has this identity."""

    def make(run_id: str, identity: str) -> RunDir:
        run = home.run(run_id)
        run.path.mkdir(parents=True)
        judge = JudgeUsed(ref=REF, identity=identity, served_as="grader@step40")
        BasesAsked(weights={}, judges=[judge]).write(run.bases)
        return run

    return make


def test_runs_graded_by_two_checkpoints_of_one_name_are_not_of_one_scale(evaluation):
    runs = [evaluation("a", "1234"), evaluation("b", "5678"), evaluation("c", "1234")]
    (warning,) = other_judges_warnings(runs)
    assert f"The judge {REF} was not the same model in a and b: " in warning


def test_runs_graded_by_one_judge_or_by_none_are_compared_without_a_word(home: Home, evaluation):
    ungraded = home.run("d")
    assert judges_of(ungraded) == ()
    assert other_judges_warnings([evaluation("a", "1234"), evaluation("b", "1234"), ungraded]) == []

"""What an attempt still does, counted by hand."""

import pytest
from typed_settings import sft_settings

from engine.worker.update.work_ahead import Exam, earliest_end, work_ahead

EXAM = Exam(choosing=50, reported=60, questions=48)


def test_a_fresh_run_asks_before_the_first_step_on_the_way_and_at_the_end():
    settings = sft_settings({"eval_every": 4, "save_every": 5})
    assert work_ahead(settings, 0, 10, EXAM, resumed=False) == {
        "training": 10,
        "evaluation": (50 + 60) + 3 * 50 + 60,  # at 4, 8 and the last step
        "skill check": 96,
        "checkpoint": 4,  # at most: 4, 5, 8 and 10
    }


def test_a_resumed_run_asks_nothing_before_its_first_step():
    settings = sft_settings({"eval_every": 4, "save_every": 4})
    assert work_ahead(settings, 8, 10, EXAM, resumed=True) == {
        "training": 2,
        "evaluation": 50 + 60,
        "skill check": 48,
        "checkpoint": 1,
    }


def test_a_run_without_held_out_tasks_only_trains():
    settings = sft_settings({"eval_every": 4, "save_every": 5})
    ahead = work_ahead(settings, 0, 10, Exam(), resumed=False)
    assert ahead == {"training": 10, "evaluation": 0, "skill check": 0, "checkpoint": 2}


@pytest.mark.parametrize(
    ("done", "without_progress", "step"),
    [(0, 0, 12), (4, 0, 16), (5, 1, 12), (7, 2, 8), (30, 2, 32), (36, 0, None)],
)
def test_the_earliest_end_is_three_evaluations_without_progress_away(done, without_progress, step):
    settings = sft_settings({"eval_every": 4, "stop_early": "heldout"})
    assert earliest_end(settings, done, 40, without_progress) == step


def test_a_run_that_does_all_its_steps_has_no_earlier_end():
    assert earliest_end(sft_settings({"eval_every": 4, "stop_early": "none"}), 0, 40, 0) is None

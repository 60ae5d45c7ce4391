"""What is left of a run, held against sums by hand and against runs that were simulated."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.machine.pace.forecast import Band, cap_sentence, remaining_after
from engine.machine.pace.heartbeat import Heartbeat, Outlook, Work

ESTIMATED = {"training": 60.0, "rollouts": 30.0, "rewards": 10.0, "evaluation": 40.0}


def heard(outlook: Outlook | None = None, **work: Work) -> Heartbeat:
    named = {name.replace("_", " "): each for name, each in work.items()}
    return Heartbeat(1, 0.0, "training", outlook=outlook or Outlook(), work=named)


def test_every_kind_of_work_to_come_counts_at_its_own_pace():
    left = remaining_after(
        heard(
            Outlook(answers_at_end=50),
            training=Work(100, 20, 10.0, 9.0),  # with sampling 2 s a step
            sampling=Work(0, 20, 30.0),
            evaluation=Work(400, 100, 25.0),  # 0.25 s an answer
            skill_check=Work(96, 48, 12.0),
            checkpoint=Work(5, 1, 0.5),
        ),
        ESTIMATED,
    )
    assert left.seconds.likely == pytest.approx(80 * 2 + 300 * 0.25 + 48 * 0.25 + 4 * 0.5)
    # Of the 300 answers 50 come after the last step, with the skill check.
    assert left.until_last_step == pytest.approx(160 + 250 * 0.25 + 2)
    assert left.steps == 80 and left.is_measured


def test_after_the_last_step_the_final_exam_is_still_to_come():
    left = remaining_after(
        heard(
            Outlook(answers_at_end=100),
            training=Work(10, 10, 10.0, 10.0),
            evaluation=Work(300, 200, 20.0),
            skill_check=Work(96, 48, 4.8),
        ),
        {},
    )
    assert left.seconds.likely == pytest.approx(10 + 4.8) and left.until_last_step == 0


def test_what_was_not_measured_yet_is_taken_from_the_estimate_with_a_wide_band():
    left = remaining_after(heard(training=Work(10), evaluation=Work(300)), ESTIMATED)
    assert left.seconds == Band(0.4 * 140, 140, 2.5 * 140) and not left.is_measured


def test_the_first_answers_of_a_batch_do_not_make_an_evaluation_look_hours_long():
    # The first two of 64 answers that are sampled at once, after 20 s; 0.1 s each was estimated.
    begun = remaining_after(heard(evaluation=Work(400, 2, 20.0)), ESTIMATED)
    assert begun.seconds.likely == pytest.approx((20.0 + 38 * 0.1) / 40 * 398)
    assert remaining_after(heard(evaluation=Work(400, 2, 20.0)), {}).seconds.likely == 3980.0
    further = remaining_after(heard(evaluation=Work(400, 40, 20.0)), ESTIMATED)
    assert further.seconds.likely == pytest.approx(180.0)


def test_time_that_passes_shortens_what_is_left_and_never_below_nothing():
    heartbeat = heard(training=Work(10, 5, 5.0, 5.0))
    assert remaining_after(heartbeat, {}, elapsed_s=2.0).seconds.likely == pytest.approx(3.0)
    assert remaining_after(heartbeat, {}, elapsed_s=9.0).seconds == Band(0.0, 0.0, 0.0)


def test_a_run_that_may_end_early_may_be_shorter_but_not_longer():
    work = {"training": Work(100, 20, 20.0, 20.0), "evaluation": Work(80, 20, 20.0)}
    whole = remaining_after(heard(**work), {}).seconds
    early = remaining_after(heard(Outlook(earliest_end=40), **work), {}).seconds
    assert early.low == pytest.approx(whole.low * 20 / 80)
    assert (early.likely, early.high) == (whole.likely, whole.high)


def test_nine_ends_in_ten_lie_in_the_band():
    """Runs of 100 steps whose steps take 0.5 to 1.5 s, judged after 20 of them."""
    random_numbers = random.Random(0)
    inside = 0
    for _ in range(400):
        seconds = [random_numbers.uniform(0.5, 1.5) for _ in range(100)]
        done = seconds[:20]
        work = Work(100, 20, sum(done), sum(each**2 for each in done))
        band = remaining_after(heard(training=work), {}).seconds
        inside += band.low <= sum(seconds[20:]) <= band.high
    assert inside / 400 >= 0.9


@given(
    planned=st.integers(0, 10**6),
    done=st.integers(0, 10**6),
    seconds=st.floats(0, 1e7),
    squares=st.floats(0, 1e12),
    elapsed=st.floats(0, 1e6),
)
def test_a_band_is_ordered_and_never_negative(planned, done, seconds, squares, elapsed):
    work = Work(planned, done, seconds, squares)
    left = remaining_after(heard(training=work, evaluation=work), ESTIMATED, elapsed)
    assert 0 <= left.seconds.low <= left.seconds.likely <= left.seconds.high
    assert 0 <= left.until_last_step <= left.seconds.likely * (1 + 1e-9) + 1e-6


def test_the_step_at_which_a_cap_stops_a_run_is_named():
    left = remaining_after(
        heard(Outlook(answers_at_end=20), training=Work(300, 60, 60.0, 60.0), evaluation=Work(20)),
        {"evaluation": 30.0},
    )
    spent = "max_gpu_hours=1 is spent"
    assert cap_sentence(left, 60, 300.0, spent) == ""
    assert cap_sentence(left, 60, 180.0, spent) == f"at this pace {spent} at step 240 of 300"
    assert cap_sentence(left, 60, 250.0, spent).endswith("in the final evaluation, after step 300")
    assert cap_sentence(left, 60, -1.0, spent) == f"{spent}: it stops now"


def test_an_evaluation_that_its_cap_ends_has_no_step():
    left = remaining_after(heard(evaluation=Work(100, 10, 10.0)), {})
    assert cap_sentence(left, 0, 50.0, "the cap is spent").endswith("spent before its end")

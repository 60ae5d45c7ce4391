"""How long a trainer may be silent: by its phase, its own pace and what was expected of it."""

import pytest

from engine.machine.pace.heartbeat import Heartbeat, Work
from engine.machine.pace.staleness import patience, stop_grace_s


def heard(phase: str, longest_silence_s: float = 0.0, **facts) -> Heartbeat:
    work = {phase: Work(planned=100, done=10, seconds=10.0, longest_silence_s=longest_silence_s)}
    return Heartbeat(1, 0.0, phase, work=work, **facts)


def test_a_fast_run_is_given_ten_minutes_all_the_same():
    allowed = patience(heard("training", 0.01), {}, stop_minutes=10)
    assert (allowed.stop_s, allowed.stalled_s) == (600.0, 180.0)


@pytest.mark.parametrize("phase", ["loading", "checkpoint", "finishing"])
def test_phases_that_are_quiet_by_nature_are_given_longer(phase):
    assert patience(heard(phase), {}, stop_minutes=10).stop_s == 1800.0


def test_a_slow_run_is_judged_by_its_own_longest_silence():
    assert patience(heard("evaluation", 60.0), {}, stop_minutes=10).stop_s == 1800.0


def test_before_the_first_sign_of_life_the_estimated_start_counts():
    assert patience(None, {}, stop_minutes=10).stop_s == 1800.0
    assert patience(None, {"startup": 600.0}, stop_minutes=10).stop_s == 6000.0


def test_a_first_step_may_take_ten_times_what_was_estimated():
    """A step of 300 s that samples everything at once must not look hung after ten minutes."""
    estimated = {"training": 10_000.0, "rollouts": 19_000.0, "rewards": 1_000.0}
    work = {"training": Work(planned=100), "sampling": Work()}
    heartbeat = Heartbeat(1, 0.0, "sampling", work=work)
    assert patience(heartbeat, estimated, stop_minutes=10).stop_s == 3000.0


def test_an_evaluation_may_take_ten_times_its_share_of_the_estimate():
    work = {"evaluation": Work(planned=100)}
    heartbeat = Heartbeat(1, 0.0, "evaluation", of=25, work=work)
    assert patience(heartbeat, {"evaluation": 400.0}, stop_minutes=10).stop_s == 1000.0


def test_what_was_measured_counts_for_more_than_what_was_estimated():
    work = {"training": Work(planned=100, done=10, seconds=50.0), "sampling": Work(seconds=850.0)}
    heartbeat = Heartbeat(1, 0.0, "training", work=work)
    assert patience(heartbeat, {"training": 1e9}, stop_minutes=10).stop_s == 900.0  # 10 x 90


def test_without_a_bound_a_run_is_still_called_stalled():
    assert patience(heard("training"), {}, stop_minutes=0).stalled_s == 180.0


def test_a_trainer_that_is_asked_to_stop_may_end_its_step_or_its_evaluation_first():
    work = {"training": Work(planned=100, done=10, seconds=50.0), "sampling": Work(seconds=350.0)}
    assert stop_grace_s(Heartbeat(1, 0.0, "sampling", work=work), {}) == 100.0  # 20 + 2 x 40
    exam = {"evaluation": Work(planned=100, done=10, seconds=30.0)}
    heartbeat = Heartbeat(1, 0.0, "evaluation", of=20, work=exam)
    assert stop_grace_s(heartbeat, {}) == 140.0  # 20 + 2 x 20 answers of 3 s
    assert stop_grace_s(None, {}) == 20.0
    slow = {"training": Work(planned=100, done=1, seconds=3000.0)}
    assert stop_grace_s(Heartbeat(1, 0.0, "training", work=slow), {}) == 300.0

"""What a mean over answers counts."""

from hypothesis import given
from hypothesis import strategies as st

from engine.core.metrics import HELDOUT, LINE_KEYS, METRICS, curve_name
from engine.evidence.stats.basics.summary import summarise
from engine.worker.core.trajectory import Trajectory


def play(reward: float, success: bool | None = None, error: str | None = None) -> Trajectory:
    return Trajectory("t", [], [1], reward=reward, success=success, error=error)


def test_errors_count_as_not_solved_and_are_told_apart() -> None:
    summary = summarise([play(1, True), play(0, False), play(0, None, "boom")])
    assert (summary.n, summary.errors) == (3, 1)
    assert summary.success == 1 / 3
    assert summary.curves()["heldout_reward"] == 1 / 3


def test_without_success_there_is_no_success_curve() -> None:
    assert "heldout_success" not in summarise([play(0.5)]).curves()


def test_a_metric_named_like_a_measured_column_stands_beside_it() -> None:
    named = {"success": 9.0, "reward": 8.0, "loss": 7.0, "parsed": 1.0}
    right = Trajectory("t", [], [1], reward=0.25, success=False, metrics=named)
    curves = summarise([right]).curves()
    assert curves == {
        "heldout_success": 0.0,
        "heldout_reward": 0.25,
        "heldout_env_success": 9.0,
        "heldout_env_reward": 8.0,
        "heldout_env_loss": 7.0,
        "heldout_parsed": 1.0,
    }


@given(st.sampled_from([*METRICS, *LINE_KEYS]), st.sampled_from(["", HELDOUT]))
def test_no_name_of_a_scorer_is_a_column_of_ours(column: str, before: str) -> None:
    for name in (column, column.removeprefix(HELDOUT)):
        assert before + curve_name(name) not in METRICS | dict.fromkeys(LINE_KEYS)


def test_a_checkpoint_is_chosen_by_success_and_else_by_reward() -> None:
    named = {"success": 1.0, "reward": 1.0}
    plays = [
        Trajectory("t", [], [1], reward=0.75, success=ok, metrics=named) for ok in (True, False)
    ]
    assert summarise(plays).score == 0.5
    assert summarise([play(0.75)]).score == 0.75

"""What a run is expected to reach, in words and as a number."""

import pytest

from engine.evidence.stats.basics.target import is_expectation, target_in


@pytest.mark.parametrize(
    ("text", "level"),
    [("90 %", 0.9), ("90%", 0.9), (">= 0.85", 0.85), ("1", 1.0), ("100 %", 1.0), ("0.5%", 0.005)],
)
def test_a_share_or_a_number_up_to_one_is_a_target(text, level):
    target = target_in(text)
    assert target is not None and target.level == pytest.approx(level)
    assert is_expectation(text)


@pytest.mark.parametrize("text", ["90", "0", "0 %", "101 %", "-0.5", "high", "better than 90 %"])
def test_anything_else_is_none_and_cannot_be_expected(text):
    assert target_in(text) is None and not is_expectation(text)


def test_a_prediction_of_the_verdict_is_no_target():
    assert target_in("better") is None
    assert all(is_expectation(word) for word in ("", "better", "no_difference"))


def test_the_sentence_says_reached_or_not_with_the_interval():
    target = target_in("90 %")
    assert target is not None
    missed = target.sentence(0.857, (0.812, 0.892), is_share=True)
    assert missed == "Target 90 %: not reached, 85.7 % (95 % interval 81.2 % to 89.2 %)."
    barely = target.sentence(0.9, (0.8, 0.95), is_share=True)
    assert barely.startswith("Target 90 %: reached, but not for sure, 90.0 %")
    assert "more tasks would tell" in barely
    assert target.sentence(0.99, (0.95, 1.0), is_share=True).endswith("95.0 % to 100.0 %).")
    assert "nothing was measured" in target.sentence(None, (None, None), is_share=True)

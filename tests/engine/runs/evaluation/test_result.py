"""The words about what an evaluation came to."""

from engine.evidence.stats.results import Level
from engine.runs.evaluation.result import interval_in_words


def test_an_interval_of_fewer_tasks_than_were_played_says_its_own_level():
    level = Level("success", 0.1875, 0.117, 0.287, 80, 80, errors=0, value_with_errors=0.1875)
    assert interval_in_words(level, 80) == " (95 % interval 11.7 % to 28.7 %)"
    text = interval_in_words(level, 160)
    assert text == "; 18.8 % on the 80 of them that count (95 % interval 11.7 % to 28.7 %)"

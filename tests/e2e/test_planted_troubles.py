"""Real runs with a planted trouble: the first finding is the cause, its lever the cure. All of them
stand in benchmarks/scenarios.py; these are the quickest, and one of them is always run."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import diagnosis
from benchmarks.scenarios import SCENARIOS
from engine.core.files import read_json
from engine.home.run_dir import Home

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]


@pytest.mark.parametrize(
    "name",
    [
        # Row 7 of the survey of agents.
        pytest.param("reference_too_long_and_paid", marks=pytest.mark.evidence),
        # Rows 21 and 22: with an alert within ten steps.
        pytest.param("reward_halved", marks=pytest.mark.evidence),
        pytest.param("plateau_from_the_start", marks=pytest.mark.evidence),  # row 31
    ],
)
def test_a_planted_trouble_is_named_first_with_its_cure(
    home: Home, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    # None of these troubles shows in what the model could do before, nor comes from its replay.
    settings = {**SCENARIOS[name].settings, "skill_rows": 4, "keep": 0}
    monkeypatch.setitem(SCENARIOS, name, replace(SCENARIOS[name], settings=settings))
    diagnosis.run_scenario(home, tmp_path, name)
    outcome = diagnosis.outcome_of(home, read_json(tmp_path / "runs" / f"{name}.json"))
    assert outcome.hits(SCENARIOS[name]), outcome


def test_a_cure_is_a_setting_moved_the_right_way_or_an_edit_that_says_so():
    lower = {"setting": "learning_rate", "now": 0.01, "to": 0.001}
    assert diagnosis.is_cure("learning_rate down", lower)
    assert not diagnosis.is_cure("learning_rate up", lower)
    assert not diagnosis.is_cure("edit rate", lower)
    longer = {"setting": "max_tokens", "now": 24, "to": 48}
    assert diagnosis.is_cure("steps up | max_tokens >= 44", longer)
    assert not diagnosis.is_cure("max_tokens >= 50", longer)
    assert diagnosis.is_cure(r"edit score\(\)|SFT", {"edit": "score(): pay for it"})

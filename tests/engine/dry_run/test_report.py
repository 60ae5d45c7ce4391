"""What the reply to a dry run says."""

import pytest

from engine.cost import estimate
from engine.dry_run import dry_run
from engine.home.run_dir import Home
from tests.engine.dry_run.conftest import add_env


def test_no_time_is_told_while_the_machine_is_still_being_measured(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    env_id = add_env(home, "sums")
    known = dry_run.dry_run(home, env_id)
    assert "about" in known["summary"] and known["next"][0]["tool"] == "submit_train"
    monkeypatch.setattr(estimate, "unmeasured_warning", lambda home, figures: ["it is measured"])
    report = dry_run.dry_run(home, env_id)
    assert "how long it takes is not known yet" in report["summary"]
    assert "about" not in report["summary"].split(";")[0]
    assert [call["tool"] for call in report["next"]] == ["dry_run", "submit_train"]

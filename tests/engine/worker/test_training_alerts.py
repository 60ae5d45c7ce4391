"""Alerts of a real small run: raised between steps, once, and an end to the run where asked."""

import json
from pathlib import Path
from typing import Any

import pytest
from loops import ENVIRONMENT, go, go_until, make_run, metrics, push

from engine.home.run_dir import Home, RunDir

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]

# At such a temperature the answers of a group are one text, and in a style that nothing pays.
OTHER_STYLE = ENVIRONMENT.replace("completion == task.answer", "completion == task.answer + '.'")
COLD: dict[str, Any] = {
    "steps": 9,
    "prompts_per_step": 4,
    "group_size": 4,
    "max_tokens": 12,
    "temperature": 0.01,
    "eval_every": 9,
    "eval_rows": 8,
    "save_every": 9,
    "seed": 3,
}


@pytest.fixture
def env_id(home: Home, tmp_path: Path) -> str:
    return push(home, tmp_path / "sums", OTHER_STYLE)


def events(run: RunDir, *names: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.events.read_text().splitlines()]
    return [event for event in found if event["event"] in names]


def test_an_alert_is_raised_once_with_its_numbers_and_its_lever(home: Home, env_id: str) -> None:
    run = make_run(home, env_id, "grpo", COLD)
    go(run)
    (alert,) = [event for event in events(run, "alert") if event["id"] == "uniform_groups"]
    # Five steps are the fewest to judge by, and two looks in a row must agree.
    assert alert["step"] == 6
    assert alert["numbers"]["groups_effective"] < 0.3 and alert["numbers"]["temperature"] == 0.01
    assert alert["lever"] == {"setting": "temperature", "now": 0.01, "to": 1.0}
    assert alert["playbook"] == "failures" and "same text" in alert["message"]
    assert metrics(run)[-1]["step"] == 9  # nobody asked it to stop


def test_stop_early_alert_ends_the_run_with_a_checkpoint_and_its_verdict(
    home: Home, env_id: str
) -> None:
    run = make_run(home, env_id, "grpo", COLD | {"stop_early": "alert"})
    result = go(run)
    assert [line["step"] for line in metrics(run)] == list(range(7))
    assert result["steps"] == 6 and result["verdict"] != ""
    assert run.checkpoint_steps() == [6]
    assert "heldout_success" in metrics(run)[-1]  # the exam is sat although it was not due
    assert run.eval_steps() == [0, 6]
    (stopped,) = events(run, "stopped_early")
    assert "uniform_groups" in stopped["message"] and stopped["step"] == 6


def test_a_resumed_run_does_not_raise_an_alert_again(home: Home, env_id: str) -> None:
    run = make_run(home, env_id, "grpo", COLD | {"save_every": 1})
    go_until(run, 7)
    go(run)
    assert metrics(run)[-1]["step"] == 9
    assert [e["step"] for e in events(run, "alert") if e["id"] == "uniform_groups"] == [6]

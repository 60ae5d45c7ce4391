"""`honesmith curate` and `evaluate --regrade`: what they pass on, and what they suggest."""

import pytest
from command_line import call, spy

from engine.core.hints import Call
from engine.home.run_dir import Home
from mcp_server.screen.shell import as_command


def test_curate_previews_until_it_is_told_to_save(home: Home, monkeypatch: pytest.MonkeyPatch):
    seen = spy(monkeypatch, "curate", {"summary": "2 kept", "kept": 2})
    rule = ["--where", "0 < avg < 1", "--select", "best_n", "--max-per-task", "3"]
    assert call("curate", "arith-eval-1", "--name", "best", *rule).exit_code == 0
    assert call("curate", "a-1", "b-2", "--name", "best", "--pool-models", "--save").exit_code == 0
    first, second = ({k: v for k, v in given.items() if k != "home"} for given in seen)
    assert first == {
        "source_ids": ["arith-eval-1"],
        "name": "best",
        "where": "0 < avg < 1",
        "select": "best_n",
        "max_per_task": 3,
        "pool_models": False,
        "preview": True,
    }
    assert second["source_ids"] == ["a-1", "b-2"] and second["pool_models"] is True
    assert second["preview"] is False
    assert call("curate", "a-1").exit_code == 2  # no name


def test_the_call_that_saves_is_shown_as_the_command_that_saves():
    call = Call("curate", {"source_ids": ["r-1"], "name": "x", "preview": False})
    assert as_command(call) == "honesmith curate r-1 --name x --save"


def test_evaluate_takes_models_or_a_run_to_regrade(monkeypatch: pytest.MonkeyPatch):
    seen = spy(monkeypatch, "evaluate", {"summary": "queued", "run_id": "r", "state": "queued"})
    assert call("evaluate", "arith", "--regrade", "arith-eval-1").exit_code == 0
    assert (seen[0]["models"], seen[0]["regrade"]) == ([], "arith-eval-1")

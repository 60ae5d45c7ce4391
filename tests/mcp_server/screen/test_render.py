"""A diagnosis and a row as a person sees them on the command line."""

import pytest
from typer.testing import CliRunner

from engine.home.run_dir import Home
from mcp_server.api import verbs
from mcp_server.cli.main import app
from mcp_server.screen import render


def test_a_diagnosis_shows_cause_numbers_lever_and_example(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    finding = {
        "id": "truncation",
        "what": "40% of the answers were cut at max_tokens = 16.",
        "evidence": {"truncated_share": 0.4},
        "playbook": "failures",
        "lever": {"setting": "max_tokens", "now": 16, "to": 32},
        "examples": [{"step": 9, "group": 2, "answer": "It goes on \x1b[31mand"}],
    }
    reply = {"summary": "r-1: truncation.", "findings": [finding], "not_judged": ["overthinking"]}
    monkeypatch.setattr(verbs, "diagnose", lambda *_: reply | {"next": [], "warnings": []})
    shown = CliRunner().invoke(app, ["diagnose", "r-1"]).stdout
    for part in (
        "1. truncation",
        "cut at max_tokens = 16",
        "truncated_share",
        "0.4",
        "to 32",
        "It goes on",
        "failures",
        "overthinking",
    ):
        assert part in shown, part
    assert "\x1b" not in shown


def test_a_row_shows_what_carries_loss_and_what_is_lost():
    row = {
        "tokens": 9,
        "trained": 4,
        "cut_at": 9,
        "lost": {"tokens": 2, "text": " the end"},
        "pieces": [
            {"text": "Count.", "trained": False, "tokens": 5},
            {"text": "1 2 3", "trained": True, "tokens": 4},
        ],
    }
    shown = render.trained_row(row)
    assert shown.plain == "Count.1 2 3 the end\n4 of 9 tokens carry loss, cut at 9"
    styles = {shown.plain[span.start : span.end]: str(span.style) for span in shown.spans}
    assert styles["1 2 3"] == "bold green" and "strike" in styles[" the end"]
    assert styles["Count."] == "dim"

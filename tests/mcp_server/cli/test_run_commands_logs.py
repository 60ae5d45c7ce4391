"""`honesmith logs`: a page, or lines as they come until the run ends."""

import pytest
from command_line import call, spy

from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from mcp_server.api import verbs


def test_logs_are_followed_until_the_run_ends(home: Home, monkeypatch: pytest.MonkeyPatch):
    pages = [
        {"lines": ["one"], "next_cursor": "console:1:4"},
        {"lines": [], "next_cursor": "console:1:4"},
        {"lines": ["two"], "next_cursor": "console:1:8"},
        {"lines": ["three"], "next_cursor": ""},
    ]
    asked: list[str] = []

    def read(home, run_id, view, keys, grep, limit, cursor):
        asked.append(cursor)
        return {"summary": "s", "next": [], "warnings": []} | pages[len(asked) - 1]

    monkeypatch.setattr(verbs, "read_logs", read)
    waits = spy(monkeypatch, "wait_run", {"state": "running"})
    done = call("logs", "r-1", "-f")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == ["one", "two", "three"]
    assert asked == ["", "console:1:4", "console:1:4", "console:1:8"]
    assert len(waits) == 1 and waits[0]["run_id"] == "r-1"


def test_following_events_ends_with_the_state_although_a_cursor_stays(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    event = {"event": "started", "message": "go", "step": 3}
    pages = [
        {"events": [event], "state": "running", "next_cursor": "events:40"},
        {"events": [], "state": "done", "next_cursor": "events:90"},  # a search that came further
        {"events": [], "state": "done", "next_cursor": "events:90"},
    ]
    asked: list[str] = []

    def read(home, run_id, view, keys, grep, limit, cursor):
        asked.append(cursor)
        return {"summary": "s", "next": [], "warnings": []} | pages[len(asked) - 1]

    monkeypatch.setattr(verbs, "read_logs", read)
    done = call("logs", "r-1", "-f", "--view", "events")
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) == 1 and "go" in done.stdout
    assert asked == ["", "events:40", "events:90"]


def test_following_a_run_that_ended_prints_its_lines_once(home: Home):
    with Store(home) as store:
        row = store.insert_run(NewRun("arith-sft", "train", "sft", "arith@0", "pebble"))
        run = home.run(row.run_id)
        run.create()
        run.log(row.attempt).parent.mkdir(parents=True, exist_ok=True)
        run.log(row.attempt).write_text("one, two\nthree\n")
        store.set_state(row.run_id, "cancelled", only_from={"queued"})
    done = call("logs", row.run_id, "-f", "--view", "console")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == ["one, two", "three"]


def test_console_lines_stand_one_to_a_line(home: Home, monkeypatch: pytest.MonkeyPatch):
    lines = ["step 1, loss 2.0", "", "step 2, loss 1.0", "wide " * 80]
    spy(monkeypatch, "read_logs", {"lines": lines, "run_id": "r-1", "state": "done"})
    for view in ("console", "error"):
        assert call("logs", "r-1", "--view", view).stdout.splitlines()[:4] == lines


def test_following_a_run_that_is_over_shows_its_last_page(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    page = {"lines": ["last"], "next_cursor": "console:1:900:older"}
    seen = spy(monkeypatch, "read_logs", page)
    assert call("logs", "r-1", "--follow").exit_code == 0
    assert len(seen) == 1


COLUMNS = ["step", "heldout_reward", "heldout_success", "heldout_loss", "grad_norm", "mfu", "lr"]
CURVES = {
    "columns": [*COLUMNS, "loss", "train_s", "microbatches", "peak_memory"],
    "rows": [[step, 0.5, 0.25, 1.5, 2.5, 0.4, 5.866e-05, 1.25, 0.05, 1, 5e8] for step in (1, 2)],
    "heldout": {"half": "select", "tasks": 20, "of": 40, "about": "of the 20 that choose"},
}


def test_curves_are_shown_when_nothing_else_is_asked_for(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    seen = spy(monkeypatch, "read_logs", CURVES)
    done = call("logs", "r-1")
    assert seen[0]["view"] == "metrics"
    assert "5.866e-05" in done.stdout and "500.0 MB" in done.stdout
    assert "heldout: of the 20 that choose" in done.stdout


def test_a_narrow_terminal_gets_whole_columns_the_foremost_first_and_hears_of_the_others(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    spy(monkeypatch, "read_logs", CURVES)
    monkeypatch.setenv("COLUMNS", "60")
    shown = call("logs", "r-1").stdout
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 60
    header = next(line for line in shown.splitlines() if line.startswith("step"))
    assert header.split()[:4] == ["step", "loss", "heldout_success", "lr"]
    told = " ".join(shown[shown.index("--all shows also") :].split())
    assert all(name in header or name in told for name in CURVES["columns"])
    whole = call("logs", "r-1", "--all").stdout
    assert all(name in whole for name in CURVES["columns"]) and "--all" not in whole
    assert sum(line.startswith("step") for line in whole.splitlines()) > 1


def test_a_followed_curve_is_one_line_a_step(home: Home, monkeypatch: pytest.MonkeyPatch):
    page = {"columns": ["step", "loss", "heldout_success"], "rows": [[1, 2.5, None], [2, 2.0, 0.5]]}
    spy(monkeypatch, "read_logs", page | {"state": "done"})
    done = call("logs", "r-1", "-f")
    assert done.stdout.splitlines() == ["step 1  loss 2.5", "step 2  loss 2  heldout_success 0.5"]


def test_what_goes_into_a_pipe_has_no_spaces_at_the_ends_of_lines(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    spy(monkeypatch, "read_logs", CURVES)
    spy(monkeypatch, "get_status", {"runs": [{"run_id": "r-1", "note": ""}] * 2, "files": {"a": 1}})
    for command in (["logs", "r-1"], ["status"], ["runs"]):
        lines = call(*command).stdout.splitlines()
        assert lines and [line for line in lines if line != line.rstrip()] == []

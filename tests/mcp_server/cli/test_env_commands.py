"""Commands about environments, their versions, data files, and the page of a home."""

import json
from pathlib import Path

import pytest
from answered import SUMS, evaluation, push, training
from click.testing import Result
from typer.testing import CliRunner

from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from mcp_server.api import verbs
from mcp_server.cli.main import app


def call(*argv: str) -> Result:
    return CliRunner().invoke(app, list(argv))


def test_a_push_with_problems_leaves_with_one(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    reply = {"summary": "s", "env_id": "a@1", "problems": [{"file": "e.py"}]}
    monkeypatch.setattr(verbs, "push_env", lambda *_, **given: seen.append(given) or reply)
    assert call("env", "push", str(tmp_path)).exit_code == 1
    assert "roots" not in seen[0], "a person may push from anywhere"
    assert call("env", "push", str(tmp_path / "none")).exit_code == 2


@pytest.mark.timeout(60)
def test_an_environment_is_started_checked_and_pushed(home: Home, tmp_path: Path):
    folder = tmp_path / "my_task"
    started = call("env", "new", str(folder), "--json")
    assert started.exit_code == 0, started.output
    assert "environment.py" in json.loads(started.stdout)["files"]
    checked = call("env", "check", str(folder), "--json")
    assert checked.exit_code == 0, checked.output
    assert json.loads(call("env", "list", "--json").stdout)["envs"] == []
    pushed = call("env", "push", str(folder), "--json")
    assert pushed.exit_code == 0, pushed.output
    (env,) = json.loads(call("env", "list", "--json").stdout)["envs"]
    assert env["env_id"] == json.loads(pushed.stdout)["env_id"]


def test_a_relative_path_does_not_lead_out_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = tmp_path / "here"
    here.mkdir()
    (here / "link").symlink_to(tmp_path)
    monkeypatch.chdir(here)
    for outside in ("../mine", "a/../../mine", "link/mine"):
        assert call("env", "new", outside).exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]
    assert call("env", "new", "below/mine").exit_code == 0
    assert (here / "below" / "mine" / "environment.py").is_file()


@pytest.mark.parametrize("command", [["status"], ["serve"], ["env", "list"], ["key", "list"]])
def test_a_home_that_cannot_be_one_is_wrong_input(tmp_path: Path, command: list[str]):
    (tmp_path / "file").write_text("x")
    done = call(*command, "--home", str(tmp_path / "file" / "home"))
    assert done.exit_code == 2, done.output
    assert "HOME_UNUSABLE" in done.stderr and "Traceback" not in done.output


def test_a_version_is_compared_pulled_and_deleted(home: Home, tmp_path: Path):
    first = push(home, tmp_path / "env")
    (tmp_path / "env" / "data.bin").write_bytes(b"\xff\x00")
    second = push(home, tmp_path / "env", SUMS.replace("< 3", "< 4"))
    told = json.loads(call("env", "diff", first, second, "--json").stdout)
    assert told["files"] == {"data.bin": "added", "environment.py": "changed"}
    assert '+        return Score(float(right), success=right, metrics={"short"' in told["diff"]
    assert "not text" in told["diff"]
    pulled = call("env", "pull", first, str(tmp_path / "out"), "--json")
    assert json.loads(pulled.stdout)["files"] == ["environment.py"]
    assert (tmp_path / "out" / "environment.py").read_text() == SUMS
    assert call("env", "pull", first, str(tmp_path / "out")).exit_code == 2
    assert call("env", "delete", first).exit_code == 0
    assert call("env", "delete", first).exit_code == 2
    (left,) = json.loads(call("env", "list", "--json").stdout)["envs"]
    assert left["env_id"] == second
    assert not home.env("sums", first.partition("@")[2]).exists()


def test_a_version_that_runs_used_is_only_deleted_when_told_so(home: Home, tmp_path: Path):
    env_id = push(home, tmp_path / "env")
    evaluation(home, env_id, {})
    refused = call("env", "delete", env_id)
    assert refused.exit_code == 2 and "sums-evaluate-1" in refused.stderr
    with Store(home) as store:
        store.insert_run(NewRun("arith-sft", "train", "sft", env_id, "pebble"))
    assert call("env", "delete", env_id, "--force").exit_code == 2, "it is queued"
    with Store(home) as store:
        store.set_state("arith-sft-1", "cancelled", only_from={"queued"})
    assert call("env", "delete", env_id, "--force").exit_code == 0


def test_packages_are_built_ahead_of_a_push(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from engine.machine.install import env_packages

    none = json.loads(call("env", "build", str(tmp_path), "--json").stdout)
    assert none["packages"] == []
    (tmp_path / "requirements.txt").write_text("left-pad==1\n")
    asked = []
    monkeypatch.setattr(
        env_packages, "install", lambda home, needed, patience: asked.append(needed) or Path("/py")
    )
    built = json.loads(call("env", "build", str(tmp_path), "--json").stdout)
    assert built["packages"] == ["left-pad==1"] and built["python"] == "/py" and len(asked) == 1


def test_a_data_file_is_looked_into(home: Home, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    found = call("data", "inspect", str(rows), "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["rows"] == 1
    rows.write_text('{"prompt": "a", "answer": "b"}\nnope\n')
    bad = call("data", "inspect", str(rows), "--json")
    assert bad.exit_code == 1 and json.loads(bad.stdout)["bad_rows"][0]["line"] == 2
    assert call("data", "inspect", str(tmp_path / "none.jsonl")).exit_code == 2
    counted = call("data", "inspect", str(rows), "--model", "pebble", "--json")
    assert json.loads(counted.stdout)["tokens"]["counted"] == 1


def test_the_page_lists_runs_and_environments_and_runs_no_text(home: Home, tmp_path: Path):
    env_id = push(home, tmp_path / "env")
    run = training(home, env_id)
    with Store(home) as store:
        store.update_run(run.id, only_in={"done"}, note="<script>alert(1)</script>\x1b[2J")
    done = call("ui", "--json")
    assert done.exit_code == 0, done.output
    text = Path(json.loads(done.stdout)["page"]).read_text()
    assert run.id in text and env_id in text and run.report.as_uri() in text
    assert run.report.is_file()
    assert "<script" not in text and "\x1b" not in text and "default-src 'none'" in text


def test_no_template_overwrites_anything(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "environment.py").write_text("x = 1")
    done = call("env", "new", str(tmp_path / "mine"))
    assert done.exit_code == 2
    assert (tmp_path / "mine" / "environment.py").read_text() == "x = 1"
    assert call("env", "new", str(tmp_path / "Bad Name")).exit_code == 2
    assert call("env", "new", str(tmp_path / "fine"), "--template", "nope").exit_code == 2


def test_every_template_is_listed_with_what_it_is_for_and_no_folder_is_asked_for():
    listed = json.loads(call("env", "new", "--template", "list", "--json").stdout)
    assert len(listed["templates"]) == 4
    assert listed["templates"]["single_turn"] == "one answer that code can check"
    shown = call("env", "new", "--template", "list").stdout
    assert "multi_turn_tool: a tool the model calls before it answers" in shown
    told = call("env", "new")
    assert told.exit_code == 2 and "no folder was named" in told.stderr


def test_a_new_environment_says_what_to_edit_before_it_is_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    shown = call("env", "new", "sort_three").stdout
    edit = "next: edit tasks() and score() in sort_three/environment.py, then honesmith env push"
    assert edit in shown
    (after,) = json.loads(call("env", "new", "other", "--json").stdout)["next"]
    assert after["tool"] == "push_env" and after["arguments"] == {"path": "other"}
    rows = call("env", "new", "rows", "--template", "sft-only").stdout
    assert "put your rows into rows/datasets" in rows

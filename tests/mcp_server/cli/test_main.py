"""The command line: the same verbs, `--json` everywhere, exit status 0, 1 or 2, never a prompt."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import call, spy
from run_configs import train_config
from typer.main import get_command

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.core.hints import Call, Hint
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from mcp_server.access.log import log_file
from mcp_server.api import verbs
from mcp_server.cli.main import app
from mcp_server.screen.terminal import settings_from

COMMANDS = {
    "serve",
    "setup",
    "demo",
    "doctor",
    "init",
    "status",
    "runs",
    "wait",
    "logs",
    "models",
    "hosts",
    "cancel",
    "pin",
    "unpin",
    "env",
    "dry-run",
    "estimate",
    "train",
    "rerun",
    "rollouts",
    "evaluate",
    "compare",
    "diff",
    "diagnose",
    "curate",
    "deploy",
    "undeploy",
    "chat",
    "export",
    "playbook",
    "report",
    "results",
    "verify",
    "share",
    "data",
    "judge",
    "key",
    "ui",
}


def test_every_promised_command_is_there():
    assert set(get_command(app).commands) == COMMANDS
    groups = {
        name: set(get_command(app).commands[name].commands)
        for name in ("env", "data", "key", "models", "hosts", "runs")
    }
    assert groups == {
        "env": {
            *("audit", "new", "check", "push", "list"),
            *("benchmarks", "build", "diff", "pull", "seal", "delete"),
        },
        "data": {"inspect"},
        "key": {"add", "list", "rotate", "budget", "remove"},
        "models": {"list", "add", "show", "remove"},
        "hosts": {"list", "add", "setup", "check", "remove"},
        "runs": {"delete", "priority"},
    }


def test_every_command_but_serve_prints_json_when_asked():
    def walk(command: Any, path: str):
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{path} {name}")
        if not getattr(command, "commands", {}):
            yield path, {option for param in command.params for option in param.opts}

    without = [
        path.strip() for path, options in walk(get_command(app), "") if "--json" not in options
    ]
    assert without == ["serve"]


@pytest.mark.parametrize(
    ("argv", "verb", "arguments"),
    [
        (["status"], "get_status", {"scope": "all", "limit": 20}),
        (["status", "envs", "--limit", "3"], "get_status", {"scope": "envs", "limit": 3}),
        (["runs"], "get_status", {"scope": "runs"}),
        (["env", "list"], "get_status", {"scope": "envs"}),
        (
            ["dry-run", "arith", "--algorithm", "sft", "--set", "steps=4", "--samples", "8"],
            "dry_run",
            {"env_id": "arith", "algorithm": "sft", "settings": {"steps": 4}, "samples": 8},
        ),
        (["dry-run", "arith", "--smoke"], "dry_run", {"smoke": True, "smoke_s": 600.0}),
        (["estimate", "arith", "--model", "m"], "estimate_cost", {"env_id": "arith", "model": "m"}),
        (
            ["train", "arith", "--set", "loss=dapo", "--note", "n", "--max-gpu-hours", "0.5"],
            "submit_train",
            {
                "env_id": "arith",
                "model": "pebble",
                "algorithm": "grpo",
                "settings": {"loss": "dapo"},
                "note": "n",
                "max_gpu_hours": 0.5,
            },
        ),
        (["train", "--resume", "r-1"], "submit_train", {"resume": "r-1", "approved": False}),
        (["train", "arith", "--yes"], "submit_train", {"env_id": "arith", "approved": True}),
        (
            ["logs", "r-1", "--view", "metrics", "--key", "loss", "--key", "kl"],
            "read_logs",
            {"run_id": "r-1", "view": "metrics", "keys": ["loss", "kl"]},
        ),
        (
            ["rollouts", "r-1", "--pick", "best", "--where", "reward < 1", "--tokens"],
            "read_rollouts",
            {"run_id": "r-1", "pick": "best", "where": "reward < 1", "tokens": True},
        ),
        (
            ["evaluate", "arith", "pebble", "r-1@best", "--rows", "40"],
            "evaluate",
            {"env_id": "arith", "models": ["pebble", "r-1@best"], "rows": 40},
        ),
        (
            ["evaluate", "arith", "pebble", "--perturb", "tools", "--perturb", "system"],
            "evaluate",
            {"env_id": "arith", "models": ["pebble"], "perturb": ["tools", "system"]},
        ),
        (
            ["evaluate", "arith", "pebble", "--task-indices", "0-9,12"],
            "evaluate",
            {"env_id": "arith", "models": ["pebble"], "task_indices": "0-9,12"},
        ),
        (["compare", "a", "b", "--env", "e"], "compare_runs", {"ids": ["a", "b"], "env_id": "e"}),
        (["diff", "r-1", "b.toml"], "diff_settings", {"before": "r-1", "after": "b.toml"}),
        (["diagnose", "r-1"], "diagnose", {"run_id": "r-1"}),
        (["cancel", "r-1", "--reason", "why"], "cancel_run", {"run_id": "r-1", "reason": "why"}),
        (["deploy", "r-1@best"], "deploy", {"run_id": "r-1@best"}),
        (["undeploy", "r-1"], "deploy", {"run_id": "r-1", "action": "stop"}),
        (
            ["export", "r-1", "/out", "--format", "merged"],
            "deploy",
            {"run_id": "r-1", "action": "export", "format": "merged", "path": "/out"},
        ),
        (
            ["chat", "r-1", "hello", "--compare-to", "pebble", "--temperature", "0.5"],
            "chat",
            {"model": "r-1", "message": "hello", "compare_to": "pebble", "temperature": 0.5},
        ),
        (
            [
                *("chat", "r-1", "--conversation", "c-1", "--seed", "3"),
                *("--messages", '{"role": "tool", "content": "7"}', "--tools", '[{"type": "x"}]'),
            ],
            "chat",
            {
                "conversation": "c-1",
                "seed": 3,
                "messages": [{"role": "tool", "content": "7"}],
                "tools": [{"type": "x"}],
            },
        ),
    ],
)
def test_a_command_reaches_its_verb(
    home: Home, monkeypatch: pytest.MonkeyPatch, argv: list[str], verb: str, arguments: dict
):
    seen = spy(monkeypatch, verb, {"run_id": "r-1", "state": "queued"})
    done = call(*argv, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["run_id"] == "r-1"
    (given,) = seen
    assert {name: given[name] for name in arguments} == arguments
    assert given["home"] == home


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UserError("SETTING_UNKNOWN", "no", hint="steps"), 2),
        (UserError("RUN_NOT_FOUND", "no"), 2),
        (UserError("BUDGET", "no"), 2),
        (UserError("DEPLOY_FAILED", "no"), 1),
        (UserError("NO_TORCH", "no"), 1),
    ],
)
def test_the_exit_status_tells_wrong_input_from_failed_work(
    home: Home, monkeypatch: pytest.MonkeyPatch, error: UserError, status: int
):
    spy(monkeypatch, "submit_train", error)
    told = call("train", "arith")
    assert told.exit_code == status
    assert told.stdout == ""
    assert error.code in told.stderr and "Traceback" not in told.stderr
    asked = call("train", "arith", "--json")
    assert asked.exit_code == status
    assert json.loads(asked.stdout) == error.payload()


def test_a_crash_is_one_sentence_and_its_traceback_is_in_the_log(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    spy(monkeypatch, "get_status", RuntimeError("the disk of doom"))
    done = call("status")
    assert done.exit_code == 1
    assert "the disk of doom" in done.stderr and "Traceback" not in done.stderr
    assert str(log_file(home)) in done.stderr
    assert "Traceback" in log_file(home).read_text()


@pytest.mark.parametrize(
    "argv",
    [
        ["status", "nothing"],
        ["train", "a", "--algorithm", "dpo"],
        ["train", "a", "--set", "steps"],
        ["wait"],
        ["wait", "r", "--until", "never"],
        ["deploy"],
        ["export", "r", "/o", "--format", "gguf"],
        ["nonsense"],
        ["status", "--bogus"],
        ["serve", "--root", "/no/such/folder"],
        ["init", "--agent", "emacs"],
        ["playbook", "nonsense"],
        ["chat", "pebble"],  # and nothing on stdin
        ["chat", "pebble", "hello", "--messages", "no-such-file.json"],
        ["train", "missing.toml"],
    ],
)
def test_wrong_input_leaves_with_two(home: Home, argv: list[str]):
    done = call(*argv)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output


def test_settings_are_json_where_they_can_be():
    given = ["steps=60", "learning_rate=1e-4", "loss=dapo", 'stop=["a"]', "thinking=true", "x=a=b"]
    assert settings_from(given) == {
        "steps": 60,
        "learning_rate": 1e-4,
        "loss": "dapo",
        "stop": ["a"],
        "thinking": True,
        "x": "a=b",
    }
    assert settings_from(None) == {}


def test_a_plan_file_is_trained_with_what_the_command_line_changes(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = tmp_path / "train.toml"
    plan.write_text(
        'model = "m"\nalgorithm = "sft"\nenv = "arith"\n[settings]\nepochs = 2\nseed = 1\n'
    )
    seen = spy(monkeypatch, "submit_train", {"run_id": "r-1"})
    assert call("train", str(plan), "--set", "seed=3", "--model", "pebble").exit_code == 0
    assert {name: seen[0][name] for name in ("env_id", "model", "algorithm", "settings")} == {
        "env_id": "arith",
        "model": "pebble",
        "algorithm": "sft",
        "settings": {"epochs": 2, "seed": 3},
    }


def test_the_teacher_is_an_option_of_train(home: Home, monkeypatch: pytest.MonkeyPatch):
    seen = spy(monkeypatch, "submit_train", {"run_id": "r-1"})
    argv = ["train", "arith", "--algorithm", "distill", "--teacher", "arith-grpo-7@best"]
    assert call(*argv, "--set", "steps=9").exit_code == 0
    assert seen[0]["algorithm"] == "distill"
    assert seen[0]["settings"] == {"teacher": "arith-grpo-7@best", "steps": 9}


def test_a_plan_file_with_an_unknown_setting_is_refused_by_line(home: Home, tmp_path: Path):
    plan = tmp_path / "train.toml"
    plan.write_text('env = "arith"\n[settings]\nstepz = 2\n')
    done = call("train", str(plan), "--json")
    assert done.exit_code == 2
    assert "train.toml:3" in json.loads(done.stdout)["message"]


@pytest.mark.parametrize(
    ("state", "status"), [("done", 0), ("failed", 1), ("cancelled", 1), ("running", 1)]
)
def test_wait_says_by_its_status_how_the_run_stands(
    home: Home, monkeypatch: pytest.MonkeyPatch, state: str, status: int
):
    spy(monkeypatch, "wait_run", {"run_id": "r-1", "state": state, "cursor": "0"})
    assert call("wait", "r-1", "--timeout", "0.05", "--json").exit_code == status


def test_waiting_for_an_evaluation_ends_when_it_came(home: Home, monkeypatch: pytest.MonkeyPatch):
    reply = {"run_id": "r-1", "state": "running", "until_met": True, "cursor": "9"}
    seen = spy(monkeypatch, "wait_run", reply)
    assert call("wait", "r-1", "--until", "next_eval", "--json").exit_code == 0
    assert len(seen) == 1


def test_train_and_wait_gives_one_json_value(home: Home, monkeypatch: pytest.MonkeyPatch):
    spy(monkeypatch, "submit_train", {"run_id": "r-1", "state": "queued"})
    spy(monkeypatch, "wait_run", {"run_id": "r-1", "state": "done", "verdict": "better"})
    done = call("train", "arith", "--wait", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["verdict"] == "better"


def test_a_hint_names_the_command_to_type(home: Home, monkeypatch: pytest.MonkeyPatch):
    assert "try: honesmith playbook judging" in call("playbook", "juding").stderr
    assert "try: To list them: honesmith playbook" in call("playbook", "xyzzy").stderr
    wait = Call("wait_run", {"run_id": "r-1"})
    spy(monkeypatch, "cancel_run", UserError("RUN_STATE", "no", hint=Hint("", wait)))
    assert "try: honesmith wait r-1" in call("cancel", "r-1").stderr
    asked = json.loads(call("cancel", "r-1", "--json").stdout)
    assert asked["hint"] == 'wait_run(run_id="r-1")'
    assert asked["call"] == wait.to_json()


def test_training_nothing_is_refused_in_the_words_of_a_terminal(home: Home):
    told = call("train")
    assert told.exit_code == 2 and "no environment was named" in told.stderr
    assert "honesmith env list" in told.stderr and "get_status" not in told.stderr


PLAN = {
    "summary": "Not ready: budget: too dear.",
    "checks": [
        {"name": "env", "status": "pass", "detail": "units@1: single"},
        {"name": "data", "status": "warn", "detail": "few rows"},
        {"name": "budget", "status": "fail", "detail": "too dear", "fix": "Lower steps."},
        {"name": "probe", "status": "skip", "detail": "needs budget"},
    ],
    "settings": {"steps": 60, "learning_rate": 0.001},
    "sources": {"steps": "user", "learning_rate": "recipe"},
    "audit": {"probes": [{"probe": "empty", "mean": 0.0}]},
    "warnings": ["data: few rows", "env_id 'unit' was taken as units@1"],
}


def test_a_dry_run_says_its_verdict_first_then_what_is_amiss_then_what_was_given(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    spy(monkeypatch, "dry_run", PLAN)
    shown = call("dry-run", "unit").stdout
    order = ["Not ready", "✗ budget", "-> Lower steps.", "! data", "passed: env", "steps = 60"]
    assert [shown.index(word) for word in order] == sorted(shown.index(word) for word in order)
    assert "learning_rate" not in shown and "empty" not in shown and shown.count("few rows") == 1
    assert "was taken as units@1" in shown
    whole = call("dry-run", "unit", "--all").stdout
    assert whole.startswith("Not ready") and "learning_rate" in whole and "empty" in whole


ESTIMATE = {
    "summary": "About 32 s.",
    "hours": {"low": 0.004, "likely": 0.009, "high": 0.02},
    "gpu_hours": {"low": 0.004, "likely": 0.009, "high": 0.02},
    "money": {"low": 0.0, "likely": 0.0, "high": 0.0},
    "gpu_hour_price": 0,
    "peak_memory": {"weights": 19_100_000, "total": 631_918_315},
    "memory_available": 25_300_000_000,
    "device": "cpu",
    "fit": "fits",
    "disk_bytes": 30_000_000,
    "lower_this": "steps from 60 to 30",
    "basis": "measured",
}


def test_an_estimate_is_in_units_people_read_and_names_what_to_lower_when_it_does_not_fit(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    spy(monkeypatch, "estimate_cost", ESTIMATE)
    shown = call("estimate", "arith").stdout
    assert "631.9 MB of 25.3 GB" in shown and "631918315" not in shown and "32 s" in shown
    assert "GPU-hours" not in shown and "money" not in shown and "lower" not in shown
    gpu = {"fit": "too_big", "device": "cuda:0", "gpu_hour_price": 2}
    spy(monkeypatch, "estimate_cost", ESTIMATE | gpu)
    shown = call("estimate", "arith").stdout
    assert "GPU-hours" in shown and "money" in shown and "lower: steps from 60 to 30" in shown


def test_the_contents_of_the_playbook_name_the_command(home: Home):
    shown = call("playbook").stdout
    assert "`honesmith playbook SECTION`" in shown and "read_playbook" not in shown
    assert "`honesmith playbook run://pebble/card`" in shown
    assert call("playbook", "run://pebble/card").stdout.startswith("# pebble")


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        (["bogus"], ""),
        (["run"], "runs"),
        (["eval"], "evaluate"),
        (["dryrun"], "dry-run"),
        (["env", "pus"], "push"),
    ],
)
def test_only_near_names_are_suggested_for_a_typo(home: Home, typed: list[str], near: str):
    told = call(*typed)
    assert told.exit_code == 2
    assert ("Did you mean" in told.stderr) == bool(near) and near in told.stderr


@pytest.mark.parametrize("argv", [["train"], ["logs"], ["serve"], ["env", "push"], ["env"], []])
def test_help_shows_no_type_for_flags_and_no_empty_choice(argv: list[str]):
    shown = call(*argv, "--help").stdout
    assert "--help" in shown
    assert "<bool>" not in shown and "<|" not in shown


def test_a_dry_run_with_a_failing_check_leaves_with_one(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    checks = [{"name": "env", "status": "fail", "detail": "no rows", "fix": "add rows"}]
    spy(monkeypatch, "dry_run", {"checks": checks})
    done = call("dry-run", "arith")
    assert done.exit_code == 1
    assert "no rows" in done.stdout and "add rows" in done.stdout


def test_the_playbook_is_printed_as_it_is(home: Home):
    assert call("playbook", "loop").stdout.strip() == verbs.read_playbook("loop").strip()
    assert json.loads(call("playbook", "loop", "--json").stdout)["text"].startswith("# ")


def test_nothing_is_asked_although_nobody_is_there_to_answer(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Silent:
        def __getattr__(self, name: str):
            raise AssertionError(f"stdin.{name} was used")

    spy(monkeypatch, "submit_train", {"run_id": "r"})
    monkeypatch.setattr(sys, "stdin", Silent())
    for argv in (["init", str(tmp_path)], ["train", "a"], ["status"], ["playbook"]):
        command = get_command(app)
        with pytest.raises(SystemExit) as left:
            command(argv)
        assert left.value.code == 0


def test_people_see_tables_warnings_and_the_next_command(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    spy(
        monkeypatch,
        "get_status",
        {
            "runs": [{"run_id": "arith-grpo-7", "state": "running", "created": 1795201422.0}],
            "warnings": ["slow disk"],
            "next": [verbs.suggest("wait_run", run_id="arith-grpo-7")],
        },
    )
    shown = call("status").stdout
    assert "arith-grpo-7  running" in shown
    assert "! slow disk" in shown
    assert "next: honesmith wait arith-grpo-7" in shown
    assert "1795201422" not in shown and "\x1b" not in shown


def test_text_of_a_run_cannot_move_the_terminal(home: Home, monkeypatch: pytest.MonkeyPatch):
    nasty = {"rollouts": [{"completion": "\x1b]0;owned\x07\x1b[2J[bold]hi[/bold]"}]}
    spy(monkeypatch, "read_rollouts", nasty)
    shown = call("rollouts", "r-1").stdout
    assert "\x1b" not in shown and "owned" not in shown
    assert "[bold]hi[/bold]" in shown


def test_doctor_names_the_log_of_our_faults(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("engine.doctor.CHECKS", ())

    def log_check() -> dict:
        checks = json.loads(call("doctor", "--json").stdout)["checks"]
        return next(check for check in checks if check["name"] == "server log")

    assert log_check()["status"] == "pass"
    log_file(home).write_text("Traceback\n")
    assert str(log_file(home)) in log_check()["detail"]


def test_doctor_leaves_with_one_when_a_check_fails(home: Home, monkeypatch: pytest.MonkeyPatch):
    from engine.doctor import Finding

    broken = (lambda home: iter([Finding("disk", "fail", "full", "tidy up")]),)
    monkeypatch.setattr("engine.doctor.CHECKS", broken)
    done = call("doctor")
    assert done.exit_code == 1
    assert "disk" in done.stdout and "tidy up" in done.stdout


def test_the_report_of_a_run_is_written_and_named(home: Home):
    with Store(home) as store:
        row = store.insert_run(NewRun("arith-sft", "train", "sft", "arith@0", "pebble"))
    run = home.run(row.run_id)
    run.create()
    write_json(run.config, train_config(row.run_id, algorithm="sft"))
    done = call("report", row.run_id, "--json")
    assert done.exit_code == 0, done.output
    path = Path(json.loads(done.stdout)["report"])
    assert path == run.report and path.is_file()

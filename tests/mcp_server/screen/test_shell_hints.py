"""What doctor tells a person to type can be typed."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import call
from typer.main import get_command

from engine import doctor
from engine.core.files import write_json
from engine.core.hints import Call, Hint
from engine.home.rows import NewRun
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.processes import outcome
from mcp_server.cli.main import app
from mcp_server.screen.shell import as_typed

HINTS = (
    Hint("Read the end of the console log; resume continues from the last checkpoint."),
    Hint("Mend score().", Call("read_rollouts", {"run_id": "sums-grpo-2", "pick": "error"})),
)


def takes(words: list[str]) -> dict[str, Any] | None:
    """The arguments of a command line, None where it is refused."""
    command, name, parent = get_command(app), "honesmith", None
    try:
        while True:
            context = command.make_context(name, list(words), parent=parent)
            if not hasattr(command, "resolve_command"):
                return dict(context.params)
            rest = [*getattr(context, "_protected_args", []), *context.args]
            found, command, words = command.resolve_command(context, rest)
            name, parent = str(found), context
    except Exception as error:  # typer's own click is not to be named
        if type(error).__name__ == "Exit" or hasattr(error, "format_message"):
            return None
        raise


def commands(text: str) -> list[dict[str, Any]]:
    """What each `honesmith ...` in a text would be called with: as many words as make sense."""
    found = []
    for said in re.findall(r"honesmith ((?:(?!honesmith )[^`;,\n])*)", text):
        words = [word.rstrip(".:)") for word in said.split()]
        lines = [takes(words[:upto]) for upto in range(len(words), 0, -1)]
        taken = next((line for line in lines if line is not None), None)
        assert taken is not None, f"nobody can type: honesmith {said}"
        found.append(taken)
    return found


def ends(home: Home, status: int, failure: dict[str, Any] | None, **stopping: Any) -> str:
    """A run whose trainer ended so, as its supervisor makes of it."""
    with Store(home) as store:
        row = store.insert_run(NewRun("sums-grpo", "train", "grpo", "sums@1", "pebble"))
        run = home.run(row.run_id)
        run.create()
        if failure:
            write_json(run.failure, failure)
        store.set_state(row.run_id, "preparing", only_from={"queued"})
        if stopping:
            store.set_state(row.run_id, "running", only_from={"preparing"})
            store.set_state(row.run_id, "stopping", only_from={"running"}, **stopping)
        row = store.get_run(row.run_id)
        ended = outcome.decide(run, row, status=status, elapsed_s=1.0)
        assert outcome.apply(store, run, row, ended)
    return row.run_id


def test_every_command_that_doctor_names_is_a_command_of_the_run_it_speaks_of(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess([], 1, "", "no torch")
    monkeypatch.setattr(doctor.launcher, "worker_python", lambda home: "python")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: done)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.launcher, "is_alive", lambda run: False)
    for kind, hint in zip(("internal", "reward"), HINTS, strict=True):
        failure = {"kind": kind, "message": "m", "hint": hint.to_json()}
        ends(home, outcome.EXIT_FAILED, failure)
    ends(home, 1, None)
    told = doctor.examine(home, tmp_path)["checks"]
    hints = {
        check["detail"]: as_typed(Hint.from_fields(check.get("fix", ""), check.get("call")))
        for check in told
    }
    failed = [check["detail"] for check in told if check["name"] == "last failures"]
    assert len(failed) == 3
    for detail, hint in hints.items():
        named = [line["run_id"] for line in commands(hint) if "run_id" in line]
        if detail in failed:
            assert named and set(named) <= {detail.split()[0]}, hint
    typed = call("doctor", "--home", str(home.root)).stdout
    assert "pick=" not in typed and "view=" not in typed


def test_a_new_cap_is_a_number_that_can_be_typed(home: Home) -> None:
    run_id = ends(home, outcome.EXIT_STOPPED, None, reason_kind="budget", reason="it is spent")
    with Store(home) as store:
        hint = as_typed(store.get_run(run_id).hint)
    assert [line["max_gpu_hours"] for line in commands(hint)][-1] == 2.0


def test_a_hint_of_an_earlier_version_is_told_as_it_was_written_down(home: Home) -> None:
    said = 'submit_train(resume="r-1") continues from step_000020.'
    failure = {"kind": "reward", "message": "m", "hint": said}
    run_id = ends(home, outcome.EXIT_FAILED, failure)
    with Store(home) as store:
        assert store.get_run(run_id).hint == Hint(said)

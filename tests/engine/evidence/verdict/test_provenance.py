"""The seal of a run: what was changed by hand afterwards shows, by name."""

import hashlib
import json

import pytest
from as_json import verify
from typer.testing import CliRunner

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.evidence.report.html_report import model_card
from engine.evidence.verdict.provenance import LINKS, seal
from mcp_server.cli.main import app


@pytest.fixture
def sealed(learned_run):
    """A finished run with weights, sealed as its trainer does."""
    for step in learned_run.run.checkpoint_steps():
        (learned_run.run.checkpoint(step) / "adapter_model.safetensors").write_bytes(b"w" * 64)
    source = learned_run.home.env("arith", "0123456789ab") / "source"
    source.mkdir()
    (source / "environment.py").write_text("def load_environment(): ...\n")
    write_json(learned_run.run.result, {"verdict": "better"})
    seal(learned_run.run)
    return learned_run


def broken(found):
    return {
        link["name"]: [item["file"] for item in link["broken"]]
        for link in found["links"]
        if not link["ok"]
    }


def test_a_run_nobody_touched_is_intact(home, sealed):
    found = verify(home, sealed.id)
    assert found["intact"] is True and broken(found) == {}
    assert [link["name"] for link in found["links"]] == list(LINKS)
    assert found["summary"].startswith(f"{sealed.id} is intact: 6 links, head ")


def edited(path):
    path.write_text(path.read_text().replace("0.6", "0.9", 1))


CHANGES = {
    "a metric": ("evaluation", "metrics.jsonl", lambda run, env: edited(run.metrics)),
    "an answer": (
        "evaluation",
        "evals/step_000040.jsonl",
        lambda run, env: run.evals(40).write_text(
            run.evals(40).read_text().replace('"success":false', '"success":true', 1)
        ),
    ),
    "a rollout": (
        "evaluation",
        "rollouts/step_000030.jsonl",
        lambda run, env: run.rollouts(30).unlink(),
    ),
    "an evaluation": (
        "evaluation",
        "evals/step_000050.jsonl",
        lambda run, env: run.evals(50).write_text(""),
    ),
    "a weight": (
        "checkpoints",
        "checkpoints/step_000040/adapter_model.safetensors",
        lambda run, env: (run.checkpoint(40) / "adapter_model.safetensors").write_bytes(b"v" * 64),
    ),
    "the best": (
        "checkpoints",
        "checkpoints/best",
        lambda run, env: (run.best.unlink(), run.best.symlink_to("step_000060")),
    ),
    "a setting": (
        "run",
        "config.json",
        lambda run, env: run.config.write_text(run.config.read_text().replace("0.001", "0.002")),
    ),
    "the manifest": ("run", "manifest.json", lambda run, env: run.manifest.write_text("{}")),
    "a held-out task": (
        "data",
        "tasks.jsonl",
        lambda run, env: (env / "tasks.jsonl").write_text("{}\n"),
    ),
    "the reward": (
        "environment",
        "source/environment.py",
        lambda run, env: (env / "source" / "environment.py").write_text("# kinder\n"),
    ),
    "where rows come from": (
        "curation",
        "source/curation.json",
        lambda run, env: (env / "source" / "curation.json").write_text("{}"),
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_by_hand_is_named(home, sealed, what):
    link, file, change = CHANGES[what]
    change(sealed.run, home.env("arith", "0123456789ab"))
    found = verify(home, sealed.id)
    assert found["intact"] is False and file in broken(found)[link]
    assert f"broken at {link}: {file}" in found["summary"]


def test_a_seal_that_was_edited_to_fit_is_broken_itself(home, sealed):
    edited(sealed.run.metrics)
    changed = verify(home, sealed.id)
    chain = json.loads(sealed.run.chain.read_text())
    fresh = json.loads(sealed.run.chain.read_text())
    seal(sealed.run)
    fresh["links"][5]["files"] = json.loads(sealed.run.chain.read_text())["links"][5]["files"]
    sealed.run.chain.write_text(json.dumps(fresh))
    found = verify(home, sealed.id)
    assert not changed["intact"] and not found["intact"]
    assert broken(found) == {"evaluation": ["chain.json"]}
    chain["links"] = chain["links"][:3]
    sealed.run.chain.write_text(json.dumps(chain))
    assert not verify(home, sealed.id)["intact"]


def test_a_verdict_rewritten_in_the_database_does_not_agree_with_the_rows(home, make_run, rows):
    run = make_run()
    for step in (0, 9):
        run.evals(step, rows.halved(lambda i: i % 2 == 0, 400))
    run.checkpoint(9, best=True).finish(verdict="better")
    seal(run.run)
    found = verify(home, run.id)
    assert broken(found) == {"evaluation": ["honesmith.db"]}
    assert "says better, the evaluations say no_difference" in found["summary"]


def test_a_child_is_broken_by_what_was_done_to_its_parent(home, sealed, make_run, rows):
    child = make_run("sft", model=f"{sealed.id}@best")
    for step in (0, 9):
        child.evals(step, rows.halved(lambda i, s=step: s == 9 or i % 9 == 0, 100))
    child.checkpoint(9, best=True).finish(verdict="better")
    seal(child.run)
    assert verify(home, child.id)["intact"]
    edited(sealed.run.metrics)
    found = verify(home, child.id)
    assert not found["intact"] and broken(found) == {}
    assert found["ancestors"][0]["run_id"] == sealed.id
    assert "what it comes from is not" in found["summary"] and "metrics.jsonl" in found["summary"]
    seal(sealed.run)  # sealing the forgery anew breaks the link to the child
    assert broken(verify(home, child.id)) == {"run": [f"chain of {sealed.id}"]}


def test_a_finished_run_without_a_seal_is_not_intact_and_an_open_one_cannot_be_verified(
    home, learned_run, make_run
):
    assert verify(home, learned_run.id)["intact"] is False
    found = verify(home, make_run().running().id)
    assert found["intact"] is None and "runs are sealed when done" in found["summary"]
    with pytest.raises(UserError, match="nosuch"):
        verify(home, "nosuch")


def test_the_command_names_the_file_and_fails(home, sealed):
    runner = CliRunner()
    fine = runner.invoke(app, ["verify", sealed.id, "--home", str(home.root)])
    assert fine.exit_code == 0 and "is intact" in fine.output
    edited(sealed.run.metrics)
    result = runner.invoke(app, ["verify", sealed.id, "--home", str(home.root)])
    assert result.exit_code == 1 and "metrics.jsonl was changed" in result.output
    as_json = runner.invoke(app, ["verify", sealed.id, "--home", str(home.root), "--json"])
    assert as_json.exit_code == 1 and json.loads(as_json.output)["intact"] is False


def test_the_model_card_prints_the_chain(home, sealed):
    card = model_card(home, sealed.id)
    head = json.loads(sealed.run.chain.read_text())["head"]
    assert head in card and f"honesmith verify {sealed.id}" in card
    for link in LINKS:
        assert f" {link}: " in card


def test_an_audit_that_was_made_again_does_not_break_the_seal_while_the_first_is_kept(home, sealed):
    env = home.env("arith", "0123456789ab")
    write_json(env / "audit.json", {"verdict": "risk"})
    seal(sealed.run)
    first = (env / "audit.json").read_bytes()
    kept = env / "earlier" / f"{hashlib.sha256(first).hexdigest()}.json"
    kept.parent.mkdir()
    kept.write_bytes(first)
    write_json(env / "audit.json", {"verdict": "ok"})
    assert verify(home, sealed.id)["intact"] is True
    kept.write_bytes(first + b" ")
    assert broken(verify(home, sealed.id)) == {"environment": ["audit.json"]}
    kept.unlink()
    assert broken(verify(home, sealed.id)) == {"environment": ["audit.json"]}

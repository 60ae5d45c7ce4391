"""What a fresh env process said of a run, where it is shown and when it is an accusation."""

from typing import Any

import pytest
from as_json import run_verdict

from engine.core.files import write_json
from engine.evidence.detect.diagnose import diagnose
from engine.evidence.report.dossier import gather
from engine.evidence.report.origins import audit_facts
from engine.evidence.verdict.fresh_scores import rewards_depend_on_past

JUDGED = {
    "asked": 24,
    "scored": 24,
    "differing": 0,
    "failed": 0,
    "confirmed": 0,
    "wavering": 0,
    "why": "",
    "deterministic": True,
    "network": True,
    "skipped": {},
    "examples": [{"task": "t", "first": 1.0, "second": 0.0}],
}


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        ({"differing": 3, "confirmed": 3}, False),  # a judge that changed its mind
        ({"differing": 0, "failed": 24}, False),  # a judge that is gone
        ({"differing": 9, "confirmed": 7, "wavering": 2}, False),  # a judge with a temperature
        ({"differing": 12, "confirmed": 6}, False),
        ({"differing": 12, "confirmed": 7}, True),
        ({"differing": 12, "network": False}, False),  # nobody asked a third one
        ({"differing": 1, "confirmed": 1, "network": False}, False),  # a program that draws
        ({"differing": 3, "confirmed": 2, "network": False}, True),
        ({"differing": 2, "confirmed": 2, "network": False, "scored": 2}, True),
        ({"differing": 3, "confirmed": 3, "network": False, "deterministic": False}, False),
        ({"differing": 3, "confirmed": 3, "network": False, "scored": 0}, False),
    ],
)
def test_a_judge_outside_may_change_its_mind(change: dict[str, Any], alarm: bool):
    assert rewards_depend_on_past(JUDGED | change) is alarm


def left(run: Any, **change: Any) -> Any:
    """The run with what its trainer would have written."""
    write_json(run.run.rescored, JUDGED | {"network": False} | change, fsync=False)
    return run


def test_a_forged_reward_is_the_first_finding_and_a_warning_of_the_verdict(home, learned_run):
    left(learned_run, differing=7, confirmed=7)
    found = diagnose(home, learned_run.id)
    first = found["findings"][0]
    assert (first["id"], first["playbook"]) == ("scorer_moves", "rewards")
    assert first["evidence"] == {
        "scored": 24,
        "differing": 7,
        "wavering": 0,
        "task": "t",
        "reward": 1,
        "fresh": 0,
    }
    assert "7 of 24 answers got another reward" in first["what"] and first["lever"]["edit"]
    (said,) = [w for w in run_verdict(learned_run.run)["warnings"] if "not to be trusted" in w]
    assert "task t: 1, and there 0" in said


def test_a_run_whose_scores_are_found_again_has_no_finding(home, learned_run):
    left(learned_run, examples=[])
    found = diagnose(home, learned_run.id)
    assert "scorer_moves" not in [finding["id"] for finding in found["findings"]]
    assert "scorer_moves" not in found["not_judged"]
    assert not any("trusted" in said for said in run_verdict(learned_run.run)["warnings"])


def test_a_run_nobody_scored_again_says_that_this_was_not_judged(home, learned_run):
    assert "scorer_moves" in diagnose(home, learned_run.id)["not_judged"]
    left(learned_run, scored=0, examples=[], why="it takes 20 s to start")
    assert "scorer_moves" in diagnose(home, learned_run.id)["not_judged"]


def test_the_report_says_what_a_new_process_said(home, learned_run):
    again = {"scored": 24, "differing": 0, "failed": 0, "wavering": 0}
    audit = {"verdict": "ok", "headline": "ok: fine", "fresh_process": again}
    write_json(home.env("arith", "0123456789ab") / "audit.json", audit, fsync=False)
    left(learned_run, differing=7, confirmed=7)
    dossier = gather(home, learned_run.id)
    facts = dict(audit_facts(dossier, dossier.audit))
    assert facts["in a new process"] == "0 of 24 earn another reward"
    assert facts["answers of the exam in a new process"] == "7 of 24 earn another reward"

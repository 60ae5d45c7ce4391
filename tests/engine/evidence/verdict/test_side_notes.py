"""What stands beside a verdict: the reward where success ties, the word of the audit."""

import json
from pathlib import Path

from run_configs import evaluate_config
from simulated import exam_records

from engine.evidence.verdict.comparison import compare_rows
from engine.evidence.verdict.side_notes import audit_sentences, tie_sentences
from engine.evidence.verdict.sides import Sides
from engine.records.run_config import as_run_config


def rows(rewards: list[float], success: list[bool], stop: str = "stop") -> list:
    return exam_records(
        [
            {"task": f"t{i}", "reward": r, "success": s, "error": None, "stop_reason": stop}
            for i, (r, s) in enumerate(zip(rewards, success, strict=True))
        ]
    )


def notes(before: list, after: list) -> list[str]:
    return tie_sentences(Sides(before, after, "step 0", "step 9"), compare_rows(before, after))


def test_where_success_ties_the_reward_and_the_cut_answers_are_told():
    never = [False] * 40
    reward, cut = notes(rows([0.0] * 40, never), rows([0.4] * 40, never, "max_tokens"))
    assert reward.startswith("Success ties on every task; the reward went from 0 to 0.4")
    assert cut == "Answers cut by a limit went from 0% to 100%."


def test_where_success_moved_nothing_is_added():
    some = [i < 20 for i in range(40)]
    assert notes(rows([0.0] * 40, [False] * 40), rows([0.5] * 40, some)) == []
    assert notes(rows([0.5] * 40, some), rows([0.5] * 40, some)) == []  # nor where nothing moved


def test_a_failed_audit_is_named_with_what_it_pays(tmp_path: Path):
    config = as_run_config(evaluate_config(env_dir=str(tmp_path)))
    assert audit_sentences(config) == []
    audit = {"verdict": "risk", "risks": ["junk", "empty", "echo"]}
    (tmp_path / "audit.json").write_text(json.dumps(audit))
    (sentence,) = audit_sentences(config)
    assert "says risk (junk, empty are paid)" in sentence
    (tmp_path / "audit.json").write_text(json.dumps({"verdict": "ok"}))
    assert audit_sentences(config) == []

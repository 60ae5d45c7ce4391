"""Answers in other words stand beside the verdict, as paired differences with their intervals."""

import json
from typing import Any

import pytest

from engine.core.files import write_json
from engine.evidence.compare.compare import compare_runs
from engine.evidence.detect.diagnose import diagnose
from engine.evidence.report import html_report
from engine.evidence.robustness.probe_calls import reworded_better
from engine.evidence.stats.inference import tango_interval
from engine.evidence.verdict.verdict import run_verdict
from engine.home.run_dir import RunDir

MODELS = [{"ref": "arith-sft-1@best", "base_path": "/base", "adapter": None}]
TOOL = {"type": "function", "function": {"name": "lookup", "description": "Runs lookup for you."}}


def probed(make_run: Any, rows: Any, solved: dict[str, int], n: int = 100, **kinds: Any) -> Any:
    """An evaluation of one model on `n` tasks; `solved` are how many, by kind of other words and
    as they are ("")."""
    named = [kind for kind in solved if kind]
    run = make_run(kind="evaluate", models=MODELS, perturb=named, rows=n)
    run.model_evals(0, [rows.eval(f"t{i}", i < solved[""]) for i in range(n)])
    run.run.reworded_kinds.parent.mkdir()
    counts = [{"kind": kind, "tasks": n, **kinds.get(kind, {})} for kind in named]
    run.run.reworded_kinds.write_text("".join(json.dumps(each) + "\n" for each in counts))
    for kind in named:
        lines = [
            rows.eval(
                f"t{i}",
                i < solved[kind],
                tools=[TOOL],
                model=MODELS[0]["ref"],
                prompt=[{"role": "user", "content": f"Task: what is t{i}?"}],
            )
            for i in range(n)
        ]
        run.run.reworded_evals(0, kind).write_text("".join(json.dumps(r) + "\n" for r in lines))
    return run


def test_a_model_that_learnt_the_words_is_fragile_with_its_interval(make_run: Any, rows: Any):
    run = probed(make_run, rows, {"": 87, "tools": 4, "wording": 86})
    verdict = run_verdict(run.run)
    told = verdict.to_json()
    (model,) = told["robustness"]
    tools, wording = model["kinds"]
    assert model["model"] == "arith-sft-1@best"
    assert (tools["before"], tools["after"], tools["difference"]) == (0.87, 0.04, -0.83)
    by_hand = tango_interval(0, 83, 100)  # none gained, 83 lost of 100
    assert tools["interval"] == [round(by_hand.low, 4), round(by_hand.high, 4)]
    assert (tools["verdict"], tools["lost"], tools["gained"], tools["n"]) == ("fragile", 83, 0, 100)
    assert wording["verdict"] in ("steady", "inconclusive")
    assert (
        "tool descriptions reworded: 87.0 % -> 4.0 % (95 % interval of the change"
        in told["summary"]
    )
    (warning,) = [each for each in told["warnings"] if "vary_wording" in each]
    assert "tool descriptions reworded" in warning and "prompt framed" not in warning
    example = tools["examples"][0]
    assert example["asked"].startswith("[tool] lookup: Runs lookup for you.")
    assert (example["before"], example["after"]) == ("42", "41")


def test_tasks_that_were_not_asked_in_other_words_do_not_count(make_run: Any, rows: Any):
    run = probed(make_run, rows, {"": 100, "tools": 100})
    path = run.run.reworded_evals(0, "tools")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:40]))
    (model,) = run_verdict(run.run).to_json()["robustness"]
    (tools,) = model["kinds"]
    assert (tools["n"], tools["before"], tools["after"]) == (40, 1.0, 1.0)


def test_a_kind_that_no_task_has_says_why(make_run: Any, rows: Any):
    none = {"tasks": 0, "left_out": 100, "why": "no tools"}
    run = probed(make_run, rows, {"": 50, "tools": 0}, tools=none)
    run.run.reworded_evals(0, "tools").write_text("")
    verdict = run_verdict(run.run)
    assert "tool descriptions reworded: not asked (no tools)" in verdict.summary
    (model,) = verdict.to_json()["robustness"]
    assert model["kinds"] == [
        {
            "kind": "tools",
            "label": "tool descriptions reworded",
            "verdict": "unknown",
            "left_out": 100,
            "why": "no tools",
        }
    ]


def test_small_losses_in_many_kinds_are_corrected_for_their_number(make_run: Any, rows: Any):
    one = run_verdict(probed(make_run, rows, {"": 50, "tools": 45}).run).evaluation
    four = run_verdict(
        probed(
            make_run, rows, {"": 50, "tools": 45, "wording": 50, "system": 50, "options": 50}
        ).run
    ).evaluation
    assert one is not None and four is not None
    alone, among = one.robustness[0].kinds[0], four.robustness[0].kinds[0]
    assert alone.outcome is not None and among.outcome is not None
    assert alone.outcome.p is not None
    assert among.outcome.p == pytest.approx(4 * alone.outcome.p)


def test_an_evaluation_without_other_words_is_told_as_before(make_run: Any, rows: Any):
    run = make_run(kind="evaluate", models=MODELS)
    run.model_evals(0, [rows.eval(f"t{i}", i < 5) for i in range(10)])
    assert "robustness" not in run_verdict(run.run).to_json()


def test_the_report_has_a_section_on_other_words(make_run: Any, rows: Any, home: Any):
    run = probed(make_run, rows, {"": 87, "tools": 4}).finish()
    html = html_report.write_report(home, run.id).read_text()
    section = html[html.index("The same tasks as they are and in other words") :]
    for cell in ("87.0", "-83.0", "fragile", "[tool] lookup: Runs lookup for you."):
        assert cell in section


def test_a_run_whose_rows_share_a_text_offers_the_call_that_tells(make_run: Any, learned_run: Any):
    manifest: RunDir = learned_run.run
    whole = json.loads(manifest.manifest.read_text())
    assert not [c for c in run_verdict(manifest).next_calls if c.tool == "evaluate"]
    extra = {
        "parent": "",
        "note": "",
        "reward_risk_accepted": False,
        "matrix_flops": 1.0,
        "quantization": "none",
        "forward": {"kind": "own", "why": ""},
        "kernels": {"kind": "own", "why": ""},
        "isolation": "",
        "eval_sampling": {"max_tokens": 4, "temperature": 0.0, "top_p": 1.0, "stop": [], "seed": 0},
        "hardware": {**whole["hardware"], "ram": 1},
    }
    write_json(manifest.manifest, {**whole, **extra, "shared_texts": ["tools"]})
    (call,) = [c for c in run_verdict(manifest).next_calls if c.tool == "evaluate"]
    assert call.arguments == {
        "env_id": learned_run.config["env_id"],
        "models": [f"{learned_run.id}@best"],
        "perturb": ["tools"],
    }


def test_a_comparison_of_models_says_what_became_of_each_in_other_words(
    make_run: Any, rows: Any, home: Any
):
    run = probed(make_run, rows, {"": 87, "tools": 4}).finish()
    base = make_run(kind="evaluate", models=[{"ref": "pebble", "base_path": "/b", "adapter": None}])
    base.model_evals(0, [rows.eval(f"t{i}", i < 50) for i in range(100)]).finish()
    arms = {arm["id"]: arm for arm in compare_runs(home, [base.id, run.id])["arms"]}
    (told,) = arms["arith-sft-1@best"]["in_other_words"]
    assert told.startswith("tool descriptions reworded: 87.0 % -> 4.0 %")
    assert "in_other_words" not in arms["pebble"]


def test_a_model_that_is_better_in_other_words_was_told_badly_and_nothing_else_says_so(
    make_run: Any, rows: Any
):
    home = make_run(kind="evaluate", models=MODELS).run.home
    ref = MODELS[0]["ref"]
    steady = probed(make_run, rows, {"": 50, "system": 52})
    assert not [each for each in run_verdict(steady.run).warnings if "prompt" in each]
    assert reworded_better(home, "arith@abc", ref) == []
    better = probed(make_run, rows, {"": 20, "system": 70})
    (warning,) = [each for each in run_verdict(better.run).warnings if "prompt alone" in each]
    assert "another system message: 20.0 % -> 70.0 %" in warning
    env_id = better.run.read_config().env_id
    assert reworded_better(home, env_id, ref) == []  # it is still asking
    better.finish()
    assert reworded_better(home, env_id, ref) == [warning]
    assert reworded_better(home, env_id, "pebble") == []
    told = diagnose(home, better.run.id)
    assert warning in told["warnings"]

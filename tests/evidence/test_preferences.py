"""DPO on pairs of a model's own answers makes it right more often on held-out tasks: a language
model from the package index, with the settings that are chosen by themselves (make evidence; five
minutes on one core)."""

import json

import pytest

from benchmarks import preference
from engine.home.run_dir import Home

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("model", "seed"), [("smollm2", 10)])
def test_pairs_of_its_own_answers_make_a_model_right_more_often(home: Home, model: str, seed: int):
    prepared = preference.prepare(home, model, seed)
    run_id = preference.dpo_run(home, prepared, {"seed": seed})
    preference.compare(home, prepared, [run_id], model)
    line = preference.judged(home, prepared, run_id)
    print(f"\n{model}: {json.dumps(line)}")
    assert line["verdict"] == "better"
    assert line["interval"][0] > 0

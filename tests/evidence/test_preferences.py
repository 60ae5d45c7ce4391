"""DPO on pairs of a model's own answers makes it right more often on held-out tasks: a language
model from the package index and the built-in one, with the settings that are chosen by themselves
(make evidence; 2 and 5 minutes on an idle core)."""

import json

import pytest

from benchmarks import preference
from engine.home.run_dir import Home

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(900)]


@pytest.mark.parametrize("model", sorted(preference.PLANS))
def test_pairs_of_its_own_answers_make_a_model_right_more_often(home: Home, model: str):
    seed = 3  # none of those that the defaults were chosen with
    prepared = preference.prepare(home, model, seed)
    run_id = preference.dpo_run(home, prepared, {"seed": seed})
    preference.compare(home, prepared, [run_id], model)
    line = preference.judged(home, prepared, run_id)
    print(f"\n{model}: {json.dumps(line)}")
    assert line["verdict"] == "better"
    assert line["interval"][0] > 0
    before, after = line["heldout_loss"]
    assert after < before, "the held-out pairs were learnt too"

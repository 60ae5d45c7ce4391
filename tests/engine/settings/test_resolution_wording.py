"""`vary_wording` is a setting of SFT and GRPO, and its rows get room for other words."""

from typing import Any

import pytest
from machines import CPU

from engine.core.errors import UserError
from engine.environments.env_facts import EnvFacts, RowLengths
from engine.models.model_files import ModelFacts
from engine.settings import resolution

MODEL = ModelFacts(
    "Qwen3ForCausalLM", 192, 4, 6, 2, 32, 512, 264, True, 1_628_992, 1024, "bfloat16", 3_257_984
)
ROWS = tuple(RowLengths(20, 28, ((20, 28),)) for _ in range(30))
ENV = EnvFacts("sums@0123456789ab", "single", True, 600, 300, 600, ROWS, paired_rows=600)


def resolve(algorithm: str, **settings: Any) -> Any:
    given = {"teacher": "arith-grpo-7"} if algorithm == "distill" else {}
    return resolution.resolve(algorithm, given | settings, model=MODEL, env=ENV, hardware=CPU)


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_rows_in_other_words_get_room(algorithm: str):
    plain = resolve(algorithm).settings
    varied = resolve(algorithm, vary_wording=0.5).settings
    assert (plain.vary_wording, varied.vary_wording) == (0, 0.5)
    assert varied.max_length == plain.max_length + 192


@pytest.mark.parametrize(("algorithm", "hint"), [("dpo", "in the rows"), ("distill", "teacher")])
def test_other_words_are_for_sft_and_grpo(algorithm: str, hint: str):
    with pytest.raises(UserError) as caught:
        resolve(algorithm, vary_wording=0.5)
    assert caught.value.code == "SETTING_NOT_APPLICABLE" and hint in str(caught.value.hint)

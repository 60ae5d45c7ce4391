"""Every name that readers ask for is a setting of some kind of run."""

from dataclasses import fields

from run_configs import evaluation_settings, grpo_settings, sft_settings

from engine.records.known_settings import KnownSettings
from engine.records.settings import EvaluationSettings, GRPOSettings, SFTSettings


def test_each_name_is_a_setting_of_some_kind_of_run():
    kinds = (SFTSettings, GRPOSettings, EvaluationSettings)
    settings = {name for kind in kinds for name in kind.model_fields}
    assert {field.name for field in fields(KnownSettings)} - settings == {"rows"}


def test_a_setting_that_a_kind_of_run_has_not_is_none():
    trained = KnownSettings.of(sft_settings(learning_rate=2e-4))
    assert (trained.learning_rate, trained.temperature, trained.group_size) == (2e-4, None, None)
    sampled = KnownSettings.of(grpo_settings(temperature=0.7))
    assert (sampled.temperature, sampled.batch_size) == (0.7, None)
    asked = KnownSettings.of(evaluation_settings(max_tokens=9))
    assert (asked.max_tokens, asked.learning_rate) == (9, None)


def test_values_by_name_and_no_values_are_read_too():
    assert KnownSettings.of({"max_tokens": 9, "unheard_of": 1}) == KnownSettings(max_tokens=9)
    assert KnownSettings.of(None) == KnownSettings()

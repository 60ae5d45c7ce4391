"""A run above its cap is refused with the call that fits, and one above the home's hours too."""

import pytest
from machines import CPU

from engine.core.errors import UserError
from engine.cost import estimate
from engine.environments.env_facts import EnvFacts, RowLengths
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.models.model_files import ModelFacts
from engine.records.estimate import Estimate
from engine.records.settings import GivenSettings
from engine.settings import resolution

SMALL = ModelFacts(
    "Qwen3ForCausalLM", 192, 4, 6, 2, 32, 512, 264, True, 1_628_992, 1024, "float32", 6_515_968
)
ENV = EnvFacts("sums@1", "single", True, 2000, 400, 2000, (RowLengths(60, 90, ((60, 90),)),) * 40)


def figures(home: Home, given: GivenSettings) -> Estimate:
    resolved = resolution.resolve("sft", given, model=SMALL, env=ENV, hardware=CPU)
    return estimate.estimate(home, resolved, SMALL, ENV, CPU).estimate


def test_a_run_above_its_cap_is_offered_the_steps_that_fit(home: Home):
    """The cap is what the caller said; more hours are named and not offered as the call."""
    given: GivenSettings = {"epochs": 20, "eval_rows": 20}
    whole = figures(home, given)
    cap = whole.gpu_hours.likely / 2
    call = {"env_id": "sums", "model": "pebble", "algorithm": "sft", "settings": given}
    with Store(home) as store:
        with pytest.raises(UserError) as caught:
            estimate.check_budget(home, store, whole, cap, call)
        assert caught.value.code == "BUDGET"
        offered = caught.value.advice.call.arguments
        assert "max_gpu_hours" not in offered and offered["env_id"] == "sums"
        settings = offered["settings"]
        assert settings.keys() == {"steps", "eval_rows"} and settings["steps"] < whole.steps
        assert f"steps = {settings['steps']} instead of {whole.steps}" in caught.value.hint
        assert "max_gpu_hours = " in caught.value.hint
        estimate.check_budget(home, store, figures(home, settings), cap, offered)


def test_a_cap_far_below_a_run_is_answered_with_the_cap_that_would_do(home: Home):
    """A handful of steps would not be the run that was asked for."""
    whole = figures(home, {"epochs": 3})
    call = {"env_id": "sums", "model": "pebble", "algorithm": "sft", "settings": {"epochs": 3}}
    with Store(home) as store:
        with pytest.raises(UserError) as caught:
            estimate.check_budget(home, store, whole, 1e-6, call)
        offered = caught.value.advice.call.arguments
        assert offered["settings"] == {"epochs": 3}
        enough = offered["max_gpu_hours"]
        assert f"Raise max_gpu_hours to {enough:g}" in caught.value.hint
        assert estimate.check_budget(home, store, whole, enough, call) == []
        between = (whole.gpu_hours.likely + whole.gpu_hours.high) / 2
        assert "stopped at" in estimate.check_budget(home, store, whole, between, call)[0]


def test_a_run_above_what_the_home_has_left_is_refused(home: Home):
    home.config_file.write_text("max_gpu_hours_total = 0.000001\n")
    with Store(home) as store, pytest.raises(UserError) as caught:
        estimate.check_budget(home, store, figures(home, {}), 2.0, {})
    assert caught.value.code == "BUDGET" and "max_gpu_hours_total" in caught.value.hint


def test_a_run_whose_time_goes_into_its_exams_is_not_offered_fewer_steps(home: Home):
    whole = figures(home, {"steps": 50})
    exams_alone = replace_seconds(whole, {"startup": 1.0, "evaluation": 5000.0, "training": 1.0})
    with Store(home) as store, pytest.raises(UserError) as caught:
        cap = exams_alone.gpu_hours.likely / 2
        estimate.check_budget(home, store, exams_alone, cap, {"env_id": "sums"})
    assert "max_gpu_hours" in caught.value.advice.call.arguments


def replace_seconds(whole: Estimate, seconds: dict[str, float]) -> Estimate:
    """The estimate with other seconds of its phases."""
    return whole.model_copy(update={"seconds": seconds})

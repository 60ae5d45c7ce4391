"""How much SFT trains when nobody says: enough updates, whatever the rows and the model."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from machines import CPU

from engine.environments.env_facts import EnvFacts, RowLengths
from engine.models.model_files import ModelFacts
from engine.records.settings import SFTSettings
from engine.settings import resolution

MODEL = ModelFacts(
    "Qwen3ForCausalLM", 192, 4, 6, 2, 32, 512, 264, True, 1_628_992, 1024, "bfloat16", 3_257_984
)
ROWS = tuple(RowLengths(20, 28, ((20, 28),)) for _ in range(30))
ENV = EnvFacts("sums@0123456789ab", "single", True, 600, 300, 600, ROWS)


def settings_for(env: EnvFacts, model: ModelFacts = MODEL) -> SFTSettings:
    settings = resolution.resolve("sft", {}, model=model, env=env, hardware=CPU).settings
    assert isinstance(settings, SFTSettings)
    return settings


@given(st.integers(1, 200_000), st.sampled_from([1_628_992, 135_000_000, 8_000_000_000]))
def test_sft_makes_enough_updates_whatever_the_number_of_rows(rows: int, params: int):
    env = replace(ENV, train_rows=rows, answered_rows=rows)
    settings = settings_for(env, replace(MODEL, params=params))
    enough = {1_628_992: 450, 135_000_000: 111, 8_000_000_000: 60}[params]
    assert settings.epochs is not None and 3 <= settings.epochs <= 20
    assert settings.steps >= enough or settings.epochs == 20
    assert settings.batch_size <= max(1, min(32, rows // 8))
    # No more is spent than what makes the updates, or three passes.
    one_pass_less = settings.steps * (settings.epochs - 1) / settings.epochs
    assert settings.epochs == 3 or one_pass_less < enough


def test_sft_without_heldout_tasks_has_nothing_to_stop_by():
    assert settings_for(replace(ENV, heldout_rows=0)).stop_early == "none"


def test_a_run_that_is_long_enough_to_forget_replays_unless_somebody_chose_otherwise():
    def kept(**given: object) -> tuple[float, str]:
        resolved = resolution.resolve("sft", given, model=MODEL, env=ENV, hardware=CPU)
        assert isinstance(resolved.settings, SFTSettings)
        return resolved.settings.keep, resolved.sources["keep"]

    assert kept(steps=10) == (0, "recipe")
    assert kept(steps=11) == (0.35, "recipe")
    assert kept(steps=300, keep=0) == (0, "user")
    assert kept(steps=10, keep=0.5) == (0.5, "user")
    # Who names an environment to replay means it to be.
    assert kept(steps=10, keep_env="sums") == (0.35, "recipe")

"""The names of a group mean that group of the model; any other name must be one of the model's."""

from dataclasses import replace

import pytest

from engine.core.errors import UserError
from engine.models.families import LayerFacts, Projection
from engine.models.model_files import ModelFacts
from engine.settings import resolution
from engine.settings.lora_targets import with_own_targets

DENSE = ModelFacts("LlamaForCausalLM", 8, 2, 2, 1, 4, 16, 32, True, 0, 4096, "float32", 0)


def model_with(*names: str) -> ModelFacts:
    projections = tuple(Projection(name, ((8, 8), (8, 8))) for name in names)
    return replace(DENSE, inside=LayerFacts(projections, 0, 0, 2, 2))


PHI = model_with("o_proj", "down_proj", "qkv_proj", "gate_up_proj")
MIXTURE = model_with("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("model", "asked", "own"),
    [
        (DENSE, "mlp", ["gate_proj", "up_proj", "down_proj"]),
        (DENSE, ["v_proj", "q_proj"], ["v_proj", "q_proj"]),
        (PHI, "all-linear", ["o_proj", "down_proj", "qkv_proj", "gate_up_proj"]),
        (PHI, "attention", ["o_proj", "qkv_proj"]),
        (PHI, "mlp", ["down_proj", "gate_up_proj"]),
        (PHI, ["qkv_proj"], ["qkv_proj"]),
        (MIXTURE, "all-linear", ["q_proj", "k_proj", "v_proj", "o_proj"]),
    ],
)
def test_targets_are_the_models_own(model: ModelFacts, asked: object, own: list[str]):
    given = resolution.validate("sft", {"lora_targets": asked})
    assert with_own_targets(given, model)["lora_targets"] == own


def test_without_targets_every_projection_of_the_model_is_adapted():
    for model in (DENSE, PHI, MIXTURE):
        found = resolution.resolve("sft", {}, model=model, env=None, hardware=None)
        assert found.settings.lora_targets == model.targets


@pytest.mark.parametrize(
    ("model", "asked", "missing"),
    [(PHI, ["q_proj", "o_proj"], "q_proj"), (MIXTURE, "mlp", "gate_proj, up_proj, down_proj")],
)
def test_a_name_the_model_lacks_is_refused_with_those_it_has(
    model: ModelFacts, asked: object, missing: str
):
    given = resolution.validate("sft", {"lora_targets": asked})
    with pytest.raises(UserError) as caught:
        with_own_targets(given, model)
    assert f"names {missing}, which" in caught.value.message
    assert ", ".join(model.targets) in caught.value.hint

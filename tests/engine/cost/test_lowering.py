"""What to lower when a run is too large or too slow: what saves most and spoils least."""

from dataclasses import replace
from typing import Any

import pytest
from machines import CPU

from engine.cost import estimate, flops, lowering
from engine.environments.env_facts import EnvFacts, RowLengths
from engine.home.run_dir import Home
from engine.models.model_files import ModelFacts
from engine.settings import resolution

SMALL = ModelFacts(
    "Qwen3ForCausalLM", 192, 4, 6, 2, 32, 512, 264, True, 1_628_992, 1024, "float32", 6_515_968
)


def rows(prompt: int, answer: int) -> tuple[RowLengths, ...]:
    return (RowLengths(prompt, prompt + answer, ((prompt, prompt + answer),)),) * 40


ENV = EnvFacts("sums@0123456789ab", "single", True, 2000, 400, 2000, rows(60, 30))
# Settings that hold the others still.
STILL = {"eval_every": 10, "save_every": 10, "eval_rows": 50, "steps": 40, "max_length": 512}


def resolve(algorithm: str, given: dict[str, Any], env: EnvFacts = ENV) -> resolution.Resolved:
    return resolution.resolve(algorithm, given, model=SMALL, env=env, hardware=CPU)


def figures(home: Home, algorithm: str, given: dict[str, Any]) -> dict[str, Any]:
    resolved = resolve(algorithm, given)
    return estimate.estimate(home, resolved, SMALL, ENV, CPU).estimate.to_json()


def test_lowering_what_is_named_saves_most(home: Home):
    found = figures(home, "grpo", STILL)
    name, _, _, _, value = found["lower_this"].split()
    after = figures(home, "grpo", STILL | {name: int(value)})["hours"]["likely"]
    for other in ("group_size", "prompts_per_step", "lora_rank"):
        halved = STILL | {other: getattr(resolve("grpo", STILL).settings, other) // 2}
        assert after <= figures(home, "grpo", halved)["hours"]["likely"]


def test_where_evaluations_take_most_of_the_time_they_are_to_be_lowered(home: Home):
    asked_often = {
        "steps": 40,
        "eval_every": 5,
        "eval_rows": 400,
        "batch_size": 8,
        "skill_rows": 10,
    }
    assert figures(home, "sft", asked_often)["lower_this"] == "eval_rows from 400 to 200"
    many_skills = {"steps": 20, "eval_every": 20, "eval_rows": 10, "batch_size": 2}
    many_skills |= {"skill_rows": 1000}
    assert figures(home, "sft", many_skills)["lower_this"] == (
        f"skill_rows from 1000 to {flops.PEBBLE_SKILLS.tasks // 2}"
    )
    trained_long = {"steps": 4000, "eval_every": 4000, "eval_rows": 10, "skill_rows": 10}
    assert figures(home, "sft", trained_long)["lower_this"] == "steps from 4000 to 2000"


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_what_is_to_be_lowered_never_cuts_the_rows(home: Home, algorithm: str):
    long = replace(ENV, lengths=rows(300, 30))
    resolved = resolve(algorithm, {"steps": 1}, env=long)
    plan = flops.Plan(resolved.settings, SMALL, long, CPU.device)
    offered = [name for name, _, _ in lowering.candidates(plan)]
    assert offered and "max_length" not in offered
    roomy = resolve(algorithm, {"steps": 1, "max_length": 1024}, env=long)
    plan = flops.Plan(roomy.settings, SMALL, long, CPU.device)
    assert ("max_length", 1024, 512) in lowering.candidates(plan)

"""Pebble is what its card says, and its corpus keeps the examples' held-out prompts out."""

import hashlib
import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import PEBBLE

from engine.worker.evaluation import pebble_skills as skills
from engine.worker.network.policy import load_base
from tools.build_pebble import examples, heldout_keys, make_model, make_tokenizer, measure

pytestmark = [pytest.mark.worker, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def card() -> dict[str, Any]:
    return json.loads((PEBBLE / "card.json").read_text())


def test_it_is_a_small_qwen3_with_the_weights_on_the_card(card: dict[str, Any]) -> None:
    config = json.loads((PEBBLE / "config.json").read_text())
    weights = (PEBBLE / "model.safetensors").read_bytes()
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] in (32, 64)
    assert 1e6 <= card["parameters"] <= 4e6
    assert len(weights) < 8e6
    assert hashlib.sha256(weights).hexdigest() == card["weights_sha256"]


def test_the_recipe_makes_the_model_and_the_tokenizer_on_the_card(card: dict[str, Any]) -> None:
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, card["seed"])
    assert sum(p.numel() for p in model.parameters()) == card["parameters"]
    shipped = json.loads((PEBBLE / "tokenizer.json").read_text())
    assert shipped["model"]["vocab"] == json.loads(tokenizer._tokenizer.to_str())["model"]["vocab"]
    assert tokenizer.chat_template == (PEBBLE / "chat_template.jinja").read_text()


def test_the_card_keeps_out_exactly_what_the_examples_hold_out_today(card: dict[str, Any]) -> None:
    keys = heldout_keys()
    assert len(keys) == card["excluded"] > 1000
    digest = hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()
    assert digest == card["excluded_sha256"]


def test_the_card_shows_every_wording_of_every_skill_as_it_is_taught(card: dict[str, Any]) -> None:
    assert card["examples"] == examples(heldout_keys(), card["seed"] + 2)
    assert list(card["examples"]) == list(card["levels"]) == list(card["scores"])
    (shout,) = [e for e in card["examples"]["upper"] if e["prompt"].startswith("Shout ")]
    assert shout["answer"] == shout["prompt"].removeprefix("Shout ").rstrip(".").upper()
    assert len(card["examples"]["tool_call"]) == len(skills.TOOLS)


def test_no_sample_of_the_corpus_gives_a_heldout_prompt_away() -> None:
    keys = heldout_keys()
    for sample in skills.corpus(random.Random(99), 20_000, keys):
        assert not keys & set(skills.keys_of(sample)), sample


def test_every_digit_is_one_token_and_role_names_are_too() -> None:
    tokenizer = make_tokenizer()
    assert len(tokenizer.encode("0123456789")) == 10
    for role in ("system", "user", "assistant", "tool"):
        assert len(tokenizer.encode(role)) == 1


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_there_are_a_dozen_skills_at_three_levels() -> None:
    assert len(skills.LEVELS) >= 12
    assert set(skills.LEVELS.values()) == {"mastered", "half known", "absent"}
    assert len(skills.STYLES) >= 3


@pytest.mark.parametrize("skill", ["add_one", "add_two", "subtract"])
def test_a_fresh_measurement_agrees_with_the_card(
    card: dict[str, Any], skill: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skills, "LEVELS", {skill: skills.LEVELS[skill]})
    base = load_base(PEBBLE, torch.device("cpu"), "float32")
    score = measure(base, heldout_keys(), per_skill=100, seed=77)[skill]
    assert abs(score - card["scores"][skill]) <= 0.15


def test_levels_show_in_the_measured_scores(card: dict[str, Any]) -> None:
    by_level: dict[str, list[float]] = {}
    for skill, score in card["scores"].items():
        by_level.setdefault(card["levels"][skill], []).append(score)
    assert min(by_level["mastered"]) >= 0.85
    assert max(by_level["absent"]) <= 0.1
    assert any(0.2 <= s <= 0.8 for s in by_level["half known"])


@pytest.mark.parametrize("skill", sorted(skills.LEVELS))
def test_a_right_answer_is_recognised_in_every_style_and_a_wrong_one_in_none(skill: str) -> None:
    if skill in ("tool_call", "guess"):
        pytest.skip("judged by their own rule")
    rng = random.Random(5)
    for _ in range(30):
        sample = skills.draw(rng, skill, (), measured=True)
        for style in skills.STYLES:
            assert skills.is_right(sample, style.format(sample.answer))
            assert not skills.is_right(sample, style.format(sample.answer + "q"))

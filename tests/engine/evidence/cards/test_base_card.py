"""Row 28: what a base model can do, and in which words, stands where a tool reaches it."""

import shutil
from pathlib import Path

import pytest

from engine.core.files import append_line, write_json
from engine.evidence.cards.base_card import base_card, base_models
from engine.home.run_dir import Home
from engine.models.catalog import BUILTIN
from engine.records.model_origin import FILE, ModelOrigin


def write_model(folder: Path) -> None:
    """A model without a card."""
    shutil.copytree(BUILTIN["pebble"], folder, ignore=shutil.ignore_patterns("card.json"))
    ModelOrigin(source="a test", sha256="0" * 64).write(folder / FILE)


def test_the_card_of_pebble_names_each_skill_with_its_share_and_its_words(home):
    text = base_card(home, "pebble")
    assert text.startswith("# pebble\n\nQwen3ForCausalLM, 1,628,992 parameters, 1,024 tokens")
    assert "- **upper**: 199 of 200, mastered" in text, "one error is not rounded away"
    assert "- **subtract**: 0 of 200, absent" in text
    assert "  - `Shout cind.` -> `CIND`" in text
    assert "(with the tool lookup(item): Price of an item.)" in text
    assert len(text) < 6_000


def test_what_was_measured_in_this_home_is_on_the_card(home, make_run, rows):
    exam = make_run("evaluate", kind="evaluate", models=[{"ref": "pebble"}, {"ref": "other"}])
    models = [{"ref": "pebble", "tasks": 60, "success": 0.25}, {"ref": "other", "tasks": 60}]
    write_json(exam.run.result, {"models": models})
    assert "Measured in this home" not in base_card(home, "pebble")
    exam.finish()
    (line,) = [text for text in base_card(home, "pebble").splitlines() if exam.id in text]
    assert line.endswith(f": success 0.25 on 60 tasks ({exam.id})")


@pytest.fixture
def other(home: Home) -> str:
    """A model of the home that has no card."""
    write_model(home.models / "small")
    return "small"


def test_a_model_without_a_card_shows_what_trainings_from_it_asked(home, make_run, other):
    assert other in base_models(home)
    assert "Nothing was asked yet in this home" in base_card(home, other)
    run = make_run("sft", model=other)
    for number in range(4):
        row = {
            "model": run.id,
            "task": f"q{number}",
            "battery": "language",
            "family": "capitals",
            "prompt": [{"role": "user", "content": f"What is the capital of {number}?"}],
            "completion": "Paris.",
            "reward": 1.0,
            "success": number != 3,
        }
        append_line(run.run.kept("before"), row)
    run.finish()
    text = base_card(home, other)
    assert "- **capitals**: 3 of 4" in text
    assert text.count("`What is the capital of") == 2
    assert "  - `What is the capital of 0?` -> `Paris.`" in text


def test_a_path_that_was_made_up_is_no_base_model(home, tmp_path: Path):
    write_model(tmp_path / "elsewhere")
    assert str(tmp_path / "elsewhere") not in base_models(home)

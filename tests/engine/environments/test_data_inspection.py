"""What is in a data file, in tokens of a model."""

import json
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.environments import data_inspection
from engine.environments.env_facts import row_lengths
from engine.environments.indexed import build
from engine.environments.indexed.rows import stored_row
from engine.home.run_dir import Home
from engine.models import catalog, tokens
from envs.base import Task

pytestmark = pytest.mark.timeout(30)
PROMPTS = ["one", "one two three", "one two three four five six"]


def write(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    rows = [{"prompt": prompt, "completion": "x" * (n + 1)} for n, prompt in enumerate(PROMPTS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("large", [False, True])
def test_lengths_are_counted_in_tokens_of_the_model(home, tmp_path, monkeypatch, large: bool):
    if large:
        monkeypatch.setattr(build, "COPIED_BYTES", 10)
    found = data_inspection.inspect(home, write(tmp_path), "pebble").tokens
    tokenizer = tokens.load(catalog.resolve_model(home, "pebble").base_path)
    task = Task("x", PROMPTS[2], "xxx")
    longest = row_lengths(stored_row(task.to_row(), "train"), [], tokenizer)
    assert found is not None and found.model == "pebble"
    assert found.prompt["max"] == longest.prompt > len(PROMPTS[2].split())
    assert (found.total["max"], found.answer["max"]) == (longest.total, longest.answer)


def test_without_a_model_nothing_is_counted(home: Home, tmp_path: Path):
    assert "tokens" not in data_inspection.inspect(home, write(tmp_path)).to_json()


def test_a_dataset_of_the_hub_that_cannot_be_fetched_is_refused_with_what_to_do(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="no file or folder 'openai/gsm8k' here") as caught:
        data_inspection.inspect(home, "openai/gsm8k")
    assert caught.value.code == "DATASET_INVALID"
    assert "Unset HF_HUB_OFFLINE, or use a folder with its files" in str(caught.value.hint)

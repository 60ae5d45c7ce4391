"""One SFT row as it is trained: the text, the loss mask, where it is cut."""

from pathlib import Path
from typing import Any

import pytest
from run_configs import sft_settings

from engine.home.sanitize import Redactor
from engine.models import catalog, tokens
from engine.runs.reading.preview import sft_row

PEBBLE = Path(catalog.__file__).parents[1] / "pebble"


def row(name: str, *turns: str, split: str = "train") -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    return {"id": name, "split": split, "gold": messages, "metadata": {}}


def shown(*rows: dict[str, Any], **settings: Any) -> dict[str, Any]:
    given = {"max_length": 128} | settings
    preview = sft_row(rows, [], PEBBLE, sft_settings(**given), Redactor())
    return preview.to_json() if preview else {}


def test_the_answer_and_its_end_are_trained_and_the_prompt_is_not():
    found = shown(row("a", "What is 2 + 3?", "5"))
    asked, said = found["pieces"]
    assert not asked["trained"] and "What is 2 + 3?" in asked["text"]
    stop = tokens.load(PEBBLE).special["eos_token"]
    assert said == {"text": f"5{stop}", "trained": True, "tokens": 2}
    assert (found["task"], found["trained"], found["tokens"]) == ("a", 2, asked["tokens"] + 2)
    assert "cut_at" not in found


@pytest.mark.parametrize(
    ("loss_on", "trained"), [("assistant", ["4", "6"]), ("last", ["6"]), ("all", ["4", "6", "2"])]
)
def test_loss_on_decides_what_is_trained(loss_on: str, trained: list[str]):
    found = shown(row("a", "2 + 2 =", "4", "3 + 3 =", "6"), loss_on=loss_on)
    text = "".join(piece["text"] for piece in found["pieces"] if piece["trained"])
    assert all(part in text for part in trained)
    assert ("3 + 3" in text) == (loss_on == "all") and ("4" in text) == (loss_on != "last")


def test_a_row_that_is_cut_is_preferred_and_shows_what_is_lost():
    long = row("long", "Count.", " ".join(str(number) for number in range(60)))
    found = shown(row("short", "2 + 2 =", "4"), long, max_length=48)
    assert (found["task"], found["cut_at"], found["tokens"]) == ("long", 48, 48)
    whole = tokens.load(PEBBLE).format().rows(long["gold"])[0]
    assert found["lost"]["tokens"] == len(whole.ids) - 48
    assert found["trained"] == sum(whole.mask()[:48])
    assert "59" in found["lost"]["text"] and "59" not in str(found["pieces"])


def test_rows_that_are_held_out_or_have_no_answer_are_not_shown():
    unanswered = row("b", "2 + 2 =", "4") | {"gold": None}
    assert shown(row("a", "2 + 2 =", "4", split="heldout"), unanswered) == {}


def test_a_long_row_takes_little_room():
    turns = ["Say " + "a" * 400, "b" * 400] * 20
    found = shown(row("a", *turns), max_length=40_000)
    assert len(str(found)) < 3000 and found["tokens"] > 10_000
    assert sum(piece["tokens"] for piece in found["pieces"]) == found["tokens"]

"""The tasks of the second demo's SFT: messages, and the booking in them as JSON."""

import json
from pathlib import Path

import pytest

from envs.json_types import TaskRow

FOLDER = Path(__file__).parents[3] / "envs" / "examples" / "booking_fields"


@pytest.fixture
def process(start):
    return start(FOLDER)


def message(row: TaskRow) -> str:
    return row["prompt"][0]["content"].partition("Message: ")[2]


def gold(row: TaskRow) -> str:
    return row["answer"][0]["content"]


def test_a_thousand_messages_differ_and_no_person_or_appointment_is_in_both_halves(process) -> None:
    rows = process.tasks()
    messages = [message(row) for row in rows]
    assert len(rows) == len(set(messages)) == 1000
    heldout, train = (
        [json.loads(gold(row)) for row in rows if row["split"] == split]
        for split in ("heldout", "train")
    )
    assert len(heldout) == 400
    for keys in (("name",), ("what", "day", "time")):
        seen = {tuple(fields[key] for key in keys) for fields in train}
        assert not seen & {tuple(fields[key] for key in keys) for fields in heldout}, keys


def test_a_quarter_of_the_heldout_messages_use_wordings_that_no_training_row_has(process) -> None:
    rows = process.tasks()
    unseen = [row for row in rows if row["metadata"]["wording"] == "unseen"]
    assert len(unseen) == 100 and {row["split"] for row in unseen} == {"heldout"}


def test_every_field_of_the_answer_can_be_read_in_its_message(process) -> None:
    numbers = "one two three four five six seven eight nine ten".split()
    for row in process.tasks():
        fields, text = json.loads(gold(row)), message(row)
        assert list(fields) == ["name", "what", "day", "time", "people"]
        for key in ("name", "what", "day", "time"):
            assert fields[key].lower() in text.lower(), (key, text)
        people = fields["people"]
        words = text.replace(".", " ").replace(",", " ").replace(";", " ").lower().split()
        assert str(people) in words or numbers[people - 1] in words, text


def test_the_object_alone_is_right_in_any_form_of_json(process) -> None:
    row = process.tasks()[0]
    fields = json.loads(gold(row))
    for reply in (gold(row), f" {gold(row)}\n", json.dumps(fields, indent=2, sort_keys=True)):
        assert process.score(row, reply)["success"], reply


def test_a_wrong_field_a_missing_one_or_words_around_are_not(process) -> None:
    row = process.tasks()[0]
    fields = json.loads(gold(row))
    one_wrong = process.score(row, json.dumps(fields | {"people": fields["people"] + 1}))
    assert (one_wrong["success"], one_wrong["reward"]) == (False, pytest.approx(0.4 * 4 / 5))
    missing = process.score(row, json.dumps({"name": fields["name"]}))
    assert (missing["success"], missing["reward"]) == (False, pytest.approx(0.4 / 5))
    as_text = process.score(row, json.dumps(fields | {"people": str(fields["people"])}))
    assert not as_text["success"], "a number in quotes is no number"
    assert not process.score(row, json.dumps(fields | {"mood": "glad"}))["success"]
    for reply in (f"Here you are: {gold(row)}", f"```json\n{gold(row)}\n```", "", "[]", "null"):
        assert process.score(row, reply)["reward"] == 0.0, reply

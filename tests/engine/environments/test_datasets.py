"""What a data file holds, said without a model."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.environments import datasets
from engine.environments.datasets import spread


def inspect(path: Path) -> dict:
    return datasets.inspect(path).to_json()


def written(folder: Path, rows: list, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return path


def test_shapes_duplicates_lengths_and_splits_are_counted(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [{"prompt": f"p{n}", "completion": "c" * n} for n in range(1, 11)]
    rows += [rows[0], {"prompt": "p1", "completion": "other"}]
    rows += [{"messages": chat, "tools": tools}, {"prompt": "alone"}]
    found = inspect(written(tmp_path, rows))
    assert (found["rows"], found["bad"]) == (14, 0)
    assert found["shapes"] == {"prompt/completion": 12, "messages": 1, "prompt": 1}
    assert found["duplicates"] == {"rows": 1, "prompts": 2}
    assert (found["with_answer"], found["with_tools"]) == (13, 1)
    assert found["lengths"]["answer"] == {"min": 0, "p50": 5, "p95": 9, "max": 10}
    assert found["lengths"]["prompt"]["max"] == 5
    assert sum(found["splits"].values()) == 14 and found["splits"]["heldout"] > 0
    assert found["sample"][0] == {
        "id": "rows-1",
        "prompt": "p1",
        "answer": "c",
        "split": None,
    }
    assert any("1 rows have no answer" in warning for warning in found["warnings"])


def test_bad_rows_are_named_by_line_whatever_is_wrong_with_them(tmp_path: Path):
    good = {"id": "x", "prompt": "p", "answer": "a"}
    rows = [good, "{\n", {"text": "?"}, good, {"messages": []}]
    found = inspect(written(tmp_path, rows))
    assert found["rows"] == 1 and found["bad"] == 4
    assert [row["line"] for row in found["bad_rows"]] == [2, 3, 4, 5]
    assert "also that of line 1" in found["bad_rows"][2]["message"]
    assert "4 that cannot be read" in found["summary"]


def test_at_most_twenty_bad_rows_are_shown(tmp_path: Path):
    found = inspect(written(tmp_path, ["x\n"] * 50))
    assert found["bad"] == 50 and len(found["bad_rows"]) == 20 and found["rows"] == 0


def test_a_split_nobody_knows_is_a_warning(tmp_path: Path):
    found = inspect(written(tmp_path, [{"prompt": "p", "answer": "a", "split": "tset"}]))
    assert "'tset'" in found["warnings"][0]


def test_the_hash_is_that_of_the_contents(tmp_path: Path):
    one = inspect(written(tmp_path, [{"prompt": "p"}], "a.jsonl"))
    same = inspect(written(tmp_path, [{"prompt": "p"}], "b.jsonl"))
    other = inspect(written(tmp_path, [{"prompt": "q"}], "c.jsonl"))
    assert one["hash"] == same["hash"] != other["hash"]


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path):
    with pytest.raises(UserError) as caught:
        inspect(tmp_path / "none.jsonl")
    assert caught.value.code == "DATASET_INVALID"


@given(st.lists(st.integers(0, 1000), max_size=50))
def test_the_spread_is_of_values_in_order(values: list[int]):
    found = spread(values)
    ranks = [found["min"], found["p50"], found["p95"], found["max"]]
    assert ranks == sorted(ranks)
    assert not values or (set(ranks) <= set(values) and ranks[0] == min(values))

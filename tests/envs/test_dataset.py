"""Rows of data files: shapes, formats, and every bad line by its number."""

import json
import sys
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from envs.base import Score
from envs.config.problem import EnvProblem
from envs.dataset import (
    MAX_ROW_BYTES,
    BadRow,
    DatasetEnv,
    read_rows,
    read_tasks,
    split_of,
    splits_of,
)

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


BAD_LINES = {
    b"{": "is no JSON",
    b"[1]": "a row is an object, got list",
    b"null": "got NoneType",
    b'{"prompt": NaN}': "NaN is no JSON number",
    b'{"a": 1, "a": 2}': "the key 'a' occurs twice",
    b'{"prompt": "\xff"}': "is not UTF-8",
    b"[" * 100_000: "nested too deep",
    b'{"n": ' + b"1" * 5000 + b"}": "digits",
    b'{"prompt": "q"} x': "Extra data",
    b'{"prompt": "\0"}': "control character",
}


def test_every_bad_line_is_named_and_the_good_ones_are_kept(tmp_path: Path):
    good = b'{"prompt": "a\xe2\x80\xa8b", "answer": "x"}'  # a line separator is no line end
    lines = [good]
    for bad in BAD_LINES:
        lines += [bad, b"", good]
    data = read_rows(written(tmp_path, "rows.jsonl", b"\n".join(lines)))
    assert len(data.rows) == len(BAD_LINES) + 1
    assert [row.line for row in data.bad] == [2 + 3 * n for n in range(len(BAD_LINES))]
    for row, said in zip(data.bad, BAD_LINES.values(), strict=True):
        assert said in row.message


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path):
    path = written(tmp_path, "r.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert [task.prompt for task in read_tasks(path)] == ["a", "b"]


def test_a_line_that_is_too_long_is_never_held_in_memory_whole(tmp_path: Path):
    long = b'{"prompt": "' + b"x" * (2 * MAX_ROW_BYTES) + b'"}'
    path = written(tmp_path, "r.jsonl", b'{"prompt": "a"}\n' + long + b'\n{"prompt": "b"}\n')
    data = read_rows(path)
    assert data.bad == [BadRow(2, "longer than 16 MB")]
    assert [line for line, _ in data.rows] == [1, 3]


@given(
    st.lists(
        st.fixed_dictionaries({"prompt": st.text(min_size=1), "answer": st.text(min_size=1)}),
        min_size=1,
        max_size=6,
    )
)
def test_json_and_jsonl_hold_the_same_rows(tmp_path_factory, rows: list[dict]):
    folder = tmp_path_factory.mktemp("rows")
    lines = written(folder, "a.jsonl", "\n".join(map(json.dumps, rows)))
    listed = written(folder, "b.json", json.dumps(rows, indent=2))
    first, second = read_rows(lines), read_rows(listed)
    assert [row for _, row in first.rows] == [row for _, row in second.rows] == rows
    assert first.bad == second.bad == []


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ('[\n{"prompt": "a"},\n{"prompt": \n}]', [(4, "is no JSON")]),
        ('[\n{"prompt": "a"}\n{"prompt": "b"}]', [(3, "a comma")]),
        ('[\n{"prompt": "a"},\n3]', [(3, "a row is an object")]),
        ('[{"prompt": "a"}] x', [(1, "text after the list")]),
        ('[\n{"prompt": "a"}', [(2, "a comma or ]")]),
    ],
)
def test_a_bad_place_in_a_json_list_has_its_line(tmp_path: Path, text: str, bad: list):
    data = read_rows(written(tmp_path, "r.json", text))
    assert len(data.rows) == 1
    assert [row.line for row in data.bad] == [line for line, _ in bad]
    assert all(said in row.message for row, (_, said) in zip(data.bad, bad, strict=True))


def test_csv_and_tsv_with_quotes_line_breaks_and_wrong_counts(tmp_path: Path):
    text = 'prompt,answer,split\n"a, b","x\ny",train\nc,z\nd,w,test\n\n'
    data = read_rows(written(tmp_path, "r.csv", text))
    assert [(line, row["prompt"]) for line, row in data.rows] == [(2, "a, b"), (5, "d")]
    assert data.bad == [BadRow(4, "2 cells, but the header has 3")]
    tabs = read_rows(written(tmp_path, "r.tsv", "prompt\tanswer\na\tb\n"))
    assert tabs.rows == [(2, {"prompt": "a", "answer": "b"})]


def test_a_chat_fits_into_a_csv_cell(tmp_path: Path):
    cell = json.dumps([USER, ASSISTANT]).replace('"', '""')
    (task,) = read_tasks(written(tmp_path, "r.csv", f'messages,id\n"{cell}",7\n'))
    assert (task.id, task.answer_text) == ("7", "a")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.txt", b"x", "no data format"),
        ("r.jsonl", None, "No such file"),
        ("r.json", b'{"a": 1}', "not a list of objects"),
        ("r.json", b"\xff", "not UTF-8"),
        ("r.csv", b"a,b\n\xff,1\n", "line 2 is not UTF-8"),
        ("r.csv", b"a,a\n1,2\n", "names a column twice"),
    ],
)
def test_a_file_that_is_no_good_as_a_whole(tmp_path: Path, name: str, content, said: str):
    path = tmp_path / name if content is None else written(tmp_path, name, content)
    with pytest.raises(EnvProblem) as caught:
        read_rows(path)
    assert caught.value.code == "DATASET_INVALID" and said in caught.value.message


def test_parquet_without_pyarrow_says_what_to_do(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvProblem, match="needs pyarrow") as caught:
        read_rows(written(tmp_path, "r.parquet", b"PAR1"))
    assert "install=true" in caught.value.hint and "honesmith[data]" in caught.value.hint


def test_parquet_is_read_where_pyarrow_is(tmp_path: Path):
    rows = [{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    assert [task.answer for task in read_tasks(tmp_path / "r.parquet")] == ["x", None]
    assert [line for line, _ in read_rows(tmp_path / "r.parquet").rows] == [1, 2]


def test_chats_in_parquet_lose_the_keys_that_other_rows_have(tmp_path: Path):
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"messages": [USER, ASSISTANT]},
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    plain, calling = read_tasks(tmp_path / "r.parquet")
    assert plain.answer_messages[0].to_dict() == ASSISTANT
    assert calling.answer_messages[0].tool_calls[0].name == "f"


def test_the_first_twenty_bad_lines_are_told(tmp_path: Path):
    path = written(tmp_path, "r.jsonl", '{"prompt": "a"}\n' + "x\n" * 30)
    with pytest.raises(EnvProblem) as caught:
        read_tasks(path)
    assert "30 of 31 rows" in caught.value.message and "and 10 more" in caught.value.message
    assert "line 21:" in caught.value.message and "line 22:" not in caught.value.message
    assert caught.value.line == 2


def test_ids_are_unique_over_all_files(tmp_path: Path):
    first = written(tmp_path, "a.jsonl", '{"id": "x", "prompt": "a"}\n')
    second = written(tmp_path, "b.jsonl", '\n{"id": "x", "prompt": "b"}\n')
    with pytest.raises(EnvProblem, match=r"line 2: the id 'x' is also that of a\.jsonl:1"):
        read_tasks(first, second)


def test_an_empty_file_is_refused(tmp_path: Path):
    with pytest.raises(EnvProblem, match="no row"):
        read_tasks(written(tmp_path, "r.jsonl", "\n  \n"))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("my_test.csv", "heldout"),
        ("eval-2.json", "heldout"),
        ("validation.jsonl", "heldout"),
        ("rows.jsonl", None),
        ("training-plan.jsonl", None),
    ],
)
def test_the_name_of_a_file_may_say_the_split(name: str, split: str | None):
    assert split_of(Path(name)) == split


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.jsonl"], [None]),
        (["train.jsonl", "more.jsonl"], [None, None]),
        (["train.jsonl", "test.jsonl", "more.jsonl"], ["train", "heldout", None]),
    ],
)
def test_a_training_file_alone_leaves_the_split_to_the_push(names: list[str], splits: list):
    assert splits_of([Path(name) for name in names]) == splits


def test_tools_that_all_rows_share_are_those_of_the_environment(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"messages": [{**USER, "content": str(n)}, ASSISTANT], "tools": tools} for n in "ab"]
    path = written(tmp_path, "r.jsonl", "\n".join(map(json.dumps, rows)))
    assert DatasetEnv(path).tools == tools
    rows[1].pop("tools")
    path = written(tmp_path, "s.jsonl", "\n".join(map(json.dumps, rows)))
    assert list(DatasetEnv(path).tools) == []


def test_the_bad_lines_of_all_files_are_told_at_once(tmp_path: Path):
    table = written(tmp_path, "more.csv", "prompt,completion\na,b\n,c\nd\n")
    lines = written(tmp_path, "rows.jsonl", '{"prompt": "", "completion": "x"}\n[1]\n')
    empty = written(tmp_path, "none.jsonl", "")
    with pytest.raises(EnvProblem) as caught:
        read_tasks(table, lines, empty)
    said = caught.value.message
    assert "more.csv line 3: prompt is empty; more.csv line 4: 1 cells" in said
    assert "rows.jsonl line 1: prompt is empty; rows.jsonl line 2: a row is" in said
    assert "none.jsonl: the file holds no row" in said
    assert (caught.value.file, caught.value.line) == ("more.csv", 3)


def test_a_row_to_learn_from_without_an_answer_is_a_bad_line(tmp_path: Path):
    rows = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "alone"},
        {"messages": [USER]},
        {"prompt": "q", "completion": [USER]},
    ]
    path = written(tmp_path, "r.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(EnvProblem) as caught:
        DatasetEnv(path)
    said = caught.value.message
    assert "3 of 4 rows" in said and "line 2: has no answer to learn from" in said
    assert "line 3: has no answer" in said and "line 4: its answer has no assistant" in said


def test_rows_that_are_scored_need_no_answer(tmp_path: Path):
    class Scored(DatasetEnv):
        def score(self, task, completion):
            return Score(1.0)

    path = written(tmp_path, "r.jsonl", '{"prompt": "alone"}')
    assert [task.prompt for task in Scored(path).tasks()] == ["alone"]


def test_a_line_that_breaks_off_says_where(tmp_path: Path):
    text = '{"prompt": "q", "completion": "a"'
    data = read_rows(written(tmp_path, "r.jsonl", f"{text}\r\n"))
    assert f"(column {len(text) + 1})" in data.bad[0].message


def test_long_faults_are_told_as_far_as_an_answer_holds_them_and_the_rest_is_counted(tmp_path):
    row = {"messages": [{"role": "x" * 100, "content": "y"}]}
    path = written(tmp_path, "r.jsonl", "\n".join([json.dumps(row)] * 30))
    with pytest.raises(EnvProblem) as caught:
        read_tasks(path)
    said = str(caught.value)
    told = said.count("line ")
    assert 1 <= told < 20 and said.endswith(f"; and {30 - told} more") and len(said) < 2000

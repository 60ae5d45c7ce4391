"""Data too large to copy: pushed by hash and index, read where they lie."""

import json
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.environments import data_inspection, datasets
from engine.environments.indexed import build
from engine.environments.indexed.rows import IndexedRows
from engine.environments.push import push_env
from engine.environments.registry import find_env, read_tasks
from engine.home.run_dir import Home

pytestmark = pytest.mark.timeout(30)


def write(folder: Path, rows: list[dict]) -> Path:
    (folder / "datasets").mkdir(parents=True, exist_ok=True)
    file = folder / "datasets" / "train.jsonl"
    file.write_text("\n" + "".join(json.dumps(row) + "\n" for row in rows))
    return file


ROWS = [{"prompt": f"p{n}", "completion": f"c{n}", "level": n} for n in range(60)]


ALL = list(enumerate(ROWS))


@pytest.fixture
def all_is_large(monkeypatch):
    monkeypatch.setattr(build, "COPIED_BYTES", 10)


def test_the_version_is_the_one_that_a_copy_makes(home: Home, tmp_path: Path, monkeypatch):
    write(tmp_path / "rows", ROWS)
    (tmp_path / "rows" / "README.md").write_text("about")
    small = push_env(home, tmp_path / "rows")
    copied = list(read_tasks(find_env(home, small.env_id)))
    other = Home.locate(tmp_path / "other")
    monkeypatch.setattr(build, "COPIED_BYTES", 10)
    large = push_env(other, tmp_path / "rows")
    assert (large.env_id, large.kind, large.rows) == (small.env_id, small.kind, small.rows)
    record = find_env(other, large.env_id)
    train = read_tasks(record, "train")
    assert isinstance(train, IndexedRows)
    assert list(train) == [row for row in copied if row["split"] == "train"]
    held = [row for row in copied if row["split"] == "heldout"]
    assert read_tasks(record, "heldout") == held
    stored = [file.name for file in record.source.rglob("*") if file.is_file()]
    assert stored == ["README.md"]
    assert any("datasets/train.jsonl (0 MB) stay where they are" in w for w in large.warnings)
    assert push_env(other, tmp_path / "rows").env_id == large.env_id


def test_rows_are_views_until_they_are_read(home: Home, tmp_path: Path, all_is_large):
    write(tmp_path / "rows", ROWS)
    train = read_tasks(find_env(home, push_env(home, tmp_path / "rows").env_id), "train")
    some = train[3:9:2]
    assert isinstance(some, IndexedRows) and len(some) == 3
    assert [row["id"] for row in some] == [train[n]["id"] for n in (3, 5, 7)]
    assert train[-1] == list(train)[-1]
    with pytest.raises(IndexError):
        train[len(train)]


def test_data_that_changed_since_the_push_are_refused(home: Home, tmp_path: Path, all_is_large):
    file = write(tmp_path / "rows", ROWS)
    record = find_env(home, push_env(home, tmp_path / "rows").env_id)
    content = file.read_bytes()
    file.write_bytes(content)  # another time, the same content
    assert len(read_tasks(record, "train")) == 30
    file.write_bytes(content.replace(b"c59", b"d59"))
    with pytest.raises(UserError, match=r"train\.jsonl.* has the SHA-256") as caught:
        read_tasks(record, "train")
    assert caught.value.code == "DATASET_INVALID" and "push the folder again" in caught.value.hint
    file.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        read_tasks(record, "train")
    assert len(read_tasks(record, "heldout")) == 30  # these are stored


def test_bad_lines_are_named_and_nothing_is_stored(home: Home, tmp_path: Path, all_is_large):
    file = write(tmp_path / "rows", ROWS)
    with file.open("a") as more:
        more.write('{"prompt"\n{"prompt": "alone"}\n')
    with pytest.raises(UserError) as caught:
        push_env(home, tmp_path / "rows")
    said = caught.value.message
    assert caught.value.code == "DATASET_INVALID" and said.startswith("2 of 62 rows")
    assert "line 62: is no JSON" in said and "line 63: has no answer to learn from" in said
    assert not any(home.envs.iterdir())


def test_groups_that_would_be_ignored_are_refused_by_line(home: Home, tmp_path: Path, all_is_large):
    write(tmp_path / "rows", [{**row, "group": "a pair"} if at == 4 else row for at, row in ALL])
    with pytest.raises(UserError, match=r"line 6: it names the group 'a pair'") as caught:
        push_env(home, tmp_path / "rows")
    assert caught.value.code == "DATASET_INVALID"


@pytest.mark.parametrize("setting", ["drop_leaks = true", "dev = 0.1"])
def test_a_division_that_large_data_do_not_have_is_refused(
    home: Home, tmp_path: Path, all_is_large, setting: str
):
    write(tmp_path / "rows", ROWS)
    (tmp_path / "rows" / "environment.toml").write_text(f"[split]\n{setting}\n")
    name = setting.partition(" ")[0]
    with pytest.raises(UserError, match=rf"{name} under \[split\] in environment.toml") as caught:
        push_env(home, tmp_path / "rows")
    assert "push fewer rows" in caught.value.hint


def test_large_preferences_are_a_kind_of_their_own(home: Home, tmp_path: Path, all_is_large):
    pairs = [{"prompt": f"p{n}", "chosen": "a", "rejected": "b"} for n in range(60)]
    write(tmp_path / "pairs", pairs)
    assert push_env(home, tmp_path / "pairs").kind == "preference"
    write(tmp_path / "mixed", pairs + ROWS)
    with pytest.raises(UserError, match="60 of 120 rows are preferences"):
        push_env(home, tmp_path / "mixed")


def test_a_report_says_the_same_of_a_file_whichever_way_it_is_read(
    home: Home, tmp_path: Path, all_is_large
):
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [*ROWS, ROWS[0], {"messages": chat, "tools": tools}, {"prompt": "alone"}]
    file = write(tmp_path / "rows", [*rows, {"text": "x"}])
    small, large = datasets.inspect(file), data_inspection.inspect(home, file)
    assert large == small and large.bad == 1 and large.duplicates.rows == 1

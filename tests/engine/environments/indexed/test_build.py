"""A large dataset is read once, by a process that a call need not wait for."""

import json
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.environments.indexed import build
from engine.home.run_dir import Home

pytestmark = pytest.mark.timeout(30)


def line(number: int, **more: object) -> str:
    return json.dumps({"prompt": f"p{number}", "completion": f"c{number}"} | more) + "\n"


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(line(n, id=f"a{n}") for n in range(30)))
    (folder / "b.jsonl").write_text("\n" + "".join(line(n) for n in range(25, 45)))
    return [folder / "a.jsonl", folder / "b.jsonl"]


def test_what_a_reading_finds(home: Home, files: list[Path]):
    indexed = build.read_once(home, files, files[0].parent, wait_s=25)
    facts = indexed.facts
    assert (facts.rows, facts.bad, facts.unanswered, facts.shapes) == (
        50,
        0,
        0,
        {"prompt/completion": 50},
    )
    assert (facts.repeated_rows, facts.repeated_prompts) == (5, 5)
    assert facts.sides["train"] + facts.sides["heldout"] == 50
    assert sum(file.train for file in facts.files) == facts.sides["train"]
    held = [json.loads(row) for row in (indexed.folder / build.HELDOUT_ROWS).open()]
    assert len(held) == facts.sides["heldout"] and {row["split"] for row in held} == {"heldout"}
    assert facts.prompt_chars.max == 3 and facts.sample[0].id == "a0"


def test_a_call_that_may_not_wait_is_told_so_and_a_later_one_has_the_result(home, files):
    with pytest.raises(UserError) as caught:
        build.read_once(home, files, files[0].parent, wait_s=0)
    assert caught.value.code == "DATASET_READING" and caught.value.retryable
    first = build.read_once(home, files, files[0].parent, wait_s=25)
    index = first.folder / "index.json"
    written = index.stat().st_mtime_ns
    assert build.read_once(home, files, files[0].parent, wait_s=0).facts == first.facts
    assert index.stat().st_mtime_ns == written


def test_every_faulty_line_is_named_with_its_file(home: Home, files: list[Path]):
    with files[1].open("a") as file:
        file.write('{"prompt": \n' + line(1, id="a3") + '{"text": "x"}\n' + line(2, split="tset"))
        file.write('{"prompt": "alone"}\n')
    facts = build.read_once(home, files, files[0].parent, wait_s=25).facts
    assert [(fault.file, fault.line) for fault in facts.faults] == [
        ("b.jsonl", 22),
        ("b.jsonl", 23),
        ("b.jsonl", 24),
        ("b.jsonl", 25),
    ]
    assert facts.faults[1].message == "the id 'a3' is also that of a.jsonl:4"
    assert facts.rows == 51 and (facts.bad, facts.unanswered, facts.unanswered_lines[0].line) == (
        4,
        1,
        26,
    )


def test_a_reading_that_dies_is_told_and_begun_anew(home: Home, files: list[Path], monkeypatch):
    monkeypatch.setattr(build, "spawn_detached", _dies)
    with pytest.raises(UserError, match="out of memory") as caught:
        build.read_once(home, files, files[0].parent, wait_s=5)
    assert caught.value.code == "DATASET_INVALID" and caught.value.retryable
    monkeypatch.undo()
    assert build.read_once(home, files, files[0].parent, wait_s=25).facts.rows == 50


def _dies(argv: list[str], cwd: Path, log: Path, **_: object) -> int:
    log.write_text("MemoryError: out of memory\n")
    return 0


def test_large_is_what_has_many_bytes_or_many_rows(files: list[Path], monkeypatch):
    folder = files[0].parent
    assert build.large_files(folder) == []
    monkeypatch.setattr(build, "COPIED_BYTES", 100)
    assert build.large_files(folder) == files
    (folder / "c.csv").write_text("prompt,completion\na,b\n")
    with pytest.raises(UserError, match=r"c\.csv lies beside"):
        build.large_files(folder)
    (folder / "c.csv").unlink()
    (folder / "environment.py").write_text("")
    assert build.large_files(folder) == []
    monkeypatch.setattr(build, "COPIED_BYTES", 10**9)
    monkeypatch.setattr(build, "_FEW_BYTES", 1)
    assert not build.is_large(files)
    monkeypatch.setattr(build, "COPIED_ROWS", 40)
    assert build.is_large(files)

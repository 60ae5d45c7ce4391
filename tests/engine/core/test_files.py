"""Files that survive kills, full disks and second writers."""

import contextlib
import errno
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.files import (
    Appender,
    append_line,
    is_locked,
    last_line,
    read_json,
    read_lines,
    read_object,
    read_tail,
    take_lock,
    write_json,
)

ROWS = [{"step": n, "text": "grün\u2028" * (n % 3), "loss": n / 7} for n in range(12)]


def all_rows(path: Path, max_bytes: int = 64) -> list[dict]:
    found, cursor = [], 0
    while True:
        rows, after = read_lines(path, cursor, max_bytes)
        found += rows
        if after == cursor:
            return found
        cursor = after


def test_what_is_appended_is_read_back_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Appender(path) as appender:
        for row in ROWS:
            appender.append(row)
    assert all_rows(path) == ROWS
    assert last_line(path) == ROWS[-1]


def test_a_file_cut_at_any_byte_gives_its_whole_lines_and_takes_new_ones(tmp_path):
    whole = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in ROWS)
    path = tmp_path / "metrics.jsonl"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = whole[:cut].count(b"\n")
        rows, cursor = read_lines(path)
        assert rows == ROWS[:complete]
        append_line(path, {"step": "after"})
        assert read_lines(path, cursor)[0] == [{"step": "after"}]
        assert all_rows(path) == [*ROWS[:complete], {"step": "after"}]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=30), max_size=3), max_size=20),
    st.integers(1, 80),
)
def test_any_text_comes_back_whatever_the_page_size(tmp_path_factory, rows, size):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    with Appender(path) as appender:
        for row in rows:
            appender.append(row)
    assert all_rows(path, size) == rows


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"loss": math.nan, "deep": [{"x": math.inf}], "fine": 1.5})
    assert read_lines(path)[0] == [{"loss": None, "deep": [{"x": None}], "fine": 1.5}]
    assert b"NaN" not in path.read_bytes()


def test_a_lone_surrogate_is_stored_as_valid_utf8(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    append_line(path, {"text": "half \ud83d of a pair"})
    path.read_bytes().decode("utf-8")
    assert read_lines(path)[0] == [{"text": "half \ud83d of a pair"}]


def test_a_line_that_is_no_object_is_skipped(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a":1}\n\n[1]\nnonsense\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"a":2}\n')
    assert read_lines(path)[0] == [{"a": 1}, {"a": 2}]


def test_a_cursor_inside_a_line_goes_to_the_next_one(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n{"a"')
    assert read_lines(path, 3) == ([{"a": 2}], 16)
    assert read_lines(path, 18) == ([], 18)
    assert read_lines(path, 10_000) == ([], 20)
    assert read_lines(path, -5)[0] == [{"a": 1}, {"a": 2}]


def test_a_missing_file_is_empty(tmp_path):
    assert read_lines(tmp_path / "none", 40) == ([], 0)
    assert last_line(tmp_path / "none") is None
    assert read_tail(tmp_path / "none", 10) == ""


def test_the_last_line_is_found_behind_long_and_torn_ones(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"a":1}\n{"b":"' + b"x" * 300_000 + b'"}\nnoise\n{"torn":')
    found = last_line(path, window=100)
    assert found is not None and set(found) == {"b"}


def test_many_processes_append_to_one_file_without_mixing_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from engine.core.files import Appender\n"
        "with Appender(Path(sys.argv[1])) as a:\n"
        "  for n in range(200): a.append({'who': sys.argv[2], 'n': n, 'pad': 'x' * n})"
    )
    argv = [sys.executable, "-P", "-c", code, str(path)]
    writers = [subprocess.Popen([*argv, str(who)]) for who in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    rows = all_rows(path, 10_000)
    for who in "0123":
        assert [row["n"] for row in rows if row["who"] == who] == list(range(200))


def test_json_is_replaced_whole_and_refuses_nan(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": math.nan})
    assert read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"n": 0})
    stop = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(len(read_json(path)["pad"]) if seen else read_json(path)["n"])

    write_json(path, {"n": 0, "pad": ""})
    reader = threading.Thread(target=read)
    reader.start()
    for n in range(100):
        write_json(path, {"n": n, "pad": "x" * (n * 100)}, fsync=False)
    stop.set()
    reader.join()
    assert seen


def test_damaged_json_is_reported_with_its_path(tmp_path):
    path = tmp_path / "exit.json"
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"exit\.json"):
            read_json(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB, where this user may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_whole_lines_and_works_again_after_cleaning(small_disk):
    path, filler = small_disk / "metrics.jsonl", small_disk / "filler"
    filler.write_bytes(b"x" * 40_000)
    with Appender(path) as appender:
        written = 0
        with pytest.raises(OSError) as caught:
            while True:
                appender.append({"n": written, "pad": "y" * 1000})
                written += 1
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(path)
        assert [row["n"] for row in all_rows(path)] == list(range(written))
        filler.unlink()
        appender.append({"n": written})
    assert [row["n"] for row in all_rows(path)] == list(range(written + 1))


def test_a_full_disk_keeps_the_old_json(small_disk):
    path = small_disk / "state.json"
    write_json(path, {"good": True})
    with contextlib.suppress(OSError):
        (small_disk / "filler").write_bytes(b"x" * 70_000)
    with pytest.raises(OSError) as caught:
        write_json(path, {"pad": "z" * 50_000})
    assert caught.value.filename is not None
    assert read_json(path) == {"good": True}
    assert sorted(os.listdir(small_disk)) == ["filler", "state.json"]


def test_a_lock_is_held_by_one_and_freed_with_its_last_holder(tmp_path):
    path = tmp_path / "worker.lock"
    assert not is_locked(path)
    lock = take_lock(path)
    assert lock is not None and is_locked(path) and take_lock(path) is None
    holder = subprocess.Popen(["sleep", "30"], pass_fds=(lock,))
    os.close(lock)
    assert is_locked(path)
    holder.kill()
    holder.wait()
    assert not is_locked(path)


def test_asking_whether_a_lock_is_held_does_not_look_like_holding_it(tmp_path):
    path = tmp_path / "worker.lock"
    path.touch()
    seen: list[bool] = []
    askers = [
        threading.Thread(target=lambda: seen.extend(is_locked(path) for _ in range(500)))
        for _ in range(4)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(seen) == 2000 and not any(seen)


@pytest.mark.parametrize("text", [None, "", "[1]", "3", "{", "\xff", "[" * 100_000])
def test_what_is_no_object_reads_as_an_empty_one(tmp_path: Path, text: str | None):
    path = tmp_path / "facts.json"
    if text is not None:
        path.write_text(text, "latin-1")
    assert read_object(path) == {}
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}


@pytest.mark.parametrize("read", [read_json, read_lines, last_line, lambda p: read_tail(p, 9)])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, read):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe or a device"):
        read(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        read(tmp_path)

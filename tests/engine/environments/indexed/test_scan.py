"""Parts of a large file: the same rows, lines and offsets as the file as a whole."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from engine.environments.indexed import scan
from envs.dataset import read_rows

LINES = st.lists(
    st.sampled_from(
        [
            b'{"prompt": "a", "completion": "x"}',
            '{"prompt": "ä\u2028", "completion": "é", "split": "test"}'.encode(),
            b"",
            b"{",
            b"\xff",
            b'{"messages": []}',
            b'{"prompt": "q", "completion": "c", "split": "tset"}',
        ]
    ),
    max_size=12,
)


def facts_in(path: Path, part_bytes: int) -> list[scan.PartFacts]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "PART_BYTES", part_bytes)
        patch.setattr(scan, "_BLOCK", 16)
        parts, _ = scan.parts_of(path, path.name, None)
    return [scan.scan(part) for part in parts]


@examples(deadline=None)
@given(LINES, st.sampled_from([b"\n", b"\r\n"]), st.integers(1, 200))
def test_a_file_in_parts_holds_what_it_holds_as_a_whole(tmp_path_factory, lines, end, size):
    path = tmp_path_factory.mktemp("parts") / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + end.join(lines))
    (whole, *more), parts = facts_in(path, 10**9) or [scan.PartFacts()], facts_in(path, size)
    assert not more
    for name in ("offsets", "lines", "prompts", "rows", "ids", "sides"):
        assert [v for part in parts for v in getattr(part, name)] == list(getattr(whole, name))
    assert [f for part in parts for f in part.faults] == whole.faults
    bad_lines = {row.line for row in read_rows(path).bad}
    assert bad_lines <= {fault.line for fault in whole.faults}
    descriptor = os.open(path, os.O_RDONLY)
    for offset in whole.offsets:
        content = scan.read_line(descriptor, offset)
        assert json.loads(content.decode("utf-8-sig"))["completion"] in ("x", "é")
    os.close(descriptor)


def test_the_hash_is_that_of_the_content(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"abc")
    _, digest = scan.parts_of(path, "rows.jsonl", None)
    assert digest.startswith("ba7816bf8f01cfea")  # of "abc", from FIPS 180


def test_a_long_line_is_read_as_a_whole(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"first\n" + b"x" * 3_000_000 + b"\r\nlast")
    descriptor = os.open(path, os.O_RDONLY)
    assert scan.read_line(descriptor, 6) == b"x" * 3_000_000
    assert scan.read_line(descriptor, 3_000_008) == b"last"
    os.close(descriptor)

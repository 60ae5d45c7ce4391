"""Environments that come as files: what is written, and what is refused before it is."""

import io
import stat
import zipfile
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.environments.indexed import build
from engine.home.run_dir import Home
from mcp_server.api import uploads, verbs
from mcp_server.api.uploads import unpack, write_files


def zipped(*entries: tuple[str | zipfile.ZipInfo, str]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in entries:
            archive.writestr(name, text)
    return packed.getvalue()


def entry(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def files_below(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


GOOD = {"environment.py": "x = 1\n", "datasets/train.jsonl": "{}\n", ".gitignore": "*"}


def test_texts_and_a_zip_become_the_same_files(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_files(tmp_path / "a", GOOD)
    unpack(tmp_path / "b", zipped(("datasets/", ""), *GOOD.items()))
    assert files_below(tmp_path / "a") == files_below(tmp_path / "b") == GOOD


HOSTILE = (
    "/etc/passwd",
    "../up.py",
    "a/../../up.py",
    "./a",
    "a//b",
    "",
    "a\\b",
    "C:/a",
    "a\x00b",
    "a\nb",
    "x" * 251,
    "/".join("d" * 40),
)


def test_data_that_a_version_would_read_where_they_lie_are_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(build, "COPIED_BYTES", 100)
    rows = '{"prompt": "1?", "answer": "1"}\n' * 20
    with pytest.raises(UserError, match="too large to copy") as refusal:
        verbs.push_env(home, name="booking", files={"train.jsonl": rows})
    assert refusal.value.code == "ENV_LIMITS"


@pytest.mark.parametrize("path", HOSTILE)
def test_a_path_that_leads_elsewhere_is_refused(tmp_path: Path, path: str):
    with pytest.raises(UserError) as refusal:
        write_files(tmp_path, {path: "x"})
    assert refusal.value.code == "BAD_ARGUMENT" and refusal.value.field == "files"
    assert list(tmp_path.parent.glob("*.py")) == [] and files_below(tmp_path) == {}


@pytest.mark.parametrize("path", [path for path in HOSTILE if "\x00" not in path and path])
def test_a_path_in_a_zip_is_held_to_the_same(tmp_path: Path, path: str):
    with pytest.raises(UserError) as refusal:
        unpack(tmp_path, zipped((path, "x")))
    assert refusal.value.code == "BAD_ARGUMENT"
    assert files_below(tmp_path) == {}


@pytest.mark.parametrize(
    "kind", [stat.S_IFLNK | 0o777, stat.S_IFIFO | 0o644, stat.S_IFCHR | 0o644, stat.S_IFSOCK]
)
def test_links_and_devices_are_refused(tmp_path: Path, kind: int):
    with pytest.raises(UserError, match="link or a device"):
        unpack(tmp_path, zipped((entry("environment.py", kind), "/etc/passwd")))


def test_a_name_twice_or_as_file_and_folder_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="twice"):
        write_files(tmp_path, {"a.py": "1", "A.py": "2"})
    with pytest.raises(UserError, match="a file and a folder"):
        write_files(tmp_path, {"b": "1", "b/c": "2"})


def test_more_than_a_push_may_hold_is_refused_while_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(uploads, "MAX_BYTES", 1 << 20)
    bomb = zipped(("environment.py", "0" * (4 << 20)))
    assert len(bomb) < 10_000
    with pytest.raises(UserError) as refusal:
        unpack(tmp_path, bomb)
    assert refusal.value.code == "ENV_LIMITS"
    monkeypatch.setattr(uploads, "MAX_FILES", 3)
    with pytest.raises(UserError, match="4 files"):
        write_files(tmp_path, {f"{number}": "" for number in range(4)})


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_what_would_be_unpacked_whole_in_memory_is_refused(tmp_path: Path, method: int):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        archive.writestr("environment.py", "0" * (1 << 20))
    with pytest.raises(UserError, match="another method than deflate"):
        unpack(tmp_path, packed.getvalue())
    assert files_below(tmp_path) == {}


def test_damaged_content_of_a_zip_is_a_fault_of_the_caller(tmp_path: Path):
    packed = bytearray(zipped(("a", "words " * 50)))
    packed[31:41] = b"\xff" * 10  # behind the header of 30 bytes and the name
    with pytest.raises(UserError, match="no zip file"):
        unpack(tmp_path, bytes(packed))


def test_a_zip_of_many_entries_is_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(uploads, "MAX_FILES", 3)
    many = zipped(*((f"{number}/a", "") for number in range(13)))
    monkeypatch.setattr(uploads.zipfile, "ZipFile", lambda *_: pytest.fail("it is read"))
    with pytest.raises(UserError, match="13 entries"):
        unpack(tmp_path, many)


@pytest.mark.parametrize(
    "packed",
    [b"", b"PK\x03\x04 no zip", zipped(("a", "b"))[:-8]],
    ids=["nothing", "no zip", "cut off"],  # without: bytes with the time of day in them
)
def test_what_is_no_zip_is_refused(tmp_path: Path, packed: bytes):
    with pytest.raises(UserError, match="no zip file"):
        unpack(tmp_path, packed)


def test_a_content_that_is_no_text_and_no_file_at_all_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no text but int"):
        write_files(tmp_path, {"a.py": 3})
    with pytest.raises(UserError, match="there is no file"):
        write_files(tmp_path, {})


def test_files_need_a_name_and_no_path(home):
    for name, path in (("", ""), ("a", "b")):
        with pytest.raises(UserError) as refusal:
            verbs.push_env(home, path, name, files=GOOD)
        assert refusal.value.code == "BAD_ARGUMENT"

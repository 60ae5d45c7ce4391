"""The far side, called as a connection calls it."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from engine.executors import far_side
from engine.executors.far_side import FarSide, Refused, read_frame, write_frame


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FarSide:
    monkeypatch.setenv("HOME", str(tmp_path))
    side = FarSide()
    assert side.hello(".honesmith-host")["root"] == str(tmp_path / ".honesmith-host")
    return side


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_frame_comes_as_it_went():
    stream = io.BytesIO()
    write_frame(stream, {"op": "read", "n": 3}, b"\0body\n")
    stream.seek(0)
    header, body = read_frame(stream)
    assert (header["op"], header["n"], body) == ("read", 3, b"\0body\n")
    with pytest.raises(EOFError):
        read_frame(stream)


@pytest.mark.parametrize(
    "data",
    [
        (far_side.MOST_HEADER + 1).to_bytes(4, "big"),
        b"\0\0\0\2[]",
        b'\0\0\0\x0c{"body": -1}',
        b'\0\0\0\x15{"body": 99999999999}',
        b"\0\0\0\1x",
    ],
)
def test_what_is_no_frame_is_refused_before_it_is_read(data: bytes):
    with pytest.raises(ValueError):
        read_frame(io.BytesIO(data))


def test_a_file_comes_in_parts_and_goes_on_where_it_was_cut(far: FarSide):
    data = b"0123456789"
    digest = sha(data)
    assert far.missing({digest: 10}) == {"absent": {digest: 0}}
    far.put(digest, 0, 10, data[:4])
    assert far.missing({digest: 10}) == {"absent": {digest: 4}}
    far.put(digest, 4, 10, data[4:])
    assert far.missing({digest: 10}) == {"absent": {}}
    far.place("models/m", {"config.json": digest, "sub/weights": digest})
    assert Path(far.root, "models/m/sub/weights").read_bytes() == data
    assert far.exist(["models/m", "models/n"]) == {"there": [True, False]}


def test_a_file_that_two_connections_send_at_once_arrives_whole(far: FarSide):
    data = bytes(range(256)) * 40
    digest, size, half = hashlib.sha256(data).hexdigest(), len(data), len(data) // 2
    far.put(digest, 0, size, data[:half])
    far.put(digest, 0, size, data[:half])  # of the other one, which began when nothing was there
    far.put(digest, half, size, data[half:])
    assert Path(far.root, "blobs", digest).read_bytes() == data
    far.put(digest, half, size, data[half:])  # it is there by now
    assert far.missing({digest: size}) == {"absent": {}}
    assert [path.name for path in Path(far.root, "blobs").iterdir()] == [digest]
    other = hashlib.sha256(b"abc").hexdigest()
    Path(far.root, "blobs", f"{other}.part").write_bytes(b"abc")  # whole, and nobody moved it
    assert far.missing({other: 3}) == {"absent": {other: 3}}
    far.put(other, 3, 3)
    assert Path(far.root, "blobs", other).read_bytes() == b"abc"


def test_a_file_with_other_bytes_than_its_hash_is_not_kept(far: FarSide):
    digest = sha(b"right")
    with pytest.raises(Refused):
        far.put(digest, 0, 5, b"wrong")
    assert far.missing({digest: 5}) == {"absent": {digest: 0}}


def test_files_of_a_run_are_copies_of_their_own(far: FarSide):
    far.put(sha(b"x"), 0, 1, b"x")
    far.place("homes/h/runs/r", {"metrics.jsonl": sha(b"x")}, own=True)
    Path(far.root, "homes/h/runs/r/metrics.jsonl").write_text("changed")
    assert Path(far.root, "blobs", sha(b"x")).read_text() == "x"


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "", "."])
def test_nothing_outside_its_folder_is_named(far: FarSide, path: str):
    with pytest.raises(Refused):
        far.read(path, 0, 1)
    with pytest.raises(Refused):
        far.write(path, b"x")


def test_a_link_is_not_read(far: FarSide):
    Path(far.root, "link").symlink_to("/etc/hostname")
    with pytest.raises(OSError):
        far.read("link", 0, 10)


@pytest.mark.parametrize("kind", ["link", "outside"])
def test_an_archive_with_a_link_or_a_way_out_is_refused(far: FarSide, kind: str):
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            member = tarfile.TarInfo("x" if kind == "link" else "../../x")
            if kind == "link":
                member.type, member.linkname = tarfile.SYMTYPE, "/etc"
            archive.addfile(member, io.BytesIO())
        data = file.getvalue()
    far.put(sha(data), 0, len(data), data)
    with pytest.raises(Refused):
        far.unpack("source/s", sha(data))
    assert not Path(far.root, "source/s").exists()


def test_a_job_gets_no_variable_but_those_on_the_list(monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "SSH_AUTH_SOCK", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LC_ALL", "C")
    names = set(far_side.job_environment())
    assert {"PATH", "LC_ALL"} <= names
    assert not {"AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "SSH_AUTH_SOCK", "HF_TOKEN"} & names


def test_an_unknown_operation_is_answered_and_the_connection_goes_on(tmp_path: Path):
    requests, answers = io.BytesIO(), io.BytesIO()
    write_frame(requests, {"op": "__init__"})
    write_frame(requests, {"op": "read", "path": "x", "offset": 0, "length": 1})
    requests.seek(0)
    far_side.serve(requests, answers)
    answers.seek(0)
    assert answers.read(1 + len(far_side.MAGIC)) == b"\n" + far_side.MAGIC
    first, second = read_frame(answers)[0], read_frame(answers)[0]
    assert (first["ok"], first["error"]) == (False, "Refused")
    assert second["ok"] is False

"""What a push reads: regular files inside the roots, within the limits, and nothing else."""

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.environments import snapshot
from engine.environments.snapshot import resolve_inside, take


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "environment.py").write_text("x = 1\n")
    return folder


def refusal(code: str, call) -> UserError:
    with pytest.raises(UserError) as caught:
        call()
    assert caught.value.code == code, caught.value.message
    return caught.value


def test_files_are_copied_and_what_is_left_out_is_listed(source: Path, tmp_path: Path):
    for name in ("data/rows.jsonl", "pkg/deep/mod.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    for name in (".git/config", "__pycache__/x.pyc", ".env", "mod.pyc", "my/pyvenv.cfg", "my/a.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("secret")
    shot = take(source, tmp_path / "copy")
    assert shot.files == ["data/rows.jsonl", "environment.py", "pkg/deep/mod.py"]
    assert (tmp_path / "copy/pkg/deep/mod.py").read_text() == "pkg/deep/mod.py"
    assert sorted(shot.left_out) == [
        ".env (hidden)",
        ".git/ (hidden)",
        "__pycache__/ (a cache)",
        "mod.pyc (compiled)",
        "my/ (a virtual environment)",
    ]
    copied = [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert len(copied) == 3


def test_the_digest_follows_names_and_contents_and_nothing_else(source: Path, tmp_path: Path):
    first = take(source, tmp_path / "1").digest
    os.utime(source / "environment.py", (1, 1))
    (source / "environment.py").chmod(0o755)
    (source / ".hidden").write_text("x")
    (source / "empty").mkdir()
    assert take(source, tmp_path / "2").digest == first
    (source / "environment.py").write_text("x = 2\n")
    changed = take(source, tmp_path / "3").digest
    (source / "environment.py").rename(source / "other.py")
    assert len({first, changed, take(source, tmp_path / "4").digest}) == 3


@given(
    st.dictionaries(
        st.text(st.sampled_from("ab"), min_size=1, max_size=3), st.binary(max_size=8), max_size=4
    ),
    st.dictionaries(
        st.text(st.sampled_from("ab"), min_size=1, max_size=3), st.binary(max_size=8), max_size=4
    ),
)
def test_different_contents_have_different_digests(tmp_path_factory, one: dict, two: dict):
    digests = []
    for files in (one, two):
        folder = tmp_path_factory.mktemp("source")
        for name, data in files.items():
            (folder / name).write_bytes(data)
        digests.append(take(folder, folder.parent / f"{folder.name}-copy").digest)
    assert (digests[0] == digests[1]) == (one == two)


@pytest.mark.parametrize("kind", ["file link", "folder link", "dangling", "fifo", "socket"])
def test_links_and_devices_are_refused(source: Path, tmp_path: Path, kind: str):
    secret = tmp_path / "secret"
    secret.write_text("token")
    bad = source / "data"
    if kind == "file link":
        bad.symlink_to(secret)
    elif kind == "folder link":
        bad.symlink_to(tmp_path)
    elif kind == "dangling":
        bad.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(bad)
    else:
        os.chdir(source)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("data")
    error = refusal("ENV_INVALID", lambda: take(source, tmp_path / "copy"))
    assert error.message.startswith("data is a")


def test_a_hard_link_is_a_file_like_any_other(source: Path, tmp_path: Path):
    os.link(source / "environment.py", source / "again.py")
    assert take(source, tmp_path / "copy").files == ["again.py", "environment.py"]


def test_too_many_files_are_refused(source: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(snapshot, "MAX_FILES", 3)
    for number in range(3):
        (source / f"{number}.txt").touch()
    error = refusal("ENV_LIMITS", lambda: take(source, tmp_path / "copy"))
    assert "more than 3 files" in error.message


def test_the_limits_are_those_promised():
    assert snapshot.MAX_FILES == 5000
    assert snapshot.MAX_BYTES == 256 * 1024**2 and snapshot.MAX_PACKED == 64 * 1024**2


def test_too_many_bytes_are_refused_also_of_a_file_with_a_hole(source: Path, tmp_path: Path):
    with open(source / "big.bin", "wb") as file:
        file.truncate(snapshot.MAX_BYTES + 1)
    error = refusal("ENV_LIMITS", lambda: take(source, tmp_path / "copy"))
    assert "larger than 256 MB" in error.message and "big.bin" in error.message


def test_what_does_not_pack_is_refused_and_what_does_is_taken(
    source: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(snapshot, "MAX_PACKED", 100_000)
    (source / "zeros.bin").write_bytes(bytes(400_000))
    assert take(source, tmp_path / "1").size > 400_000
    (source / "noise.bin").write_bytes(os.urandom(200_000))
    error = refusal("ENV_LIMITS", lambda: take(source, tmp_path / "2"))
    assert "packed" in error.message


def test_folders_nested_too_deep_are_refused(source: Path, tmp_path: Path):
    deep = source
    for _ in range(40):
        deep = deep / "d"
    deep.mkdir(parents=True)
    refusal("ENV_LIMITS", lambda: take(source, tmp_path / "copy"))


def test_a_name_that_is_no_text_is_left_out(source: Path, tmp_path: Path):
    os.close(os.open(os.fsencode(source) + b"/\xff.txt", os.O_CREAT))
    shot = take(source, tmp_path / "copy")
    assert shot.files == ["environment.py"] and "not UTF-8" in shot.left_out[0]


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    for name in ("root/env", "root-evil/env", "outside/env"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root/file.py").touch()
    (tmp_path / "root/link").symlink_to(tmp_path / "outside")
    return [tmp_path / "root"]


def test_a_folder_inside_a_root_is_found(roots: list[Path]):
    root = roots[0]
    assert resolve_inside(root / "env", roots) == root / "env"
    assert resolve_inside(f"{root}/env/../env/.", roots) == root / "env"
    assert resolve_inside(root, roots) == root


@pytest.mark.parametrize(
    "path",
    [
        "{root}/../outside/env",
        "{root}-evil/env",
        "{root}/link/env",
        "/etc",
        "/",
        "~",
        "env",
        "{root}/env/../../outside",
    ],
)
def test_every_way_out_of_the_roots_is_refused(roots: list[Path], path: str):
    given_path = path.format(root=roots[0])
    error = refusal("PATH_OUTSIDE_ROOTS", lambda: resolve_inside(given_path, roots))
    assert "--root" in error.hint and error.field == "path"


def test_without_roots_nothing_is_read(roots: list[Path]):
    refusal("PATH_OUTSIDE_ROOTS", lambda: resolve_inside(roots[0] / "env", []))
    assert resolve_inside(roots[0] / "env", None) == roots[0] / "env"


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000])
def test_what_is_no_path_is_refused(path: str, roots: list[Path]):
    refusal("BAD_ARGUMENT", lambda: resolve_inside(path, roots))


def test_a_file_or_nothing_is_no_folder(roots: list[Path]):
    error = refusal("ENV_INVALID", lambda: resolve_inside(roots[0] / "file.py", roots))
    assert str(roots[0]) in error.hint
    refusal("ENV_INVALID", lambda: resolve_inside(roots[0] / "none", roots))


def test_a_path_longer_than_a_file_system_takes_is_refused(tmp_path: Path):
    error = refusal("ENV_INVALID", lambda: resolve_inside(str(tmp_path / ("x" * 300)), [tmp_path]))
    assert error.hint


def test_a_relative_path_outside_the_roots_is_told_how_to_name_it(roots: list[Path]):
    error = refusal("PATH_OUTSIDE_ROOTS", lambda: resolve_inside("no-such-folder", roots))
    assert "as it stands in one of these folders" in error.hint
    error = refusal("PATH_OUTSIDE_ROOTS", lambda: resolve_inside("/etc", roots))
    assert error.hint.startswith("Start the server with --root")

"""A hash that is remembered is that of the file as it is."""

import os
from pathlib import Path

from engine.home.hashes import file_hashes, fingerprint, sha256, then_and_now
from engine.home.run_dir import Home


def test_a_file_put_in_the_place_of_another_is_hashed_again_whatever_its_size_and_time(
    home: Home, tmp_path: Path
):
    file, other = tmp_path / "model.safetensors", tmp_path / "other"
    file.write_bytes(b"a" * 64)
    before = file.stat()
    assert file_hashes(home, [file]) == {file.name: sha256(file)}
    other.write_bytes(b"b" * 64)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, file)
    assert file_hashes(home, [file]) == {file.name: sha256(file)}
    with file.open("r+b") as stream:  # the same inode, changed where it stands
        stream.write(b"c")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert file_hashes(home, [file]) == {file.name: sha256(file)}


def test_one_fingerprint_stands_for_all_weight_files():
    one = {"model.safetensors": "ab" * 32, "config.json": "0" * 64}
    assert fingerprint(one) == "ab" * 32 and fingerprint({"config.json": "0" * 64}) == ""
    shards = {"a.safetensors": "1" * 64, "b.safetensors": "2" * 64}
    swapped = {"a.safetensors": "2" * 64, "b.safetensors": "1" * 64}
    assert fingerprint(shards) == fingerprint(dict(reversed(shards.items())))
    assert len({fingerprint(shards), fingerprint(swapped), fingerprint(one)}) == 3


def test_what_differs_is_said_with_both_fingerprints():
    then = {"model.safetensors": "a" * 64, "config.json": "0" * 64}
    assert then_and_now(then, then) == ""
    now = then | {"model.safetensors": "b" * 64}
    assert then_and_now(then, now) == f"weights {'a' * 12} then, {'b' * 12} now"
    assert then_and_now(then, {}) == f"weights {'a' * 12} then, none now"
    assert then_and_now(then, then | {"config.json": "1"}) == "other contents of config.json"

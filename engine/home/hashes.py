"""SHA-256 of large files, remembered in the home: a base model is read once, not for every run."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from engine.core.files import read_object, write_json
from engine.home.run_dir import Home


def file_hashes(home: Home, files: Iterable[Path]) -> dict[str, str]:
    """Return file name -> SHA-256 in hexadecimal, for each of the files.

    A hash is taken from the home's cache if the file's path, size and modification time have not
    changed since it was hashed. Other files are read, and their hashes are added to the cache.
    """
    cache_file = home.cache / "hashes.json"
    cache: dict[str, str] = read_object(cache_file)
    hashes = {}
    has_new_hash = False
    for file in files:
        key = _cache_key(file)
        if key not in cache:
            cache[key] = _digest(file)
            has_new_hash = True
        hashes[file.name] = cache[key]
    if has_new_hash:
        home.cache.mkdir(parents=True, exist_ok=True)
        write_json(cache_file, cache)
    return hashes


def weight_hashes(home: Home, folder: Path) -> dict[str, str]:
    """Return file name -> SHA-256, for the safetensors files in a model's folder."""
    return file_hashes(home, sorted(folder.glob("*.safetensors")))


def _cache_key(file: Path) -> str:
    """Return the key of a file's hash in the cache; the key changes when the file changes."""
    status = file.stat()
    return f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}"


def _digest(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

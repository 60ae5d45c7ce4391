"""SHA-256 of large files, remembered in the home: a base model is read once, not for every run."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from engine.core.files import read_object, write_json
from engine.home.run_dir import Home


def file_hashes(home: Home, files: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file in hexadecimal, by file name.

    A hash comes from the home's cache if the file has the path, size and modification time that it
    had when it was hashed. Other files are read, and their hashes added to the cache.
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
    """SHA-256 of the safetensors files in a model's folder, by file name."""
    return file_hashes(home, sorted(folder.glob("*.safetensors")))


def _cache_key(file: Path) -> str:
    """The key of a file's hash in the cache: it changes when the file does."""
    status = file.stat()
    return f"{file.resolve()}|{status.st_size}|{status.st_mtime_ns}"


def _digest(file: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

"""SHA-256 of large files, remembered in the home: a base model is read once, not for every run."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.core.files import read_object, write_json
from engine.home.run_dir import Home

_SHOWN = 12  # hexadecimal digits of a hash in a sentence


def file_hashes(home: Home, files: Iterable[Path]) -> dict[str, str]:
    """Return file name -> SHA-256 in hexadecimal, for each of the files.

    A hash is taken from the home's cache if the file's path, size, times and inode have not changed
    since it was hashed. Other files are read, and their hashes are added to the cache.
    """
    cache_file = home.cache / "hashes.json"
    cache: dict[str, str] = read_object(cache_file)
    hashes = {}
    has_new_hash = False
    for file in files:
        key = _cache_key(file)
        if key not in cache:
            cache[key] = sha256(file)
            has_new_hash = True
        hashes[file.name] = cache[key]
    if has_new_hash:
        home.cache.mkdir(parents=True, exist_ok=True)
        write_json(cache_file, cache)
    return hashes


def weight_hashes(home: Home, folder: Path) -> dict[str, str]:
    """Return file name -> SHA-256, for the safetensors files in a model's folder."""
    return file_hashes(home, sorted(folder.glob("*.safetensors")))


def weights_among(files: Mapping[str, str]) -> dict[str, str]:
    """Return those of the hashes (file name -> SHA-256) that are of weight files."""
    return {name: digest for name, digest in files.items() if name.endswith(".safetensors")}


def fingerprint(files: Mapping[str, str]) -> str:
    """Return one SHA-256 that stands for a model's weights.

    It is that of its one weight file, as `sha256sum` prints it, or that over the names and hashes
    of several. Returns "" if there is no weight file. `files` maps file name -> SHA-256.
    """
    weights = weights_among(files)
    if len(weights) == 1:
        return next(iter(weights.values()))
    if not weights:
        return ""
    lines = "\n".join(f"{name} {weights[name]}" for name in sorted(weights))
    return hashlib.sha256(lines.encode()).hexdigest()


def shown(digest: str) -> str:
    """Return the first `_SHOWN` digits of a SHA-256, as a sentence shows them; "none" for ""."""
    return digest[:_SHOWN] or "none"


def then_and_now(recorded: Mapping[str, str], present: Mapping[str, str]) -> str:
    """Say how a model's `present` files differ from those `recorded` of it earlier.

    Both map file name -> SHA-256. Examples: "weights 12ab34cd56ef then, 98fe76dc54ba now", "other
    contents of config.json". Returns "" if no file differs.
    """
    if weights_among(recorded) != weights_among(present):
        old_weights, new_weights = shown(fingerprint(recorded)), shown(fingerprint(present))
        return f"weights {old_weights} then, {new_weights} now"
    all_names = {*recorded, *present}
    changed_names = sorted(n for n in all_names if recorded.get(n) != present.get(n))
    return f"other contents of {', '.join(changed_names)}" if changed_names else ""


def _cache_key(file: Path) -> str:
    """Return the key of a file's hash in the cache; the key changes when the file changes.

    Size and modification time can be given to another file by hand (`touch -r`). The time of the
    last change of the inode cannot, so a file that was put in its place has another key.
    """
    status = file.stat()
    times = f"{status.st_mtime_ns}|{status.st_ctime_ns}"
    return f"{file.resolve()}|{status.st_size}|{times}|{status.st_ino}"


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

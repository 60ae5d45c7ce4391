"""Environments that come as files and not as a folder of this machine: texts by path, or a zip.

They are written into a folder of their own, which is pushed like any other: with the same limits
and the same audit. What the other side may not send is refused before it is written: links,
devices, absolute paths, `..`, a name twice, more than a push may hold.
"""

import io
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from engine.core.errors import UserError
from engine.environments.snapshot import CHUNK, MAX_BYTES, MAX_DEPTH, MAX_FILES

# Those that zipfile unpacks piece by piece; it unpacks the others whole, however large they become.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_NAME_BYTES, _PATH_BYTES = 250, 1_000  # the longest name and path of a file
_ENTRY_MARK = b"PK\x01\x02"  # begins each entry of a zip file's table (APPNOTE 4.3.12)


@contextmanager
def written(name: str, files: Mapping[str, object] | bytes, path: str = "") -> Iterator[Path]:
    """Write an environment whose files the caller sends into a folder, which is deleted at the end.

    Args:
        name: name of the environment; there is no folder whose name could be taken.
        files: path -> text, or the bytes of a zip file.
        path: must be "": it is one or the other.

    Raises UserError: those of `write_files` and `unpack`; BAD_ARGUMENT without a name or with a
    path; ENV_LIMITS for data that are too large to copy.
    """
    if path or not name:
        fault = "path and files are both given" if path else "files have no folder to be named by"
        raise UserError(
            "BAD_ARGUMENT", fault, hint='Give files and name, as in name="booking".', field="name"
        )
    # Outside the home: a key may not push what lies in it.
    with tempfile.TemporaryDirectory(prefix="honesmith-upload-") as folder:
        if isinstance(files, bytes):
            unpack(Path(folder), files)
        else:
            write_files(Path(folder), files)
        _refuse_indexed(Path(folder).resolve())
        yield Path(folder)


def _refuse_indexed(folder: Path) -> None:
    """Raise UserError ENV_LIMITS if the data files of `folder` are so large that a version reads
    them where they lie, because this folder is deleted after the push."""
    from engine.environments.indexed import build  # noqa: PLC0415  only uploads need it

    if build.large_files(folder):
        raise UserError(
            "ENV_LIMITS",
            "the data files of the upload are too large to copy into a version",
            hint="Put them on the server's machine, and push their folder by its path.",
            field="files",
        )


def write_files(folder: Path, files: Mapping[str, object]) -> None:
    """Write texts into `folder`, which exists and is empty.

    Args:
        folder: where to write.
        files: path -> text.

    Raises:
        UserError: BAD_ARGUMENT for a path that may not be written or a value that is no text,
            ENV_LIMITS for too many files or bytes.
    """
    contents: list[tuple[str, IO[bytes]]] = []
    for path, text in files.items():
        if not isinstance(text, str):
            raise _refused(path, f"its content is no text but {type(text).__name__}")
        data = text.encode("utf-8", "surrogatepass")
        contents.append((path, io.BytesIO(data)))
    _write_all(folder, iter(contents), len(contents))


def unpack(folder: Path, packed: bytes) -> None:
    """Unpack a zip file into `folder`, which exists and is empty.

    Raises:
        UserError: BAD_ARGUMENT if it is no zip file, or holds an encrypted file, a link, a device
            or a path that may not be written; ENV_LIMITS for too many files or bytes.
    """
    # zipfile makes an object of each entry before any can be counted: a million empty ones fit into
    # a request. Each has this mark; folders and zips within the zip have it too, hence the four.
    marked = packed.count(_ENTRY_MARK)
    if marked > 4 * MAX_FILES:
        raise _too_large(f"{marked} entries; a push may hold {MAX_FILES} files")
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            for entry in entries:
                _check_entry(entry)
            _write_all(
                folder, ((each.filename, archive.open(each)) for each in entries), len(entries)
            )
    # What zipfile raises for damaged or hostile files.
    except (
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        EOFError,
        RuntimeError,
        ValueError,
    ) as error:
        raise UserError(
            "BAD_ARGUMENT",
            f"the body is no zip file that can be unpacked: {str(error)[:200]}",
            hint="Send the folder as a zip: cd FOLDER && zip -r ../env.zip .",
            field="files",
        ) from error


def _check_entry(entry: zipfile.ZipInfo) -> None:
    """Raise UserError BAD_ARGUMENT if an entry of a zip file is encrypted, no regular file, or
    packed by a method that is none of `_METHODS`."""
    mode = entry.external_attr >> 16  # 0 where the program that packed it wrote none
    if mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise _refused(entry.filename, "it is a link or a device")
    if entry.flag_bits & 0x1:
        raise _refused(entry.filename, "it is encrypted")
    if entry.compress_type not in _METHODS:
        raise _refused(entry.filename, "it is packed by another method than deflate")


def _write_all(folder: Path, files: Iterator[tuple[str, IO[bytes]]], count: int) -> None:
    """Write files below `folder`. Raises the errors of `write_files`; what was written stays."""
    if not count:
        raise UserError(
            "BAD_ARGUMENT", "there is no file", hint="Send environment.py.", field="files"
        )
    if count > MAX_FILES:
        raise _too_large(f"{count} files; a push may hold {MAX_FILES}")
    left = MAX_BYTES
    seen: set[str] = set()
    for path, source in files:
        target = folder / _checked(path)
        # A file system may ignore case: two such names would be one file.
        if str(target).casefold() in seen:
            raise _refused(path, "its name comes twice")
        seen.add(str(target).casefold())
        left -= _write(path, source, target, left)


def _write(path: str, source: IO[bytes], target: Path, most: int) -> int:
    """Write what `source` holds to `target`, and return its bytes. Raises UserError ENV_LIMITS
    above `most` bytes, and BAD_ARGUMENT if another file stands where a folder is needed."""
    written = 0
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with source, target.open("xb") as file:
            while chunk := source.read(CHUNK):
                written += len(chunk)
                if written > most:
                    raise _too_large(f"more than {MAX_BYTES >> 20} MB")
                file.write(chunk)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise _refused(path, "a file and a folder have this name") from error
    return written


def _checked(path: str) -> PurePosixPath:
    """Return the path of a file below the folder. Raises UserError BAD_ARGUMENT if it leads
    elsewhere, or has names that some file system does not have."""
    pure = PurePosixPath(path)
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or ":" in path:
        raise _refused(path, "it is no relative path with / between its names")
    if any(part in ("", ".", "..") for part in parts):
        raise _refused(path, "it has an empty name, . or ..")
    if any(not character.isprintable() for character in path):
        raise _refused(path, "it has characters that cannot be printed")
    encoded = [part.encode() for part in parts]
    is_long = len(path.encode()) > _PATH_BYTES or max(map(len, encoded)) > _NAME_BYTES
    if is_long or len(parts) > MAX_DEPTH:
        raise _refused(path, "it is too long or too deep")
    return pure


def _refused(path: str, why: str) -> UserError:
    """Make the error for a file that is not written."""
    return UserError(
        "BAD_ARGUMENT",
        f"the file {path[:100]!r} is refused: {why}",
        hint='Give paths below the folder of the environment, such as "datasets/train.jsonl".',
        field="files",
    )


def _too_large(what: str) -> UserError:
    """Make the error for more than a push may hold."""
    return UserError(
        "ENV_LIMITS",
        f"the upload has {what}",
        hint="Leave out what the environment does not read.",
        field="files",
    )

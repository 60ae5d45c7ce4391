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
def upload_folder(name: str, files: Mapping[str, object] | bytes, path: str = "") -> Iterator[Path]:
    """Context manager: write the files of an environment that a caller sends into a temporary
    folder, and yield the folder, which is deleted at the end of the block.

    Args:
        name: name of the environment; it must be given, because the temporary folder has no name
            that the environment could take.
        files: path -> text, or the bytes of a zip file.
        path: the path of a folder that the caller names; it must be "", because a caller may send
            files or name a folder, and not do both.

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
        _refuse_large_data(Path(folder).resolve())
        yield Path(folder)


def _refuse_large_data(folder: Path) -> None:
    """Raise UserError ENV_LIMITS if `folder` has large data files.

    A push does not copy large data files: the stored environment reads them where they lie. Those
    of an upload lie in a temporary folder, which is deleted after the push.
    """
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

    `files` maps the path of each file, relative to `folder`, to its text.

    Raises:
        UserError: BAD_ARGUMENT for a path that may not be written or a value that is no text,
            ENV_LIMITS for too many files or bytes.
    """
    contents: list[tuple[str, IO[bytes]]] = []
    for path, text in files.items():
        if not isinstance(text, str):
            raise _file_refusal(path, f"its content is no text but {type(text).__name__}")
        # surrogatepass: JSON may hold half of a character, which UTF-8 alone refuses to encode.
        data = text.encode("utf-8", "surrogatepass")
        contents.append((path, io.BytesIO(data)))
    _write_all(folder, iter(contents), len(contents))


def unpack(folder: Path, packed: bytes) -> None:
    """Unpack a zip file, whose bytes are `packed`, into `folder`, which exists and is empty.

    Raises:
        UserError: BAD_ARGUMENT if it is no zip file, or holds an encrypted file, a link, a device
            or a path that may not be written; ENV_LIMITS for too many files or bytes.
    """
    # zipfile makes an object of each entry before any can be counted, and a million empty entries
    # fit into a request. So the marks of entries in the bytes are counted first. Entries of folders
    # and of zips within the zip have the mark too, hence four times as many are allowed.
    mark_count = packed.count(_ENTRY_MARK)
    if mark_count > 4 * MAX_FILES:
        raise _size_refusal(f"{mark_count} entries; a push may hold {MAX_FILES} files")
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            for entry in entries:
                _check_entry(entry)
            # A generator: only one file of the zip is open at a time.
            files = ((entry.filename, archive.open(entry)) for entry in entries)
            _write_all(folder, files, len(entries))
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
    # The upper 16 bits hold the Unix mode; 0 if the program that packed the file wrote none.
    mode = entry.external_attr >> 16
    if mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise _file_refusal(entry.filename, "it is a link or a device")
    is_encrypted = entry.flag_bits & 0x1
    if is_encrypted:
        raise _file_refusal(entry.filename, "it is encrypted")
    if entry.compress_type not in _METHODS:
        raise _file_refusal(entry.filename, "it is packed by another method than deflate")


def _write_all(folder: Path, files: Iterator[tuple[str, IO[bytes]]], count: int) -> None:
    """Write `count` files, given as (path, open file to read from), below `folder`.

    Raises UserError as `write_files` does; the files that were written before the error stay.
    """
    if not count:
        raise UserError(
            "BAD_ARGUMENT", "there is no file", hint="Send environment.py.", field="files"
        )
    if count > MAX_FILES:
        raise _size_refusal(f"{count} files; a push may hold {MAX_FILES}")
    bytes_left = MAX_BYTES  # of all files together
    folded_paths: set[str] = set()
    for path, source in files:
        target = folder / _checked_path(path)
        # A file system may ignore case: there two names that differ in case only are one file.
        folded_path = str(target).casefold()
        if folded_path in folded_paths:
            raise _file_refusal(path, "its name comes twice")
        folded_paths.add(folded_path)
        bytes_left -= _write(path, source, target, bytes_left)


def _write(path: str, source: IO[bytes], target: Path, max_bytes: int) -> int:
    """Copy what `source` holds into the new file `target`, and return how many bytes these are.
    `path` is the path of the file as the caller gave it, for errors.

    Raises UserError ENV_LIMITS above `max_bytes` bytes, and BAD_ARGUMENT if another file stands
    where a folder is needed.
    """
    byte_count = 0
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with source, target.open("xb") as file:
            while chunk := source.read(CHUNK):
                byte_count += len(chunk)
                if byte_count > max_bytes:
                    raise _size_refusal(f"more than {MAX_BYTES >> 20} MB")
                file.write(chunk)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise _file_refusal(path, "a file and a folder have this name") from error
    return byte_count


def _checked_path(path: str) -> PurePosixPath:
    """Return `path`, a path that a caller gave for a file below the folder of an upload.

    Raises UserError BAD_ARGUMENT if it leads out of the folder, or has names that not every file
    system can hold, such as one with a backslash, a colon or too many bytes.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or ":" in path:
        raise _file_refusal(path, "it is no relative path with / between its names")
    if any(part in ("", ".", "..") for part in parts):
        raise _file_refusal(path, "it has an empty name, . or ..")
    if any(not character.isprintable() for character in path):
        raise _file_refusal(path, "it has characters that cannot be printed")
    longest_name = max(len(part.encode()) for part in parts)  # bytes
    is_long = len(path.encode()) > _PATH_BYTES or longest_name > _NAME_BYTES
    if is_long or len(parts) > MAX_DEPTH:
        raise _file_refusal(path, "it is too long or too deep")
    return PurePosixPath(path)


def _file_refusal(path: str, why: str) -> UserError:
    """Make the error for an upload with a file that may not be written. `why` is the reason, such
    as "it is encrypted"."""
    return UserError(
        "BAD_ARGUMENT",
        f"the file {path[:100]!r} is refused: {why}",
        hint='Give paths below the folder of the environment, such as "datasets/train.jsonl".',
        field="files",
    )


def _size_refusal(amount: str) -> UserError:
    """Make the error for an upload that is larger than a push may be. `amount` is what is too much,
    such as "more than 64 MB"."""
    return UserError(
        "ENV_LIMITS",
        f"the upload has {amount}",
        hint="Leave out what the environment does not read.",
        field="files",
    )

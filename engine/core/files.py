"""Writing and reading files so that a kill, a full disk or a second process does no harm.

Files that are replaced go through `write_json`; files that grow go through `Appender` and
`read_lines`, whose cursor is a byte offset and therefore survives every restart.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# A JSON object whose keys are not known here: another program's file, a user's metadata, or a
# line before it is checked.
JsonObject = dict[str, Any]

UNFINISHED = ".aside"  # how the name of a new file ends until it takes the place of the old one
_BLOCK = 65_536  # bytes that are read at once when a file is searched from its end
# NaN and infinity are not valid JSON. Nothing here writes them, and they are read as null.
_LINE_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def write_json(path: Path, obj: Any, fsync: bool = True) -> None:
    """Replace the file at `path` by the JSON text of `obj`.

    A reader sees either the old file or the new one, never a part. With `fsync` the new file
    survives a power cut once this function returns. Raises ValueError if `obj` holds NaN or
    infinity, OSError, which names the path, if the file cannot be written: the old file then stays.
    """
    text = json.dumps(obj, allow_nan=False, ensure_ascii=False, indent=1)
    write_text(path, text + "\n", fsync=fsync)


def write_text(path: Path, text: str, fsync: bool = True, mode: int = 0o600) -> None:
    """Replace the file at `path` by `text`.

    A reader sees either the old file or the new one, never a part. Raises OSError, which names the
    path, if the file cannot be written; the old file then stays.

    Args:
        path: the file.
        text: its new content.
        fsync: whether to sync, so that the new file survives a power cut once this returns.
        mode: the permissions of the new file; by default only its owner may read and write it.
    """
    new_file = path.with_name(f".{path.name}.{secrets.token_hex(6)}{UNFINISHED}")
    data = text.encode("utf-8", "surrogatepass")  # a model's text may hold a lone surrogate
    try:
        _create_file(new_file, data, mode, fsync=fsync)
        os.replace(new_file, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new_file.unlink(missing_ok=True)
        if error.filename is None:  # an error of a write to a file descriptor names no file
            error.filename = str(path)
        raise
    if fsync:
        sync_folder(path.parent)


def _create_file(path: Path, data: bytes, mode: int, *, fsync: bool) -> None:
    """Write a new file with the permissions `mode`.

    Raises FileExistsError if a file or link exists at `path`.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        if fsync:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that creations, renamings and deletions in it survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def list_names(folder: Path) -> list[str]:
    """Return the names of the files and folders in `folder`; [] if there is no such folder."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def open_file(path: Path) -> BinaryIO:
    """Open the regular file at `path` for reading bytes.

    Raises OSError, which names the path, if there is no such file, or if it is a folder, a pipe or
    a device. Pipes are refused because opening a pipe waits until somebody writes to it, and a
    thread that waits there cannot be ended.
    """
    # With O_NONBLOCK, opening a pipe does not wait, so the pipe can be refused below.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "It is a pipe or a device, not a file", str(path))


def read_json(path: Path) -> Any:
    """Read the JSON value in the file at `path`.

    Raises OSError if the file cannot be read, ValueError, which names the path, if it does not hold
    valid JSON.
    """
    with open_file(path) as file:
        data = file.read()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path) -> JsonObject:
    """Read the JSON object in the file at `path`.

    Returns {} if the file is missing, cannot be read or does not hold a JSON object.
    """
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


class Appender:
    """Appends JSON objects to a file, each as one compact line.

    Several processes may append to one file, because each line is written under a lock on the file.
    An incomplete last line, whose writer was killed, is removed when the file is opened. A line
    that did not fit onto the disk is removed at once. NaN and infinity become null.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at `path` for appending, or create it; remove an incomplete last line."""
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        with self._locked():
            self._cut_torn_tail()

    def append(self, obj: JsonObject) -> None:
        """Append `obj` as one line.

        Raises OSError, which names the file, if the line cannot be written, for example on a full
        disk. A part of the line that was written is removed again.
        """
        line = _dump_line(obj)
        with self._locked():
            size = os.fstat(self._fd).st_size
            try:
                unwritten = memoryview(line)
                while unwritten:
                    written_bytes = os.write(self._fd, unwritten)  # may write only a part
                    unwritten = unwritten[written_bytes:]
            except OSError as error:
                os.ftruncate(self._fd, size)
                if error.filename is None:  # an error of a write to a descriptor names no file
                    error.filename = str(self.path)
                raise

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Context manager: hold the exclusive lock on the file while the block runs."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _cut_torn_tail(self) -> None:
        """Cut the file after its last newline, to remove a line whose writer was killed.

        The file is read in blocks from its end until a block holds a newline.
        """
        size = os.fstat(self._fd).st_size
        end_of_lines = size
        while end_of_lines > 0:
            start = max(0, end_of_lines - _BLOCK)
            newline = os.pread(self._fd, end_of_lines - start, start).rfind(b"\n")
            if newline >= 0:
                end_of_lines = start + newline + 1
                break
            end_of_lines = start
        if end_of_lines < size:
            os.ftruncate(self._fd, end_of_lines)


def append_line(path: Path, obj: JsonObject) -> None:
    """Open the file at `path`, append `obj` as one line, and close it. For rare writes."""
    with Appender(path) as appender:
        appender.append(obj)


@dataclass(frozen=True)
class Chunk:
    """A part of a file of JSON lines.

    Attributes:
        rows: the JSON objects of the complete lines, in order.
        damaged: how many of the lines are not JSON objects.
        end: the byte after the last line, which is the cursor for the next read.
    """

    rows: list[JsonObject]
    damaged: int
    end: int


def read_lines(
    path: Path, cursor: int = 0, max_bytes: int = 1_000_000
) -> tuple[list[JsonObject], int]:
    """Read the complete JSON lines from byte `cursor` on, without counting damaged lines.

    Returns the JSON objects of these lines, and the cursor for the next read. About `max_bytes` are
    read; see `read_chunk`.
    """
    chunk = read_chunk(path, cursor, max_bytes)
    return chunk.rows, chunk.end


def read_chunk(path: Path, cursor: int = 0, max_bytes: int = 1_000_000) -> Chunk:
    """Read the complete lines of a file of JSON lines from byte `cursor` on.

    If `cursor` is inside a line, reading begins with the next line. About `max_bytes` are read, but
    at least one line, if a complete one follows. A last line without a newline is still being
    written and is left for the next call. A missing file counts as empty.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        return Chunk([], damaged=0, end=0)
    with file:
        start, data = _complete_lines(file, cursor, max_bytes)
    lines = [line for line in data.split(b"\n") if line.strip()]
    parsed = [_parse_line(line) for line in lines]
    rows = [row for row in parsed if row is not None]
    return Chunk(rows, damaged=len(lines) - len(rows), end=start + len(data))


def _complete_lines(file: BinaryIO, cursor: int, max_bytes: int) -> tuple[int, bytes]:
    """Read about `max_bytes` of complete lines, but at least one, from byte `cursor` on.

    If `cursor` is inside a line, reading begins with the next line. Returns (the byte at which the
    lines begin, their bytes); the bytes are b"" if no complete line follows.
    """
    size = os.fstat(file.fileno()).st_size
    position = min(max(cursor, 0), size)
    start = _seek_line_start(file, position)
    if start is None:
        return position, b""
    data = file.read(max(max_bytes, 1))
    if b"\n" not in data:  # the line is longer than `max_bytes`
        data += file.readline()
    return start, _complete_part(data)


def _seek_line_start(file: BinaryIO, position: int) -> int | None:
    """Move the file to the first line that begins at byte `position` or later; return that byte.

    Returns None if `position` is inside the last line, which has no newline yet.
    """
    # A line begins at `position` if the byte before is a newline. Reading this byte also moves the
    # file to `position`.
    file.seek(max(position - 1, 0))
    if position == 0 or file.read(1) == b"\n":
        return position
    rest_of_line = file.readline()
    return position + len(rest_of_line) if rest_of_line.endswith(b"\n") else None


def keep_lines(path: Path, should_keep: Callable[[JsonObject], bool]) -> None:
    """Rewrite a file of JSON lines with only those lines for which `should_keep` returns True.

    An incomplete line, a line that is not valid JSON, and a line for which `should_keep` raises
    KeyError are removed too. Readers see either the old file or the new one. A missing file stays
    missing.
    """
    if not path.exists():
        return
    kept_lines = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and should_keep(json.loads(line)):
                kept_lines.append(line)
        except (ValueError, KeyError):  # not valid JSON, or `should_keep` misses a key
            continue
    new_file = path.with_name(f".{path.name}.{os.getpid()}")
    with new_file.open("wb") as file:
        file.writelines(kept_lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new_file, path)


def last_line(path: Path, window: int = _BLOCK) -> JsonObject | None:
    """Return the last JSON object in a file of JSON lines; None if there is none, or no file.

    A line that is still being written, or is not a JSON object, is skipped.

    Args:
        path: the file.
        window: how many bytes of the file's end are read at first; more are read only if these hold
            no object.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        return None
    with file:
        size = os.fstat(file.fileno()).st_size
        while True:
            start = max(0, size - window)
            file.seek(start)
            lines = _complete_part(file.read(size - start)).split(b"\n")
            if start > 0:
                lines = lines[1:]  # the first line may have begun before the block
            row = _last_object(lines)
            if row is not None or start == 0:
                return row
            window *= 8  # there is no object in the window, so a larger one is read


def _complete_part(data: bytes) -> bytes:
    """Return `data` up to its last newline, without a line that is still being written.

    Returns b"" if there is no newline.
    """
    return data[: data.rfind(b"\n") + 1]


def _last_object(lines: Sequence[bytes]) -> JsonObject | None:
    """Return the JSON object of the last line that holds one; None if no line does."""
    for line in reversed(lines):
        row = _parse_line(line)
        if row is not None:
            return row
    return None


def read_tail(path: Path, max_bytes: int) -> str:
    """Return the last `max_bytes` bytes of a text file as text; "" if the file is missing.

    Bytes that are not UTF-8 become U+FFFD.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            return file.read(max_bytes).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def take_lock(path: Path, wait_s: float = 0.0) -> int | None:
    """Take an exclusive lock on the file at `path`; wait for it at most `wait_s` seconds.

    Returns an open descriptor, or None if another process holds the lock. The lock is held until
    every process that has a copy of the descriptor has closed it or ended, even by a kill.
    """
    return _lock(path, fcntl.LOCK_EX, wait_s)


def share_lock(path: Path, wait_s: float) -> int | None:
    """Take a shared lock on the file at `path`; wait for it at most `wait_s` seconds.

    Several processes may hold the shared lock at once. Returns an open descriptor, or None if
    another process holds the exclusive lock of `take_lock(path)`.
    """
    return _lock(path, fcntl.LOCK_SH, wait_s)


def _lock(path: Path, lock_kind: int, wait_s: float) -> int | None:
    """Take a lock of `lock_kind` (fcntl.LOCK_EX or LOCK_SH), and return its open descriptor.

    Returns None if the lock does not become free within `wait_s` seconds.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, lock_kind | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
            time.sleep(0.002)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the exclusive lock of `take_lock(path)`; False if there is no
    file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # A shared lock, so that two processes that only test the lock do not see each other as
        # its holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _dump_line(obj: JsonObject) -> bytes:
    """Return `obj` as one line of compact JSON with its newline, encoded as UTF-8.

    NaN and infinity become null. If a text holds a lone surrogate, the whole line is escaped to
    plain ASCII.
    """
    try:
        text = json.dumps(obj, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError:  # `obj` holds NaN or infinity; these are rare, so they are searched for here
        text = json.dumps(_finite(obj), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # a lone surrogate: only the escaped form is valid UTF-8
        return json.dumps(_finite(obj), separators=(",", ":")).encode("ascii") + b"\n"


def _finite(value: Any) -> Any:
    """Return a copy of the JSON value `value` with every NaN and infinity in it replaced by None;
    tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _parse_line(line: bytes) -> JsonObject | None:
    """Return the JSON object in `line`; None if the line is damaged or holds another JSON value."""
    try:
        row = _LINE_DECODER.decode(line.decode())
    # ValueError: the line is not UTF-8 or not JSON. RecursionError: it is nested too deeply.
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None

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

_BLOCK = 65_536  # bytes that are read at once when a file is searched from its end
# NaN and infinity are no JSON; nothing here writes them, and a reader takes them for null.
_LINE_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def write_json(path: Path, obj: Any, fsync: bool = True) -> None:
    """Replace the file at `path` by the JSON text of `obj`. A reader sees either the old file or
    the new one, never a part; on a full disk the old file stays.

    With `fsync` the new file survives a power cut once this returns. Raises ValueError where `obj`
    holds NaN or infinity, and OSError naming the path.
    """
    text = json.dumps(obj, allow_nan=False, ensure_ascii=False, indent=1)
    write_text(path, text + "\n", fsync=fsync)


def write_text(path: Path, text: str, fsync: bool = True, mode: int = 0o600) -> None:
    """Replace the file at `path` by `text`. A reader sees either the old file or the new one, never
    a part.

    With `fsync` the new file survives a power cut once this returns. Raises OSError naming the
    path; the old file then stays as it was.

    Args:
        mode: the permissions of the new file; by default only its owner may read and write it.
    """
    new_file = path.with_name(f".{path.name}.{secrets.token_hex(6)}.aside")
    data = text.encode("utf-8", "surrogatepass")  # a model's text may hold a lone surrogate
    try:
        _create_file(new_file, data, mode, fsync=fsync)
        os.replace(new_file, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new_file.unlink(missing_ok=True)
        if error.filename is None:  # an error about a descriptor names no file
            error.filename = str(path)
        raise
    if fsync:
        sync_folder(path.parent)


def _create_file(path: Path, data: bytes, mode: int, *, fsync: bool) -> None:
    """Write a new file with the permissions `mode`. Raises FileExistsError for a file or link that
    somebody else put there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        if fsync:
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make sure that files created, renamed or deleted in `folder` stay so after a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_file(path: Path) -> BinaryIO:
    """Open the regular file at `path` for reading bytes.

    Raises OSError naming the path, also when it is a folder, a pipe or a device. Pipes are refused
    because opening one waits until somebody writes to it, and a thread that waits there cannot be
    ended.
    """
    # With O_NONBLOCK opening a pipe does not wait, so that it can be refused here.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "It is a pipe or a device, not a file", str(path))


def read_json(path: Path) -> Any:
    """The JSON value in the file at `path`. Raises OSError, or ValueError naming the path when the
    file does not hold valid JSON."""
    with open_file(path) as file:
        data = file.read()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path) -> JsonObject:
    """The JSON object in the file at `path`; {} when the file is missing, cannot be read or does
    not hold a JSON object."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


class Appender:
    """Appends JSON objects to a file, each as one compact line.

    Several processes may append to one file: each line is written under a lock on the file. A last
    line without a newline, whose writer was killed, is removed when the file is opened; a line that
    did not fit onto the disk is removed at once. NaN and infinity become null.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at `path` for appending, or create it. An incomplete line at its end, whose
        writer was killed, is cut off."""
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        with self._locked():
            self._cut_torn_tail()

    def append(self, obj: JsonObject) -> None:
        """Append `obj` as one line. Raises OSError naming the file; a line that was written only in
        part, for example on a full disk, is removed again."""
        line = _dump_line(obj)
        with self._locked():
            size = os.fstat(self._fd).st_size
            try:
                unwritten = memoryview(line)
                while unwritten:
                    written_bytes = os.write(self._fd, unwritten)  # perhaps only a part
                    unwritten = unwritten[written_bytes:]
            except OSError as error:
                os.ftruncate(self._fd, size)
                if error.filename is None:  # an error about a descriptor names no file
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
        """Hold the exclusive lock on the file while the `with` block runs."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _cut_torn_tail(self) -> None:
        """Cut the file after its last newline: what follows it is a line whose writer was killed.

        The file is read in blocks from its end until one holds a newline.
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
    """Append one line to the file at `path`; for files that are rarely written."""
    with Appender(path) as appender:
        appender.append(obj)


@dataclass(frozen=True)
class Chunk:
    """A part of a file of JSON lines.

    Attributes:
        rows: the JSON objects of its complete lines, in order.
        damaged: how many lines held something else.
        end: the byte after the last of its lines: the cursor for the next read.
    """

    rows: list[JsonObject]
    damaged: int
    end: int


def read_lines(
    path: Path, cursor: int = 0, max_bytes: int = 1_000_000
) -> tuple[list[JsonObject], int]:
    """Read JSON lines like `read_chunk`, for callers that need no number of damaged lines.

    Returns the JSON objects of the complete lines from byte `cursor` on, and the cursor for the
    next read.
    """
    chunk = read_chunk(path, cursor, max_bytes)
    return chunk.rows, chunk.end


def read_chunk(path: Path, cursor: int = 0, max_bytes: int = 1_000_000) -> Chunk:
    """Read the complete lines of a file of JSON lines from byte `cursor` on; a cursor inside a line
    moves to the next line. A missing file counts as empty.

    About `max_bytes` are read, but at least one line, if a complete one follows. A last line
    without a newline is still being written; it is left for the next call.
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
    """Read the complete lines from byte `cursor` on, or from the next line if it lies inside one:
    about `max_bytes`, but at least one line. Returns the byte at which they begin, and their bytes;
    no bytes if no complete line follows."""
    size = os.fstat(file.fileno()).st_size
    position = min(max(cursor, 0), size)
    start = _seek_line_start(file, position)
    if start is None:
        return position, b""
    data = file.read(max(max_bytes, 1))
    if b"\n" not in data:  # one line that is longer than `max_bytes`
        data += file.readline()
    return start, _complete_part(data)


def _seek_line_start(file: BinaryIO, position: int) -> int | None:
    """Move the file to the first line that begins at byte `position` or later; returns its byte.

    None if `position` lies inside the last line, which has no newline yet.
    """
    # The byte before the line must be a newline; reading it moves the file to `position`.
    file.seek(max(position - 1, 0))
    if position == 0 or file.read(1) == b"\n":
        return position
    rest_of_line = file.readline()
    return position + len(rest_of_line) if rest_of_line.endswith(b"\n") else None


def keep_lines(path: Path, should_keep: Callable[[JsonObject], bool]) -> None:
    """Rewrite a file of JSON lines, keeping only the complete lines for which `should_keep` returns
    True.

    A line that is not valid JSON, or for which `should_keep` raises KeyError, is removed too.
    Readers see either the old file or the new one. A missing file stays missing.
    """
    if not path.exists():
        return
    kept_lines = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and should_keep(json.loads(line)):
                kept_lines.append(line)
        except (ValueError, KeyError):  # no valid JSON; `should_keep` misses a key
            continue
    new_file = path.with_name(f".{path.name}.{os.getpid()}")
    with new_file.open("wb") as file:
        file.writelines(kept_lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new_file, path)


def last_line(path: Path, window: int = _BLOCK) -> JsonObject | None:
    """The last JSON object in a file of JSON lines; None if it has none, or is missing. A line that
    is still being written, or holds anything else, is passed over.

    Args:
        window: how many bytes of the file's end are read at first; more are read only if they hold
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
            window *= 8  # the window holds no whole line with an object: look further back


def _complete_part(data: bytes) -> bytes:
    """`data` up to its last newline, without a line that is still being written; b"" if it has no
    newline."""
    return data[: data.rfind(b"\n") + 1]


def _last_object(lines: Sequence[bytes]) -> JsonObject | None:
    """The JSON object on the last of the lines that holds one; None if none does."""
    for line in reversed(lines):
        row = _parse_line(line)
        if row is not None:
            return row
    return None


def read_tail(path: Path, max_bytes: int) -> str:
    """The last `max_bytes` bytes of a text file as text; "" when the file is missing. Bytes that
    are not UTF-8 become U+FFFD."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            return file.read(max_bytes).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def take_lock(path: Path, wait_s: float = 0.0) -> int | None:
    """Lock the file at `path` for this process alone, waiting at most `wait_s` seconds.

    Returns an open descriptor, or None when another process holds the lock. The lock is held until
    every process that has a copy of the descriptor has closed it or ended, even by a kill.
    """
    return _lock(path, fcntl.LOCK_EX, wait_s)


def share_lock(path: Path, wait_s: float) -> int | None:
    """Take a shared lock on the file at `path`, which several processes may hold at once; wait at
    most `wait_s` seconds.

    Returns an open descriptor, or None when another process holds the exclusive lock of
    `take_lock(path)`.
    """
    return _lock(path, fcntl.LOCK_SH, wait_s)


def _lock(path: Path, lock_kind: int, wait_s: float) -> int | None:
    """Take a lock of `lock_kind` (fcntl.LOCK_EX or LOCK_SH). Returns its open descriptor; None when
    the lock does not become free within `wait_s` seconds."""
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
    """Whether some process holds the exclusive lock of `take_lock(path)`. A missing file is not
    locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # A shared lock, so that two processes that only ask do not take each other for a holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _dump_line(obj: JsonObject) -> bytes:
    """Return `obj` as one line of compact JSON with its newline, encoded as UTF-8.

    NaN and infinity become null; if a text holds a lone surrogate, the whole line is escaped to
    plain ASCII.
    """
    try:
        text = json.dumps(obj, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError:  # NaN or infinity; they are rare, so the object is searched only now
        text = json.dumps(_finite(obj), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # a lone surrogate: only the escaped form is valid UTF-8
        return json.dumps(_finite(obj), separators=(",", ":")).encode("ascii") + b"\n"


def _finite(value: Any) -> Any:
    """Return a copy of `value` with every NaN and infinity inside it replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _parse_line(line: bytes) -> JsonObject | None:
    """The JSON object in `line`; None when the line is damaged or holds another JSON value."""
    try:
        row = _LINE_DECODER.decode(line.decode())
    except (ValueError, RecursionError):  # ValueError: no UTF-8 or no JSON; else nested too deeply
        return None
    return row if isinstance(row, dict) else None

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

# A JSON object whose keys are not known here: another program's file, a user's metadata, or a
# line before it is checked.
JsonObject = dict[str, Any]

# NaN and infinity are no JSON; nothing here writes them, and a reader takes them for null.
_LINES = json.JSONDecoder(parse_constant=lambda _: None)


def write_json(path: Path, obj: Any, fsync: bool = True) -> None:
    """Replace `path` with `obj` as JSON; a reader sees the old text or the new, never a part.

    Written aside, flushed, synced and closed with every step checked before the rename: on a
    full disk the old file stays. NaN and infinity are refused (ValueError).
    """
    text = json.dumps(obj, allow_nan=False, ensure_ascii=False, indent=1)
    write_text(path, text + "\n", fsync=fsync)


def write_text(path: Path, text: str, fsync: bool = True, mode: int = 0o600) -> None:
    """Replace `path` with `text`, atomically and (with `fsync`) durably."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.aside")
    data = text.encode("utf-8", "surrogatepass")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        if error.filename is None:
            error.filename = str(path)
        raise
    if fsync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_file(path: Path) -> BinaryIO:
    """The regular file at `path`, to be read as bytes.

    A pipe has no end until somebody writes to it, and who waits for that in a thread cannot even
    be ended: nothing but a file is opened. Raises OSError naming the path.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "It is a pipe or a device, not a file", str(path))


def read_json(path: Path) -> Any:
    """The JSON value in `path`. Raises OSError, or ValueError naming the path."""
    with open_file(path) as file:
        data = file.read()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path) -> JsonObject:
    """The JSON object in `path`; {} where there is none, or none that can be read."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


class Appender:
    """Appends one compact JSON object per line to a file.

    Several processes may append to one file: each line is written under a lock on the file, in
    one go. A torn last line (the writer was killed) is cut off before the first append;
    a line that the disk had no room for is cut back whole. NaN and infinity become null.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        with self._locked():
            self._cut_torn_tail()

    def append(self, obj: JsonObject) -> None:
        """Write one line. Raises OSError naming the file; the file then ends as it did before."""
        line = _dump_line(obj)
        with self._locked():
            size = os.fstat(self._fd).st_size
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError as error:
                os.ftruncate(self._fd, size)
                if error.filename is None:
                    error.filename = str(self.path)
                raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "Appender":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _cut_torn_tail(self) -> None:
        """Cut off what follows the last newline: a line whose writer was killed."""
        end = os.fstat(self._fd).st_size
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            newline = os.pread(self._fd, keep - start, start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            os.ftruncate(self._fd, keep)


def append_line(path: Path, obj: JsonObject) -> None:
    """Append a single line to a file that is rarely written."""
    with Appender(path) as appender:
        appender.append(obj)


@dataclass(frozen=True)
class Chunk:
    """Complete lines of a file that grows.

    Attributes:
        rows: the JSON objects, in order.
        damaged: how many lines held something else.
        end: the byte after the last line, the cursor to go on from.
    """

    rows: list[JsonObject]
    damaged: int
    end: int


def read_lines(
    path: Path, cursor: int = 0, max_bytes: int = 1_000_000
) -> tuple[list[JsonObject], int]:
    """The objects of the complete lines from byte `cursor` on, and the cursor to go on from.

    As `read_chunk`, for callers that do not count what could not be read.
    """
    chunk = read_chunk(path, cursor, max_bytes)
    return chunk.rows, chunk.end


def read_chunk(path: Path, cursor: int = 0, max_bytes: int = 1_000_000) -> Chunk:
    """The complete lines from byte `cursor` on.

    Reads about `max_bytes` and always at least one whole line where one is complete. A torn last
    line is left for the next call; a line that is not a JSON object is skipped and counted; a
    cursor inside a line moves to the next one; a missing file is empty.
    """
    try:
        file = open_file(path)
    except FileNotFoundError:
        return Chunk([], 0, 0)
    with file:
        size = os.fstat(file.fileno()).st_size
        start = min(max(cursor, 0), size)
        file.seek(max(start - 1, 0))
        if start and file.read(1) != b"\n":
            tail = file.readline()
            if not tail.endswith(b"\n"):
                return Chunk([], 0, start)
            start += len(tail)
        data = file.read(max(max_bytes, 1))
        if b"\n" not in data:
            data += file.readline()
        end = data.rfind(b"\n") + 1
    lines = [line for line in data[:end].split(b"\n") if line.strip()]
    rows = [row for line in lines if (row := _parse_line(line)) is not None]
    return Chunk(rows, len(lines) - len(rows), start + end)


def keep_lines(path: Path, wanted: Callable[[JsonObject], bool]) -> None:
    """Keep the whole lines of a JSONL file that are wanted, replacing it atomically."""
    if not path.exists():
        return
    lines = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if line.endswith(b"\n") and wanted(json.loads(line)):
                lines.append(line)
        except (ValueError, KeyError):
            continue
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("wb") as out:
        out.writelines(lines)
        out.flush()
        os.fsync(out.fileno())
    os.replace(aside, path)


def last_line(path: Path, window: int = 65536) -> JsonObject | None:
    """The last complete object of a JSONL file, reading only its end; None without one."""
    try:
        file = open_file(path)
    except FileNotFoundError:
        return None
    with file:
        size = os.fstat(file.fileno()).st_size
        while True:
            start = max(0, size - window)
            file.seek(start)
            data = file.read(size - start)
            lines = data[: data.rfind(b"\n") + 1].split(b"\n")
            for line in reversed(lines if start == 0 else lines[1:]):
                row = _parse_line(line)
                if row is not None:
                    return row
            if start == 0:
                return None
            window *= 8


def read_tail(path: Path, max_bytes: int) -> str:
    """The last `max_bytes` of a text file, "" when it is missing."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            return file.read(max_bytes).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def take_lock(path: Path, wait_s: float = 0.0) -> int | None:
    """An exclusive flock on `path` as an open descriptor, None when another holds it.

    The lock lives as long as any process holds a copy of the descriptor: it ends with the last of
    them however they end, which no process id can promise.
    """
    return _lock(path, fcntl.LOCK_EX, wait_s)


def share_lock(path: Path, wait_s: float) -> int | None:
    """A shared flock on `path` as an open descriptor, None when one holds `take_lock(path)`."""
    return _lock(path, fcntl.LOCK_SH, wait_s)


def _lock(path: Path, kind: int, wait_s: float) -> int | None:
    """A flock of that kind as an open descriptor, None when it is not free within `wait_s`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(fd)
                return None
            time.sleep(0.002)


def is_locked(path: Path) -> bool:
    """Whether somebody holds `take_lock(path)`; a missing file is not locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two processes which only ask do not see each other.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _dump_line(obj: JsonObject) -> bytes:
    """One line of compact JSON; NaN and infinity as null, lone surrogates escaped."""
    try:
        text = json.dumps(obj, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(obj), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # a lone surrogate: only the escaped form is valid UTF-8
        return json.dumps(_finite(obj), separators=(",", ":")).encode("ascii") + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _parse_line(line: bytes) -> JsonObject | None:
    try:
        row = _LINES.decode(line.decode())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None

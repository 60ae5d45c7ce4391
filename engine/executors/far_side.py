"""What runs at the other end of an ssh connection: it takes files, hands files out, and calls jobs.

The text of this module is sent over the connection and executed there, by any Python from 3.8 on,
before anything of ours lies on that machine. So it imports the standard library alone; the
functions of engine/executors/jobs.py are called once our source is there (`use`). It lives as long
as the connection: no daemon, no port.

A frame is the length of a JSON object (4 bytes), that object, and as many bytes after it as its
key `body` says. A request names an operation in `op`; its answer has `ok`, or `error` and
`message`. The side that asks reads its own frames with the functions here.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tarfile
from typing import Any, BinaryIO

MAGIC = b"honesmith-far-side-1\n"  # what a login shell prints before it is passed over
MOST_HEADER, MOST_BODY = 32 << 20, 8 << 20  # the most bytes of a frame's object, and after it
_OUTPUT_CHARS = 4000  # how much of a command's output an answer quotes
_MESSAGE_CHARS, _HINT_CHARS = 2000, 1000  # how much of an error an answer quotes
CHUNK = 1 << 20  # bytes of a file in one frame
LEAST_PYTHON = (3, 11)
# Of the variables of the session, those that a job gets; nothing that may hold a credential.
PASSED_ON = frozenset(
    "PATH HOME USER LOGNAME SHELL LANG TZ TMPDIR LD_LIBRARY_PATH SLURM_CONF".split()
)
PASSED_ON_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "HONESMITH_")


class Refused(Exception):
    """An operation that cannot be done; its text goes back to who asked."""


def write_frame(stream: Any, header: dict, body: bytes = b"") -> None:
    """Write one frame and flush the stream. A frame is the length of a JSON object in 4 bytes, the
    object (`header`, to which the length of `body` is added), and the bytes of `body`."""
    text = json.dumps({**header, "body": len(body)}).encode()
    stream.write(len(text).to_bytes(4, "big") + text + body)
    stream.flush()


def read_frame(stream: Any) -> tuple[dict, bytes]:
    """Read one frame, as `write_frame` writes it: return (its JSON object, the bytes after it).

    `stream.read(n)` must return n bytes, fewer only at the end. Raises EOFError at the end,
    ValueError for something that is no frame, or is too large.
    """
    length = int.from_bytes(_exactly(stream, 4), "big")
    if length > MOST_HEADER:
        raise ValueError(f"a frame with {length} bytes of text")
    header = json.loads(_exactly(stream, length))
    size = header.get("body", 0) if isinstance(header, dict) else None
    if not isinstance(size, int) or not 0 <= size <= MOST_BODY:
        raise ValueError("a frame without a usable length")
    return header, _exactly(stream, size)


def _exactly(stream: Any, count: int) -> bytes:
    """Read exactly `count` bytes. Raises EOFError if the stream ends before."""
    data = stream.read(count) if count else b""
    if len(data) < count:
        raise EOFError
    return data


class FarSide:
    """The operations that requests can name. Every path they are given must lie below the root, the
    folder that `hello` chooses."""

    def __init__(self) -> None:
        """Begin without a root, which `hello` chooses, and without the module with the functions of
        jobs, which `use` loads."""
        self.root = ""
        self.jobs: Any = None  # a module: engine.executors.jobs or its like

    def hello(self, folder: str) -> dict:
        """Make the root, which is `folder` below the user's home folder, or at its own place if it
        is an absolute path. Returns facts about this machine: its Python, its system, its name and
        the free bytes on its disk."""
        self.root = os.path.abspath(os.path.join(os.path.expanduser("~"), folder))
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        return {
            "root": self.root,
            "python": sys.executable,
            "version": list(sys.version_info[:3]),
            "system": platform.system(),
            "machine": platform.machine(),
            "node": platform.node(),
            "disk_free": shutil.disk_usage(self.root).free,
        }

    def exist(self, folders: list) -> dict:
        """Tell of each of these folders or files whether it exists, in the same order."""
        return {"there": [os.path.exists(self._path(folder)) for folder in folders]}

    def missing(self, blobs: dict) -> dict:
        """Return which of these files (SHA-256 -> size in bytes) are not here in full, each with
        the number of its bytes that are here already, so that `put` can go on from there."""
        absent = {}
        for digest, size in blobs.items():
            if not os.path.exists(self._blob(digest)):
                part = self._blob(digest) + ".part"
                present = os.path.getsize(part) if os.path.exists(part) else 0
                absent[digest] = present if present <= size else 0
        return {"absent": absent}

    def put(self, digest: str, offset: int, size: int, body: bytes = b"") -> dict:
        """Write one part of a file, and keep the file once all of it has come.

        Args:
            digest: the SHA-256 that the whole file must have; it also names the file.
            offset: where the part begins in the file, in bytes.
            size: bytes of the whole file.
            body: the part; empty if all bytes are here already.

        Raises Refused if the whole file has another SHA-256, or an earlier part is gone.
        """
        blob = self._blob(digest)
        part = blob + ".part"
        os.makedirs(os.path.dirname(part), exist_ok=True)
        # Several connections may send the same file at once: each writes the same bytes to the same
        # places, nothing that is there is cut off, and whoever is last finds the file complete.
        try:
            create = 0 if offset or os.path.exists(blob) else os.O_CREAT
            descriptor = os.open(part, os.O_RDWR | create, 0o600)
        except FileNotFoundError:
            if os.path.exists(blob):
                return {}
            raise Refused("the first part of a file is no longer there: send it again") from None
        with os.fdopen(descriptor, "r+b") as file:
            file.seek(offset)
            file.write(body)
            if offset + len(body) < size:
                return {}
            file.truncate(size)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            actual = hashlib.sha256()
            while block := file.read(CHUNK):
                actual.update(block)
        with contextlib.suppress(FileNotFoundError):  # another connection has moved it already
            if actual.hexdigest() != digest:
                os.unlink(part)
                raise Refused("a file came with other bytes than its hash says")
            os.replace(part, blob)
        return {}

    def place(self, folder: str, files: dict, own: bool = False) -> dict:
        """Make a folder out of files that were put before. If the folder exists, it stays as it is.

        Args:
            files: name in the folder -> SHA-256 of the file.
            own: whether the files are copies, which may be written to. If not, they are hard links,
                which share their content with other folders.
        """
        target = self._path(folder)
        if os.path.exists(target):
            return {}
        aside = f"{target}.new-{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        for name, digest in files.items():
            path = self._path(name, aside)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if own:
                shutil.copyfile(self._blob(digest), path)
            else:
                os.link(self._blob(digest), path)
        os.makedirs(aside, exist_ok=True)
        _move(aside, target)
        return {}

    def unpack(self, folder: str, digest: str) -> dict:
        """Make a folder out of an archive that was put before under the SHA-256 `digest`, and
        delete the archive. If the folder exists, it stays as it is."""
        target = self._path(folder)
        # Another connection may unpack the same archive at the same time, and delete it first.
        with contextlib.suppress(FileNotFoundError):
            if not os.path.exists(target):
                self._unpack_to(target, digest)
            os.unlink(self._blob(digest))  # its content is there now
        if not os.path.exists(target):
            raise Refused(f"{folder} was to be unpacked, and its archive is not there")
        return {}

    def _unpack_to(self, target: str, digest: str) -> None:
        """Unpack the archive with the SHA-256 `digest` into the new folder `target`, which appears
        complete or not at all. Raises FileNotFoundError if the archive is gone, Refused if it holds
        anything but files below the folder."""
        aside = f"{target}.new-{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        os.makedirs(aside)
        with tarfile.open(self._blob(digest)) as archive:
            for member in archive:
                path = self._path(member.name, aside)
                if not member.isfile():
                    raise Refused("an archive with something that is no file")
                os.makedirs(os.path.dirname(path), exist_ok=True)
                source = archive.extractfile(member)
                assert source is not None  # it is a file
                with open(path, "wb") as file:
                    shutil.copyfileobj(source, file)
        _move(aside, target)

    def write(self, path: str, body: bytes) -> dict:
        """Write a small file, so that readers see the old content or the new one, never a part."""
        target = self._path(path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        aside = f"{target}.new-{os.getpid()}"
        with open(aside, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
        return {}

    def read(self, path: str, offset: int, length: int) -> tuple[dict, bytes]:
        """Return ({its inode, its size in bytes}, at most `length` bytes from `offset` on) of a
        file; never more than CHUNK bytes. Raises Refused or OSError for a link or a folder."""
        descriptor = os.open(self._path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{path} is no file")
            file.seek(offset)
            body = file.read(min(length, CHUNK))
        return {"inode": status.st_ino, "size": status.st_size}, body

    def digest(self, path: str) -> dict:
        """Return the SHA-256 of a file's content."""
        digest = hashlib.sha256()
        with open(self._path(path), "rb") as file:
            while block := file.read(CHUNK):
                digest.update(block)
        return {"digest": digest.hexdigest()}

    def run(self, argv: list, limit_s: float) -> dict:
        """Run a command in the root. Returns its exit status and the end of what it printed. Raises
        subprocess.TimeoutExpired after `limit_s` seconds."""
        process = subprocess.run(
            argv,
            cwd=self.root,
            env=job_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
        output = process.stdout.decode("utf-8", "replace")[-_OUTPUT_CHARS:]
        return {"status": process.returncode, "output": output}

    def remove(self, folder: str) -> dict:
        """Delete a folder below the root, or the root itself for "". A missing one is no error."""
        shutil.rmtree(self._path(folder) if folder else self.root, ignore_errors=True)
        return {}

    def use(self, source: str, calls: str = "engine.executors.jobs") -> dict:
        """Load this program's source from the folder `source`, where it was unpacked. From now on
        `job` calls the functions in CALLS of its module `calls`."""
        path = self._path(source)
        variables = job_environment()  # read before the environment is cleared
        os.environ.clear()
        os.environ.update(variables, PYTHONPATH=path)
        sys.path.insert(0, path)
        self.jobs = importlib.import_module(calls)
        return {}

    def job(self, call: str, **arguments: Any) -> dict:
        """Call the function `call` of the module that `use` loaded, with the root and these
        arguments, and return its result. The module is engine/executors/jobs.py or one like it."""
        return self.jobs.CALLS[call](self.root, **arguments)

    def _blob(self, digest: str) -> str:
        """Return the path where the file with this SHA-256 is kept. Raises Refused for a text that
        is no SHA-256 and might lead to another folder."""
        if len(digest) != 64 or not digest.isalnum():
            raise Refused(f"no hash: {digest!r}")
        return os.path.join(self.root, "blobs", digest)

    def _path(self, path: str, below: str = "") -> str:
        """Return the absolute path of `path` in the folder `below`, or in the root if that is "".
        Raises Refused if it leads out of that folder."""
        base = below or self.root
        absolute = os.path.normpath(os.path.join(base, path))
        if not path or not absolute.startswith(base + os.sep):
            raise Refused(f"{path!r} does not lie below {base}")
        return absolute


def job_environment() -> dict:
    """Return those environment variables of this process that a job may have: names that are known
    to be needed, and none that may hold a credential."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)
    }


def _move(aside: str, target: str) -> None:
    """Rename the finished folder `aside` to `target`. If another process has made `target` in the
    meantime, that one stays and `aside` is deleted."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.rename(aside, target)
    except OSError:
        if not os.path.isdir(target):  # the error has another cause
            raise
        shutil.rmtree(aside, ignore_errors=True)


OPERATIONS = (
    *("hello", "exist", "missing", "put", "place", "unpack", "write", "read", "digest"),
    *("run", "remove", "use", "job"),
)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests, one frame each, until the connection ends. The answer has "ok" and the
    result of the operation, or "error", "message" and "hint"."""
    # The line feed ends a line that a login shell may have begun.
    answers.write(b"\n" + MAGIC)
    answers.flush()
    far_side = FarSide()
    while True:
        try:
            request, body = read_frame(requests)
        except EOFError:
            return
        name = request.pop("op", "")
        del request["body"]
        if body:
            request["body"] = body
        try:
            if name not in OPERATIONS:
                raise Refused(f"no operation {name!r}")
            result = getattr(far_side, name)(**request)
            header, data = result if isinstance(result, tuple) else (result, b"")
        except Exception as error:  # noqa: BLE001 - the side that asked gets every error
            code = str(getattr(error, "code", type(error).__name__))
            message = str(error)[:_MESSAGE_CHARS]
            hint = str(getattr(error, "hint", ""))[:_HINT_CHARS]
            header = {"error": code, "message": message, "hint": hint}
            data = b""
        write_frame(answers, {"ok": "error" not in header, **header}, data)


if __name__ == "__main__":
    os.umask(0o077)
    # Nothing but frames may go to the descriptor that carries them.
    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, _answers)

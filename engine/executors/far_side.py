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
MOST_HEADER, MOST_BODY = 32 << 20, 8 << 20
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
    """Write one frame and flush the stream."""
    text = json.dumps({**header, "body": len(body)}).encode()
    stream.write(len(text).to_bytes(4, "big") + text + body)
    stream.flush()


def read_frame(stream: Any) -> tuple[dict, bytes]:
    """Read one frame: its object and its bytes.

    `stream.read(n)` returns n bytes, fewer only at the end. Raises EOFError at the end, ValueError
    for what is no frame or too large.
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
    """Read `count` bytes. Raises EOFError where the stream ends before."""
    data = stream.read(count) if count else b""
    if len(data) < count:
        raise EOFError
    return data


class FarSide:
    """The operations; every path they are given lies below the root, which `hello` names."""

    def __init__(self) -> None:
        """No folder is chosen before `hello`, and no module of jobs loaded before `use`."""
        self.root = ""
        self.jobs: Any = None  # a module: engine.executors.jobs or its like

    def hello(self, folder: str) -> dict:
        """Make the root ready and say what this machine is."""
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
        """Which of these folders or files are there."""
        return {"there": [os.path.exists(self._path(folder)) for folder in folders]}

    def missing(self, blobs: dict) -> dict:
        """Of these files (SHA-256 -> bytes) those that are not here, with the bytes that are."""
        absent = {}
        for digest, size in blobs.items():
            if not os.path.exists(self._blob(digest)):
                part = self._blob(digest) + ".part"
                have = os.path.getsize(part) if os.path.exists(part) else 0
                absent[digest] = have if have <= size else 0
        return {"absent": absent}

    def put(self, digest: str, offset: int, size: int, body: bytes = b"") -> dict:
        """Take a part of a file; the whole is kept once it has the SHA-256 that names it. An empty
        part says that all of it is here."""
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
            seen = hashlib.sha256()
            while block := file.read(CHUNK):
                seen.update(block)
        with contextlib.suppress(FileNotFoundError):  # where another connection moved it
            if seen.hexdigest() != digest:
                os.unlink(part)
                raise Refused("a file came with other bytes than its hash says")
            os.replace(part, blob)
        return {}

    def place(self, folder: str, files: dict, own: bool = False) -> dict:
        """Make a folder of files (name -> SHA-256) that were put; one that is there stays.

        With `own` they are copies, which may be written to, else links.
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
        """Make a folder of an archive that was put; one that is there stays."""
        target = self._path(folder)
        with contextlib.suppress(FileNotFoundError):  # another connection may do the same
            if not os.path.exists(target):
                self._unpack_to(target, digest)
            os.unlink(self._blob(digest))  # its content is there now
        if not os.path.exists(target):
            raise Refused(f"{folder} was to be unpacked, and its archive is not there")
        return {}

    def _unpack_to(self, target: str, digest: str) -> None:
        """Make the folder `target` of an archive. Raises FileNotFoundError where that is gone."""
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
        """Write a small file whole."""
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
        """A part of a file, with its inode and its size; a link is no file."""
        descriptor = os.open(self._path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Refused(f"{path} is no file")
            file.seek(offset)
            body = file.read(min(length, CHUNK))
        return {"inode": status.st_ino, "size": status.st_size}, body

    def digest(self, path: str) -> dict:
        """The SHA-256 of a file."""
        seen = hashlib.sha256()
        with open(self._path(path), "rb") as file:
            while block := file.read(CHUNK):
                seen.update(block)
        return {"digest": seen.hexdigest()}

    def run(self, argv: list, limit_s: float) -> dict:
        """Run a command in the root: its exit status, and the end of what it printed."""
        done = subprocess.run(
            argv,
            cwd=self.root,
            env=job_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
        return {"status": done.returncode, "output": done.stdout.decode("utf-8", "replace")[-4000:]}

    def remove(self, folder: str) -> dict:
        """Delete a folder below the root, or the root itself with ""."""
        shutil.rmtree(self._path(folder) if folder else self.root, ignore_errors=True)
        return {}

    def use(self, source: str, calls: str = "engine.executors.jobs") -> dict:
        """Take the engine in the folder `source`: from now on `job` calls the functions that its
        module `calls` lists."""
        path = self._path(source)
        kept = job_environment()
        os.environ.clear()
        os.environ.update(kept, PYTHONPATH=path)
        sys.path.insert(0, path)
        self.jobs = importlib.import_module(calls)
        return {}

    def job(self, call: str, **arguments: Any) -> dict:
        """Call a function of engine/executors/jobs.py, or of the module that `use` took."""
        return self.jobs.CALLS[call](self.root, **arguments)

    def _blob(self, digest: str) -> str:
        if len(digest) != 64 or not digest.isalnum():
            raise Refused(f"no hash: {digest!r}")
        return os.path.join(self.root, "blobs", digest)

    def _path(self, path: str, below: str = "") -> str:
        """The absolute path of `path`. Raises Refused where it leads out of the folder `below`, or
        of the root."""
        base = below or self.root
        whole = os.path.normpath(os.path.join(base, path))
        if not path or not whole.startswith(base + os.sep):
            raise Refused(f"{path!r} does not lie below {base}")
        return whole


def job_environment() -> dict:
    """The variables of this session that a job may have."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_ON or name.startswith(PASSED_ON_PREFIXES)
    }


def _move(aside: str, target: str) -> None:
    """Move a finished folder to its place; another process may have been faster."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.rename(aside, target)
    except OSError:
        if not os.path.isdir(target):
            raise
        shutil.rmtree(aside, ignore_errors=True)


OPERATIONS = (
    *("hello", "exist", "missing", "put", "place", "unpack", "write", "read", "digest"),
    *("run", "remove", "use", "job"),
)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the connection ends."""
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
        except Exception as error:  # noqa: BLE001 - whatever it is goes back
            code = getattr(error, "code", type(error).__name__)
            hint = str(getattr(error, "hint", ""))
            header = {"error": str(code), "message": str(error)[:2000], "hint": hint[:1000]}
            data = b""
        write_frame(answers, {"ok": "error" not in header, **header}, data)


if __name__ == "__main__":
    os.umask(0o077)
    # Nothing but frames may go to the descriptor that carries them.
    _answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, _answers)

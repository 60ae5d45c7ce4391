"""A folder is read once into a copy and a content hash, within the limits of a push.

Only regular files are taken, opened without following links; what is left out is listed with the
reason. The hash covers the names and bytes of what was copied, so it describes the copy even when
somebody edits the folder meanwhile.
"""

import contextlib
import errno
import hashlib
import os
import stat
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.errors import UserError

MAX_FILES = 5_000
MAX_DEPTH = 32
MAX_BYTES = 256 << 20
MAX_PACKED = 64 << 20
CHUNK = 1 << 20
SHOWN = 50
LEFT_OUT_NAMES = {
    "__pycache__": "a cache",
    "node_modules": "installed packages",
    "venv": "a virtual environment",
}


@dataclass(frozen=True)
class Snapshot:
    """A copied folder.

    Attributes:
        digest: SHA-256 over names and contents, in hex.
        files: paths that were copied, sorted.
        size: their bytes.
        left_out: "path (reason)" of what was not.
    """

    digest: str
    files: list[str]
    size: int
    left_out: list[str] = field(default_factory=list)


def resolve_inside(path: str | Path, roots: list[Path] | None) -> Path:
    """The real path of `path`, if it lies inside one of `roots` (None: anywhere).

    Raises UserError PATH_OUTSIDE_ROOTS, or ENV_INVALID when there is no such folder.
    """
    given = str(path)
    if not given or "\0" in given or len(given) > 4096:
        raise UserError(
            "BAD_ARGUMENT",
            f"path is no path: {given[:60]!r}",
            field="path",
            hint="Pass the folder that holds environment.py.",
        )
    try:
        real = Path(os.path.expanduser(given)).resolve()
        real.is_dir()  # a name longer than the file system takes raises here
        inside = roots is None or any(real.is_relative_to(root.resolve()) for root in roots)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            "ENV_INVALID",
            f"{given[:200]!r} cannot be resolved: {getattr(error, 'strerror', '') or error}",
            field="path",
            hint="Pass the folder that holds environment.py.",
        ) from error
    if not inside:
        allowed = ", ".join(str(root) for root in roots or []) or "none"
        raise UserError(
            "PATH_OUTSIDE_ROOTS",
            f"{given[:200]!r} lies outside the folders this server may read ({allowed})",
            field="path",
            hint=_way_inside(given),
        )
    if not real.is_dir():
        what = "is a file" if real.is_file() else "does not exist"
        parent = f" Pass its folder {str(real.parent)!r}." if real.is_file() else ""
        raise UserError(
            "ENV_INVALID",
            f"the folder {given[:200]!r} {what}",
            field="path",
            hint=f"path is the folder that holds environment.py.{parent}",
        )
    return real


def _way_inside(given: str) -> str:
    """What to do about a path outside the roots; a relative one may only be misspelt."""
    move = "Start the server with --root FOLDER, or move the environment into one of them."
    if os.path.isabs(os.path.expanduser(given)):
        return move
    return f"Name it as it stands in one of these folders, or in full; check the spelling. {move}"


def take(source: Path, target: Path) -> Snapshot:
    """Copies `source` into the new folder `target`.

    Raises UserError ENV_LIMITS (too large) or ENV_INVALID (a link, a device, an unreadable file).
    """
    copier = _Copier(target)
    try:
        folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            copier.folder(folder, "")
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise  # the disk's fault: push.push_env tells of it
        raise _invalid(f"{error.filename} cannot be copied: {error.strerror or error}") from error
    if copier.size > MAX_PACKED:
        _check_packed(target, sorted(copier.digests))
    whole = hashlib.sha256()
    for name, digest in sorted(copier.digests.items()):
        encoded = name.encode()
        whole.update(b"%d:%s:%s\n" % (len(encoded), encoded, digest.encode()))
    return Snapshot(
        whole.hexdigest(), sorted(copier.digests), copier.size, _shorten(copier.left_out)
    )


class _Copier:
    """Walks by descriptors, so that nothing that is swapped for a link meanwhile is followed."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.digests: dict[str, str] = {}
        self.size = 0
        self.left_out: list[str] = []

    def folder(self, fd: int, prefix: str) -> None:
        if prefix.count("/") > MAX_DEPTH:
            raise _too_large(f"its folders are nested deeper than {MAX_DEPTH}")
        (self.target / prefix).mkdir(mode=0o700)
        for name in sorted(os.listdir(fd)):
            path = prefix + name
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            is_folder = stat.S_ISDIR(info.st_mode)
            reason = _reason_to_leave_out(name)
            if not reason and is_folder and _has(fd, name, "pyvenv.cfg"):
                reason = "a virtual environment"
            if reason:
                shown = path.encode("utf-8", "backslashreplace").decode()
                self.left_out.append(f"{shown}{'/' if is_folder else ''} ({reason})")
            elif is_folder:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                try:
                    self.folder(below, path + "/")
                finally:
                    os.close(below)
            elif stat.S_ISREG(info.st_mode):
                self.file(fd, name, path)
            else:
                what = "a link" if stat.S_ISLNK(info.st_mode) else "a device, socket or pipe"
                raise _invalid(f"{path} is {what}; a push takes regular files alone")

    def file(self, folder: int, name: str, path: str) -> None:
        if len(self.digests) >= MAX_FILES:
            raise _too_large(f"it has more than {MAX_FILES:,} files")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        digest = hashlib.sha256()
        with open(name, "rb", opener=lambda n, _: os.open(n, flags, dir_fd=folder)) as source:
            info = os.fstat(source.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise _invalid(f"{path} is no regular file")
            self.check_size(info.st_size, path)  # before any of it is copied
            with open(self.target / path, "xb") as copy:
                os.fchmod(copy.fileno(), 0o600)
                while data := source.read(CHUNK):
                    self.check_size(len(data), path)
                    self.size += len(data)
                    digest.update(data)
                    copy.write(data)
        self.digests[path] = digest.hexdigest()

    def check_size(self, more: int, path: str) -> None:
        if self.size + more > MAX_BYTES:
            raise _too_large(f"it is larger than {MAX_BYTES >> 20} MB (at {path})")


def _reason_to_leave_out(name: str) -> str:
    """Why a file of this name is not part of a version, "" when it is."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if name.startswith("."):
        return "hidden"
    if name.endswith((".pyc", ".pyo")):
        return "compiled"
    if name.endswith(".egg-info"):
        return "built"
    return LEFT_OUT_NAMES.get(name, "")


def _has(folder: int, name: str, file: str) -> bool:
    with contextlib.suppress(OSError):
        os.stat(f"{name}/{file}", dir_fd=folder, follow_symlinks=False)
        return True
    return False


def _check_packed(target: Path, names: list[str]) -> None:
    """Only asked above 64 MB: below, the packed size is below too."""
    packer = zlib.compressobj(6)
    packed = 0
    for name in names:
        with open(target / name, "rb") as file:
            while data := file.read(CHUNK):
                packed += len(packer.compress(data))
                if packed > MAX_PACKED:
                    raise _too_large(f"it is larger than {MAX_PACKED >> 20} MB packed (at {name})")


def _shorten(left_out: list[str]) -> list[str]:
    if len(left_out) <= SHOWN:
        return left_out
    return [*left_out[:SHOWN], f"... and {len(left_out) - SHOWN} more"]


def _too_large(why: str) -> UserError:
    return UserError(
        "ENV_LIMITS",
        f"the environment is too large to push: {why}",
        field="path",
        hint="Keep models and raw data out of the folder; make rows in tasks() or sample them.",
    )


def _invalid(message: str) -> UserError:
    return UserError(
        "ENV_INVALID", message, field="path", hint="Replace it by a regular file, or move it away."
    )

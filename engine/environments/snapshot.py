"""Copies a folder and hashes its content in one pass, within the size limits of a push.

Only regular files are copied, and links are never followed. Files that are left out are listed with
the reason. The hash covers the names and bytes that were copied, so it describes the copy even if
somebody edits the folder meanwhile.
"""

import contextlib
import errno
import hashlib
import os
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from engine.core.errors import UserError
from engine.home.run_dir import Home

MAX_FILES = 5_000
MAX_DEPTH = 32
MAX_BYTES = 256 << 20
MAX_PACKED = 64 << 20  # bytes of all files together when compressed
CHUNK = 1 << 20  # bytes read at once
MOST_LISTED = 50  # files left out that are listed
# The disk or the user's quota is full, or a limit on file sizes is reached.
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PATH_MAX = 4096  # Linux's longest path
_SHOWN_CHARS = 200  # characters of a path that an error message shows
_SHOWN_OF_NO_PATH = 60  # characters that it shows of a text that cannot be a path
REASONS_TO_LEAVE_OUT = {
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
        size: bytes of these files together.
        left_out: "path (reason)" for each file that was not copied: at most 50, then a count.
    """

    digest: str
    files: list[str]
    size: int
    left_out: list[str] = field(default_factory=list)


def resolve_inside(path: str | Path, roots: list[Path] | None) -> Path:
    """Return the folder `path` as an absolute path with all links resolved.

    The folder must lie inside one of `roots`; None allows every folder. Raises UserError
    BAD_ARGUMENT if the text cannot be a path, PATH_OUTSIDE_ROOTS if the folder lies outside
    `roots`, or ENV_INVALID if there is no such folder.
    """
    text = str(path)
    if not text or "\0" in text or len(text) > _PATH_MAX:
        raise _no_path(text)
    try:
        folder = Path(os.path.expanduser(text)).resolve()
        folder.is_dir()  # called for its error: a name too long for the file system raises here
        is_inside = roots is None or any(folder.is_relative_to(root.resolve()) for root in roots)
    # OSError: a name is too long, or a folder may not be read. RuntimeError: links in a circle.
    # ValueError: characters that no path can have.
    except (OSError, RuntimeError, ValueError) as error:
        raise _unresolvable(text, error) from error
    if not is_inside:
        raise _outside_roots(text, roots or [])
    if not folder.is_dir():
        raise _no_folder(text[:_SHOWN_CHARS], folder)
    return folder


def is_hidden(home: Home, path: str | Path) -> bool:
    """Return whether `path` lies in the home and the home has a viewer, who may not look into it.
    The answer does not depend on whether anything is there."""
    if home.viewer is None:
        return False
    try:
        resolved = Path(os.path.expanduser(str(path))).resolve()
    except (OSError, RuntimeError, ValueError):  # no path at all; whoever opens it says so
        return False
    return resolved.is_relative_to(home.root.resolve())


def _no_path(text: str) -> UserError:
    """Make the error for a text that cannot be the path of a folder."""
    return UserError(
        "BAD_ARGUMENT",
        f"path is no path: {text[:_SHOWN_OF_NO_PATH]!r}",
        field="path",
        hint="Pass the folder that holds environment.py.",
    )


def _unresolvable(path: str, error: Exception) -> UserError:
    """Make the error for a path that the file system cannot look up; `error` says why."""
    return UserError(
        "ENV_INVALID",
        f"{path[:_SHOWN_CHARS]!r} cannot be resolved: {getattr(error, 'strerror', '') or error}",
        field="path",
        hint="Pass the folder that holds environment.py.",
    )


def _outside_roots(path: str, roots: list[Path]) -> UserError:
    """Make the error for a path that lies in none of the folders `roots`."""
    allowed = ", ".join(str(root) for root in roots) or "none"
    return UserError(
        "PATH_OUTSIDE_ROOTS",
        f"{path[:_SHOWN_CHARS]!r} lies outside the folders this server may read ({allowed})",
        field="path",
        hint=_hint_for_outside(path),
    )


def _no_folder(given_path: str, path: Path) -> UserError:
    """Make the error for a path that is no folder; `given_path` is how the caller wrote it."""
    fault, advice = "does not exist", ""
    if path.is_file():
        fault, advice = "is a file", f" Pass its folder {str(path.parent)!r}."
    return UserError(
        "ENV_INVALID",
        f"the folder {given_path!r} {fault}",
        field="path",
        hint=f"path is the folder that holds environment.py or data files.{advice}",
    )


def _hint_for_outside(path: str) -> str:
    """Return the hint for a path outside the allowed folders. For a relative path the hint also
    says to check the spelling.
    """
    move = "Start the server with --root FOLDER, or move the environment into one of them."
    if os.path.isabs(os.path.expanduser(path)):
        return move
    return f"Name it as it stands in one of these folders, or in full; check the spelling. {move}"


def take(source: Path, target: Path, by_reference: Mapping[str, str] | None = None) -> Snapshot:
    """Copy the folder `source` to `target`, which must not exist yet, and hash what was copied.

    `by_reference` maps paths to the SHA-256 of files that are not copied but enter the digest as if
    they were. Raises UserError ENV_LIMITS if the folder is too large, ENV_INVALID if it holds a
    link, a device or an unreadable file, and OSError if the disk is full.
    """
    referenced = by_reference or {}
    copier = _Copier(target, referenced)
    try:
        with _open_folder(source) as folder:
            copier.copy_folder(folder, prefix="")
    except OSError as error:
        if error.errno in _DISK_FULL:  # the folder is not at fault; push_env reports a full disk
            raise
        raise _invalid_file(
            f"{error.filename} cannot be copied: {error.strerror or error}"
        ) from error
    if copier.size > MAX_PACKED:  # smaller files need no check: compressing does not enlarge them
        _check_packed(target, sorted(copier.digests))
    return Snapshot(
        digest=_content_hash({**copier.digests, **referenced}),
        files=sorted(copier.digests),
        size=copier.size,
        left_out=_shortened_list(copier.left_out),
    )


def _content_hash(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 in hex of a folder's content; `digests` maps path -> SHA-256 of a file."""
    content_hash = hashlib.sha256()
    # The length stands before each name, so that no two different folders give the same bytes.
    for name, digest in sorted(digests.items()):
        encoded = name.encode()
        content_hash.update(b"%d:%s:%s\n" % (len(encoded), encoded, digest.encode()))
    return content_hash.hexdigest()


class _Copier:
    """Copies a folder tree and hashes its files.

    Everything is opened relative to open descriptors, so that a folder which is replaced by a link
    during the copy is not followed.

    Attributes:
        digests: path -> SHA-256 in hex of each file copied so far.
        size: bytes copied so far.
        left_out: "path (reason)" of what was not copied.
    """

    def __init__(self, target: Path, by_reference: Collection[str]) -> None:
        """Prepare to copy into the folder `target`.

        `by_reference` are paths that are not copied, because their content stays where it is.
        """
        self.target = target
        self.by_reference = by_reference
        self.digests: dict[str, str] = {}
        self.size = 0
        self.left_out: list[str] = []

    def copy_folder(self, folder: int, prefix: str) -> None:
        """Copy an open folder with everything in it.

        Args:
            folder: descriptor of the folder.
            prefix: the folder's path within the copy, ending in "/"; "" for the top folder.

        Raises UserError ENV_LIMITS if the copy becomes too large, ENV_INVALID if something in it
        cannot be pushed, and OSError if it cannot be read or written.
        """
        if prefix.count("/") > MAX_DEPTH:
            raise _too_large(f"its folders are nested deeper than {MAX_DEPTH}")
        (self.target / prefix).mkdir(mode=0o700)
        for name in sorted(os.listdir(folder)):
            self.copy_entry(folder, name, prefix + name)

    def copy_entry(self, folder: int, name: str, path: str) -> None:
        """Copy one entry of a folder: a file, or a subfolder with everything in it. If the entry is
        not to be copied, add it with the reason to `left_out`.

        A file in `by_reference` is skipped.

        Args:
            folder: descriptor of the folder that holds the entry.
            name: the name of the entry in that folder.
            path: its path within the copy.

        Raises what `copy_file` raises, and UserError ENV_INVALID for a link, a device, a socket or
        a pipe.
        """
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        is_folder = stat.S_ISDIR(mode)
        reason = _reason_to_leave_out(name)
        # A virtual environment has a pyvenv.cfg, whatever its folder is called.
        if not reason and is_folder and _folder_contains(folder, name, "pyvenv.cfg"):
            reason = "a virtual environment"
        if reason:
            self.left_out.append(_left_out_entry(f"{path}/" if is_folder else path, reason))
        elif is_folder:
            with _open_folder(name, inside=folder) as subfolder:
                self.copy_folder(subfolder, path + "/")
        elif path in self.by_reference:  # the file stays where it is, and its hash is known
            return
        elif stat.S_ISREG(mode):
            self.copy_file(folder, name, path)
        else:
            kind = "a link" if stat.S_ISLNK(mode) else "a device, socket or pipe"
            raise _invalid_file(f"{path} is {kind}; a push takes regular files alone")

    def copy_file(self, folder: int, name: str, path: str) -> None:
        """Copy and hash one file.

        Args:
            folder: descriptor of the folder that holds it.
            name: its name in that folder.
            path: its path within the copy.

        Raises UserError ENV_LIMITS if the copy becomes too large, ENV_INVALID if it is not a
        regular file, and OSError if it cannot be read or written.
        """
        if len(self.digests) >= MAX_FILES:
            raise _too_large(f"it has more than {MAX_FILES:,} files")
        with _open_without_links(folder, name) as source:
            info = os.fstat(source.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise _invalid_file(f"{path} is no regular file")
            self.check_size(info.st_size, path)  # before any of it is copied
            self.digests[path] = self.copy_content(source, path)

    def copy_content(self, source: BinaryIO, path: str) -> str:
        """Copy an open file to `path` within the copy; return the SHA-256 of its content in hex."""
        digest = hashlib.sha256()
        with open(self.target / path, "xb") as copy:
            os.fchmod(copy.fileno(), 0o600)
            while data := source.read(CHUNK):
                # The size is checked again, because the file may grow while it is copied.
                self.check_size(len(data), path)
                self.size += len(data)
                digest.update(data)
                copy.write(data)
        return digest.hexdigest()

    def check_size(self, more_bytes: int, path: str) -> None:
        """Raise UserError ENV_LIMITS if `more_bytes` of `path` would make the copy too large."""
        if self.size + more_bytes > MAX_BYTES:
            raise _too_large(f"it is larger than {MAX_BYTES >> 20} MB (at {path})")


@contextlib.contextmanager
def _open_folder(path: str | Path, inside: int | None = None) -> Iterator[int]:
    """Context manager: yield a descriptor of the folder `path`. Raises OSError if it is a link.

    `inside` is the descriptor of the folder that a relative path starts from; None: the working
    folder.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    descriptor = os.open(path, flags, dir_fd=inside)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_without_links(folder: int, name: str) -> BinaryIO:
    """Open the file `name` in the open folder `folder` for reading. Raises OSError for a link."""
    # O_NONBLOCK: opening must not block if a pipe has taken the place of the file.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK

    def open_in_folder(file_name: str, _: int) -> int:  # `_`: the flags that `open` would use
        """Open the file with `flags` instead; `open` calls this as its `opener`."""
        return os.open(file_name, flags, dir_fd=folder)

    return open(name, "rb", opener=open_in_folder)


def _left_out_entry(path: str, reason: str) -> str:
    """Return the text "path (reason)"; characters of the path that are not UTF-8 are escaped."""
    printable = path.encode("utf-8", "backslashreplace").decode()
    return f"{printable} ({reason})"


def _reason_to_leave_out(name: str) -> str:
    """Return the reason why a file or folder of this name is not copied; "" if it is copied."""
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
    return REASONS_TO_LEAVE_OUT.get(name, "")


def _folder_contains(folder: int, name: str, file: str) -> bool:
    """Return whether the folder `name` in the open folder `folder` contains `file`."""
    with contextlib.suppress(OSError):  # no such file
        os.stat(f"{name}/{file}", dir_fd=folder, follow_symlinks=False)
        return True
    return False


def _check_packed(target: Path, names: list[str]) -> None:
    """Raise UserError ENV_LIMITS if the copied files take more than MAX_PACKED when compressed.

    `target` is the copy, `names` are the paths of its files.
    """
    packer = zlib.compressobj(6)
    packed_bytes = 0  # the packer is never flushed: its last few bytes do not matter
    for name in names:
        with open(target / name, "rb") as file:
            while data := file.read(CHUNK):
                packed_bytes += len(packer.compress(data))
                if packed_bytes > MAX_PACKED:
                    raise _too_large(f"it is larger than {MAX_PACKED >> 20} MB packed (at {name})")


def _shortened_list(left_out: list[str]) -> list[str]:
    """Return at most 50 entries of `left_out`, and if there are more e.g. "... and 7 more"."""
    if len(left_out) <= MOST_LISTED:
        return left_out
    return [*left_out[:MOST_LISTED], f"... and {len(left_out) - MOST_LISTED} more"]


def _too_large(limit: str) -> UserError:
    """Make the error for an environment that exceeds a limit; `limit` says which, e.g. "it has more
    than 5,000 files"."""
    return UserError(
        "ENV_LIMITS",
        f"the environment is too large to push: {limit}",
        field="path",
        hint="Keep models and raw data out of the folder; make rows in tasks() or sample them.",
    )


def _invalid_file(message: str) -> UserError:
    """Make the error for a file that cannot be pushed; `message` says which and why."""
    return UserError(
        "ENV_INVALID", message, field="path", hint="Replace it by a regular file, or move it away."
    )

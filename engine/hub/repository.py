"""Reads one version of a repository on the hub, and fetches its files whole or in part."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from engine.core.files import JsonObject, take_lock
from engine.hub.client import RepoKind
from engine.records.record import Record

if TYPE_CHECKING:
    import httpx

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
COMMIT = re.compile(r"[0-9a-f]{7,64}")
_SMALL_LIMIT = 64 << 20  # bytes; the largest tokenizers have about a third of this
_TRIES = 4  # how often a download is tried if the connection breaks
_PARTIAL_CONTENT, _RANGE_NOT_SATISFIABLE = 206, 416  # HTTP statuses


class RemoteFile(Record):
    """A file of a repository. An unknown `size` (in bytes) is 0, an unknown `sha256` (hex) is
    ""."""

    name: str
    size: int = 0
    sha256: str = ""


class _LargeFile(BaseModel):
    """What the hub says of a file in large file storage."""

    sha256: str | None = None


class _HubFile(BaseModel):
    """One file in the hub's answer. `lfs` is None for files that are not in large file storage."""

    rfilename: str
    size: int | None = None
    lfs: _LargeFile | None = None


class _HubAnswer(BaseModel):
    """The part of the hub's answer about the newest version of a repository that is used here."""

    sha: str
    siblings: list[_HubFile]
    cardData: JsonObject | None = None  # the hub spells the name like this


@dataclass(frozen=True)
class HubVersion:
    """One version of a repository on the hub.

    Attributes:
        commit: the hash of the version.
        files: the files by name.
        card: the data at the head of the README.md; {} if there are none.
    """

    client: "httpx.Client"
    kind: RepoKind
    repo: str
    commit: str
    files: dict[str, RemoteFile]
    card: JsonObject = field(default_factory=dict)

    def url(self, name: str) -> str:
        """Return the address of a file of this version, given the file's name in the repository."""
        return file_url(self.kind, self.repo, self.commit, name)


def file_url(kind: RepoKind, repo: str, commit: str, name: str) -> str:
    """Return the address of the file `name` in the version `commit` of a model or dataset (`kind`),
    relative to the hub's endpoint."""
    return f"{kind.files}/{repo}/resolve/{commit}/{name}"


def newest_version(client: "httpx.Client", kind: RepoKind, repo: str) -> HubVersion:
    """Ask the hub for the newest version of `repo`, with the sizes and checksums of its files.

    Raises httpx.HTTPError if the request fails, and UserError with the `absent_code` of `kind` (a
    model or a dataset) if the answer is not that of a hub.
    """
    # "blobs" asks for the sizes and checksums of the files.
    reply = client.get(f"{kind.api}/{repo}/revision/main", params={"blobs": "true"})
    reply.raise_for_status()
    try:
        answer = _HubAnswer.model_validate_json(reply.content)
    except ValidationError as error:
        raise kind.absent(
            f"the hub's answer for {repo} makes no sense", "Check HF_ENDPOINT."
        ) from error
    if not COMMIT.fullmatch(answer.sha):
        raise kind.absent(f"the hub names no version of {repo}", "Check HF_ENDPOINT.")
    files = _files_of(answer)
    return HubVersion(client, kind, repo, answer.sha, files, answer.cardData or {})


def _files_of(answer: "_HubAnswer") -> dict[str, RemoteFile]:
    """Return the files of a repository by their names. The hub gives checksums of large files only,
    so a small file has the checksum "". An unknown size is 0."""
    files = {}
    for file in answer.siblings:
        sha256 = file.lfs.sha256 if file.lfs is not None else None
        files[file.rfilename] = RemoteFile(
            name=file.rfilename, size=file.size or 0, sha256=sha256 or ""
        )
    return files


def fetch_text(remote: HubVersion, name: str) -> str:
    """Fetch the content of the small file `name` of a repository.

    Raises httpx.HTTPError if the request fails, and UserError with the `unusable_code` of
    `remote.kind` (a model or a dataset) if the file is over 64 MB or not UTF-8.
    """
    content = b""
    with remote.client.stream("GET", remote.url(name)) as reply:
        reply.raise_for_status()
        for chunk in reply.iter_bytes():
            content += chunk
            if len(content) > _SMALL_LIMIT:
                raise remote.kind.unusable(
                    f"{name} is over 64 MB", f"Use another {remote.kind.word}."
                )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise remote.kind.unusable(
            f"{name} is not text", f"Use another {remote.kind.word}."
        ) from error


def fetch_first_bytes(remote: HubVersion, name: str, count: int) -> bytes:
    """Fetch the first `count` bytes of the file `name` of the version `remote`, or the whole file
    if it is shorter.

    If the server ignores the range and sends the whole file, reading stops after these bytes.
    """
    headers = {"Range": f"bytes=0-{count - 1}"}
    content = b""
    with remote.client.stream("GET", remote.url(name), headers=headers) as reply:
        reply.raise_for_status()
        for chunk in reply.iter_raw():
            content += chunk
            if len(content) >= count:
                break
    return content[:count]


def download(
    client: "httpx.Client",
    url: str,
    target: Path,
    file: RemoteFile,
    report: Callable[[int], None] | None = None,
) -> str:
    """Download one file to the path `target` and check its size and checksum. A partial file of an
    earlier attempt is continued.

    Returns "" if the file is right, else what is wrong with it; a wrong file is deleted. Raises
    httpx.HTTPError if the request fails.

    Args:
        report: called with the number of bytes so far. An error that it raises ends the download
            and leaves the partial file.
    """
    with _own_partial_file(target) as partial_file:
        return _fetch_into(client, url, target, file, partial_file, report)


@contextmanager
def _own_partial_file(target: Path) -> Iterator[Path]:
    """Context manager that yields a partial file of `target` which no other process uses.

    This is the file that an earlier attempt has left, or a new one while another process is
    fetching the same target.
    """
    shared_file = target.with_name(f"{target.name}.part")
    lock = take_lock(shared_file)
    # The process that held the lock before may have given the locked file its final name.
    is_in_place = lock is not None and _is_open_file(lock, shared_file)
    partial_file = (
        shared_file if is_in_place else target.with_name(f"{target.name}.{token_hex(6)}.part")
    )
    try:
        yield partial_file
    finally:
        if not is_in_place:  # no later attempt can know this random name
            partial_file.unlink(missing_ok=True)
        elif shared_file.exists() and not shared_file.stat().st_size:
            shared_file.unlink(missing_ok=True)  # taking the lock made an empty file
        if lock is not None:
            os.close(lock)


def _is_open_file(descriptor: int, path: Path) -> bool:
    """Tell whether the file that is open as `descriptor` is the one that lies at `path` now. It is
    not if that was renamed or deleted since it was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _fetch_into(
    client: "httpx.Client",
    url: str,
    target: Path,
    file: RemoteFile,
    partial_file: Path,
    report: Callable[[int], None] | None,
) -> str:
    """Download into the partial file `partial_file`, check it, and rename it to `target`.

    The arguments, the result and the errors are those of `download`.
    """
    import httpx  # noqa: PLC0415  already loaded by the client

    for attempt in range(1, _TRIES + 1):
        try:
            _continue_download(client, url, partial_file, report)
            break
        except httpx.TransportError:  # the connection broke
            if attempt == _TRIES:
                raise
    fault = _download_fault(partial_file, file)
    if fault:
        partial_file.unlink(missing_ok=True)  # another process that fetches it may have been first
        return f"{file.name}: {fault}"
    os.replace(partial_file, target)
    return ""


def _continue_download(
    client: "httpx.Client", url: str, partial_file: Path, report: Callable[[int], None] | None
) -> None:
    """Append the missing bytes to the partial file `partial_file` and sync it to disk.

    If the server ignores ranges, the file is fetched from its start. `report` is called with the
    number of bytes in `partial_file` so far. Raises httpx.HTTPError if the request fails; what has
    arrived by then stays in `partial_file`.
    """
    stored_bytes = partial_file.stat().st_size if partial_file.is_file() else 0
    headers = {}
    if stored_bytes:
        headers["Range"] = f"bytes={stored_bytes}-"  # from the first missing byte on
    with client.stream("GET", url, headers=headers) as reply:
        # `partial_file` is as long as the file, or longer.
        if reply.status_code == _RANGE_NOT_SATISFIABLE:
            return
        reply.raise_for_status()
        if reply.status_code != _PARTIAL_CONTENT:  # the server sends the whole file
            stored_bytes = 0
        with open(partial_file, "ab" if stored_bytes else "wb") as file:
            for chunk in reply.iter_raw():
                file.write(chunk)
                stored_bytes += len(chunk)
                if report is not None:
                    report(stored_bytes)
            file.flush()
            os.fsync(file.fileno())


def _download_fault(partial_file: Path, file: RemoteFile) -> str:
    """Explain what is wrong with the downloaded file `partial_file`, or return "" if size and
    checksum are right.

    A size of 0 or a checksum of "" in `file` is unknown and not compared.
    """
    size = partial_file.stat().st_size if partial_file.is_file() else 0
    if file.size and size != file.size:
        return f"{size} of {file.size} bytes arrived"
    if file.sha256:
        with open(partial_file, "rb") as data:
            if hashlib.file_digest(data, "sha256").hexdigest() != file.sha256:
                return "the checksum is wrong"
    return ""

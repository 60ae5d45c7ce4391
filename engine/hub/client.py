"""The connection to a hub, and what its errors mean for a user."""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from engine.core.errors import UserError

if TYPE_CHECKING:
    import ssl

    import httpx


@dataclass(frozen=True)
class RepoKind:
    """What a repository of the hub holds: its addresses, and the errors about it.

    Attributes:
        word: for messages.
        api: path of the hub's answers about such repositories.
        files: what stands before "/ORG/NAME" in the path of a file.
        absent_code: code of the error if the repository cannot be had.
        unusable_code: code of the error if what it holds cannot be used.
        field: the argument of a tool that named it.
        instead: what a user can name instead.
    """

    word: str
    api: str
    files: str
    absent_code: str
    unusable_code: str
    field: str
    instead: str

    def absent(self, message: str, hint: str, retryable: bool = False) -> UserError:
        """The error for a repository that cannot be had; `retryable` if it may be had later."""
        return UserError(
            self.absent_code, message, hint=hint, field=self.field, retryable=retryable
        )

    def unusable(self, message: str, hint: str) -> UserError:
        """The error for a repository whose content cannot be used."""
        return UserError(self.unusable_code, message, hint=hint, field=self.field)


MODEL = RepoKind(
    word="model",
    api="/api/models",
    files="",
    absent_code="MODEL_NOT_FOUND",
    unusable_code="MODEL_UNSUPPORTED",
    field="model",
    instead="`pebble` or the path of a local model",
)
DATASET = RepoKind(
    word="dataset",
    api="/api/datasets",
    files="/datasets",
    absent_code="DATASET_INVALID",
    unusable_code="DATASET_INVALID",
    field="path",
    instead="a folder with its files",
)


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids asking the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def refuse_offline(repo: str, kind: RepoKind) -> None:
    """Raise UserError if HF_HUB_OFFLINE is set; to be called for a repository in no local cache.

    Its code is the `absent_code` of `kind` (a model or a dataset).
    """
    if is_offline():
        raise kind.absent(
            f"{repo} is in no local cache and HF_HUB_OFFLINE is set",
            f"Unset HF_HUB_OFFLINE, or use {kind.instead}.",
        )


def connect(endpoint: str = "") -> "httpx.Client":
    """An HTTP client for the hub at `endpoint`, with the token in HF_TOKEN, if that is set.

    An `endpoint` of "" stands for HF_ENDPOINT, or for the public hub if that is unset.
    """
    import httpx  # noqa: PLC0415  takes 70 ms to import; only hub access needs it

    base = endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    headers = {"Accept-Encoding": "identity"}  # sizes and ranges count the file's own bytes
    token = os.environ.get("HF_TOKEN", "").strip()
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return httpx.Client(
        base_url=base.rstrip("/"),
        headers=headers,
        follow_redirects=True,  # httpx drops the token when a redirect leaves the host
        timeout=httpx.Timeout(20, connect=8),
        verify=_certificates(),
    )


@lru_cache(maxsize=1)
def _certificates() -> "ssl.SSLContext":
    """The TLS settings, made once per process: reading the certificates takes 0.3 s."""
    import httpx  # noqa: PLC0415  loaded by the client already

    return httpx.create_ssl_context()


@contextlib.contextmanager
def errors_as_refusals(repo: str, kind: RepoKind) -> Iterator[None]:
    """Context manager: turn errors of HTTP and of a full disk into a UserError about `repo`.

    Its code is the `absent_code` of `kind` (a model or a dataset) for errors of HTTP, and DISK_FULL
    for a full disk. Other errors pass unchanged.
    """
    import httpx  # noqa: PLC0415  loaded by the client already

    try:
        yield
    except httpx.HTTPStatusError as error:
        raise _status_error(repo, kind, error.response.status_code) from error
    except httpx.HTTPError as error:
        raise kind.absent(
            f"{repo} could not be fetched: {type(error).__name__} {error}".rstrip(),
            f"Check the network (HF_ENDPOINT), or use {kind.instead}.",
            retryable=True,
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = f" ({error.filename})" if error.filename else ""
        raise UserError(
            "DISK_FULL",
            f"no room for the files of {repo}{place}",
            hint="Free disk space, or set HONESMITH_HOME to a volume with room.",
        ) from error


def _status_error(repo: str, kind: RepoKind, status: int) -> UserError:
    """The error for an HTTP status that means failure, with what to do about it.

    Its code is always the `absent_code` of `kind` (a model or a dataset), which means that a
    repository cannot be had, for whatever reason.
    """
    if status in (401, 403):
        return kind.absent(
            f"{repo} does not exist or needs permission (HTTP {status})",
            f"Accept the {kind.word}'s terms on its page and set HF_TOKEN for this server.",
        )
    if status == 404:
        return kind.absent(
            f"{repo} does not exist on the hub", "Check the spelling: ORGANISATION/NAME."
        )
    return kind.absent(f"the hub answered HTTP {status} for {repo}", "Try again.", retryable=True)

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
        word: what messages call such a repository.
        api: path of the hub's API for such repositories.
        files: what stands before "/ORG/NAME" in the path of a file.
        absent_code: code of the error if the repository cannot be fetched.
        unusable_code: code of the error if the content of the repository cannot be used.
        field: the argument of a tool that named the repository.
        instead: what a user can name instead, for hints.
    """

    word: str
    api: str
    files: str
    absent_code: str
    unusable_code: str
    field: str
    instead: str

    def absent(self, message: str, hint: str, retryable: bool = False) -> UserError:
        """Return the error for a repository of this kind that cannot be fetched. `retryable` says
        that a later try may succeed; `hint` says what to do."""
        return UserError(
            self.absent_code, message, hint=hint, field=self.field, retryable=retryable
        )

    def unusable(self, message: str, hint: str) -> UserError:
        """Return the error for a repository of this kind whose content cannot be used; `hint` says
        what to do."""
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
    """Tell whether HF_HUB_OFFLINE forbids asking the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def refuse_offline(repo: str, kind: RepoKind) -> None:
    """Raise UserError with the `absent_code` of `kind` (a model or a dataset) if HF_HUB_OFFLINE is
    set. Callers have already found that no local cache has the repository."""
    if is_offline():
        raise kind.absent(
            f"{repo} is in no local cache and HF_HUB_OFFLINE is set",
            f"Unset HF_HUB_OFFLINE, or use {kind.instead}.",
        )


def connect(endpoint: str = "") -> "httpx.Client":
    """Make an HTTP client for the hub at `endpoint`, with the token in HF_TOKEN if that is set.

    An empty `endpoint` stands for HF_ENDPOINT, or for the public hub if that is unset.
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
        timeout=httpx.Timeout(20, connect=8),  # seconds
        verify=_certificates(),
    )


@lru_cache(maxsize=1)
def _certificates() -> "ssl.SSLContext":
    """Make the TLS settings, once per process because reading the certificates takes 0.3 s."""
    import httpx  # noqa: PLC0415  already loaded by the client

    return httpx.create_ssl_context()


@contextlib.contextmanager
def errors_as_refusals(repo: str, kind: RepoKind) -> Iterator[None]:
    """Context manager that turns HTTP errors and a full disk into a UserError about `repo`.

    The code is the `absent_code` of `kind` (a model or a dataset) for HTTP errors, and DISK_FULL
    for a full disk. Other errors pass unchanged.
    """
    import httpx  # noqa: PLC0415  already loaded by the client

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
    """Return the error for a failed request with this HTTP status, with a hint what to do about it.

    The code is always the `absent_code` of `kind` (a model or a dataset), which means that a
    repository cannot be fetched, for whatever reason.
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

"""Models by hub id: taken from a local cache, or fetched over HTTP into the home.

A model is examined before it is downloaded: its small files and the headers of its weights (a few
hundred kilobytes, by range requests) contain everything that the control side needs. The weights
are downloaded when a run starts: its worker calls `ensure_weights`, which does nothing if they are
there already. Caches use the layout of huggingface_hub:
models--ORG--NAME/{refs/main,snapshots/COMMIT/}. HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE
and HF_HOME have the same meaning as there.

Why this module does not let huggingface_hub fetch the files. Measured with its version 2.4.0 and a
local server that sends 60 MB in two seconds:

- `hf_hub_download`, killed at 40 MB and started again, asked for all 60 MB and left the 40 MB on
  disk for good: since its pull request 4228 partial files have random names and are never
  continued. This module, killed at 50 MB, asked for the last 10 MB. Runs can be killed and restart
  by themselves, so this reason would be enough.
- It accepted a file of the right size with one wrong byte: over plain HTTP it compares only sizes.
  docs/reliability.md (A19) promises that weights are compared with their checksums.
- Trainers and deployments run with HF_HUB_OFFLINE=1, so that transformers cannot fetch anything.
  They are also the processes that download weights, and there the library refuses every request.
  So does its `http_get`, which could continue a file but is not part of its documented interface.
- If the hub cannot be reached, this module reports it after 0.4 s, the library after 24 s of
  retries.
- The library asks HF_ENDPOINT for a list of coding agents (/api/agent-harnesses), and names the
  agent it recognises in later requests. This module tells a hub nothing about the caller.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from engine.core.errors import UserError
from engine.core.files import write_text
from engine.home.run_dir import Home
from engine.models import model_files
from engine.records.record import Record

if TYPE_CHECKING:
    import ssl

    import httpx

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_SMALL_LIMIT = 64 << 20  # bytes; the largest tokenizers have about a third of it
_FIRST_BYTES = 1 << 18  # enough for most headers, so that one request will do
_PLAN = "download.json"
_TRIES = 4  # times that a weight file is downloaded until the connection holds
_PARTIAL_CONTENT, _RANGE_NOT_SATISFIABLE = 206, 416  # HTTP statuses

Progress = Callable[[int, int], None]  # called with bytes downloaded so far, bytes in total


class WeightFile(Record):
    """A weight file of a repository; `size` in bytes is 0 and `sha256` (hex) "" where unknown."""

    name: str
    size: int = 0
    sha256: str = ""


class DownloadPlan(Record):
    """`download.json` of a snapshot: its weight files and where to download them."""

    repo: str
    commit: str
    endpoint: str
    weights: list[WeightFile]


class _LargeFile(BaseModel):
    """What the hub says of a file in large file storage."""

    sha256: str | None = None


class _HubFile(BaseModel):
    """One file in the hub's answer; `lfs` is None for files that are not in large file storage."""

    rfilename: str
    size: int | None = None
    lfs: _LargeFile | None = None


class _HubAnswer(BaseModel):
    """The part that is used of the hub's answer about the newest version of a model."""

    sha: str
    siblings: list[_HubFile]


@dataclass(frozen=True)
class _HubVersion:
    """One version of a repository on the hub: its commit and its files by name."""

    client: "httpx.Client"
    repo: str
    commit: str
    files: dict[str, WeightFile]

    def url(self, name: str) -> str:
        return _file_url(self.repo, self.commit, name)


def cached(home: Home, repo: str) -> Path | None:
    """The snapshot folder of `repo` in a local cache; None if no cache has it.

    A snapshot with all weights is preferred, first in the shared cache, then in the home's. Without
    one it is the home's snapshot whose weights still have to be downloaded.
    """
    for root in (_shared_cache(), home.cache / "hub"):
        folder = _snapshot(root, repo)
        if folder is not None and is_complete(folder):
            return folder
    folder = _snapshot(home.cache / "hub", repo)
    if folder is None or not (folder / _PLAN).is_file():  # without a plan it stays incomplete
        return None
    return folder


def cached_ids(home: Home) -> list[str]:
    """Hub ids, sorted, of the models that a local cache has with all their weights."""
    repos = set()
    for root in (_shared_cache(), home.cache / "hub"):
        for folder in sorted(root.glob("models--*--*")):
            # "models--ORG--NAME"; a NAME may have more dashes.
            repo = folder.name.removeprefix("models--").replace("--", "/", 1)
            snapshot = _snapshot(root, repo)
            if snapshot is not None and is_complete(snapshot):
                repos.add(repo)
    return sorted(repos)


def is_complete(folder: Path) -> bool:
    """Whether the folder has config.json and every weight file that it declares, or the two files
    of an adapter."""
    if all((folder / name).is_file() for name in ADAPTER_FILES):
        return True
    try:
        names = model_files.weight_files(folder)
    except UserError:
        return False
    return (folder / "config.json").is_file() and all((folder / name).is_file() for name in names)


def look_up(home: Home, repo: str) -> Path:
    """The snapshot folder of `repo`, from a cache or from the hub.

    From the hub only the small files and the headers of the weights are fetched. Raises UserError
    MODEL_NOT_FOUND (also if the hub is offline or unreachable), MODEL_UNSUPPORTED or DISK_FULL.
    """
    folder = cached(home, repo)
    if folder is not None:
        return folder
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _not_found(
            f"{repo} is in no local cache and HF_HUB_OFFLINE is set",
            "Unset HF_HUB_OFFLINE, or use `pebble` or the path of a local model.",
        )
    with _client() as client, _http_errors_as_refusals(repo):
        return _fetch_small(home, _newest_version(client, repo))


def ensure_weights(folder: Path, progress: Progress | None = None) -> None:
    """Download the weights that are missing in `folder`, if any.

    Partial files are continued; size and sha256 are checked before a file gets its final name.
    `progress` is called with the bytes of all files so far and in total. One process downloads at a
    time; others wait for it.

    Raises UserError MODEL_NOT_FOUND (retryable), MODEL_UNSUPPORTED on a wrong checksum, or
    DISK_FULL.
    """
    if is_complete(folder):
        return
    plan = _read_plan(folder)
    if plan is None:  # another program's cache: nothing says where to download the rest
        return
    with _http_errors_as_refusals(plan.repo), open(folder / "download.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second worker waits here; the files are there then
        with _client(plan.endpoint) as client:
            _fetch_weights(client, folder, plan, progress)


def _fetch_weights(
    client: "httpx.Client", folder: Path, plan: DownloadPlan, progress: Progress | None
) -> None:
    """Download each weight file of the plan that is not in `folder` yet.

    `progress` is called with the bytes of all files so far and in total.
    """
    total_bytes = sum(file.size for file in plan.weights)
    bytes_before = 0  # sizes of the earlier files of the plan

    def report(file_bytes: int) -> None:
        if progress is not None:
            progress(bytes_before + file_bytes, total_bytes)

    for file in plan.weights:
        if not (folder / file.name).is_file():
            url = _file_url(plan.repo, plan.commit, file.name)
            _download(client, url, folder, file, report)
        bytes_before += file.size


def _read_plan(folder: Path) -> DownloadPlan | None:
    """The download plan in a snapshot folder.

    None if it has none, as in a cache that another program made.
    """
    path = folder / _PLAN
    return DownloadPlan.read(path) if path.is_file() else None


def _file_url(repo: str, commit: str, name: str) -> str:
    """Where a file of one version is downloaded, relative to the endpoint."""
    return f"/{repo}/resolve/{commit}/{name}"


def missing_bytes(folder: Path) -> int:
    """Bytes of weights that still have to be downloaded into `folder`.

    0 for a folder without a download plan, which has all its weights.
    """
    plan = _read_plan(folder)
    weights = plan.weights if plan is not None else []
    return sum(file.size for file in weights if not (folder / file.name).is_file())


def _shared_cache() -> Path:
    """huggingface_hub's own cache folder, as its environment variables set it."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or default).expanduser() / "hub"


def _model_folder(root: Path, repo: str) -> Path:
    """The folder of `repo` in the cache `root`, named models--ORG--NAME."""
    return root / ("models--" + repo.replace("/", "--"))


def _snapshot(root: Path, repo: str) -> Path | None:
    """The snapshot folder of `repo` in the cache `root`; None if there is none.

    It is the snapshot that the file refs/main names. Without that file it is the only snapshot, or
    None if there are several.
    """
    folder = _model_folder(root, repo)
    try:
        commit = (folder / "refs" / "main").read_text("utf-8").strip()
    except OSError:
        commit = ""
    if not commit:
        snapshots = list((folder / "snapshots").glob("*"))
        return snapshots[0] if len(snapshots) == 1 else None
    # The pattern also keeps a damaged file from leading out of the folder.
    snapshot = folder / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def _client(endpoint: str = "") -> "httpx.Client":
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
def _http_errors_as_refusals(repo: str) -> Iterator[None]:
    """Context manager: turn errors of HTTP and of a full disk into a UserError about `repo`.

    Raises UserError MODEL_NOT_FOUND (HTTP) or DISK_FULL; other errors pass unchanged.
    """
    import httpx  # noqa: PLC0415  loaded by the client already

    try:
        yield
    except httpx.HTTPStatusError as error:
        raise _status_error(repo, error.response.status_code) from error
    except httpx.HTTPError as error:
        raise _not_found(
            f"{repo} could not be fetched: {type(error).__name__} {error}".rstrip(),
            "Check the network (HF_ENDPOINT), or use `pebble` or the path of a local model.",
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


def _status_error(repo: str, status: int) -> UserError:
    """The error MODEL_NOT_FOUND for an HTTP status that means failure, with what to do about it."""
    if status in (401, 403):
        return _not_found(
            f"{repo} does not exist or needs permission (HTTP {status})",
            "Accept the model's terms on its page and set HF_TOKEN for this server.",
        )
    if status == 404:
        return _not_found(
            f"{repo} does not exist on the hub", "Check the spelling: ORGANISATION/NAME."
        )
    return _not_found(f"the hub answered HTTP {status} for {repo}", "Try again.", retryable=True)


def _not_found(message: str, hint: str, retryable: bool = False) -> UserError:
    """The error MODEL_NOT_FOUND; `retryable` if the same call may succeed later."""
    return UserError("MODEL_NOT_FOUND", message, hint=hint, field="model", retryable=retryable)


def _newest_version(client: "httpx.Client", repo: str) -> _HubVersion:
    """Ask the hub for the newest version of `repo`, with the sizes and checksums of its files.

    Raises httpx.HTTPError if the request fails, UserError MODEL_NOT_FOUND if the answer is not that
    of a hub.
    """
    reply = client.get(f"/api/models/{repo}/revision/main", params={"blobs": "true"})
    reply.raise_for_status()
    try:
        answer = _HubAnswer.model_validate_json(reply.content)
    except ValidationError as error:
        raise _not_found(
            f"the hub's answer for {repo} makes no sense", "Check HF_ENDPOINT."
        ) from error
    if not _COMMIT.fullmatch(answer.sha):
        raise _not_found(f"the hub names no version of {repo}", "Check HF_ENDPOINT.")
    files = {}
    for file in answer.siblings:
        sha256 = file.lfs.sha256 if file.lfs is not None else None  # only of large files
        files[file.rfilename] = WeightFile(
            name=file.rfilename, size=file.size or 0, sha256=sha256 or ""
        )
    return _HubVersion(client, repo, answer.sha, files)


def _fetch_small(home: Home, remote: _HubVersion) -> Path:
    """Fetch the small files and the headers of the weights; returns the snapshot folder.

    Of a model it also writes the download plan, from which `ensure_weights` fetches the rest; an
    adapter is fetched whole. `refs/main` is written last, because it makes the folder a part of the
    cache. Raises UserError MODEL_UNSUPPORTED, or httpx.HTTPError.
    """
    is_adapter = "config.json" not in remote.files and set(ADAPTER_FILES) <= set(remote.files)
    if not is_adapter:
        _require_config(remote)
    root = _model_folder(home.cache / "hub", remote.repo)
    folder = root / "snapshots" / remote.commit
    folder.mkdir(parents=True, exist_ok=True)
    if is_adapter:
        _fetch_adapter(remote, folder)
    else:
        _fetch_model_without_weights(remote, folder)
    (root / "refs").mkdir(exist_ok=True)
    write_text(root / "refs" / "main", remote.commit)
    return folder


def _fetch_adapter(remote: _HubVersion, folder: Path) -> None:
    """Fetch an adapter into `folder`, its weights at once, because they are small beside a
    model's."""
    config, weights = ADAPTER_FILES
    write_text(folder / config, _fetch_text(remote, config))
    if not (folder / weights).is_file():
        _download(remote.client, remote.url(weights), folder, remote.files[weights], _ignore)


def _fetch_model_without_weights(remote: _HubVersion, folder: Path) -> None:
    """Fetch the small files of a model and the headers of its weights into `folder`, and write the
    plan for the weights."""
    for name in _SMALL_FILES:
        if name in remote.files and not (folder / name).is_file():
            write_text(folder / name, _fetch_text(remote, name))
            if name == "config.json":  # refused before the larger files are fetched
                model_files.check_config(model_files.load_json(folder / name), remote.repo)
    names = _weight_names(folder, remote)
    model_files.check_text_files(folder)  # refuses a model without tokenizer or chat template
    for name in names:
        (folder / (name + model_files.HEADER)).write_bytes(_fetch_header(remote, name))
    plan = DownloadPlan(
        repo=remote.repo,
        commit=remote.commit,
        endpoint=str(remote.client.base_url),
        weights=[remote.files[name] for name in names],
    )
    plan.write(folder / _PLAN)


def _ignore(_bytes: int) -> None:
    """For a download whose progress nobody follows."""


def _require_config(remote: _HubVersion) -> None:
    """Raise UserError MODEL_UNSUPPORTED for a repository without config.json.

    Such a repository holds a model for a library other than transformers.
    """
    if "config.json" in remote.files:
        return
    raise model_files.unsupported(
        f"{remote.repo} is no transformers model", hint="It has no config.json."
    )


def _weight_names(folder: Path, remote: _HubVersion) -> list[str]:
    """Names of the weight files: those in the shard index, or the single file.

    Raises UserError MODEL_UNSUPPORTED if the repository does not have them.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = model_files.shards(model_files.load_json(index), index.name)
    else:
        names = ["model.safetensors"]
    if any(name not in remote.files for name in names):
        raise model_files.no_safetensors(remote.repo, list(remote.files))
    return names


def _fetch_text(remote: _HubVersion, name: str) -> str:
    """Fetch the content of a small file.

    Raises UserError MODEL_UNSUPPORTED if it is over 64 MB or not UTF-8, or httpx.HTTPError.
    """
    content = b""
    with remote.client.stream("GET", remote.url(name)) as reply:
        reply.raise_for_status()
        for chunk in reply.iter_bytes():
            content += chunk
            if len(content) > _SMALL_LIMIT:
                raise model_files.unsupported(f"{name} is over 64 MB", "Use another model.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise model_files.unsupported(f"{name} is not text", "Use another model.") from error


def _fetch_header(remote: _HubVersion, name: str) -> bytes:
    """Fetch the safetensors header of a weight file, with the eight bytes of its length.

    One request is enough unless the header is longer than 256 KB.
    """
    first_bytes = _fetch_first_bytes(remote, name, _FIRST_BYTES)
    wanted_bytes = 8 + model_files.header_length(first_bytes, name)
    if len(first_bytes) < wanted_bytes:
        first_bytes = _fetch_first_bytes(remote, name, wanted_bytes)
    return first_bytes[:wanted_bytes]


def _fetch_first_bytes(remote: _HubVersion, name: str, count: int) -> bytes:
    """Fetch the first `count` bytes of a file, or all of them if it is shorter.

    From a server that ignores the range and sends everything, only these bytes are read.
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


def _download(
    client: "httpx.Client",
    url: str,
    folder: Path,
    file: WeightFile,
    report: Callable[[int], None],
) -> None:
    """Download one weight file into `folder`, and check its size and checksum.

    A partial file of an earlier attempt is continued. If the connection breaks, it is continued up
    to three times. `report` is called with the number of bytes that are there. Raises
    httpx.HTTPError, or UserError MODEL_UNSUPPORTED if the file has the wrong size or checksum.
    """
    import httpx  # noqa: PLC0415  loaded by the client already

    target = folder / file.name
    part = folder / (file.name + ".part")
    for attempt in range(1, _TRIES + 1):
        try:
            _continue_part(client, url, part, report)
            break
        except httpx.TransportError:  # the connection broke
            if attempt == _TRIES:
                raise
    fault = _download_fault(part, file)
    if fault:
        part.unlink()
        raise model_files.unsupported(f"{file.name}: {fault}", "Start the run again.")
    os.replace(part, target)
    # The header is in the file itself now.
    (folder / (file.name + model_files.HEADER)).unlink(missing_ok=True)


def _continue_part(
    client: "httpx.Client", url: str, part: Path, report: Callable[[int], None]
) -> None:
    """Append the missing bytes to the partial file `part` and sync it to disk.

    If the server ignores ranges, the file is fetched from its start. Raises httpx.HTTPError; what
    has arrived by then stays in `part`.
    """
    size = part.stat().st_size if part.is_file() else 0
    headers = {}
    if size:
        headers["Range"] = f"bytes={size}-"  # from the first missing byte on
    with client.stream("GET", url, headers=headers) as reply:
        # There is nothing after `size`: the file is complete.
        if reply.status_code == _RANGE_NOT_SATISFIABLE:
            return
        reply.raise_for_status()
        if reply.status_code != _PARTIAL_CONTENT:  # the server sends the whole file
            size = 0
        with open(part, "ab" if size else "wb") as file:
            for chunk in reply.iter_raw():
                file.write(chunk)
                size += len(chunk)
                report(size)
            file.flush()
            os.fsync(file.fileno())


def _download_fault(part: Path, file: WeightFile) -> str:
    """What is wrong with the downloaded file `part`; "" if size and checksum are right.

    A size of 0 or a checksum of "" in `file` is unknown and not compared.
    """
    size = part.stat().st_size
    if file.size and size != file.size:
        return f"{size} of {file.size} bytes arrived"
    if file.sha256:
        with open(part, "rb") as data:
            if hashlib.file_digest(data, "sha256").hexdigest() != file.sha256:
                return "the checksum is wrong"
    return ""

"""Models by hub id: looked up in the local caches, else fetched over HTTP into the home.

A model is looked at before it is downloaded: its small files and the headers of its weights (a
few hundred kilobytes, by range requests) say everything the control side needs. The weights come
when a run starts: `ensure_weights` in its worker, which costs nothing once they are there.
Caches use the layout of huggingface_hub: models--ORG--NAME/{refs/main,snapshots/COMMIT/}.
HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE and HF_HOME mean what they mean there.

Why huggingface_hub does not fetch the files itself. Measured with its version 2.4.0 and a server on
the loopback that sends 60 MB in two seconds:

- `hf_hub_download`, killed at 40 MB and started again, asked for all 60 MB and left the 40 MB on
  disk for good: since its pull request 4228 partial files have random names and none is continued.
  This module, killed at 50 MB, asked for the last 10 MB. Runs are killed and start again by
  themselves, so this alone decides.
- It took a file of the right size with one wrong byte: over plain HTTP it compares sizes alone.
  docs/reliability.md (A19) promises that weights are held against their checksums.
- Trainers and deployments run with HF_HUB_OFFLINE=1, so that transformers fetches nothing behind
  our back. They are also where weights arrive, and there the library refuses every request. So
  does its `http_get`, which could continue a file but is not part of its documented interface.
- A hub that cannot be reached is refused here after 0.4 s, there after 24 s of retries.
- It asks HF_ENDPOINT for a list of coding agents (/api/agent-harnesses), to name the one it
  recognises in later requests. Nothing here tells a hub who asks.
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
_SMALL = (
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
_SMALL_LIMIT = 64 << 20
_FIRST_BYTES = 1 << 18  # holds the header of most files, so one request does
_PLAN = "download.json"
_TRIES = 4

Progress = Callable[[int, int], None]  # bytes that have arrived, bytes in all


class WeightFile(Record):
    """A weight file of a repository; `size` in bytes is 0 and `sha256` (hex) "" where unknown."""

    name: str
    size: int = 0
    sha256: str = ""


class DownloadPlan(Record):
    """`download.json` of a snapshot: which weights belong to it and where they come from."""

    repo: str
    commit: str
    endpoint: str
    weights: list[WeightFile]


class _LargeFile(BaseModel):
    sha256: str | None = None


class _Sibling(BaseModel):
    """One file in the hub's answer; `lfs` only where the file is stored apart from the text."""

    rfilename: str
    size: int | None = None
    lfs: _LargeFile | None = None


class _Answer(BaseModel):
    """What the hub answers about the newest version of a model, as far as it is read."""

    sha: str
    siblings: list[_Sibling]


@dataclass(frozen=True)
class _Remote:
    """One version of a repository on the hub: its commit and its files by name."""

    client: "httpx.Client"
    repo: str
    commit: str
    files: dict[str, WeightFile]

    def url(self, name: str) -> str:
        return _file_url(self.repo, self.commit, name)


def cached(home: Home, repo: str) -> Path | None:
    """The snapshot of `repo` in a local cache: one with weights first, else our own of headers."""
    for root in (_shared_cache(), home.cache / "hub"):
        folder = _snapshot(root, repo)
        if folder is not None and is_complete(folder):
            return folder
    folder = _snapshot(home.cache / "hub", repo)
    return folder if folder is not None and (folder / _PLAN).is_file() else None


def cached_ids(home: Home) -> list[str]:
    """Hub ids of the models with a whole snapshot in a local cache, sorted."""
    repos = set()
    for root in (_shared_cache(), home.cache / "hub"):
        for folder in sorted(root.glob("models--*--*")):
            repo = folder.name.removeprefix("models--").replace("--", "/", 1)
            snapshot = _snapshot(root, repo)
            if snapshot is not None and is_complete(snapshot):
                repos.add(repo)
    return sorted(repos)


def is_complete(folder: Path) -> bool:
    """Whether config.json and every weight file the folder declares are there."""
    try:
        names = model_files.weight_files(folder)
    except UserError:
        return False
    return (folder / "config.json").is_file() and all((folder / name).is_file() for name in names)


def look_up(home: Home, repo: str) -> Path:
    """The folder of `repo`, its small files and weight headers fetched when no cache has it.

    Raises UserError MODEL_NOT_FOUND (also when offline or unreachable) or MODEL_UNSUPPORTED.
    """
    folder = cached(home, repo)
    if folder is not None:
        return folder
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _not_found(
            f"{repo} is in no local cache and HF_HUB_OFFLINE is set",
            "Unset HF_HUB_OFFLINE, or use `pebble` or the path of a local model.",
        )
    with _client() as client, _explained(repo):
        return _fetch_small(home, _newest(client, repo))


def ensure_weights(folder: Path, progress: Progress | None = None) -> None:
    """Download the weights still missing in `folder`; nothing happens where none are.

    Continues a partial file, checks size and sha256, renames last.
    Raises UserError MODEL_NOT_FOUND (retryable), MODEL_UNSUPPORTED on a wrong checksum, DISK_FULL.
    """
    plan = None if is_complete(folder) else _plan(folder)
    if plan is None:
        return
    with _explained(plan.repo), open(folder / "download.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second worker waits, then the files are there
        with _client(plan.endpoint) as client:
            _fetch_weights(client, folder, plan, progress or (lambda arrived, total: None))


def _fetch_weights(
    client: "httpx.Client", folder: Path, plan: DownloadPlan, progress: Progress
) -> None:
    total = sum(file.size for file in plan.weights)
    before = 0  # bytes of the files that are there
    for file in plan.weights:
        if not (folder / file.name).is_file():
            url = _file_url(plan.repo, plan.commit, file.name)
            _download(
                client, url, folder, file, lambda size, start=before: progress(start + size, total)
            )
        before += file.size


def _plan(folder: Path) -> DownloadPlan | None:
    path = folder / _PLAN
    return DownloadPlan.read(path) if path.is_file() else None


def _file_url(repo: str, commit: str, name: str) -> str:
    return f"/{repo}/resolve/{commit}/{name}"


def missing_bytes(folder: Path) -> int:
    """Bytes of weights still to be downloaded into `folder`."""
    plan = _plan(folder)
    weights = plan.weights if plan is not None else []
    return sum(file.size for file in weights if not (folder / file.name).is_file())


def _shared_cache() -> Path:
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or default).expanduser() / "hub"


def _folder(root: Path, repo: str) -> Path:
    return root / ("models--" + repo.replace("/", "--"))


def _snapshot(root: Path, repo: str) -> Path | None:
    """The snapshot that refs/main names, else the only one there is."""
    folder = _folder(root, repo)
    try:
        commit = (folder / "refs" / "main").read_text("utf-8").strip()
    except OSError:
        commit = ""
    if _COMMIT.fullmatch(commit) and (folder / "snapshots" / commit).is_dir():
        return folder / "snapshots" / commit
    others = list((folder / "snapshots").glob("*")) if not commit else []
    return others[0] if len(others) == 1 else None


def _client(endpoint: str = "") -> "httpx.Client":
    import httpx  # noqa: PLC0415  70 ms that only a look at the hub needs

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
    """Read once per process: it takes a third of a second."""
    import httpx  # noqa: PLC0415  loaded by the client already

    return httpx.create_ssl_context()


@contextlib.contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn what HTTP and the disk can raise into the refusal the caller can act on."""
    import httpx  # noqa: PLC0415  loaded by the client already

    try:
        yield
    except httpx.HTTPStatusError as error:
        raise _refusal(repo, error.response.status_code) from error
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


def _refusal(repo: str, status: int) -> UserError:
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
    return UserError("MODEL_NOT_FOUND", message, hint=hint, field="model", retryable=retryable)


def _newest(client: "httpx.Client", repo: str) -> _Remote:
    """The newest version of `repo`, with the sizes and checksums of its files."""
    reply = client.get(f"/api/models/{repo}/revision/main", params={"blobs": "true"})
    reply.raise_for_status()
    try:
        answer = _Answer.model_validate_json(reply.content)
    except ValidationError as error:
        raise _not_found(
            f"the hub's answer for {repo} makes no sense", "Check HF_ENDPOINT."
        ) from error
    if not _COMMIT.fullmatch(answer.sha):
        raise _not_found(f"the hub names no version of {repo}", "Check HF_ENDPOINT.")
    files = {
        item.rfilename: WeightFile(
            name=item.rfilename,
            size=item.size or 0,
            sha256=(item.lfs and item.lfs.sha256) or "",
        )
        for item in answer.siblings
    }
    return _Remote(client, repo, answer.sha, files)


def _fetch_small(home: Home, remote: _Remote) -> Path:
    """The snapshot folder, with the small files, the headers of the weights and the plan.

    `refs/main` is written last: until then no cache look-up sees the folder.
    """
    _refuse_other_kinds(remote)
    root = _folder(home.cache / "hub", remote.repo)
    folder = root / "snapshots" / remote.commit
    folder.mkdir(parents=True, exist_ok=True)
    for name in _SMALL:
        if name in remote.files and not (folder / name).is_file():
            write_text(folder / name, _small_text(remote, name))
            if name == "config.json":
                model_files.check_config(model_files.load_json(folder / name), remote.repo)
    names = _weight_names(folder, remote)
    model_files.check_text_files(folder)
    for name in names:
        (folder / (name + model_files.HEADER)).write_bytes(_header_bytes(remote, name))
    plan = DownloadPlan(
        repo=remote.repo,
        commit=remote.commit,
        endpoint=str(remote.client.base_url),
        weights=[remote.files[name] for name in names],
    )
    plan.write(folder / _PLAN)
    (root / "refs").mkdir(exist_ok=True)
    write_text(root / "refs" / "main", remote.commit)
    return folder


def _refuse_other_kinds(remote: _Remote) -> None:
    """Refuse a repository without config.json: an adapter, or another library's model."""
    if "config.json" in remote.files:
        return
    adapter = "adapter_config.json" in remote.files
    raise model_files.unsupported(
        f"{remote.repo} is {'only a LoRA adapter' if adapter else 'no transformers model'}",
        "Name the base model it was made for." if adapter else "It has no config.json.",
    )


def _weight_names(folder: Path, remote: _Remote) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = model_files.shards(model_files.load_json(index), index.name)
    else:
        names = ["model.safetensors"]
    if any(name not in remote.files for name in names):
        raise model_files.no_safetensors(remote.repo, list(remote.files))
    return names


def _small_text(remote: _Remote, name: str) -> str:
    data = b""
    with remote.client.stream("GET", remote.url(name)) as reply:
        reply.raise_for_status()
        for chunk in reply.iter_bytes():
            data += chunk
            if len(data) > _SMALL_LIMIT:
                raise model_files.unsupported(f"{name} is over 64 MB", "Use another model.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise model_files.unsupported(f"{name} is not text", "Use another model.") from error


def _header_bytes(remote: _Remote, name: str) -> bytes:
    """The safetensors header of a weight file, with the eight bytes before it."""
    data = _first_bytes(remote, name, _FIRST_BYTES)
    length = 8 + model_files.header_length(data, name)
    if len(data) < length:
        data = _first_bytes(remote, name, length)
    return data[:length]


def _first_bytes(remote: _Remote, name: str, count: int) -> bytes:
    """The first `count` bytes; a server that ignores the range is read no further than that."""
    span = {"Range": f"bytes=0-{count - 1}"}
    data = b""
    with remote.client.stream("GET", remote.url(name), headers=span) as reply:
        reply.raise_for_status()
        for chunk in reply.iter_raw():
            data += chunk
            if len(data) >= count:
                break
    return data[:count]


def _download(
    client: "httpx.Client",
    url: str,
    folder: Path,
    file: WeightFile,
    report: Callable[[int], None],
) -> None:
    """Fetch one weight file into `folder`; `report` is told how many of its bytes are there."""
    import httpx  # noqa: PLC0415  loaded by the client already

    target = folder / file.name
    part = folder / (file.name + ".part")
    for attempt in range(1, _TRIES + 1):
        try:
            _continue_part(client, url, part, report)
            break
        except httpx.TransportError:
            if attempt == _TRIES:
                raise
    fault = _fault(part, file)
    if fault:
        part.unlink()
        raise model_files.unsupported(f"{file.name}: {fault}", "Start the run again.")
    os.replace(part, target)
    (folder / (file.name + model_files.HEADER)).unlink(missing_ok=True)


def _continue_part(
    client: "httpx.Client", url: str, part: Path, report: Callable[[int], None]
) -> None:
    """Append to the partial file what it lacks; a server that ignores ranges sends all of it."""
    size = part.stat().st_size if part.is_file() else 0
    headers = {"Range": f"bytes={size}-"} if size else {}
    with client.stream("GET", url, headers=headers) as reply:
        if reply.status_code == 416:  # nothing left to fetch
            return
        reply.raise_for_status()
        if reply.status_code != 206:
            size = 0
        with open(part, "ab" if size else "wb") as file:
            for chunk in reply.iter_raw():
                file.write(chunk)
                size += len(chunk)
                report(size)
            file.flush()
            os.fsync(file.fileno())


def _fault(part: Path, file: WeightFile) -> str:
    """What is wrong with a file that has arrived, "" where nothing is."""
    size = part.stat().st_size
    if file.size and size != file.size:
        return f"{size} of {file.size} bytes arrived"
    if file.sha256:
        with open(part, "rb") as data:
            if hashlib.file_digest(data, "sha256").hexdigest() != file.sha256:
                return "the checksum is wrong"
    return ""

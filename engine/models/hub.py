"""Models by hub id: found in the local caches, else fetched over HTTP into the home.

A model is looked at before it is downloaded: its small files and the headers of its weights (a
few hundred kilobytes, by range requests) say everything the control side needs. The weights come
when a run starts: `ensure_weights` in its worker, which costs nothing once they are there.
Caches use the layout of huggingface_hub: models--ORG--NAME/{refs/main,snapshots/COMMIT/}.
HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE and HF_HOME mean what they mean there.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.errors import UserError
from engine.core.files import read_json, write_json, write_text
from engine.home.run_dir import Home
from engine.models import model_files

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
    found = set()
    for root in (_shared_cache(), home.cache / "hub"):
        for folder in sorted(root.glob("models--*--*")):
            repo = folder.name.removeprefix("models--").replace("--", "/", 1)
            snapshot = _snapshot(root, repo)
            if snapshot is not None and is_complete(snapshot):
                found.add(repo)
    return sorted(found)


def is_complete(folder: Path) -> bool:
    """Whether every weight file the folder declares is there."""
    try:
        names = model_files.weight_files(folder)
    except UserError:
        return False
    return (folder / "config.json").is_file() and all((folder / name).is_file() for name in names)


def look_up(home: Home, repo: str) -> Path:
    """The folder of `repo`, its small files and weight headers fetched when no cache has it.

    Raises UserError MODEL_NOT_FOUND (also when offline or unreachable) or MODEL_UNSUPPORTED.
    """
    found = cached(home, repo)
    if found is not None:
        return found
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _not_found(
            f"{repo} is in no local cache and HF_HUB_OFFLINE is set",
            "Unset HF_HUB_OFFLINE, or use `pebble` or the path of a local model.",
        )
    with _client() as client, _explained(repo):
        info = _listing(client, repo)
        return _fetch_small(client, home, repo, info)


def ensure_weights(folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Download the weights still missing in `folder`; nothing happens where none are.

    Continues a part-file, checks size and sha256, renames last. `progress(done, total)` in bytes.
    Raises UserError MODEL_NOT_FOUND (retryable), MODEL_UNSUPPORTED on a wrong checksum, DISK_FULL.
    """
    if is_complete(folder) or not (folder / _PLAN).is_file():
        return
    plan = read_json(folder / _PLAN)
    with _explained(plan["repo"]), open(folder / "download.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second worker waits, then finds the files there
        with _client(plan["endpoint"]) as client:
            _fetch_weights(client, folder, plan, progress)


def _fetch_weights(
    client: "httpx.Client",
    folder: Path,
    plan: dict[str, Any],
    progress: Callable[[int, int], None] | None,
) -> None:
    total = sum(int(item["size"]) for item in plan["weights"])
    done = 0
    for item in plan["weights"]:
        target = folder / item["name"]
        if not target.is_file():
            start = done
            report = (lambda got, start=start: progress(start + got, total)) if progress else None
            url = f"/{plan['repo']}/resolve/{plan['commit']}/{item['name']}"
            _download(client, url, target, item, report)
        done += int(item["size"])


def missing_bytes(folder: Path) -> int:
    """Bytes of weights still to be downloaded into `folder`."""
    if not (folder / _PLAN).is_file():
        return 0
    weights = read_json(folder / _PLAN)["weights"]
    return sum(int(item["size"]) for item in weights if not (folder / item["name"]).is_file())


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
        raise UserError(
            "DISK_FULL",
            f"no room for the files of {repo} ({error.filename})",
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


def _listing(client: "httpx.Client", repo: str) -> dict[str, Any]:
    """{"commit", "files": {name: {"size", "sha256"}}} of the newest version."""
    reply = client.get(f"/api/models/{repo}/revision/main", params={"blobs": "true"})
    reply.raise_for_status()
    try:
        body = reply.json()
        commit = str(body["sha"])
        files = {
            str(item["rfilename"]): {
                "size": int(item.get("size") or 0),
                "sha256": (item.get("lfs") or {}).get("sha256", ""),
            }
            for item in body["siblings"]
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_found(
            f"the hub's answer for {repo} makes no sense", "Check HF_ENDPOINT."
        ) from error
    if not _COMMIT.fullmatch(commit):
        raise _not_found(f"the hub names no version of {repo}", "Check HF_ENDPOINT.")
    return {"commit": commit, "files": files}


def _fetch_small(client: "httpx.Client", home: Home, repo: str, info: dict[str, Any]) -> Path:
    files, commit = info["files"], info["commit"]
    if "config.json" not in files:
        adapter = "adapter_config.json" in files
        raise model_files.unsupported(
            f"{repo} is {'only a LoRA adapter' if adapter else 'no transformers model'}",
            "Name the base model it was made for." if adapter else "It has no config.json.",
        )
    root = _folder(home.cache / "hub", repo)
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True, exist_ok=True)
    base = f"/{repo}/resolve/{commit}"
    for name in _SMALL:
        if name in files and not (folder / name).is_file():
            write_text(folder / name, _small_text(client, f"{base}/{name}", name))
            if name == "config.json":
                model_files.check_config(model_files.load_json(folder / name), repo)
    names = _weight_names(folder, repo, files)
    model_files.check_text_files(folder)
    for name in names:
        header = _header_bytes(client, f"{base}/{name}", name)
        (folder / (name + model_files.HEADER)).write_bytes(header)
    plan = {
        "repo": repo,
        "commit": commit,
        "endpoint": str(client.base_url),
        "weights": [{"name": name, **files[name]} for name in names],
    }
    write_json(folder / _PLAN, plan)
    (root / "refs").mkdir(exist_ok=True)
    write_text(root / "refs" / "main", commit)
    return folder


def _weight_names(folder: Path, repo: str, files: dict[str, Any]) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = model_files.shards(model_files.load_json(index), index.name)
    else:
        names = ["model.safetensors"]
    if any(name not in files for name in names):
        raise model_files.no_safetensors(repo, list(files))
    return names


def _small_text(client: "httpx.Client", url: str, name: str) -> str:
    with client.stream("GET", url) as reply:
        reply.raise_for_status()
        data = b""
        for chunk in reply.iter_bytes():
            data += chunk
            if len(data) > _SMALL_LIMIT:
                raise model_files.unsupported(f"{name} is over 64 MB", "Use another model.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise model_files.unsupported(f"{name} is not text", "Use another model.") from error


def _header_bytes(client: "httpx.Client", url: str, name: str) -> bytes:
    raw = _first_bytes(client, url, _FIRST_BYTES)
    need = 8 + model_files.header_length(raw, name)
    if len(raw) < need:
        raw = _first_bytes(client, url, need)
    return raw[:need]


def _first_bytes(client: "httpx.Client", url: str, count: int) -> bytes:
    """The first `count` bytes; a server that ignores the range is read no further than that."""
    with client.stream("GET", url, headers={"Range": f"bytes=0-{count - 1}"}) as reply:
        reply.raise_for_status()
        data = b""
        for chunk in reply.iter_raw():
            data += chunk
            if len(data) >= count:
                break
    return data[:count]


def _download(
    client: "httpx.Client",
    url: str,
    target: Path,
    item: dict[str, Any],
    report: Callable[[int], None] | None,
) -> None:
    import httpx  # noqa: PLC0415  loaded by the client already

    part = target.with_name(target.name + ".part")
    for attempt in range(1, _TRIES + 1):
        try:
            _continue_part(client, url, part, report)
            break
        except httpx.TransportError:
            if attempt == _TRIES:
                raise
    problem = _wrong(part, item)
    if problem:
        part.unlink()
        raise model_files.unsupported(f"{target.name}: {problem}", "Start the run again.")
    os.replace(part, target)
    target.with_name(target.name + model_files.HEADER).unlink(missing_ok=True)


def _continue_part(
    client: "httpx.Client", url: str, part: Path, report: Callable[[int], None] | None
) -> None:
    have = part.stat().st_size if part.is_file() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    with client.stream("GET", url, headers=headers) as reply:
        if reply.status_code == 416:  # nothing left to fetch
            return
        reply.raise_for_status()
        if reply.status_code != 206:
            have = 0
        with open(part, "ab" if have else "wb") as file:
            for chunk in reply.iter_raw():
                file.write(chunk)
                have += len(chunk)
                if report is not None:
                    report(have)
            file.flush()
            os.fsync(file.fileno())


def _wrong(part: Path, item: dict[str, Any]) -> str:
    size = part.stat().st_size
    if item["size"] and size != item["size"]:
        return f"{size} of {item['size']} bytes arrived"
    if item["sha256"]:
        with open(part, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != item["sha256"]:
                return "the checksum is wrong"
    return ""

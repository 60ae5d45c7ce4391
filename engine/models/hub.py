"""Models by hub id: taken from a local cache, or fetched over HTTP into the home.

A model is examined before it is downloaded: its small files and the headers of its weights (a few
hundred kilobytes, by range requests) contain everything that the control side needs. The weights
are downloaded when a run starts: its worker calls `ensure_weights`, which does nothing if they are
already there. Caches have the layout of huggingface_hub:
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

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.errors import UserError
from engine.core.files import write_text
from engine.home.run_dir import Home
from engine.hub.client import MODEL, connect, errors_as_refusals, refuse_offline
from engine.hub.repository import (
    COMMIT,
    HubVersion,
    RemoteFile,
    download,
    fetch_first_bytes,
    fetch_text,
    file_url,
    newest_version,
)
from engine.models import model_files
from engine.records.record import Record

if TYPE_CHECKING:
    import httpx

SMALL_FILES = (
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
_FIRST_BYTES = 1 << 18  # enough for most headers, so that one request suffices
_PLAN = "download.json"  # says which weights of a snapshot are to be downloaded, and from where

Progress = Callable[[int, int], None]  # called with (bytes downloaded so far, bytes in total)


class DownloadPlan(Record):
    """`download.json` of a snapshot: its weight files and where to download them."""

    repo: str
    commit: str
    endpoint: str
    weights: list[RemoteFile]


def cached(home: Home, repo: str) -> Path | None:
    """Return the snapshot folder of `repo` in a local cache, or None if no cache has one that can
    be used.

    A snapshot with all weights is preferred, first from the cache that other programs share, then
    from the home's own. Otherwise it is the home's snapshot whose weights are still to be
    downloaded.
    """
    for root in (_shared_cache(), home.cache / "hub"):
        folder = _snapshot(root, repo)
        if folder is not None and is_complete(folder):
            return folder
    folder = _snapshot(home.cache / "hub", repo)
    # Without the plan, which names the files to download, a snapshot could never be completed.
    if folder is None or not (folder / _PLAN).is_file():
        return None
    return folder


def cached_ids(home: Home) -> list[str]:
    """Return the sorted hub ids of the models that a local cache has with all their weights."""
    repos = set()
    for root in (_shared_cache(), home.cache / "hub"):
        for folder in sorted(root.glob("models--*--*")):
            # "models--ORG--NAME"; NAME may hold "--" too, so only the first becomes a slash.
            repo = folder.name.removeprefix("models--").replace("--", "/", 1)
            snapshot = _snapshot(root, repo)
            if snapshot is not None and is_complete(snapshot):
                repos.add(repo)
    return sorted(repos)


def is_complete(folder: Path) -> bool:
    """Tell whether the folder has config.json and all weight files of a model, or the two files of
    an adapter."""
    if all((folder / name).is_file() for name in ADAPTER_FILES):
        return True
    try:
        names = model_files.weight_files(folder)
    except UserError:
        return False
    return (folder / "config.json").is_file() and all((folder / name).is_file() for name in names)


def look_up(home: Home, repo: str) -> Path:
    """Return the snapshot folder of `repo`, from a cache or else from the hub.

    From the hub, only the small files and the headers of the weights are fetched. Raises UserError
    MODEL_NOT_FOUND if the hub does not have the model, is unreachable or may not be asked
    (offline), MODEL_UNSUPPORTED or DISK_FULL.
    """
    folder = cached(home, repo)
    if folder is not None:
        return folder
    refuse_offline(repo, MODEL)
    with connect() as client, errors_as_refusals(repo, MODEL):
        return _fetch_snapshot(home, newest_version(client, MODEL, repo))


def ensure_weights(folder: Path, progress: Progress | None = None) -> None:
    """Download the weights that are missing in `folder`, continuing partial files.

    Does nothing if no weights are missing or the folder has no download plan. `progress` is called
    with (bytes of all files so far, bytes in total). Raises UserError MODEL_NOT_FOUND (retryable)
    if the download fails, MODEL_UNSUPPORTED for a wrong checksum, or DISK_FULL.
    """
    if is_complete(folder):
        return
    plan = _read_plan(folder)
    if plan is None:  # another program's cache, which does not say what to download
        return
    with errors_as_refusals(plan.repo, MODEL), open(folder / "download.lock", "wb") as lock:
        # A second worker waits here until the first has downloaded the files, and then skips them.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with connect(plan.endpoint) as client:
            _fetch_weights(client, folder, plan, progress)


def _fetch_weights(
    client: "httpx.Client", folder: Path, plan: DownloadPlan, progress: Progress | None
) -> None:
    """Download each weight file of the plan that is not in `folder` yet.

    `progress` is called with (bytes of all files so far, bytes in total).
    """
    total_bytes = sum(file.size for file in plan.weights)
    bytes_before = 0  # sizes of the earlier files of the plan

    def report(file_bytes: int) -> None:
        """Turn the number of bytes of the current file into progress over all files."""
        if progress is not None:
            progress(bytes_before + file_bytes, total_bytes)

    for file in plan.weights:
        if not (folder / file.name).is_file():
            url = file_url(MODEL, plan.repo, plan.commit, file.name)
            _download(client, url, folder, file, report)
        bytes_before += file.size


def _download(
    client: "httpx.Client",
    url: str,
    folder: Path,
    file: RemoteFile,
    report: Callable[[int], None] | None = None,
) -> None:
    """Download one weight file into `folder`, and delete its header file there.

    `report` is called with the number of this file's bytes so far. Raises httpx.HTTPError, or
    UserError MODEL_UNSUPPORTED if the file has the wrong size or checksum.
    """
    fault = download(client, url, folder / file.name, file, report)
    if fault:
        raise model_files.unsupported(fault, "Start the run again.")
    # The file's header was fetched earlier, into a file of its own, which is no longer needed.
    (folder / (file.name + model_files.HEADER)).unlink(missing_ok=True)


def _read_plan(folder: Path) -> DownloadPlan | None:
    """Read the download plan of a snapshot folder. Returns None if the folder has no plan, as in a
    cache that another program made."""
    path = folder / _PLAN
    return DownloadPlan.read(path) if path.is_file() else None


def missing_bytes(folder: Path) -> int:
    """Count the bytes of weights that still have to be downloaded into `folder`.

    A folder without a download plan has all its weights, so the result is 0.
    """
    plan = _read_plan(folder)
    weights = plan.weights if plan is not None else []
    return sum(file.size for file in weights if not (folder / file.name).is_file())


def _shared_cache() -> Path:
    """Return huggingface_hub's own cache folder: the one named by the first of HF_HUB_CACHE,
    HF_HOME and XDG_CACHE_HOME that is set, or else ~/.cache/huggingface/hub."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or default).expanduser() / "hub"


def _model_folder(root: Path, repo: str) -> Path:
    """Return the folder of `repo` in the cache `root`, named models--ORG--NAME."""
    return root / ("models--" + repo.replace("/", "--"))


def _snapshot(root: Path, repo: str) -> Path | None:
    """Return the snapshot folder of `repo` in the cache `root`, or None if there is none.

    The file refs/main names the snapshot. Without that file it is the only snapshot, or None if
    there are several.
    """
    folder = _model_folder(root, repo)
    try:
        commit = (folder / "refs" / "main").read_text("utf-8").strip()
    except OSError:
        commit = ""
    if not commit:
        snapshots = list((folder / "snapshots").glob("*"))
        return snapshots[0] if len(snapshots) == 1 else None
    snapshot = folder / "snapshots" / commit
    # COMMIT also keeps a damaged refs/main from leading out of the folder.
    if COMMIT.fullmatch(commit) is None or not snapshot.is_dir():
        return None
    return snapshot


def _fetch_snapshot(home: Home, remote: HubVersion) -> Path:
    """Fetch a whole adapter, or a model without its weights, which `ensure_weights` fetches later.

    Returns the snapshot folder. Raises UserError MODEL_UNSUPPORTED if the model cannot be trained
    here, or httpx.HTTPError.
    """
    # A config.json belongs to a whole model; an adapter beside it is ignored.
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
    # Written last, because it makes the folder a part of the cache.
    write_text(root / "refs" / "main", remote.commit)
    return folder


def _fetch_adapter(remote: HubVersion, folder: Path) -> None:
    """Fetch the config and the weights of an adapter into `folder`; weights that are already there
    are kept. The weights are fetched at once, because they are small beside those of a model."""
    config, weights = ADAPTER_FILES
    write_text(folder / config, fetch_text(remote, config))
    if not (folder / weights).is_file():
        _download(remote.client, remote.url(weights), folder, remote.files[weights])


def _fetch_model_without_weights(remote: HubVersion, folder: Path) -> None:
    """Fetch the small files of a model and the headers of its weights into `folder`, and write the
    plan by which `ensure_weights` downloads the weights later."""
    _fetch_small_files(remote, folder)
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


def _fetch_small_files(remote: HubVersion, folder: Path) -> None:
    """Fetch config, tokenizer and chat template of a model into `folder`, except files that are
    already there. Raises UserError MODEL_UNSUPPORTED for a model that cannot be trained here."""
    for name in SMALL_FILES:
        if name in remote.files and not (folder / name).is_file():
            write_text(folder / name, fetch_text(remote, name))
            if name == "config.json":  # checked at once: a refusal saves the larger files
                model_files.check_config(model_files.load_json(folder / name), remote.repo)


def _require_config(remote: HubVersion) -> None:
    """Raise UserError MODEL_UNSUPPORTED for a repository without config.json.

    Such a repository holds a model for a library other than transformers.
    """
    if "config.json" in remote.files:
        return
    raise model_files.unsupported(
        f"{remote.repo} is no transformers model", hint="It has no config.json."
    )


def _weight_names(folder: Path, remote: HubVersion) -> list[str]:
    """Return the names of the weight files: those in the shard index, or the single file.

    Raises UserError MODEL_UNSUPPORTED if the repository lacks one of them.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = model_files.shards(model_files.load_json(index), index.name)
    else:
        names = ["model.safetensors"]
    if any(name not in remote.files for name in names):
        raise model_files.no_safetensors(remote.repo, list(remote.files))
    return names


def _fetch_header(remote: HubVersion, name: str) -> bytes:
    """Fetch the safetensors header of a weight file, including the eight bytes of its length.

    One request is enough unless the header is longer than 256 KB.
    """
    first_bytes = fetch_first_bytes(remote, name, _FIRST_BYTES)
    wanted_bytes = 8 + model_files.header_length(first_bytes, name)
    if len(first_bytes) < wanted_bytes:
        first_bytes = fetch_first_bytes(remote, name, wanted_bytes)
    return first_bytes[:wanted_bytes]

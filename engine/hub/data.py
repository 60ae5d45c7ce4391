"""Fetches a dataset of the hub, named by its id, as a folder of data files in the home's cache.

The dataset's card (README.md) decides which files belong together, as for `datasets.load_dataset`:
`configs` at its head names subsets and the files of each split (hub documentation, "Manual
configuration"). Without `configs`, all data files of one format are taken, and their names decide
the split.
"""

import fnmatch
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import write_json
from engine.core.format import counted
from engine.home.run_dir import Home
from engine.hub.client import DATASET, connect, errors_as_refusals, is_offline, refuse_offline
from engine.hub.repository import HUB_ID, HubVersion, RemoteFile, download, newest_version
from engine.records.record import Record
from envs.dataset import FORMATS, split_of

_URL = "hf://datasets/"  # how huggingface_hub's file system names datasets
_FETCHED = "fetched.json"  # written last, so the folder is complete if this file exists
_SHOWN_SUBSETS = 20  # how many subsets an error names
# If a dataset is stored in several formats, the first of these is read.
_PREFERRED = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")


@dataclass(frozen=True)
class DatasetRef:
    """A dataset as a user names it: `ORG/NAME`, or `ORG/NAME:SUBSET` for one of its subsets.

    Only the splits named in `splits` are fetched; () means all splits.
    """

    repo: str
    subset: str = ""
    splits: tuple[str, ...] = ()

    @property
    def cache_name(self) -> str:
        """The name of the dataset's folder in the cache, such as "openai--gsm8k--main"."""
        parts = [*self.repo.split("/"), self.subset.replace("/", "-"), "+".join(self.splits)]
        return "--".join(part for part in parts if part)


class FetchedData(Record):
    """`fetched.json` beside the files of a dataset: where they come from.

    `licence` is "" if the dataset's card names none; `left_out` are data files that were not
    fetched.
    """

    repo: str
    subset: str
    commit: str
    licence: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A name for an environment made from the dataset, such as "gsm8k-main"."""
        parts = [self.repo.partition("/")[2], self.subset]
        return "-".join(part for part in parts if part)

    def in_words(self) -> str:
        """Describe in one or two sentences where the files come from."""
        subset = f":{self.subset}" if self.subset else ""
        licence = self.licence or "none named"
        text = f"From {self.repo}{subset} at {self.commit[:12]} (licence: {licence})."
        if self.left_out:
            text += f" {counted(len(self.left_out), 'other data file')} of it left out."
        return text


@dataclass(frozen=True)
class Dataset:
    """A fetched dataset: `folder` holds its data files, `origin` says where they come from.

    `name` becomes the name of an environment that is made from the dataset.
    """

    folder: Path
    origin: FetchedData
    name: str


def parse(text: str) -> DatasetRef | None:
    """Return the dataset that `text` names: `ORG/NAME` or `ORG/NAME:SUBSET`, with or without
    `hf://datasets/` before it. Returns None if `text` cannot name a dataset."""
    repo, _, subset = text.removeprefix(_URL).partition(":")
    # `data/train.jsonl` is a file's path, not an id. No dataset's id ends with a dot.
    is_id = HUB_ID.fullmatch(repo) is not None and not repo.endswith((".", *FORMATS))
    return DatasetRef(repo, subset) if is_id else None


def named_dataset(
    home: Home, path: str | Path, places: Sequence[Path], deadline: float
) -> Dataset | None:
    """Return the dataset of the hub that `path` names, fetching it by `deadline` (a value of
    `time.monotonic()`) if necessary, or None if `path` names no dataset.

    `hf://datasets/ORG/NAME` always names a dataset. ORG/NAME is a path instead if one of the
    folders `places` holds a folder ORG. Raises UserError if the dataset cannot be fetched.
    """
    text = str(path)
    ref = parse(text)
    if ref is None:
        return None
    if not text.startswith(_URL) and any((place / text).parent.is_dir() for place in places):
        return None
    try:
        return fetch(home, ref, deadline)
    except UserError as error:
        if error.code != DATASET.absent_code or text.startswith(_URL):
            raise
        # ORG/NAME may be meant as the path of a folder, so the error speaks of both.
        raise DATASET.absent(
            f"there is no file or folder {text!r} here; as a dataset: {error.message}",
            str(error.hint),
            retryable=error.retryable,
        ) from error


def fetch(home: Home, ref: DatasetRef, deadline: float) -> Dataset:
    """Return the newest version of the dataset `ref`, fetching it into the home's cache if
    necessary. Without a network (HF_HUB_OFFLINE is set, or the hub cannot be reached), return the
    version fetched last.

    Raises UserError DATASET_INVALID or DISK_FULL if the dataset cannot be fetched, and
    DATASET_READING (retryable) if it is not fetched by `deadline` (a value of `time.monotonic()`);
    the next call then continues the download.
    """
    root = home.cache / "hub-data" / ref.cache_name
    latest = _latest_fetched(root)
    if latest is not None and is_offline():
        return latest
    refuse_offline(ref.repo, DATASET)
    with connect() as client:
        try:
            with errors_as_refusals(ref.repo, DATASET):
                remote = newest_version(client, DATASET, ref.repo)
        except UserError as error:
            if latest is None or not error.retryable:  # retryable: the hub cannot be reached
                raise
            return latest
        folder = root / remote.commit
        if not (folder / _FETCHED).is_file():
            with errors_as_refusals(ref.repo, DATASET):
                _fetch_files(remote, ref, folder, deadline)
    return _dataset_in(folder)


def _dataset_in(folder: Path) -> Dataset:
    """Read the dataset in `folder`, which holds one completely fetched version."""
    origin = FetchedData.read(folder / _FETCHED)
    return Dataset(folder / "datasets", origin, origin.name)


def _latest_fetched(root: Path) -> Dataset | None:
    """Return the dataset in the newest complete folder below `root`, or None if there is none."""
    markers = list(root.glob(f"*/{_FETCHED}"))  # such a file is in each complete folder
    if not markers:
        return None
    markers.sort(key=lambda path: path.stat().st_mtime)
    return _dataset_in(markers[-1].parent)


def _fetch_files(remote: HubVersion, ref: DatasetRef, folder: Path, deadline: float) -> None:
    """Download the files of the version `remote` that `ref` asks for into `folder`/datasets, then
    write fetched.json, which marks `folder` as complete. `deadline` is a value of
    `time.monotonic()`."""
    chosen = _choose_files(remote, ref)
    data_folder = folder / "datasets"
    data_folder.mkdir(parents=True, exist_ok=True)
    _check_room(data_folder, _total_bytes(chosen), remote.repo)
    _download_all(remote, chosen, data_folder, deadline)
    fetched_names = {file.name for file in chosen.values()}  # in the repository
    write_json(folder / _FETCHED, _describe_origin(remote, ref.subset, fetched_names).model_dump())


def _total_bytes(files: Mapping[str, RemoteFile]) -> int:
    """Sum the sizes of all files."""
    return sum(file.size for file in files.values())


def _download_all(
    remote: HubVersion, files: Mapping[str, RemoteFile], folder: Path, deadline: float
) -> None:
    """Download those of `files` that are missing in `folder`.

    Args:
        remote: the version of the dataset on the hub.
        files: the files by the name that each gets in `folder`.
        deadline: a value of `time.monotonic()`.

    Raises UserError DATASET_READING at the deadline, DATASET_INVALID for a file of the wrong size
    or checksum.
    """
    total_bytes = _total_bytes(files)
    bytes_before = 0  # sizes of the files that are already complete

    def check_deadline(file_bytes: int) -> None:
        """Raise the error for the deadline if it has passed; called during a download with the
        number of the file's bytes so far."""
        if time.monotonic() >= deadline:
            raise _not_ready(remote.repo, bytes_before + file_bytes, total_bytes)

    for local_name, file in files.items():
        target = folder / local_name
        if not target.is_file():
            fault = download(remote.client, remote.url(file.name), target, file, check_deadline)
            if fault:
                raise DATASET.unusable(fault, "Call again.")
        bytes_before += file.size


def _describe_origin(remote: HubVersion, subset: str, fetched_names: set[str]) -> FetchedData:
    """Describe where the data came from, and which of the repository's data files were not fetched.
    `fetched_names` are the names of those that were, in the repository; `subset` is "" for none."""
    return FetchedData(
        repo=remote.repo,
        subset=subset,
        commit=remote.commit,
        licence=str(remote.card.get("license") or ""),
        left_out=tuple(sorted(set(_data_files(remote)) - fetched_names)),
    )


def _check_room(folder: Path, needed_bytes: int, repo: str) -> None:
    """Raise UserError DISK_FULL if the disk of `folder` has less than `needed_bytes` free for the
    data of `repo`."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        needed_mb, free_mb = needed_bytes >> 20, free_bytes >> 20
        raise UserError(
            "DISK_FULL",
            f"{repo} has {needed_mb} MB of data, {free_mb} MB are free",
            hint="Free disk space, or set HONESMITH_HOME to a volume with room.",
        )


def _not_ready(repo: str, fetched_bytes: int, total_bytes: int) -> UserError:
    """Return the error for a dataset that is still being fetched, with its progress. `total_bytes`
    is 0 if the sizes of its files are unknown."""
    fetched_mb, total_mb = fetched_bytes >> 20, total_bytes >> 20
    of_total = f" of {total_mb}" if total_bytes else ""
    return UserError(
        "DATASET_READING",
        f"{repo} is being fetched, {fetched_mb}{of_total} MB so far; nothing is stored yet",
        hint="Call again; it goes on from there.",
        field="path",
        retryable=True,
    )


def _choose_files(remote: HubVersion, ref: DatasetRef) -> dict[str, RemoteFile]:
    """Return the files of the version `remote` to fetch for `ref`, by the name that each gets in
    the cache, such as "train-00000.parquet".

    Raises UserError DATASET_INVALID if there are none, or if the user has to name a subset.
    """
    by_split = _files_by_split(remote, ref.subset)
    if ref.splits:
        # A split may have the name that the dataset's card declares, such as "validation", or the
        # one that `split_of` took from a file's name, "train" or "heldout". Both count.
        wanted_splits = {*ref.splits, *(split_of(Path(split)) for split in ref.splits)}
        by_split = {split: names for split, names in by_split.items() if split in wanted_splits}
    chosen = _name_by_split(remote, by_split)
    if not chosen:
        of_splits = f" of the splits {', '.join(ref.splits)}" if ref.splits else ""
        raise DATASET.unusable(
            f"{remote.repo} has no data files{of_splits} that can be read here",
            f"Formats that can: {', '.join(FORMATS)}.",
        )
    return chosen


def _files_by_split(remote: HubVersion, subset: str) -> dict[str, list[str]]:
    """Return the names of a subset's files by their split; "" stands for files without a split.

    `remote` is the version of the dataset, `subset` the subset's name, or "" if the user named
    none. Raises UserError DATASET_INVALID if there is no such subset, or if one has to be named.
    """
    configs = remote.card.get("configs")  # the subsets, if the dataset's card declares any
    if isinstance(configs, list) and any(_data_files_of(config) for config in configs):
        return _declared_files(remote, _choose_subset(remote.repo, configs, subset))
    if subset:
        raise DATASET.unusable(
            f"{remote.repo} declares no subsets, so there is no {subset!r}",
            f"Name {remote.repo} alone.",
        )
    return _undeclared_files(remote)


def _name_by_split(
    remote: HubVersion, by_split: Mapping[str, Sequence[str]]
) -> dict[str, RemoteFile]:
    """Name each file for the cache by its split and a number, such as "train-00000.parquet". The
    name has no other word, because a reader takes the split from the name.

    Args:
        by_split: names of files in the repository by their split; "" stands for files without one.
    """
    file_by_local_name: dict[str, RemoteFile] = {}
    for split, names in by_split.items():
        for name in names:
            split_word = re.sub(r"\W", "-", split) or "data"
            local_name = f"{split_word}-{len(file_by_local_name):05d}{Path(name).suffix.lower()}"
            file_by_local_name[local_name] = remote.files[name]
    return file_by_local_name


def _data_files(remote: HubVersion) -> list[str]:
    """Return the sorted names of the repository's data files, without hidden files and without the
    JSON files that only describe a dataset."""
    return sorted(
        name
        for name in remote.files
        if name.lower().endswith(FORMATS)
        and not any(part.startswith(".") for part in name.split("/"))
        and not name.endswith(("dataset_infos.json", "dataset_info.json", "state.json"))
    )


def _undeclared_files(remote: HubVersion) -> dict[str, list[str]]:
    """Return the names of the data files by their split, for a dataset whose card declares no
    files.

    A file's name tells its split, or else the folders it is in; "" stands for files without a
    split. Only files of one format are taken, because another format may hold the same rows.
    """
    names = _data_files(remote)
    names_of_format: list[str] = []
    for suffix in _PREFERRED:  # the first format of which there are files
        names_of_format = [name for name in names if name.lower().endswith(suffix)]
        if names_of_format:
            break
    by_split: dict[str, list[str]] = {}
    for name in names_of_format:
        split = split_of(Path(name)) or _split_of_folders(name)
        by_split.setdefault(split, []).append(name)
    return by_split


def _split_of_folders(name: str) -> str:
    """Return the split named by the innermost folder of a file's path that names one, or "" if none
    does."""
    for folder in reversed(name.split("/")[:-1]):
        split = split_of(Path(folder))
        if split:
            return split
    return ""


def _choose_subset(repo: str, configs: Sequence[Any], subset: str) -> Any:
    """Return that one of the declared subsets (`configs`) which is named `subset`; for "", the
    default subset or the only one.

    Raises UserError DATASET_INVALID, naming the subsets, if none fits.
    """
    by_name = {
        str(config.get("config_name") or "default"): config  # the hub's name for an unnamed one
        for config in configs
        if isinstance(config, dict)
    }
    if subset in by_name:
        return by_name[subset]
    if not subset:
        defaults = [config for config in by_name.values() if config.get("default") is True]
        if defaults:
            return defaults[0]
        if "default" in by_name:
            return by_name["default"]
        if len(by_name) == 1:
            return next(iter(by_name.values()))
    raise _no_subset(repo, list(by_name), subset)


def _no_subset(repo: str, names: Sequence[str], subset: str) -> UserError:
    """Return the error for a `subset` that is not among `names`, the dataset's subsets, or for a
    missing one ("") that has to be named."""
    shown_names = ", ".join(names[:_SHOWN_SUBSETS])
    if len(names) > _SHOWN_SUBSETS:
        shown_names += f" and {len(names) - _SHOWN_SUBSETS} more"
    fault = f"has no subset {subset!r}" if subset else f"has {len(names)} subsets"
    return DATASET.unusable(
        f"{repo} {fault}: {shown_names}", f"Name one, such as {repo}:{names[0]}."
    )


def _data_files_of(config: Any) -> Any:
    """Return the entry `data_files` of a subset that a dataset's card declares; None if it has
    none, or if `config` is no object."""
    return config.get("data_files") if isinstance(config, dict) else None


def _declared_files(remote: HubVersion, config: Any) -> dict[str, list[str]]:
    """Return the files of a declared subset by split; "" stands for files whose split is not
    declared.

    Args:
        config: what the dataset's card says of the subset. Its `data_files` is a pattern, a list of
            patterns, or a list of {split, path}.
    """
    folder = str(config.get("data_dir") or "").strip("/")
    entries = _as_list(_data_files_of(config))
    by_split: dict[str, list[str]] = {}
    for entry in entries:
        split, patterns = _declared_split(entry)
        paths = [f"{folder}/{pattern}".lstrip("/") for pattern in patterns]
        by_split.setdefault(split, []).extend(_matching(_data_files(remote), paths))
    return by_split


def _declared_split(entry: Any) -> tuple[str, list[Any]]:
    """Return the split and the patterns of one entry of `data_files`; the split is "" if none is
    declared."""
    if isinstance(entry, dict):
        return str(entry.get("split") or ""), _as_list(entry.get("path"))
    return "", _as_list(entry)


def _as_list(value: Any) -> list[Any]:
    """Return a list unchanged, None as [], and any other value in a list of its own."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Return the file names that match one of the patterns, as in a shell. `*` also matches "/",
    like the hub's `**`."""
    return [
        name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]

"""What a run needs on another machine, and how it gets there: each file once, by its hash.

Our own source and the versions of environments go as archives; weights and what the run's folder
holds already go file by file. The run's config is the same but for the paths in it.
"""

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import engine
import envs
from engine.core.errors import UserError
from engine.core.files import JsonObject, read_json
from engine.environments import registry
from engine.executors import far_side
from engine.executors.mirror import NOT_SENT
from engine.executors.ssh import Link
from engine.home.hashes import file_hashes
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.home.user_config import key_of
from engine.records.run_config import DistillConfig, EndpointTeacher, LocalTeacher, TrainConfig

SOURCES = "source"  # folder over there: one folder of our source for each hash
_LEFT_OUT = frozenset({"__pycache__"})
# Weights in forms that nothing of ours loads where safetensors stand beside them.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")


@dataclass(frozen=True)
class Folder:
    """A folder that a run reads over there: its name below the root of the connection, and the
    files by name."""

    name: str
    files: Mapping[str, Path]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class EnvVersionUsed:
    """A version of an environment: its place, and what its row in the database says."""

    name: str
    hash: str
    kind: str
    info: JsonObject
    folder: Path

    def to_json(self) -> JsonObject:
        return {"name": self.name, "hash": self.hash, "kind": self.kind, "info": self.info}


@dataclass(frozen=True)
class Bundle:
    """All that a run needs.

    Attributes:
        config: the content of its config.json over there.
        run_files: what its folder holds before it starts, by path in it; config.json is not among
            them.
        models: the folders of base models.
        envs: the versions of environments, the run's own first.
    """

    config: JsonObject
    run_files: Folder
    models: Sequence[Folder]
    envs: Sequence[EnvVersionUsed]


def source_archive() -> bytes:
    """An archive of the packages that a run needs, the same bytes for the same source."""
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for package in (engine, envs):
                folder = Path(str(package.__file__)).parent
                for path in _files_below(folder):
                    _add(archive, f"{package.__name__}/{path.relative_to(folder)}", path)
        return file.getvalue()


def _folder_archive(folder: Path) -> bytes:
    """An archive of a folder's files, the same bytes for the same files."""
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for path in _files_below(folder):
                _add(archive, str(path.relative_to(folder)), path)
        return file.getvalue()


def _files_below(folder: Path) -> Iterator[Path]:
    """Every file below a folder, in a fixed order; links to files count as files."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        yield from (Path(place, name) for name in sorted(names) if Path(place, name).is_file())


def _add(archive: tarfile.TarFile, name: str, path: Path) -> None:
    """Add a file to an archive without anything of this machine: owner, time, rights."""
    member = tarfile.TarInfo(name)
    content = path.read_bytes()
    member.size, member.mode = len(content), 0o600
    archive.addfile(member, io.BytesIO(content))


def bundle_of(run: RunDir, config: TrainConfig, root: str, home_id: str, run_folder: str) -> Bundle:
    """Collect what a training run needs.

    Args:
        root: the absolute path over there below which everything lies.
        home_id: the id of this home there.
        run_folder: the run's folder there, below the root.

    Raises UserError where something of it is gone here, or cannot go there.
    """
    home = run.home
    content = read_json(run.config)
    base = _model_folder(home, Path(config.base.path))
    models = {base.name: base}
    run_root = f"{root}/{run_folder}"
    content["base"]["path"] = f"{root}/{base.name}"
    content["start_adapter"] = _moved(content.get("start_adapter"), run, run_root)
    content["waits_for"] = []  # what it waited for is in its folder by now
    content["plan"] = None
    if isinstance(config, DistillConfig) and isinstance(config.teacher, LocalTeacher):
        teacher = _model_folder(home, Path(config.teacher.base_path))
        models[teacher.name] = teacher
        content["teacher"]["base_path"] = f"{root}/{teacher.name}"
        content["teacher"]["adapter"] = _moved(content["teacher"].get("adapter"), run, run_root)
    versions = env_versions(home, config)
    content["env_dir"] = f"{root}/{env_folder(home_id, versions[0])}"
    return Bundle(
        config=content,
        run_files=_run_files(run),
        models=list(models.values()),
        envs=versions,
    )


def secrets_of(run: RunDir) -> dict[str, str]:
    """Return the variables that a run needs over there, with their values: the secrets of its
    environment, and its teacher's key, which may stand in the home's .env. Those that this process
    does not have are left out."""
    config = run.read_config()
    names = registry.find_env(run.home, config.env_id, sealed=True).secrets
    secrets = {name: os.environ[name] for name in names if name in os.environ}
    if isinstance(config, DistillConfig) and isinstance(config.teacher, EndpointTeacher):
        key = key_of(run.home.root, config.teacher.key_env)
        secrets |= {config.teacher.key_env: key} if key else {}
    return secrets


def env_folder(home_id: str, version: EnvVersionUsed) -> str:
    """The folder of a version over there, below the root."""
    return f"homes/{home_id}/envs/{version.name}/{version.hash}"


def env_versions(home: Home, config: TrainConfig) -> list[EnvVersionUsed]:
    """The versions of environments that a run reads, its own first.

    Raises UserError ENV_NOT_FOUND, or ENV_DEPS where one cannot go.
    """
    return [_env_used(home, env_id) for env_id in _env_ids(config)]


def _env_ids(config: TrainConfig) -> list[str]:
    """The versions that a run reads: its own, and those whose rows it replays."""
    kept = getattr(config.settings, "keep_env", "")
    return [config.env_id, *([kept] if kept else [])]


def _env_used(home: Home, env_id: str) -> EnvVersionUsed:
    """A version of an environment. Raises UserError ENV_NOT_FOUND, or ENV_DEPS if it cannot go."""
    record = registry.find_env(home, env_id, sealed=True)
    why_not = why_not_sent(record)
    if why_not:
        raise UserError("ENV_DEPS", f"{env_id} {why_not}", hint="Train on it here.", field="env_id")
    with Store(home) as store:
        row = store.find_env(env_id)[0]
    return EnvVersionUsed(row.name, row.hash, row.kind, row.info, record.dir)


def why_not_sent(record: registry.EnvRecord) -> str:
    """Why a version of an environment cannot be used on another machine yet; "" where it can."""
    if record.version.python:
        return "has packages of its own, which are not installed on another machine"
    if record.version.data:
        return "has large data that stayed where it was pushed from"
    if registry.endpoints_of(record):
        return "asks models by name, which another machine does not know"
    return ""


def _model_folder(home: Home, folder: Path) -> Folder:
    """A model's folder, named by the content of its files."""
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    if any(name.endswith(".safetensors") for name in files):
        files = {name: path for name, path in files.items() if not name.endswith(_OTHER_WEIGHTS)}
    digests = file_hashes(home, files.values())
    text = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return Folder(f"models/{hashlib.sha256(text.encode()).hexdigest()[:24]}", files, digests)


def _moved(path: Any, run: RunDir, run_root: str) -> str | None:
    """A path in the run's folder, as it is over there; None for none."""
    return f"{run_root}/{Path(path).relative_to(run.path)}" if path else None


def _run_files(run: RunDir) -> Folder:
    """What the run's folder holds already: adapters, and what earlier attempts left."""
    files = {}
    for path in _files_below(run.path):
        name = str(path.relative_to(run.path))
        if not path.is_symlink() and not NOT_SENT.fullmatch(name):
            files[name] = path
    digests = {name: _digest(path) for name, path in files.items()}
    return Folder("", files, digests)


def _digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def send_source(link: Link) -> str:
    """Put our own source over there, if it is not there; returns its folder."""
    archive = source_archive()
    folder = f"{SOURCES}/{hashlib.sha256(archive).hexdigest()[:24]}"
    _send_archive(link, folder, archive)
    return folder


def send_env(link: Link, home_id: str, version: EnvVersionUsed) -> None:
    """Put a version of an environment over there, if it is not there."""
    folder = env_folder(home_id, version)
    if not _is_there(link, folder):
        _send_archive(link, folder, _folder_archive(version.folder))


def _send_archive(link: Link, folder: str, archive: bytes) -> None:
    """Put an archive over there and unpack it, if the folder is not there."""
    if _is_there(link, folder):
        return
    packed = gzip.compress(archive, compresslevel=6, mtime=0)
    digest = hashlib.sha256(packed).hexdigest()
    _send_bytes(link, digest, packed)
    link.call("unpack", folder=folder, digest=digest)


def send_folder(
    link: Link,
    folder: Folder,
    name: str,
    more: Mapping[str, bytes] = MappingProxyType({}),
    *,
    is_own: bool = False,
) -> int:
    """Put a folder over there under `name`, if it is not there; returns the bytes that were sent.

    It appears there whole: its files, and those of `more` (name -> content). With `is_own` they
    may be written to over there.
    """
    if _is_there(link, name):
        return 0
    sent = send_files(link, {folder.digests[file]: path for file, path in folder.files.items()})
    digests = dict(folder.digests)
    for file, content in more.items():
        digests[file] = hashlib.sha256(content).hexdigest()
        _send_bytes(link, digests[file], content)
    link.call("place", folder=name, files=digests, own=is_own)
    return sent


def send_files(link: Link, files: Mapping[str, Path]) -> int:
    """Put files (SHA-256 -> file) over there that are not there; returns the bytes that were sent.

    A file of which a part is there goes on where it was cut.
    """
    sizes = {digest: path.stat().st_size for digest, path in files.items()}
    header, _ = link.call("missing", blobs=sizes)
    sent = 0
    for digest, have in _absent(header, sizes):
        with files[digest].open("rb") as file:
            file.seek(have)
            offset = have
            while True:
                part = file.read(far_side.CHUNK)
                link.call("put", part, digest=digest, offset=offset, size=sizes[digest])
                offset += len(part)
                sent += len(part)
                if offset >= sizes[digest] or not part:
                    break
    return sent


def _absent(header: JsonObject, sizes: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """The files that the other side has not, with the bytes that it has of each."""
    absent = header.get("absent")
    for digest, have in absent.items() if isinstance(absent, dict) else ():
        if digest in sizes and isinstance(have, int) and 0 <= have <= sizes[digest]:
            yield digest, have


def _send_bytes(link: Link, digest: str, data: bytes) -> None:
    """Put bytes over there under their hash."""
    header, _ = link.call("missing", blobs={digest: len(data)})
    for _, have in _absent(header, {digest: len(data)}):
        for offset in range(have, len(data), far_side.CHUNK) or [have]:
            part = data[offset : offset + far_side.CHUNK]
            link.call("put", part, digest=digest, offset=offset, size=len(data))


def _is_there(link: Link, folder: str) -> bool:
    """Whether a folder is there."""
    return link.call("exist", folders=[folder])[0].get("there") == [True]

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

SOURCES = "source"  # folder on the host: one folder of this program's source for each hash
_LEFT_OUT = frozenset({"__pycache__"})
# Weights in forms that nothing of ours loads where safetensors stand beside them.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")
# Of a checkpoint: what a run needs that goes on from it, and nobody else.
_OF_TRAINERS = ("optimizer.safetensors", "trainer_state.json")


@dataclass(frozen=True)
class Folder:
    """A folder that a run reads on the host.

    Attributes:
        name: its name there, below the root of the connection.
        files: the files on this machine, by their names in the folder.
        digests: the SHA-256 of each file, by the same names.
    """

    name: str
    files: Mapping[str, Path]
    digests: Mapping[str, str]


@dataclass(frozen=True)
class EnvVersionUsed:
    """A version of an environment that a run uses: its folder here, and what its row in the
    database says."""

    name: str
    hash: str
    kind: str
    info: JsonObject
    folder: Path

    def to_json(self) -> JsonObject:
        """Return the version's row of the database, for the database of the home on the host."""
        return {"name": self.name, "hash": self.hash, "kind": self.kind, "info": self.info}


@dataclass(frozen=True)
class Bundle:
    """All that a run needs on the host.

    Attributes:
        config: the content of its config.json there.
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
    """Return a tar archive of this program's packages that a run needs: `engine` and `envs`. The
    same source always gives the same bytes, so that its hash can name it."""
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for package in (engine, envs):
                folder = Path(str(package.__file__)).parent
                for path in _files_below(folder):
                    _add(archive, f"{package.__name__}/{path.relative_to(folder)}", path)
        return file.getvalue()


def _folder_archive(folder: Path) -> bytes:
    """Return a tar archive of a folder's files. The same files always give the same bytes."""
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for path in _files_below(folder):
                _add(archive, str(path.relative_to(folder)), path)
        return file.getvalue()


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder, in a fixed order. Links to files count as files; folders of
    compiled Python are left out."""
    for parent, subfolders, names in os.walk(folder):
        # Changed in place: that is how os.walk is told where to go on, and in which order.
        subfolders[:] = sorted(name for name in subfolders if name not in _LEFT_OUT)
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file():
                yield path


def _add(archive: tarfile.TarFile, name: str, path: Path) -> None:
    """Add the file `path` to an archive under `name`. Its owner, time and rights on this machine
    are left out, so that equal files give equal archives."""
    member = tarfile.TarInfo(name)
    content = path.read_bytes()
    member.size, member.mode = len(content), 0o600
    archive.addfile(member, io.BytesIO(content))


def bundle_of(run: RunDir, config: TrainConfig, root: str, home_id: str, run_folder: str) -> Bundle:
    """Collect what a training run needs on the host. The paths in its config become paths there.

    Args:
        root: the absolute path on the host below which everything lies.
        home_id: the name of this home there.
        run_folder: the run's folder there, below the root.

    Raises UserError if something of it no longer exists here, or cannot be used there.
    """
    home = run.home
    content = read_json(run.config)
    base = model_folder(home, Path(config.base.path))
    models = {base.name: base}
    run_root = f"{root}/{run_folder}"
    content["base"]["path"] = f"{root}/{base.name}"
    content["start_adapter"] = _path_on_host(content.get("start_adapter"), run, run_root)
    content["waits_for"] = []  # what it waited for is in its folder by now
    content["plan"] = None  # plans are kept by this home alone
    if isinstance(config, DistillConfig) and isinstance(config.teacher, LocalTeacher):
        teacher = model_folder(home, Path(config.teacher.base_path))
        models[teacher.name] = teacher
        content["teacher"]["base_path"] = f"{root}/{teacher.name}"
        adapter = content["teacher"].get("adapter")
        content["teacher"]["adapter"] = _path_on_host(adapter, run, run_root)
    versions = env_versions(home, config)
    content["env_dir"] = f"{root}/{env_folder(home_id, versions[0])}"
    return Bundle(
        config=content,
        run_files=_run_files(run),
        models=list(models.values()),
        envs=versions,
    )


def secrets_of(run: RunDir) -> dict[str, str]:
    """Return the environment variables that a run needs on the host, with their values: the secrets
    of its environment, and its teacher's key, which may stand in the home's .env. Those that this
    process does not have are left out."""
    config = run.read_config()
    names = registry.find_env(run.home, config.env_id, sealed=True).secrets
    secrets = {name: os.environ[name] for name in names if name in os.environ}
    if isinstance(config, DistillConfig) and isinstance(config.teacher, EndpointTeacher):
        key = key_of(run.home.root, config.teacher.key_env)
        secrets |= {config.teacher.key_env: key} if key else {}
    return secrets


def env_folder(home_id: str, version: EnvVersionUsed) -> str:
    """Return the folder of an environment's version on the host, below the root. `home_id` is the
    name of this home there."""
    return f"homes/{home_id}/envs/{version.name}/{version.hash}"


def env_versions(home: Home, config: TrainConfig) -> list[EnvVersionUsed]:
    """Return the versions of environments that a run reads, its own first.

    Raises UserError ENV_NOT_FOUND, or ENV_DEPS if one cannot be used on another machine.
    """
    return [_env_used(home, env_id) for env_id in _env_ids(config)]


def _env_ids(config: TrainConfig) -> list[str]:
    """Return the ids of the environments that a run reads: its own, and the one whose rows it
    replays (the setting keep_env), if there is one."""
    replayed = getattr(config.settings, "keep_env", "")  # not every algorithm has the setting
    return [config.env_id, replayed] if replayed else [config.env_id]


def _env_used(home: Home, env_id: str) -> EnvVersionUsed:
    """Find the version of an environment that `env_id` names. Raises UserError ENV_NOT_FOUND, or
    ENV_DEPS if it cannot be used on another machine."""
    record = registry.find_env(home, env_id, sealed=True)
    why_not = why_not_sent(record)
    if why_not:
        raise UserError("ENV_DEPS", f"{env_id} {why_not}", hint="Train on it here.", field="env_id")
    with Store(home) as store:
        row = store.find_env(env_id)[0]
    return EnvVersionUsed(row.name, row.hash, row.kind, row.info, record.dir)


def why_not_sent(record: registry.EnvRecord) -> str:
    """Say why a version of an environment cannot be used on another machine; "" if it can. The text
    continues a sentence that begins with the environment's id."""
    if record.version.python:
        return "has packages of its own, which are not installed on another machine"
    if record.version.data:
        return "has large data that stayed where it was pushed from"
    if registry.endpoints_of(record):
        return "asks models by name, which another machine does not know"
    return ""


def model_folder(home: Home, folder: Path) -> Folder:
    """Describe the model or adapter in `folder` for sending. On the host its name is a hash of its
    files, so that each is sent once. Weights in other formats are left out beside safetensors, and
    of a checkpoint what only a trainer reads."""
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    for name in _OF_TRAINERS:
        files.pop(name, None)
    if any(name.endswith(".safetensors") for name in files):
        files = {name: path for name, path in files.items() if not name.endswith(_OTHER_WEIGHTS)}
    digests = file_hashes(home, files.values())
    listing = "\n".join(f"{name} {digests[name]}" for name in sorted(digests))
    return Folder(f"models/{_short_hash(listing.encode())}", files, digests)


def _short_hash(content: bytes) -> str:
    """Return the first 24 hexadecimal digits of the SHA-256, enough to name a folder."""
    return hashlib.sha256(content).hexdigest()[:24]


def _path_on_host(path: Any, run: RunDir, run_root: str) -> str | None:
    """Turn a path in the run's folder into the same file's path on the host, where the run's folder
    is `run_root`. Returns None for None or ""."""
    return f"{run_root}/{Path(path).relative_to(run.path)}" if path else None


def _run_files(run: RunDir) -> Folder:
    """Describe for sending what the run's folder holds already: adapters, and what earlier attempts
    left. Records of this machine's own processes (`NOT_SENT`) are left out."""
    files = {}
    for path in _files_below(run.path):
        name = str(path.relative_to(run.path))
        if not path.is_symlink() and not NOT_SENT.fullmatch(name):
            files[name] = path
    digests = {name: _digest(path) for name, path in files.items()}
    return Folder("", files, digests)


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def send_source(link: Link) -> str:
    """Put this program's source on the host, unless it is there already. Returns its folder there,
    below the root."""
    archive = source_archive()
    folder = f"{SOURCES}/{_short_hash(archive)}"
    _send_archive(link, folder, archive)
    return folder


def send_env(link: Link, home_id: str, version: EnvVersionUsed) -> None:
    """Put a version of an environment on the host, unless it is there already. `home_id` is the
    name of this home there."""
    folder = env_folder(home_id, version)
    if not _exists_on_host(link, folder):  # asked before the archive is made
        _send_archive(link, folder, _folder_archive(version.folder))


def _send_archive(link: Link, folder: str, archive: bytes) -> None:
    """Send a tar archive to the host and unpack it into `folder`, unless that folder exists."""
    if _exists_on_host(link, folder):
        return
    # mtime=0: without the time of the compression, the same archive has the same hash.
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
    """Put a folder on the host, unless it is there already. It appears there with all its files at
    once.

    Args:
        name: its name there, below the root.
        more: further small files, which need not exist here: name -> content.
        is_own: whether its files may be written to there. If not, files with the same content are
            shared with other folders.

    Returns the number of bytes that were sent for `folder.files`.
    """
    if _exists_on_host(link, name):
        return 0
    sent = send_files(link, {folder.digests[file]: path for file, path in folder.files.items()})
    digests = dict(folder.digests)
    for file, content in more.items():
        digests[file] = hashlib.sha256(content).hexdigest()
        _send_bytes(link, digests[file], content)
    link.call("place", folder=name, files=digests, own=is_own)
    return sent


def send_files(link: Link, files: Mapping[str, Path]) -> int:
    """Send the files (SHA-256 -> file) that the host does not have yet. Returns the number of bytes
    that were sent. A file that was sent in part before is continued.
    """
    sizes = {digest: path.stat().st_size for digest, path in files.items()}
    header, _ = link.call("missing", blobs=sizes)
    sent = 0
    for digest, offset in _absent(header, sizes):
        with files[digest].open("rb") as file:
            file.seek(offset)
            while True:  # at least once: an empty part tells the host that the file is complete
                part = file.read(far_side.CHUNK)
                link.call("put", part, digest=digest, offset=offset, size=sizes[digest])
                offset += len(part)
                sent += len(part)
                if offset >= sizes[digest] or not part:
                    break
    return sent


def _absent(header: JsonObject, sizes: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Yield the files that the host does not have in full: (SHA-256, how many bytes of it the host
    has already).

    `header` is the host's answer to "missing". Entries that make no sense for `sizes` (SHA-256 ->
    bytes of the file) are skipped, because a host is not trusted.
    """
    absent = header.get("absent")
    for digest, present in absent.items() if isinstance(absent, dict) else ():
        if digest in sizes and isinstance(present, int) and 0 <= present <= sizes[digest]:
            yield digest, present


def _send_bytes(link: Link, digest: str, data: bytes) -> None:
    """Send `data` to the host as a file named by its SHA-256, `digest`, unless the host has it."""
    header, _ = link.call("missing", blobs={digest: len(data)})
    for _, present in _absent(header, {digest: len(data)}):
        # If no bytes are left to send, one empty part tells the host that the file is complete.
        for offset in range(present, len(data), far_side.CHUNK) or [present]:
            part = data[offset : offset + far_side.CHUNK]
            link.call("put", part, digest=digest, offset=offset, size=len(data))


def _exists_on_host(link: Link, folder: str) -> bool:
    """Ask the host whether it has a folder or file at the path `folder`, below the root."""
    answer, _ = link.call("exist", folders=[folder])
    return answer.get("there") == [True]

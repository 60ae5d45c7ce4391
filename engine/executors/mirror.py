"""The files of a run brought back from another machine, while it runs and at its end.

The other machine is the user's own and is not believed: only names that a run writes are taken,
each below the run's folder and never through a link; sizes and counts have limits. Files that only
grow come by offset, others whole when they change, a checkpoint complete or not at all.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from engine.core.files import JsonObject, read_object, sync_folder, write_json
from engine.core.format import size
from engine.executors import far_side
from engine.executors.ssh import Connection, FarError
from engine.home.run_dir import CHECKPOINT_MANIFEST, RunDir

# Files that a trainer appends to: they come by offset.
GROWING = re.compile(
    r"metrics\.jsonl|endpoint_calls\.jsonl|replayed\.jsonl|rollouts/step_\d{6,9}\.jsonl"
    r"|evals/(step_\d{6,9}|kept_before|kept_after|model_\d{1,3})\.jsonl"
    r"|evals/reworded/(kinds|model_\d{1,3}_[a-z_]{1,40})\.jsonl"
)
# Files that come whole.
WHOLE = re.compile(
    r"manifest\.json|heartbeat\.json|result\.json|failure\.json|evals/rescored\.json"
    r"|logs/(environment|vllm)\.log|logs/profile\.txt|logs/trace_step_\d{1,9}\.json\.gz"
)
CHECKPOINT = re.compile(r"checkpoints/(step_\d{6,9})/([A-Za-z0-9_-][A-Za-z0-9._-]{0,99})")
CONSOLE = re.compile(r"logs/attempt_(\d{1,6})\.log")
_NAMES = RunDir(Path("run"))  # of the files in a run's folder
EVENTS = _NAMES.events.name
MIRRORED = (GROWING, WHOLE, CHECKPOINT)
# What of a run's folder stays on its side: records of its own processes, and what is written anew.
NOT_SENT = re.compile(
    r"config\.json|(placement|place|spent)\.json|worker\.lock|started\.json|exit\.json|STATUS\.md|report\.html"
    r"|chain\.json|deleted\.json|heartbeat\.json|result\.json|failure\.json|events\.jsonl"
    r"|logs/.*|ranks/.*|sampled/.*|(.*/)?\.[^/]*"
)
MOST_FILES = 50_000
MOST_BYTES = {"text": 8 << 30, "checkpoint": 64 << 30}  # of one file
DISK_RESERVE = 500_000_000  # bytes that stay free here
_SHOWN_NAMES = 3  # of refused files, in a message


class HostileFiles(Exception):
    """The other machine offers files that no run writes; nothing more is taken from it."""

    def __init__(self, message: str, hint: str = "") -> None:
        """`message` says what is wrong with the files, `hint` what a person can do; "" for the
        usual advice."""
        super().__init__(message)
        self.message = message
        self.hint = hint or "Look at the machine over there before it is used again."


class FileState(NamedTuple):
    """What the host says of one of its files. A file that was replaced has another inode; one that
    was appended to has more bytes."""

    inode: int
    size: int  # bytes
    changed: int  # time of the last change, in nanoseconds


@dataclass
class Mirror:
    """Brings back the files of one run from a host, again and again while the run goes on. Every
    path is the file's path in the run's folder, which is laid out alike on both sides.

    Attributes:
        folder: the run's folder on the host, below the root of the connection.
        console: called with what the trainer on the host printed.
        refused: paths that were refused, each once.
        brought: how each file was on the host when it was brought here, by path.
    """

    run: RunDir
    link: Connection
    folder: str
    console: Callable[[bytes], None]
    refused: set[str] = field(default_factory=set)
    brought: dict[str, FileState] = field(default_factory=dict)
    _on_host: dict[str, FileState] = field(default_factory=dict)  # how each file is there now

    def take(self, look: JsonObject) -> list[str]:
        """Bring back the files that have changed on the host.

        `look` is the host's answer to a probe (`look` in engine/executors/jobs.py): which files
        were "changed" and "removed" since the last one, and the name of the "best" checkpoint.

        Returns the paths that were refused for the first time, because no run writes such files.
        Raises HostileFiles for sizes or counts above the limits, HostLost if the connection ends.
        """
        refused = self._update_list(look)
        for path in sorted(self._on_host, key=_order):
            state = self._on_host[path]
            if self.brought.get(path) == state or CHECKPOINT.fullmatch(path):
                continue
            self._take_file(path, state)
        self._take_checkpoints(look.get("best"))
        return refused

    def verify(self) -> None:
        """Compare every file that was brought here with the one on the host, by SHA-256, and bring
        one that differs again. Raises HostileFiles if it differs after that too."""
        for path in list(self.brought):
            if not (GROWING.fullmatch(path) or WHOLE.fullmatch(path)) or self._is_same(path):
                continue
            data = self._read_whole(path, self.brought[path].size, "text")
            if data is not None:
                _write(self.run.path / path, data)
            if not self._is_same(path):
                raise HostileFiles(f"{path} did not come as it is over there")

    def _is_same(self, path: str) -> bool:
        """Tell whether a file here has the same bytes as the one on the host."""
        try:
            answer, _ = self.link.call("digest", path=f"{self.folder}/{path}")
        except FarError:  # the file is gone, which the files of an ended run should not be
            return False
        with (self.run.path / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == answer.get("digest")

    def _update_list(self, look: JsonObject) -> list[str]:
        """Update what is known of the files on the host from its answer to a probe, `look`.

        Returns the paths that are refused for the first time. Raises HostileFiles if the answer has
        a file without a size, or too many files.
        """
        removed, changed = look.get("removed"), look.get("changed")
        for path in removed if isinstance(removed, list) else []:
            self._on_host.pop(str(path), None)
        refused = []
        for path, facts in changed.items() if isinstance(changed, dict) else ():
            if not _is_brought_back(path):
                if not _stays_on_host(path) and path not in self.refused:
                    self.refused.add(path)
                    refused.append(path)
                continue
            if not _are_facts(facts):
                raise HostileFiles(f"the host lists {path} without a size")
            bytes_there, inode, changed_at = facts
            self._on_host[path] = FileState(inode, bytes_there, changed_at)
        if len(self._on_host) > MOST_FILES or len(self.refused) > MOST_FILES:
            raise HostileFiles(f"the host lists more than {MOST_FILES:,} files of the run")
        return refused

    def _take_file(self, path: str, state: FileState) -> None:
        """Bring back one file that belongs to no checkpoint; `state` is how it is on the host."""
        if GROWING.fullmatch(path):
            self._take_growth(path, state)
        elif path == EVENTS:
            self._take_events(state)  # notes by itself how much was brought
            return
        elif CONSOLE.fullmatch(path):
            self._take_console(path, state)
        else:
            data = self._read_whole(path, state.size, "text")
            if data is None:
                return
            _write(self.run.path / path, data)
        self.brought[path] = state

    def _take_growth(self, path: str, state: FileState) -> None:
        """Append the new bytes of a file to which the trainer only appends. If it was replaced on
        the host, as by a resumed run, it is replaced here too."""
        target = self.run.path / path
        before = self.brought.get(path)
        size_here = _size(target)
        is_continued = size_here <= state.size and (before is None or before.inode == state.inode)
        # If this process has not brought the file before, its content has to be compared.
        if before is None and size_here:
            is_continued = is_continued and self._is_beginning(path, target, size_here)
        if not is_continued:
            aside = target.with_name(f".{target.name}.new")
            self._append(path, aside, 0, state.size, fresh=True)
            os.replace(aside, target)
            return
        self._append(path, target, size_here, state.size)

    def _is_beginning(self, path: str, target: Path, length: int) -> bool:
        """Tell whether the file on the host begins with the `length` bytes of the file `target`."""
        ours, theirs = hashlib.sha256(), hashlib.sha256()
        with target.open("rb") as file:
            offset = 0
            while offset < length:
                block = file.read(far_side.CHUNK)
                data = self._read(path, offset, len(block))
                if len(data) != len(block):
                    return False
                ours.update(block)
                theirs.update(data)
                offset += len(block)
        return ours.digest() == theirs.digest()

    def _append(
        self, path: str, target: Path, offset: int, end: int, *, fresh: bool = False
    ) -> None:
        """Append the bytes from `offset` to `end` of a file on the host to the file `target` here,
        which is emptied first if `fresh`."""
        self._require_room(path, end - offset, end, "text")
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = os.O_TRUNC if fresh else os.O_APPEND
        # O_NOFOLLOW: a link here must not lead what comes from the host to another file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | mode
        with os.fdopen(os.open(target, flags, 0o600), "ab") as file:
            while offset < end:
                data = self._read(path, offset, min(far_side.CHUNK, end - offset))
                if not data:  # it was cut in the meantime; the next probe says so
                    break
                file.write(data)
                offset += len(data)

    def _take_events(self, state: FileState) -> None:
        """Append the events of the host's events.jsonl to the run's own, each once: both sides
        write events. `state` is how the file is on the host."""
        before = self.brought.get(EVENTS)
        is_continued = before and before.inode == state.inode and before.size <= state.size
        offset = before.size if before and is_continued else 0
        self._require_room(EVENTS, state.size - offset, state.size, "text")
        data = b""
        while offset + len(data) < state.size:
            part = self._read(EVENTS, offset + len(data), far_side.CHUNK)
            if not part:
                break
            data += part
        complete_lines = data[: data.rfind(b"\n") + 1]
        ours = self.run.events.read_bytes() if self.run.events.exists() else b""
        present = set(ours.splitlines())
        lines = complete_lines.splitlines()
        new_lines = [line for line in lines if line not in present and _is_event(line)]
        if new_lines:
            with self.run.events.open("ab") as file:
                file.write(b"".join(line + b"\n" for line in new_lines))
        # What follows the last complete line is read again next time.
        self.brought[EVENTS] = state._replace(size=offset + len(complete_lines))

    def _take_console(self, path: str, state: FileState) -> None:
        """Hand on to `console` what the trainer has printed since the last time. How much of each
        log was handed on is kept in a file, for the next process that looks after the run."""
        offsets = read_object(console_marks(self.run))
        offset = offsets.get(path, 0)
        offset = offset if isinstance(offset, int) and 0 <= offset <= state.size else 0
        while offset < min(state.size, MOST_BYTES["text"]):
            data = self._read(path, offset, far_side.CHUNK)
            if not data:
                break
            self.console(data)
            offset += len(data)
        write_json(console_marks(self.run), {**offsets, path: offset})

    def _take_checkpoints(self, best: object) -> None:
        """Bring back every complete checkpoint that is not here, delete those that the host no
        longer has, and let the link `best` name the best one. `best` is its name as the host says
        it; anything but the name of a complete checkpoint is ignored."""
        folders: dict[str, dict[str, FileState]] = {}  # the files of each checkpoint, by its name
        for path, state in self._on_host.items():
            match = CHECKPOINT.fullmatch(path)
            if match:
                folders.setdefault(match[1], {})[match[2]] = state
        # The manifest is written last, so a checkpoint that has one is complete.
        complete = {name: files for name, files in folders.items() if CHECKPOINT_MANIFEST in files}
        for name in sorted(complete):
            if not (self.run.checkpoints / name / CHECKPOINT_MANIFEST).exists():
                self._take_checkpoint(name, complete[name])
        if complete:
            self._delete_checkpoints_except(set(complete))
        if isinstance(best, str) and best in complete:
            _mark_best(self.run, best)

    def _take_checkpoint(self, name: str, files: Mapping[str, FileState]) -> None:
        """Bring back the checkpoint `name`, which appears here complete or not at all.

        `files` are its files on the host by name. They are put into a folder aside first, where a
        file that was cut short is continued. Raises HostileFiles if a file is not as the
        checkpoint's manifest says.
        """
        aside = self.run.checkpoints / f".{name}.coming"
        aside.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, state in files.items():
            self._take_checkpoint_file(name, file, state, aside / file)
        if any(_size(aside / file) < state.size for file, state in files.items()):
            shutil.rmtree(aside, ignore_errors=True)  # the trainer deleted it in the meantime
            return
        damage = _damage(aside)
        if damage:
            shutil.rmtree(aside, ignore_errors=True)
            raise HostileFiles(f"the checkpoint {name} did not come as it was written: {damage}")
        target = self.run.checkpoints / name
        shutil.rmtree(target, ignore_errors=True)  # an incomplete one
        os.replace(aside, target)
        sync_folder(self.run.checkpoints)

    def _take_checkpoint_file(self, name: str, file: str, state: FileState, target: Path) -> None:
        """Bring the file `file` of the checkpoint `name` to the path `target`. Bytes that are there
        already are kept, unless they are more than the file has on the host."""
        offset = _size(target)
        if offset > state.size:
            target.unlink()
            offset = 0
        self._require_room(name, state.size - offset, state.size, "checkpoint")
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_APPEND
        with os.fdopen(os.open(target, flags, 0o600), "ab") as stream:
            while offset < state.size:
                data = self._read(f"checkpoints/{name}/{file}", offset, far_side.CHUNK)
                if not data:
                    break
                stream.write(data)
                offset += len(data)
            stream.flush()
            os.fsync(stream.fileno())

    def _delete_checkpoints_except(self, names: set[str]) -> None:
        """Delete the checkpoints here that are not among `names`, those that the host has."""
        for name in [f"step_{step:06d}" for step in self.run.checkpoint_steps()]:
            if name not in names:
                shutil.rmtree(self.run.checkpoints / name, ignore_errors=True)

    def _read_whole(self, path: str, length: int, kind: str) -> bytes | None:
        """Read all `length` bytes of a file on the host; None if it has fewer by now or is gone.

        `kind`, a key of MOST_BYTES, says how large it may be. Raises HostileFiles if it is larger.
        """
        self._require_room(path, length, length, kind)
        data = b""
        while len(data) < length:
            part = self._read(path, len(data), far_side.CHUNK)
            if not part:
                break
            data += part
        return data if len(data) == length else None

    def _read(self, path: str, offset: int, length: int) -> bytes:
        """Read at most `length` bytes, from `offset` on, of a file on the host. Returns b"" at the
        file's end, and if it is gone."""
        path_there = f"{self.folder}/{path}"
        try:
            _, body = self.link.call("read", path=path_there, offset=offset, length=length)
        except FarError:
            return b""
        return body[:length]  # the host is not trusted to send no more

    def _require_room(self, path: str, more: int, total: int, kind: str) -> None:
        """Check that `more` bytes of a file with `total` bytes on the host can be written here.

        Raises HostileFiles if the file is larger than any of its `kind` (a key of MOST_BYTES) can
        be, OSError if the disk here has no room, which is no fault of the host.
        """
        if total > MOST_BYTES[kind]:
            raise HostileFiles(f"the host says that {path} has {size(total)}")
        free = shutil.disk_usage(self.run.path).free
        if more > free - DISK_RESERVE:
            message = f"{path} from the host has {size(more)}, and {size(free)} are free here"
            raise OSError(errno.ENOSPC, f"{message}: free some space")


def console_marks(run: RunDir) -> Path:
    """Return the path of the file that says how many bytes of each log of the trainer on the host
    were handed on already: path of the log -> bytes."""
    return run.logs / ".shown.json"


# Names that a run's folder holds on the host and that nobody needs here.
_ONLY_ON_HOST = re.compile(
    r"config\.json|started\.json|exit\.json|(coming|launch|lease)\.json|worker\.lock|STATUS\.md"
    r"|report\.html|chain\.json|contamination\.json|pins\.json|checkpoints/best|holds|go"
    r"|(start|models|ranks|sampled|logs)/.*|checkpoints/damaged_step_.*|(.*/)?\.[^/]*"
)


def _is_brought_back(path: object) -> bool:
    """Tell whether the path of a file of a run is one that is brought back from a host."""
    if not isinstance(path, str):
        return False
    patterns = (*MIRRORED, CONSOLE)
    return path == EVENTS or any(pattern.fullmatch(path) for pattern in patterns)


def _stays_on_host(path: object) -> bool:
    """Tell whether the path of a file is one that a run has on a host and that is not brought back.
    Such a file is passed over without a complaint."""
    return isinstance(path, str) and ".." not in path and bool(_ONLY_ON_HOST.fullmatch(path))


def _are_facts(facts: object) -> bool:
    """Tell whether a value that a host sent is [bytes, inode, time of change] of a file: a list of
    three integers that are not negative."""
    if not isinstance(facts, list) or len(facts) != 3:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in facts)


def _order(path: str) -> tuple[bool, str]:
    """Return the key by which paths are sorted before they are brought: by name, but the files that
    say how the run ended come last. Who reads those finds everything else here."""
    is_last = path in (_NAMES.result.name, _NAMES.failure.name, EVENTS)
    return is_last, path


def _size(path: Path) -> int:
    """Return the bytes of a file on this machine; 0 if there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _write(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old content or the new one, never a part."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def _is_event(line: bytes) -> bool:
    """Tell whether a line of the host's events.jsonl is an event to take over. The event
    "trainer_exited" is not: the supervisor on this machine writes its own."""
    try:
        event = json.loads(line)["event"]
    # No JSON, no object, an object without that key, or one that is nested too deeply.
    except (ValueError, TypeError, KeyError, RecursionError):
        return False
    return isinstance(event, str) and event != "trainer_exited"


def _damage(folder: Path) -> str:
    """Say what is wrong with the files of the checkpoint in `folder`: one is missing, or has
    another SHA-256 than its manifest says. Returns "" if nothing is wrong."""
    files = read_object(folder / CHECKPOINT_MANIFEST).get("files", {})
    for name, facts in files.items() if isinstance(files, dict) else ():
        path = folder / str(name)
        if "/" in str(name) or not path.is_file():
            return f"{name} is missing"
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if not isinstance(facts, dict) or digest != facts.get("sha256"):
            return f"{name} is not what its manifest says"
    return ""


def _mark_best(run: RunDir, name: str) -> None:
    """Make the link `best` of a run's checkpoints point to the checkpoint `name`, such as
    "step_000020"; readers see the old link or the new one."""
    if run.best.is_symlink() and os.readlink(run.best) == name:
        return
    aside = run.checkpoints / ".best.coming"
    aside.unlink(missing_ok=True)
    os.symlink(name, aside)
    os.replace(aside, run.best)

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
    r"config\.json|(placement|spent)\.json|worker\.lock|started\.json|exit\.json|STATUS\.md|report\.html"
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
        super().__init__(message)
        self.message = message
        self.hint = hint or "Look at the machine over there before it is used again."


@dataclass
class Mirror:
    """Brings back the files of one run.

    Attributes:
        console: called with what the trainer over there printed.
        refused: names that were refused, each once.
        at: what of each file is here: path -> (inode, bytes, time of change) over there.
    """

    run: RunDir
    link: Connection
    folder: str  # of the run over there, below the root
    console: Callable[[bytes], None]
    refused: set[str] = field(default_factory=set)
    at: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    _listed: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def take(self, look: JsonObject) -> list[str]:
        """Bring back what a look (engine/executors/jobs.py) says has changed.

        Returns the names that were refused for the first time. Raises HostileFiles for sizes or
        counts above the limits, HostLost where the connection ends.
        """
        refused = self._note(look)
        for path in sorted(self._listed, key=_order):
            facts = self._listed[path]
            if self.at.get(path) == facts or CHECKPOINT.fullmatch(path):
                continue
            self._take_file(path, facts)
        self._take_checkpoints(look.get("best"))
        return refused

    def verify(self) -> None:
        """Hold every file that is here against the one over there, and bring one that differs
        again. Raises HostileFiles where it differs once more."""
        for path in [path for path in self.at if GROWING.fullmatch(path) or WHOLE.fullmatch(path)]:
            if not self._is_same(path):
                data = self._whole(path, self.at[path][1], "text")
                if data is not None:
                    _write(self.run.path / path, data)
                if not self._is_same(path):
                    raise HostileFiles(f"{path} did not come as it is over there")

    def _is_same(self, path: str) -> bool:
        """Whether a file here has the bytes of the one over there."""
        try:
            theirs = self.link.call("digest", path=f"{self.folder}/{path}")[0].get("digest")
        except FarError:  # gone meanwhile, which an ended run's files are not
            return False
        with (self.run.path / path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == theirs

    def _note(self, look: JsonObject) -> list[str]:
        """Add what is new to the list of files over there; returns names that are refused."""
        removed, changed = look.get("removed"), look.get("changed")
        for path in removed if isinstance(removed, list) else []:
            self._listed.pop(str(path), None)
        refused = []
        for path, facts in changed.items() if isinstance(changed, dict) else ():
            if not _is_ours(path):
                if not _is_known(path) and path not in self.refused:
                    self.refused.add(path)
                    refused.append(path)
                continue
            if not _are_facts(facts):
                raise HostileFiles(f"the host lists {path} without a size")
            self._listed[path] = (facts[1], facts[0], facts[2])
        if len(self._listed) > MOST_FILES or len(self.refused) > MOST_FILES:
            raise HostileFiles(f"the host lists more than {MOST_FILES:,} files of the run")
        return refused

    def _take_file(self, path: str, facts: tuple[int, int, int]) -> None:
        """Bring back one file that is no checkpoint's."""
        if GROWING.fullmatch(path):
            self._grow(path, facts)
        elif path == EVENTS:
            self._take_events(facts)
            return
        elif CONSOLE.fullmatch(path):
            self._take_console(path, facts)
        else:
            data = self._whole(path, facts[1], "text")
            if data is None:
                return
            _write(self.run.path / path, data)
        self.at[path] = facts

    def _grow(self, path: str, facts: tuple[int, int, int]) -> None:
        """Append what is new of a file that only grows; one that was replaced over there, as by a
        resumed run, is replaced here."""
        target = self.run.path / path
        known = self.at.get(path)
        have = _size(target)
        # Of a file that this process has not read yet nothing is known but what is here.
        goes_on = have <= facts[1] and (known is None or known[0] == facts[0])
        if known is None and have:
            goes_on = goes_on and self._is_beginning(path, target, have)
        if not goes_on:
            aside = target.with_name(f".{target.name}.new")
            self._append(path, aside, 0, facts[1], fresh=True)
            os.replace(aside, target)
            return
        self._append(path, target, have, facts[1])

    def _is_beginning(self, path: str, target: Path, have: int) -> bool:
        """Whether the file here is how the one over there begins."""
        ours, theirs = hashlib.sha256(), hashlib.sha256()
        with target.open("rb") as file:
            offset = 0
            while offset < have:
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
        """Write the bytes from `offset` to `end` of a file over there to the end of one here."""
        self._require_room(path, end - offset, end, "text")
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_TRUNC if fresh else os.O_APPEND)
        with os.fdopen(os.open(target, flags, 0o600), "ab") as file:
            while offset < end:
                data = self._read(path, offset, min(far_side.CHUNK, end - offset))
                if not data:  # it was cut meanwhile; the next look says so
                    break
                file.write(data)
                offset += len(data)

    def _take_events(self, facts: tuple[int, int, int]) -> None:
        """Add the events over there to the run's own, each once: both sides write events."""
        known = self.at.get(EVENTS)
        offset = known[1] if known and known[0] == facts[0] and known[1] <= facts[1] else 0
        self._require_room(EVENTS, facts[1] - offset, facts[1], "text")
        data = b""
        while offset + len(data) < facts[1]:
            part = self._read(EVENTS, offset + len(data), far_side.CHUNK)
            if not part:
                break
            data += part
        complete = data[: data.rfind(b"\n") + 1]
        ours = self.run.events.read_bytes() if self.run.events.exists() else b""
        present = set(ours.splitlines())
        new = [line for line in complete.splitlines() if line not in present and _is_event(line)]
        if new:
            with self.run.events.open("ab") as file:
                file.write(b"".join(line + b"\n" for line in new))
        # What follows the last whole line is read again.
        self.at[EVENTS] = (facts[0], offset + len(complete), facts[2])

    def _take_console(self, path: str, facts: tuple[int, int, int]) -> None:
        """Hand on what the trainer printed since the last look."""
        shown = read_object(self._console_marks)
        offset = shown.get(path, 0)
        offset = offset if isinstance(offset, int) and 0 <= offset <= facts[1] else 0
        while offset < min(facts[1], MOST_BYTES["text"]):
            data = self._read(path, offset, far_side.CHUNK)
            if not data:
                break
            self.console(data)
            offset += len(data)
        write_json(self._console_marks, {**shown, path: offset})

    @property
    def _console_marks(self) -> Path:
        return console_marks(self.run)

    def _take_checkpoints(self, best: object) -> None:
        """Bring back every complete checkpoint that is not here, drop those that are gone over
        there, and mark the best one."""
        folders: dict[str, dict[str, tuple[int, int, int]]] = {}
        for path, facts in self._listed.items():
            match = CHECKPOINT.fullmatch(path)
            if match:
                folders.setdefault(match[1], {})[match[2]] = facts
        complete = {name: files for name, files in folders.items() if CHECKPOINT_MANIFEST in files}
        for name in sorted(complete):
            if not (self.run.checkpoints / name / CHECKPOINT_MANIFEST).exists():
                self._take_checkpoint(name, complete[name])
        if complete:
            self._drop_others(set(complete))
        if isinstance(best, str) and best in complete:
            _mark_best(self.run, best)

    def _take_checkpoint(self, name: str, files: Mapping[str, tuple[int, int, int]]) -> None:
        """Bring back one checkpoint, aside first; its manifest says what its files must be."""
        aside = self.run.checkpoints / f".{name}.coming"
        aside.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, facts in files.items():
            target = aside / file
            have = _size(target)
            if have > facts[1]:
                target.unlink()
                have = 0
            self._require_room(name, facts[1] - have, facts[1], "checkpoint")
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_APPEND
            with os.fdopen(os.open(target, flags, 0o600), "ab") as stream:
                offset = have
                while offset < facts[1]:
                    data = self._read(f"checkpoints/{name}/{file}", offset, far_side.CHUNK)
                    if not data:
                        break
                    stream.write(data)
                    offset += len(data)
                stream.flush()
                os.fsync(stream.fileno())
        if any(_size(aside / file) < facts[1] for file, facts in files.items()):
            shutil.rmtree(aside, ignore_errors=True)  # the trainer deleted it meanwhile
            return
        damage = _damage(aside)
        if damage:
            shutil.rmtree(aside, ignore_errors=True)
            raise HostileFiles(f"the checkpoint {name} did not come as it was written: {damage}")
        target = self.run.checkpoints / name
        shutil.rmtree(target, ignore_errors=True)  # an incomplete one
        os.replace(aside, target)
        sync_folder(self.run.checkpoints)

    def _drop_others(self, kept: set[str]) -> None:
        """Delete checkpoints here that the trainer has deleted over there."""
        for name in [f"step_{step:06d}" for step in self.run.checkpoint_steps()]:
            if name not in kept:
                shutil.rmtree(self.run.checkpoints / name, ignore_errors=True)

    def _whole(self, path: str, length: int, kind: str) -> bytes | None:
        """The bytes of a file; None where it is gone by now."""
        self._require_room(path, length, length, kind)
        data = b""
        while len(data) < length:
            part = self._read(path, len(data), far_side.CHUNK)
            if not part:
                break
            data += part
        return data if len(data) == length else None

    def _read(self, path: str, offset: int, length: int) -> bytes:
        """A part of a file over there; b"" at its end, and where it is gone."""
        try:
            whole = f"{self.folder}/{path}"
            return self.link.call("read", path=whole, offset=offset, length=length)[1][:length]
        except FarError:
            return b""

    def _require_room(self, path: str, more: int, whole: int, kind: str) -> None:
        """Raise HostileFiles if a file is larger than any run's, OSError if there is no room for it
        here, which is no fault of the other machine."""
        if whole > MOST_BYTES[kind]:
            raise HostileFiles(f"the host says that {path} has {size(whole)}")
        free = shutil.disk_usage(self.run.path).free
        if more > free - DISK_RESERVE:
            message = f"{path} from the host has {size(more)}, and {size(free)} are free here"
            raise OSError(errno.ENOSPC, f"{message}: free some space")


def console_marks(run: RunDir) -> Path:
    """How much of each console of a launch was handed on, kept for the next process."""
    return run.logs / ".shown.json"


# Names that a run's folder holds over there and that nobody needs here.
_KNOWN = re.compile(
    r"config\.json|started\.json|exit\.json|(coming|launch|lease)\.json|worker\.lock|STATUS\.md"
    r"|report\.html|chain\.json|contamination\.json|pins\.json|checkpoints/best|holds|go"
    r"|(start|models|ranks|sampled|logs)/.*|checkpoints/damaged_step_.*|(.*/)?\.[^/]*"
)


def _is_ours(path: object) -> bool:
    """Whether a file is one that is brought back."""
    if not isinstance(path, str):
        return False
    patterns = (*MIRRORED, CONSOLE)
    return path == EVENTS or any(pattern.fullmatch(path) for pattern in patterns)


def _is_known(path: object) -> bool:
    """Whether a file is one that a run has over there and that stays there."""
    return isinstance(path, str) and ".." not in path and bool(_KNOWN.fullmatch(path))


def _are_facts(facts: object) -> bool:
    """Whether these are the bytes, the inode and the time of a file."""
    return (
        isinstance(facts, list)
        and len(facts) == 3
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in facts)
    )


def _order(path: str) -> tuple[bool, str]:
    """What is read last comes last: a result means that everything else is there."""
    return path in (_NAMES.result.name, _NAMES.failure.name, EVENTS), path


def _size(path: Path) -> int:
    """The bytes of a file here; 0 without one."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _write(path: Path, data: bytes) -> None:
    """Write a file whole, so that readers see the old one or the new one."""
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
    """Whether a line is an event; that the trainer has ended is one of the supervisor here."""
    try:
        event = json.loads(line)["event"]
        return isinstance(event, str) and event != "trainer_exited"
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def _damage(folder: Path) -> str:
    """What is wrong with the files of a checkpoint, by its manifest; "" for nothing."""
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
    """Let `best` name a checkpoint."""
    if run.best.is_symlink() and os.readlink(run.best) == name:
        return
    aside = run.checkpoints / ".best.coming"
    aside.unlink(missing_ok=True)
    os.symlink(name, aside)
    os.replace(aside, run.best)

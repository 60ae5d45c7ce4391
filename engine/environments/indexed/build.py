"""Reading a large dataset once, in a process of its own that outlives the call that started it.

The call waits as long as it may and is refused as retryable after that; the next one goes on
waiting. What was found is kept in the home's cache under the names, sizes and times of the files,
so the same files are read once.

    python -P -m engine.environments.indexed.build FOLDER

reads what FOLDER/request.json names and leaves there index.json (last), rows.idx and heldout.jsonl.
"""

import contextlib
import fcntl
import hashlib
import heapq
import json
import os
import shutil
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import sync_folder
from engine.environments.indexed import columns, scan, sides
from engine.environments.indexed.rows import ROWS_INDEX, stored_row
from engine.home.run_dir import Home
from engine.processes.launcher import spawn_detached
from engine.records.data_index import DataIndex, FaultyLine, IndexedFile, Spread
from engine.records.record import Record
from envs.dataset import LINE_FORMATS, data_files, parse_line, splits_of
from envs.row_shapes import to_task

# Above one of these a dataset is indexed instead of copied.
COPIED_BYTES = 64 << 20
COPIED_ROWS = 100_000
HELDOUT_ROWS = "heldout.jsonl"
_INDEX, _REQUEST, _LOCK, _LOG, _DONE = "index.json", "request.json", "lock", "log", "done"
_VERSION = 1  # of what is kept in the cache; raise it when the reading changes
_LOOK_S = 0.05
_LOG_CHARS = 500
_FEW_BYTES = 4 << 20  # so small a file has no COPIED_ROWS rows
_BLOCK = 1 << 20


class _RequestedFile(Record):
    path: str
    name: str
    split: str | None


class _Request(Record):
    """The files to read, in order."""

    files: tuple[_RequestedFile, ...]


@dataclass(frozen=True)
class Indexed:
    """A dataset that was read: the folder with HELDOUT_ROWS and ROWS_INDEX, and what was found."""

    folder: Path
    found: DataIndex


def large_files(folder: Path) -> list[Path]:
    """The data files of a folder without code that are too large to copy; [] if they are not.

    `folder` is absolute and has no links in it. Raises UserError DATASET_INVALID if files of
    another format lie beside them.
    """
    if (folder / "environment.py").exists():
        return []
    files = [path for path in data_files(folder) if _is_pushed(path)]
    by_line = [path for path in files if path.suffix.lower() in LINE_FORMATS]
    if not is_large(by_line):
        return []
    if len(by_line) < len(files):
        other = next(path for path in files if path not in by_line)
        raise UserError(
            "DATASET_INVALID",
            f"{other.name} lies beside JSONL files of more than {COPIED_BYTES >> 20} MB or "
            f"{COPIED_ROWS:,} rows, and those are read line by line",
            hint="Write it as JSONL too, or move it away.",
            field="path",
        )
    return by_line


def is_large(files: Sequence[Path]) -> bool:
    """Whether these JSONL files together are indexed instead of copied."""
    sizes = [path.stat().st_size for path in files]
    if sum(sizes) > COPIED_BYTES:
        return True
    return sum(sizes) > _FEW_BYTES and sum(map(_count_lines, files)) > COPIED_ROWS


def read_once(home: Home, files: Sequence[Path], folder: Path, wait_s: float) -> Indexed:
    """What reading the files found; they are read in a process of its own if they were not yet.

    Args:
        folder: their names are relative to it.
        wait_s: how long to wait for it; reading goes on behind that.

    Raises UserError: DATASET_READING, retryable, if it is not done by then; DATASET_INVALID if the
    process ended without a result.
    """
    splits = splits_of(files)
    request = _Request(
        files=tuple(
            _RequestedFile(path=str(path), name=path.relative_to(folder).as_posix(), split=split)
            for path, split in zip(files, splits, strict=True)
        )
    )
    place = home.cache / "data" / _key(request)
    deadline = time.monotonic() + wait_s
    while True:
        is_being_read = _is_being_read(place)  # asked first: the result is there before it ends
        with contextlib.suppress(OSError):
            return Indexed(place, DataIndex.read(place / _INDEX))
        if not is_being_read:
            if (place / _LOG).exists():
                raise _died(place)
            _start(place, request)
        if time.monotonic() >= deadline:
            raise _not_ready(place, files)
        time.sleep(_LOOK_S)


def _start(place: Path, request: _Request) -> None:
    """Start the process that reads the files into `place`; the lock passes on to it."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            request.write(place / _REQUEST)
            (place / _DONE).write_text("0")
            argv = [sys.executable, "-P", "-m", __name__, str(place)]
            spawn_detached(argv, place, place / _LOG, pass_fds=[lock])
    finally:
        os.close(lock)


def _is_being_read(place: Path) -> bool:
    """Whether a process holds the lock of `place`."""
    try:
        lock = os.open(place / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _not_ready(place: Path, files: Sequence[Path]) -> UserError:
    """The error for a dataset that is still being read, with how far it is."""
    total = sum(path.stat().st_size for path in files)
    done = 0
    with contextlib.suppress(OSError, ValueError):
        done = int((place / _DONE).read_text())
    share = min(0.99, done / total) if total else 0.0
    return UserError(
        "DATASET_READING",
        f"{total >> 20} MB of data are being read, {share:.0%} so far; nothing is stored yet",
        hint="Call again; the reading goes on meanwhile and is not begun anew.",
        field="path",
        retryable=True,
    )


def _died(place: Path) -> UserError:
    """The error for a reading that ended without a result; the next call begins it anew."""
    log = (place / _LOG).read_text("utf-8", "replace").strip()[-_LOG_CHARS:]
    shutil.rmtree(place, ignore_errors=True)
    reason = log.splitlines()[-1] if log else "it was killed"
    return UserError(
        "DATASET_INVALID",
        f"reading the data ended without a result: {reason}",
        hint="Call again; if it ends in the same way, the machine may be short of memory or disk.",
        field="path",
        retryable=True,
    )


def _key(request: _Request) -> str:
    """A name for what reading these files finds, from their paths, sizes and times."""
    facts: list[object] = [_VERSION]
    for file in request.files:
        info = os.stat(file.path)
        facts += [file.path, file.name, file.split]
        facts += [info.st_size, info.st_mtime_ns, info.st_ino]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _is_pushed(path: Path) -> bool:
    """Whether a push would take a data file: a regular one, reached without links."""
    is_link = path.resolve() != path
    return path.is_file() and not is_link and not path.name.startswith(".")


def _count_lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK), b""))


class _Reading:
    """One reading of the files of a request, in the process of its own."""

    def __init__(self, folder: Path, request: _Request) -> None:
        self.folder = folder
        self.request = request
        self.files: list[IndexedFile] = []
        self.parts: list[scan.Part] = []
        self.rows_of_file: list[int] = []
        self.repeated_ids = 0
        self.total = scan.PartFound()  # its arrays stay empty; the columns hold the numbers
        self.offsets = columns.Column(folder / "offsets", "Q")
        self.lines = columns.Column(folder / "lines", "Q")
        self.prompts = columns.Column(folder / "prompts", "Q")
        self.rows = columns.Column(folder / "rows", "Q")
        self.ids = columns.Column(folder / "ids", "Q")
        self.sides = columns.Column(folder / "sides", "B")

    def run(self) -> None:
        """Read everything and write the results, index.json last."""
        for file in self.request.files:
            path = Path(file.path)
            info = path.stat()
            parts, digest = scan.parts_of(path, file.name, file.split)
            self.parts += parts
            self.files.append(
                IndexedFile(
                    path=file.path,
                    name=file.name,
                    size=info.st_size,
                    mtime_ns=info.st_mtime_ns,
                    sha256=digest,
                )
            )
        self._scan_parts()
        self._name_repeated_ids()
        decided = sides.decide(self.prompts.values(), bytes(self.sides.values()))
        self._write_rows(decided)
        self._found(decided).write(self.folder / _INDEX)
        for name in ("offsets", "lines", "prompts", "rows", "ids", "sides"):
            (self.folder / name).unlink()
        sync_folder(self.folder)

    def _scan_parts(self) -> None:
        """Read all parts, several at once, and add up what they hold, in order."""
        done = 0
        counts = Counter({file.name: 0 for file in self.files})
        with ProcessPoolExecutor(min(scan.workers(), max(1, len(self.parts)))) as pool:
            for part, found in zip(self.parts, pool.map(scan.scan, self.parts), strict=True):
                self.offsets.extend(found.offsets)
                self.lines.extend(found.lines)
                self.prompts.extend(found.prompts)
                self.rows.extend(found.rows)
                self.ids.extend(found.ids)
                self.sides.extend(found.sides)
                counts[part.name] += len(found.offsets)
                _add(self.total, found)
                done += part.end - part.start
                (self.folder / _DONE).write_text(str(done))
        self.rows_of_file = [counts[file.name] for file in self.files]

    def _name_repeated_ids(self) -> None:
        """Make a fault of every row whose id an earlier row has."""
        repeated = columns.repeated(self.ids.values())
        for place, earlier in heapq.nsmallest(2 * scan.MOST_FAULTS, self._counted(repeated)):
            task_id = self._task_row(place)["id"]
            if task_id != self._task_row(earlier)["id"]:  # two ids of one hash
                self.repeated_ids -= 1
                continue
            self.total.faults.append(
                FaultyLine(
                    file=self._file_of(place).name,
                    line=self.lines.values()[place],
                    message=f"the id {task_id!r} is also that of "
                    f"{self._file_of(earlier).name}:{self.lines.values()[earlier]}",
                )
            )

        self.total.bad += self.repeated_ids

    def _counted(self, pairs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Pass the pairs on and count them in `repeated_ids`."""
        for pair in pairs:
            self.repeated_ids += 1
            yield pair

    def _write_rows(self, decided: sides.Sides) -> None:
        """Write the held-out rows and the index of the training rows."""
        offsets, lines = self.offsets.values(), self.lines.values()
        with open(self.folder / HELDOUT_ROWS, "w", encoding="utf-8") as file:
            for place, side in enumerate(decided.of_row):
                if side == sides.IN_HELDOUT:
                    row = stored_row(self._task_row(place), "heldout")
                    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with open(self.folder / ROWS_INDEX, "wb") as file:
            for column in (offsets, lines):
                for start in range(0, len(column), columns.PORTION):
                    stop = start + columns.PORTION
                    kept = zip(column[start:stop], decided.of_row[start:stop], strict=True)
                    array("Q", (v for v, side in kept if side == sides.IN_TRAIN)).tofile(file)
            file.flush()
            os.fsync(file.fileno())
        first = 0
        for index, count in enumerate(self.rows_of_file):
            train = decided.of_row.count(sides.IN_TRAIN, first, first + count)
            self.files[index] = self.files[index].model_copy(update={"train": train})
            first += count

    def _found(self, decided: sides.Sides) -> DataIndex:
        total = self.total
        count = len(self.offsets.values())
        place_of = {file.name: index for index, file in enumerate(self.files)}
        return DataIndex(
            files=tuple(self.files),
            rows=count - self.repeated_ids,
            bad=total.bad,
            faults=_first(total.faults, place_of),
            unanswered=total.unanswered,
            unanswered_lines=_first(total.unanswered_lines, place_of),
            preferences=total.preferences,
            with_tools=total.with_tools,
            shapes=dict(total.shapes),
            turns=_spread(total.turns),
            prompt_chars=_spread(total.prompt_chars),
            answer_chars=_spread(total.answer_chars),
            repeated_rows=count - columns.count_distinct(self.rows.values()),
            repeated_prompts=count - columns.count_distinct(self.prompts.values()),
            distinct_prompts=decided.distinct_prompts,
            sides={
                "train": decided.count(sides.IN_TRAIN),
                "heldout": decided.count(sides.IN_HELDOUT),
            },
            split=decided.source,
            warnings=tuple(decided.warnings),
            sample=tuple(total.sample[: scan.SAMPLE_ROWS]),
        )

    def _file_of(self, place: int) -> IndexedFile:
        """The file that holds the row at `place`."""
        for file, count in zip(self.files, self.rows_of_file, strict=True):
            if place < count:
                return file
            place -= count
        raise IndexError(place)

    def _task_row(self, place: int) -> dict:
        """The row at `place`, as `Task.to_row` writes it."""
        file = self._file_of(place)
        descriptor = os.open(file.path, os.O_RDONLY)
        try:
            content = scan.read_line(descriptor, self.offsets.values()[place])
        finally:
            os.close(descriptor)
        line = self.lines.values()[place]
        return to_task(parse_line(content), scan.default_id(file.name, line)).to_row()


def _add(total: scan.PartFound, found: scan.PartFound) -> None:
    """Add the counts of one part to the total."""
    for name in ("shapes", "turns", "prompt_chars", "answer_chars"):
        getattr(total, name).update(getattr(found, name))
    for name in ("bad", "unanswered", "preferences", "with_tools"):
        setattr(total, name, getattr(total, name) + getattr(found, name))
    for name in ("faults", "unanswered_lines", "sample"):
        kept = getattr(total, name)
        kept += getattr(found, name)[: scan.MOST_FAULTS - len(kept)]


def _first(lines: Sequence[FaultyLine], place_of: dict[str, int]) -> tuple[FaultyLine, ...]:
    """The first of the lines, in the order of files and lines."""
    return tuple(
        heapq.nsmallest(scan.MOST_FAULTS, lines, key=lambda line: (place_of[line.file], line.line))
    )


def _spread(counts: Counter[int]) -> Spread:
    """The spread of numbers of which each occurs so many times; zeros if there are none."""
    if not counts:
        return Spread()
    last = sum(counts.values()) - 1

    def ranked(ranks: Sequence[int]) -> Iterator[int]:
        passed, wanted = 0, list(ranks)
        for value in sorted(counts):
            passed += counts[value]
            while wanted and wanted[0] < passed:
                wanted.pop(0)
                yield value

    low, middle, high, most = ranked([0, round(0.5 * last), round(0.95 * last), last])
    return Spread(min=low, p50=middle, p95=high, max=most)


def main() -> None:
    """Read the files of the request in the folder that the command line names."""
    folder = Path(sys.argv[1])
    _Reading(folder, _Request.read(folder / _REQUEST)).run()


if __name__ == "__main__":
    main()

"""Reads a large dataset once, in a separate process that outlives the call that started it.

The call waits for the process as long as it may, and then raises a retryable error; the next call
goes on waiting. The results are kept in the home's cache under a hash of the names, sizes and times
of the files, so unchanged files are read only once.

    python -P -m engine.environments.indexed.build FOLDER

reads the files that FOLDER/request.json names, and writes rows.idx, heldout.jsonl and at last
index.json into FOLDER.
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
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import sync_folder
from engine.core.format import whole_percent
from engine.environments.indexed import columns, scan, sides
from engine.environments.indexed.rows import ROWS_INDEX, stored_row
from engine.home.run_dir import Home
from engine.machine.processes.launcher import spawn_detached
from engine.records.data_index import DataIndex, FaultyLine, IndexedFile, Spread
from engine.records.record import Record
from envs.config.problem import EnvProblem
from envs.config.settings import read_settings
from envs.dataset import LINE_FORMATS, data_files, parse_line, splits_of
from envs.json_types import TaskRow
from envs.row_shapes import to_task

# A dataset with more bytes or more rows than this is indexed instead of copied.
COPIED_BYTES = 64 << 20
COPIED_ROWS = 100_000
HELDOUT_ROWS = "heldout.jsonl"
_INDEX, _REQUEST, _LOCK, _LOG, _DONE = "index.json", "request.json", "lock", "log", "done"
_VERSION = 2  # version of the results in the cache; raise it when the reading changes
_POLL_S = 0.05  # seconds between two looks for the result
_LOG_CHARS = 500  # characters at the end of the process's log that an error is made from
_FEW_BYTES = 4 << 20  # smaller files cannot have COPIED_ROWS rows, so their lines are not counted
_BLOCK = 1 << 20  # bytes read at once


class _RequestedFile(Record):
    """A file to read. `name` is its path within the dataset; `split` is the side that its name
    gives to its rows, e.g. "heldout" for test.jsonl, or None."""

    path: str
    name: str
    split: str | None


class _Request(Record):
    """The files to read, in order."""

    files: tuple[_RequestedFile, ...]


@dataclass(frozen=True)
class Indexed:
    """A dataset that was read: the folder with its HELDOUT_ROWS and ROWS_INDEX, and its facts."""

    folder: Path
    facts: DataIndex


def large_files(folder: Path) -> list[Path]:
    """Return the data files of a folder if they are too large to copy and the folder has no code.

    Otherwise return []. `folder` is an absolute path without links. Raises UserError
    DATASET_INVALID if data files of another format than JSONL lie beside the large ones.
    """
    if (folder / "environment.py").exists() or _has_adapter(folder):
        return []
    files = [path for path in data_files(folder) if _is_pushed(path)]
    jsonl_files = [path for path in files if path.suffix.lower() in LINE_FORMATS]
    if not is_large(jsonl_files):
        return []
    if len(jsonl_files) < len(files):
        wrong_file = next(path for path in files if path not in jsonl_files)
        raise UserError(
            "DATASET_INVALID",
            f"{wrong_file.name} lies beside JSONL files of more than {COPIED_BYTES >> 20} MB or "
            f"{COPIED_ROWS:,} rows, and those are read line by line",
            hint="Write it as JSONL too, or move it away.",
            field="path",
        )
    return jsonl_files


def _has_adapter(folder: Path) -> bool:
    """Return whether an environment's folder is in the format of another tool, whose own code reads
    its data files (its environment.toml then names an adapter)."""
    # EnvProblem: environment.toml is wrong. The push itself raises that error later.
    with contextlib.suppress(EnvProblem):
        return read_settings(folder).adapter is not None
    return False


def is_large(files: Sequence[Path]) -> bool:
    """Return whether these JSONL files together have more than COPIED_BYTES or COPIED_ROWS, so that
    they are indexed instead of copied."""
    size = sum(path.stat().st_size for path in files)
    if size > COPIED_BYTES:
        return True
    if size <= _FEW_BYTES:  # too small to have so many rows: the lines need not be counted
        return False
    return sum(map(_count_lines, files)) > COPIED_ROWS


def read_once(home: Home, files: Sequence[Path], folder: Path, wait_s: float) -> Indexed:
    """Return the facts about data files that are too large to copy.

    If the files have not been read yet, a separate process reads them first.

    Args:
        home: the home whose cache keeps the facts.
        files: the data files.
        folder: the folder of the dataset, which holds them.
        wait_s: how many seconds to wait for the process, which goes on reading after that.

    Raises UserError DATASET_READING (retryable) if the process is not
    done in time, or DATASET_INVALID if it has ended without a result.
    """
    request = _request_for(files, folder)
    results = home.cache / "data" / _key(request)
    deadline = time.monotonic() + wait_s
    while True:
        # The order matters: whether the process runs is checked before its result is read. If it
        # has ended by now, its result is there, unless it failed.
        is_being_read = _is_being_read(results)
        with contextlib.suppress(OSError):  # no result yet
            return Indexed(results, DataIndex.read(results / _INDEX))
        if not is_being_read:
            if (results / _LOG).exists():  # a process was started and has ended without a result
                raise _ended_without_result(results)
            _start(results, request)
        if time.monotonic() >= deadline:
            raise _not_ready(results, files)
        time.sleep(_POLL_S)


def _request_for(files: Sequence[Path], folder: Path) -> _Request:
    """Make the request for the process: the files, with their paths within the dataset's folder."""
    return _Request(
        files=tuple(
            _RequestedFile(path=str(path), name=path.relative_to(folder).as_posix(), split=split)
            for path, split in zip(files, splits_of(files), strict=True)
        )
    )


def _start(results: Path, request: _Request) -> None:
    """Start the process that reads the files of a request and writes into the folder `results`,
    unless another call has just started it.

    The process inherits the lock of the folder and holds it until its end.
    """
    results.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(results / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(BlockingIOError):  # another call has the lock and starts it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            request.write(results / _REQUEST)
            (results / _DONE).write_text("0")
            argv = [sys.executable, "-P", "-m", __name__, str(results)]
            spawn_detached(argv, results, results / _LOG, pass_fds=[lock])
    finally:
        os.close(lock)


def _is_being_read(results: Path) -> bool:
    """Return whether a process is still reading the data whose results go to the folder `results`;
    it then holds the lock of the folder."""
    try:
        lock = os.open(results / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # no process was started yet
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _not_ready(results: Path, files: Sequence[Path]) -> UserError:
    """Make the error for a dataset that is still being read, with the share that is done.

    `results` is the folder that the process writes to; `files` are the data files.
    """
    total_bytes = sum(path.stat().st_size for path in files)
    done_bytes = 0
    with contextlib.suppress(OSError, ValueError):  # ValueError: the file is being written just now
        done_bytes = int((results / _DONE).read_text())
    share = 0.0
    if total_bytes:  # never 100 %, because the result is not there yet
        share = min(0.99, done_bytes / total_bytes)
    return UserError(
        "DATASET_READING",
        f"{total_bytes >> 20} MB of data are being read, {whole_percent(share)} so far; "
        "nothing is stored yet",
        hint="Call again; the reading goes on meanwhile and is not begun anew.",
        field="path",
        retryable=True,
    )


def _ended_without_result(results: Path) -> UserError:
    """Make the error for a reading process that has ended without a result, and remove its folder
    `results`, so that the next call starts again."""
    log = (results / _LOG).read_text("utf-8", "replace").strip()[-_LOG_CHARS:]
    shutil.rmtree(results, ignore_errors=True)
    reason = log.splitlines()[-1] if log else "it was killed"
    return UserError(
        "DATASET_INVALID",
        f"reading the data ended without a result: {reason}",
        hint="Call again; if it ends in the same way, the machine may be short of memory or disk.",
        field="path",
        retryable=True,
    )


def _key(request: _Request) -> str:
    """Return the name of the folder in the cache for these files: a hash of everything on which
    their content, or what is read from it, depends."""
    parts: list[object] = [_VERSION]
    for file in request.files:
        info = os.stat(file.path)
        parts += [file.path, file.name, file.split]
        parts += [info.st_size, info.st_mtime_ns, info.st_ino]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _is_pushed(path: Path) -> bool:
    """Return whether a push takes this data file: it is a regular file, not hidden, and no part of
    its path is a link."""
    is_link = path.resolve() != path
    return path.is_file() and not is_link and not path.name.startswith(".")


def _count_lines(path: Path) -> int:
    """Count the line ends in a file."""
    with open(path, "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK), b""))


class _IndexBuilder:
    """One reading of the files of a request; it runs in a separate process."""

    def __init__(self, folder: Path, request: _Request) -> None:
        """Prepare to read the files of `request` and to write the results into `folder`.

        A column is a file with one number per row of the dataset, of 8 bytes ("Q") or of 1 ("B").
        `PartFacts` says what each column holds.
        """
        self.folder = folder
        self.request = request
        self.files: list[IndexedFile] = []
        self.parts: list[scan.Part] = []
        self.rows_of_file: list[int] = []  # how many rows each file has
        self.repeated_ids = 0  # how many rows have the id of an earlier row
        self.total = scan.PartFacts()  # its arrays stay empty: the columns hold these numbers
        self.offsets = columns.Column(folder / "offsets", "Q")
        self.lines = columns.Column(folder / "lines", "Q")
        self.prompts = columns.Column(folder / "prompts", "Q")
        self.rows = columns.Column(folder / "rows", "Q")
        self.ids = columns.Column(folder / "ids", "Q")
        self.sides = columns.Column(folder / "sides", "B")

    def run(self) -> None:
        """Read all files and write the results into the folder, index.json last."""
        for file in self.request.files:
            self._cut_into_parts(file)
        self._scan_parts()
        self._refuse_repeated_ids()
        row_sides = sides.decide(self.prompts.values(), bytes(self.sides.values()))
        self._write_heldout_rows(row_sides)
        self._write_train_index(row_sides)
        self._count_train_rows(row_sides)
        self._data_index(row_sides).write(self.folder / _INDEX)
        for name in ("offsets", "lines", "prompts", "rows", "ids", "sides"):
            (self.folder / name).unlink()  # the columns are needed only while the process runs
        sync_folder(self.folder)

    def _cut_into_parts(self, file: _RequestedFile) -> None:
        """Read a file once to hash it and to cut it into parts; its rows are not parsed yet."""
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

    def _scan_parts(self) -> None:
        """Read all parts, several at once in separate processes, and add up their facts in order.

        The number of bytes done is written into a file, from which waiting calls read it.
        """
        done_bytes = 0
        row_counts = Counter({file.name: 0 for file in self.files})
        processes = min(scan.workers(), max(1, len(self.parts)))  # a pool needs at least 1
        with ProcessPoolExecutor(processes) as pool:
            for part, facts in zip(self.parts, pool.map(scan.scan, self.parts), strict=True):
                self._extend_columns(facts)
                row_counts[part.name] += len(facts.offsets)
                _add_counts(self.total, facts)
                done_bytes += part.end - part.start
                # Waiting calls read this file and report how far the reading is.
                (self.folder / _DONE).write_text(str(done_bytes))
        self.rows_of_file = [row_counts[file.name] for file in self.files]

    def _extend_columns(self, facts: scan.PartFacts) -> None:
        """Append the numbers of a part's rows to the columns: one number per row to each."""
        self.offsets.extend(facts.offsets)
        self.lines.extend(facts.lines)
        self.prompts.extend(facts.prompts)
        self.rows.extend(facts.rows)
        self.ids.extend(facts.ids)
        self.sides.extend(facts.sides)

    def _refuse_repeated_ids(self) -> None:
        """Count the rows with the id of an earlier row as bad, and list the first as faults."""
        # `columns.find_repeated` finds equal hashes of ids; `_count_as_repeated` counts its pairs.
        repeated_pairs = self._count_as_repeated(columns.find_repeated(self.ids.values()))
        # Twice as many pairs as are shown, because some may be different ids with the same hash.
        for row, earlier in heapq.nsmallest(2 * scan.MOST_FAULTS, repeated_pairs):
            task_id = self._task_row(row)["id"]
            if task_id != self._task_row(earlier)["id"]:  # only the hashes of the ids are equal
                self.repeated_ids -= 1
                continue
            file_name, line = self._place(row)
            earlier_file, earlier_line = self._place(earlier)
            message = f"the id {task_id!r} is also that of {earlier_file}:{earlier_line}"
            self.total.faults.append(FaultyLine(file=file_name, line=line, message=message))
        self.total.bad += self.repeated_ids

    def _place(self, row: int) -> tuple[str, int]:
        """Return (name of the file, line in it) of row number `row`, counted through all files."""
        return self._file_of(row).name, self.lines.values()[row]

    def _count_as_repeated(self, pairs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Pass on pairs (row, earlier row with the same id) and count them in `repeated_ids`."""
        for pair in pairs:
            self.repeated_ids += 1
            yield pair

    def _write_heldout_rows(self, row_sides: sides.Sides) -> None:
        """Write the held-out rows that models are judged on, as JSON lines, to HELDOUT_ROWS."""
        with open(self.folder / HELDOUT_ROWS, "w", encoding="utf-8") as file:
            for row, side in enumerate(row_sides.of_row):
                if side == sides.IN_HELDOUT:
                    task_row = stored_row(self._task_row(row), "heldout")
                    file.write(json.dumps(task_row, ensure_ascii=False, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _write_train_index(self, row_sides: sides.Sides) -> None:
        """Write the file ROWS_INDEX: the offsets of all training rows, then their line numbers."""
        with open(self.folder / ROWS_INDEX, "wb") as file:
            for column in (self.offsets.values(), self.lines.values()):
                # The column is written in portions, so that memory stays small.
                for start in range(0, len(column), columns.PORTION):
                    stop = start + columns.PORTION
                    portion = zip(column[start:stop], row_sides.of_row[start:stop], strict=True)
                    train_numbers = (number for number, side in portion if side == sides.IN_TRAIN)
                    array("Q", train_numbers).tofile(file)
            file.flush()
            os.fsync(file.fileno())

    def _count_train_rows(self, row_sides: sides.Sides) -> None:
        """Set in the record of each file how many of its rows are training rows."""
        first_row = 0
        for index, row_count in enumerate(self.rows_of_file):
            end_row = first_row + row_count
            train = row_sides.of_row.count(sides.IN_TRAIN, first_row, end_row)
            self.files[index] = self.files[index].model_copy(update={"train": train})
            first_row = end_row

    def _data_index(self, row_sides: sides.Sides) -> DataIndex:
        """Make the content of index.json, the facts about all files. `row_sides` holds the side of
        every row."""
        total = self.total
        row_count = len(self.offsets.values())
        return DataIndex(
            files=tuple(self.files),
            rows=row_count - self.repeated_ids,  # rows with the id of an earlier one count as bad
            bad=total.bad,
            faults=self._first_lines(total.faults),
            unanswered=total.unanswered,
            unanswered_lines=self._first_lines(total.unanswered_lines),
            preferences=total.preferences,
            with_tools=total.with_tools,
            shapes=dict(total.shapes),
            turns=_spread(total.turns),
            prompt_chars=_spread(total.prompt_chars),
            answer_chars=_spread(total.answer_chars),
            repeated_rows=_count_repeated(self.rows),
            repeated_prompts=_count_repeated(self.prompts),
            distinct_prompts=row_sides.distinct_prompts,
            sides=_rows_per_side(row_sides),
            split=row_sides.source,
            warnings=tuple(row_sides.warnings),
            sample=tuple(total.sample[: scan.SAMPLE_ROWS]),
        )

    def _first_lines(self, lines: Sequence[FaultyLine]) -> tuple[FaultyLine, ...]:
        """Return the first MOST_FAULTS of the lines, ordered by file and by line."""
        file_order = {file.name: index for index, file in enumerate(self.files)}

        def place(line: FaultyLine) -> tuple[int, int]:
            """Return the place of a line in the dataset: (number of its file, line in it)."""
            return file_order[line.file], line.line

        return tuple(heapq.nsmallest(scan.MOST_FAULTS, lines, key=place))

    def _file_of(self, row: int) -> IndexedFile:
        """Return the file that holds row number `row`; numbers run through all files."""
        for file, count in zip(self.files, self.rows_of_file, strict=True):
            if row < count:
                return file
            row -= count  # from here on counted from the first row of the next file
        raise IndexError(row)

    def _task_row(self, row: int) -> TaskRow:
        """Read row number `row` from its file, in the form of `Task.to_row`."""
        file = self._file_of(row)
        descriptor = os.open(file.path, os.O_RDONLY)
        try:
            content = scan.read_line(descriptor, self.offsets.values()[row])
        finally:
            os.close(descriptor)
        line = self.lines.values()[row]
        return to_task(parse_line(content), scan.default_id(file.name, line)).to_row()


def _count_repeated(hashes: columns.Column) -> int:
    """Count the numbers of a column that are equal to an earlier one."""
    return len(hashes.values()) - columns.count_distinct(hashes.values())


def _rows_per_side(row_sides: sides.Sides) -> dict[str, int]:
    """Count the rows that are trained on, and the held-out rows that models are judged on."""
    return {"train": row_sides.count(sides.IN_TRAIN), "heldout": row_sides.count(sides.IN_HELDOUT)}


def _add_counts(total: scan.PartFacts, part: scan.PartFacts) -> None:
    """Add the counts of one part of a dataset to `total`, in place.

    The lists of faulty lines, unanswered lines and sample rows keep only their first MOST_FAULTS
    items. (`_data_index` cuts the sample further.)
    """
    for name in ("shapes", "turns", "prompt_chars", "answer_chars"):
        getattr(total, name).update(getattr(part, name))
    for name in ("bad", "unanswered", "preferences", "with_tools"):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    for name in ("faults", "unanswered_lines", "sample"):
        items = getattr(total, name)
        items += getattr(part, name)[: scan.MOST_FAULTS - len(items)]


def _spread(counts: Counter[int]) -> Spread:
    """Return minimum, median, 95th percentile and maximum of the numbers in `counts` (number -> how
    often it occurs); zeros if there are none."""
    if not counts:
        return Spread()
    numbers = sorted(counts)
    count_up_to = list(accumulate(counts[number] for number in numbers))
    last_rank = count_up_to[-1] - 1

    def at_rank(rank: int) -> int:
        """Return the number at position `rank` (from 0) if all numbers, with their repetitions,
        stood in one sorted list."""
        return numbers[bisect_right(count_up_to, rank)]

    return Spread(
        min=at_rank(0),
        p50=at_rank(round(0.5 * last_rank)),
        p95=at_rank(round(0.95 * last_rank)),
        max=at_rank(last_rank),
    )


def main() -> None:
    """Read the data files of the request in the folder that the command line names, and write the
    results into that folder."""
    folder = Path(sys.argv[1])
    _IndexBuilder(folder, _Request.read(folder / _REQUEST)).run()


if __name__ == "__main__":
    main()

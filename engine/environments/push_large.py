"""A push of data too large to copy: its files are hashed and indexed and stay where they are."""

import os
import shutil
import time
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import sync_folder, write_json
from engine.environments import registry
from engine.environments.draft import Draft
from engine.environments.indexed import build
from engine.environments.indexed.rows import ROWS_INDEX, IndexedRows, check_files
from engine.evidence.stats import overlap
from engine.home.run_dir import Home
from engine.records.data_index import DataIndex, FaultyLine
from engine.records.env_version import EnvVersion
from envs.audit.verdict import unscored
from envs.dataset import FAULT_CHARS, SHOWN, SHOWN_CHARS

_AFTER_READING_S = 8.0  # of a push, kept for what follows the reading
_NO_CODE = "none needed: data without code"
_LEAST_SCAN_S = 0.5  # for the search for shared tasks, even if the push has no time left


def find(home: Home, folder: Path, deadline: float) -> build.Indexed | None:
    """What was found in the data of a folder, if it is too large to copy; None if it is not.

    The files are read in a process of its own, in as many calls as that takes.

    Args:
        folder: absolute and without links.
        deadline: value of `time.monotonic()` by which the push must be done.

    Raises UserError: DATASET_READING if they are still being read, DATASET_INVALID naming the bad
    lines.
    """
    files = build.large_files(folder)
    if not files:
        return None
    wait_s = max(0.0, deadline - time.monotonic() - _AFTER_READING_S)
    indexed = build.read_once(home, files, folder, wait_s)
    _refuse_bad_lines(indexed.found)
    return indexed


def build_version(draft: Draft, indexed: build.Indexed) -> None:
    """Write the held-out rows, the index and env.json of a version into the draft's folder.

    Raises UserError DATASET_INVALID if a file changed while it was read.
    """
    found = indexed.found
    env_id = f"{draft.name}@{draft.hash}"
    check_files(found.files, env_id)
    shutil.copyfile(indexed.folder / build.HELDOUT_ROWS, draft.folder / registry.TASKS)
    try:  # the index never changes, so one file serves the cache and the version
        os.link(indexed.folder / ROWS_INDEX, draft.folder / ROWS_INDEX)
    except OSError:  # another file system, or one without links
        shutil.copyfile(indexed.folder / ROWS_INDEX, draft.folder / ROWS_INDEX)
    sync_folder(draft.folder)
    train = IndexedRows(found.files, draft.folder / ROWS_INDEX)
    heldout = list(registry.read_rows(draft.folder / registry.TASKS))
    scan_s = max(_LEAST_SCAN_S, min(overlap.BUDGET_S, draft.seconds_left))
    contamination = overlap.scan(train, heldout, scan_s)
    write_json(draft.folder / registry.AUDIT, {**unscored(found.rows, seed=0)})
    size = sum(file.size for file in found.files)
    stays = f"{', '.join(file.name for file in found.files)} ({size >> 20} MB) stay where they are"
    version = EnvVersion(
        env_id=env_id,
        name=draft.name,
        hash=draft.hash,
        digest=draft.shot.digest,
        kind="preference" if found.preferences else "sft",
        scored=False,
        tools=[],
        rows=found.sides,
        split=found.split,
        contamination=contamination,
        data=found.files,
        distinct_prompts=found.distinct_prompts,
        files=len(draft.shot.files),
        size=draft.shot.size,
        left_out=tuple(draft.shot.left_out),
        limits=draft.settings.limits,
        secrets=draft.settings.secrets,
        isolation=_NO_CODE,
        warnings=(*found.warnings, f"{stays}: keep them, the version holds their hashes alone"),
    )
    version.write(draft.folder / registry.FACTS)


def _refuse_bad_lines(found: DataIndex) -> None:
    """Raise UserError DATASET_INVALID if a line is no row to learn from, naming the first ones."""
    faults, bad = [*found.faults], found.bad
    if found.unanswered:
        faults += found.unanswered_lines
        bad += found.unanswered
    if 0 < found.preferences < found.rows - found.unanswered:
        fault = f"{found.preferences} of {found.rows} rows are preferences, the others are not"
        hint = "Push them as two datasets, each in a folder of its own."
    elif bad:
        fault = f"{bad} of {found.rows + found.bad} rows cannot be read: {_listed(faults, bad)}"
        hint = "Correct or remove those lines."
    elif not found.rows:
        fault, hint = "the files hold no row", "Write one JSON object per line."
    else:
        return
    raise UserError("DATASET_INVALID", fault, hint=hint, field="path")


def _listed(faults: list[FaultyLine], bad: int) -> str:
    """The first faulty lines in words, as many as an answer holds, and how many more there are."""
    several = len({fault.file for fault in faults}) > 1
    texts: list[str] = []
    for fault in faults[:SHOWN]:
        place = f"{Path(fault.file).name} line" if several else "line"
        texts.append(f"{place} {fault.line}: {fault.message}"[:FAULT_CHARS])
        if len("; ".join(texts)) > SHOWN_CHARS and len(texts) > 1:
            texts.pop()
            break
    more = f"; and {bad - len(texts)} more" if bad > len(texts) else ""
    return "; ".join(texts) + more

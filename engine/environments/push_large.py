"""Pushes data that are too large to copy: the files are hashed and indexed, and stay where they
are."""

import os
import shutil
import time
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import JsonObject, sync_folder, write_json
from engine.environments import registry
from engine.environments.draft import Draft
from engine.environments.indexed import build
from engine.environments.indexed.rows import ROWS_INDEX, IndexedRows, check_files
from engine.evidence.overlap import overlap
from engine.home.run_dir import Home
from engine.records.data_index import DataIndex, FaultyLine
from engine.records.env_version import EnvVersion
from envs.audit.verdict import unscored
from envs.dataset import FAULT_CHARS, SHOWN, SHOWN_CHARS

_AFTER_READING_S = 8.0  # seconds of a push that are kept for its work after the reading
_NO_CODE = "none needed: data without code"
_LEAST_SCAN_S = 0.5  # seconds for the search for shared tasks, even if the push has no time left


def index_if_large(home: Home, folder: Path, deadline: float) -> build.Indexed | None:
    """Read and index the data files of a folder if they are too large to copy, and return the
    result; None if they are not too large.

    A separate process reads the files. If that takes longer than this call may, the next call goes
    on waiting for it.

    Args:
        folder: an absolute path without links.
        deadline: value of `time.monotonic()` by which the push must be done.

    Raises UserError: DATASET_READING if the files are still being read; DATASET_INVALID if lines
    cannot be used, which the message names.
    """
    files = build.large_files(folder)
    if not files:
        return None
    wait_s = max(0.0, deadline - time.monotonic() - _AFTER_READING_S)
    indexed = build.read_once(home, files, folder, wait_s)
    _refuse_bad_lines(indexed.facts)
    return indexed


def build_version(draft: Draft, indexed: build.Indexed) -> None:
    """Write the held-out rows, the index, the empty audit and env.json of a version into the
    draft's folder.

    Raises UserError DATASET_INVALID if a file changed while it was read, or if `environment.toml`
    has a setting that works only on copied data.
    """
    facts = indexed.facts
    _refuse_split_settings(draft)
    check_files(facts.files, f"{draft.name}@{draft.hash}")
    _copy_index(indexed.folder, draft.folder)
    contamination = _find_contamination(draft, facts)
    empty_audit = unscored(facts.rows, seed=0)  # the data have no scorer
    write_json(draft.folder / registry.AUDIT, {**empty_audit})
    version = _env_version(draft, facts, contamination)
    version.write(draft.folder / registry.FACTS)


def _refuse_split_settings(draft: Draft) -> None:
    """Raise UserError DATASET_INVALID if `environment.toml` has a setting that works only on data
    that are copied: `scorer`, `drop_leaks`, `[prompt]`, or a share of the rows as dev tasks."""
    settings = draft.settings
    switched_on = {
        "scorer": bool(settings.scorer),
        "drop_leaks under [split]": settings.drop_leaks,
        "dev under [split]": settings.dev_share > 0,
        "[prompt]": settings.prompt is not None,
    }
    refused_names = [name for name, is_on in switched_on.items() if is_on]
    if refused_names:
        raise UserError(
            "DATASET_INVALID",
            f"{' and '.join(refused_names)} in environment.toml: these data are too "
            "large to copy, so their rows stay as they are in the files",
            hint="Leave out those rows in the files themselves and take the setting away, or push "
            "fewer rows.",
            field="path",
        )


def _find_contamination(draft: Draft, facts: DataIndex) -> JsonObject:
    """Search the train rows for texts of the held-out rows, and return what they share. The search
    takes the time that the push has left, but always gets `_LEAST_SCAN_S`."""
    train = IndexedRows(facts.files, draft.folder / ROWS_INDEX)
    heldout = list(registry.read_rows(draft.folder / registry.TASKS))
    scan_s = min(overlap.BUDGET_S, draft.seconds_left)
    return overlap.scan(train, heldout, max(_LEAST_SCAN_S, scan_s))


def _copy_index(source: Path, target: Path) -> None:
    """Copy the held-out rows and the index of the train rows from the folder `source` (in the
    cache) into the folder `target` (the version)."""
    shutil.copyfile(source / build.HELDOUT_ROWS, target / registry.TASKS)
    try:  # the index never changes, so the cache and the version can share one file
        os.link(source / ROWS_INDEX, target / ROWS_INDEX)
    except OSError:  # the folders lie on two file systems, or on one without hard links
        shutil.copyfile(source / ROWS_INDEX, target / ROWS_INDEX)
    sync_folder(target)


def _env_version(draft: Draft, facts: DataIndex, contamination: JsonObject) -> EnvVersion:
    """Make the content of env.json for data that stay where they are.

    `facts` are those of the index; `contamination` is what the train rows share with the held-out
    ones.
    """
    return EnvVersion(
        env_id=f"{draft.name}@{draft.hash}",
        name=draft.name,
        hash=draft.hash,
        digest=draft.copied.digest,
        kind="preference" if facts.preferences else "sft",
        scored=False,
        tools=[],
        rows=facts.sides,
        split=facts.split,
        contamination=contamination,
        data=facts.files,
        distinct_prompts=facts.distinct_prompts,
        files=len(draft.copied.files),
        size=draft.copied.size,
        left_out=tuple(draft.copied.left_out),
        limits=draft.settings.limits,
        secrets=draft.settings.secrets,
        isolation=_NO_CODE,
        warnings=(*facts.warnings, _keep_files_warning(facts)),
    )


def _keep_files_warning(facts: DataIndex) -> str:
    """Return the warning that the data files must be kept, because they were not copied."""
    size = sum(file.size for file in facts.files)
    names = ", ".join(file.name for file in facts.files)
    return (
        f"{names} ({size >> 20} MB) stay where they are: keep them, the version holds their hashes "
        "alone"
    )


def _refuse_bad_lines(facts: DataIndex) -> None:
    """Raise UserError DATASET_INVALID if only some rows are preferences (a better and a worse
    answer), if lines hold no row to learn from, or if there is no row at all. The message names the
    first bad lines."""
    bad_lines = [*facts.faults, *facts.unanswered_lines]
    bad_count = facts.bad + facts.unanswered
    answered_rows = facts.rows - facts.unanswered  # those with one answer, and preferences
    if 0 < facts.preferences < answered_rows:
        fault = f"{facts.preferences} of {facts.rows} rows are preferences, the others are not"
        hint = "Push them as two datasets, each in a folder of its own."
    elif bad_count:
        line_count = facts.rows + facts.bad
        listed = _listed(bad_lines, bad_count)
        fault = f"{bad_count} of {line_count} rows cannot be read: {listed}"
        hint = "Correct or remove those lines."
    elif not facts.rows:
        fault, hint = "the files hold no row", "Write one JSON object per line."
    else:
        return
    raise UserError("DATASET_INVALID", fault, hint=hint, field="path")


def _listed(bad_lines: list[FaultyLine], bad_count: int) -> str:
    """Describe the first bad lines in one text, as many as a reply has room for, and say how many
    more there are.

    `bad_count` is the number of all bad lines, of which `bad_lines` holds only the first.
    """
    in_several_files = len({line.file for line in bad_lines}) > 1
    texts: list[str] = []
    for bad in bad_lines[:SHOWN]:
        text = _fault_text(bad, with_file=in_several_files)
        # `texts and`: the first line is always shown, however long its text is.
        if texts and len("; ".join([*texts, text])) > SHOWN_CHARS:
            break
        texts.append(text)
    more = f"; and {bad_count - len(texts)} more" if bad_count > len(texts) else ""
    return "; ".join(texts) + more


def _fault_text(bad: FaultyLine, *, with_file: bool) -> str:
    """Describe a bad line: "line 3: no JSON"; with `with_file` "train.jsonl line 3: no JSON"."""
    place = f"{Path(bad.file).name} line" if with_file else "line"
    return f"{place} {bad.line}: {bad.message}"[:FAULT_CHARS]

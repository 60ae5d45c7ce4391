"""Deleting runs: which may be deleted, what is removed, what stays.

The row stays, and so do the small files that say what was tried and with which result: an id is
never used twice, hours that were spent stay counted, and so does how often held-out tasks were used
to choose. What takes disk space is removed: checkpoints, answers, curves, logs.
"""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.core.files import read_object, write_json, write_text
from engine.core.format import counted, size
from engine.core.hints import Call, Hint
from engine.core.reply import Reply
from engine.curation.curated import CARD
from engine.environments.registry import SOURCE
from engine.evidence.report.html_report import write_report
from engine.home.database import reports_unwritable_disk
from engine.home.owner_marks import pinned_steps
from engine.home.rows import OPEN, RunRow, abbreviation_warning
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import deployments, launcher
from engine.records.run_config import AskingConfig, RegradeConfig

_MAX_NAMES = 5  # the most names that a message lists
_ALL_RUNS = 1_000_000  # a limit for lists of runs: more than any home has


def deletable(home: Home, refs: Sequence[str], force: bool = False) -> tuple[list[str], list[str]]:
    """Check that runs may be deleted together; return their whole ids, each once, and warnings.

    Args:
        home: the home that holds the runs.
        refs: ids of runs, or unique beginnings of ids.
        force: whether to delete a run although something was built on it or a checkpoint of it is
            pinned; this is then a warning and not an error.

    Raises UserError RUN_NOT_FOUND if a name matches no run or more than one. Raises RUN_STATE for a
    run that has not ended, that an open run needs, on which another run, a living deployment or a
    dataset was built, or that has pinned checkpoints.
    """
    launcher.reap(home)  # updates the state of runs whose processes are gone
    warnings: list[str] = []
    rows_to_delete: dict[str, RunRow] = {}  # run id -> row
    with Store(home) as store:
        for ref in refs:
            row = store.get_run(ref)
            rows_to_delete[row.run_id] = row
            # A warning if `ref` was only the beginning of the id.
            warnings += abbreviation_warning("run", ref, row.run_id)
        all_rows = store.list_runs(_ALL_RUNS)
    all_ids = {row.run_id for row in all_rows}
    rows_to_keep = [row for row in all_rows if row.run_id not in rows_to_delete]
    for row in rows_to_delete.values():
        warnings += _check_run(home, row, rows_to_keep, all_ids, force=force)
    return list(rows_to_delete), warnings


def _check_run(
    home: Home, row: RunRow, kept_rows: Sequence[RunRow], all_ids: Collection[str], *, force: bool
) -> list[str]:
    """Check that one run may be deleted; return warnings about what its deletion affects.

    The warnings name what was built on the run, and its pinned checkpoints; [] if there is neither.

    Args:
        row: the run.
        kept_rows: all runs that are not deleted together with this one.
        all_ids: the ids of all runs.
        force: whether dependents and pinned checkpoints are warnings and not errors.

    Raises UserError RUN_STATE if the run has not ended or an open run needs it; without `force`
    also if something was built on the run or a checkpoint of it is pinned.
    """
    _require_ended(home, row)
    _require_unused(home, row, kept_rows)
    dependents = _find_dependents(home, row, kept_rows, all_ids)
    pinned = _describe_pinned(home.run(row.run_id))
    if dependents and not force:
        raise _has_dependents_error(row, dependents)
    if pinned and not force:
        hint = "Unpin them (honesmith unpin), or delete the run with --force."
        raise _not_deletable_error(row, f"has pinned checkpoints: {pinned}", hint)
    warnings = [f"{_join_names(dependents)} came from {row.run_id}"] if dependents else []
    if pinned:
        warnings.append(f"pinned checkpoints of {row.run_id} go too: {pinned}")
    return warnings


def _describe_pinned(run: RunDir) -> str:
    """Name the steps of the run's pinned checkpoints, such as "step 20, step 40"; "" for none.

    Pins of checkpoints that no longer exist are left out. If the file of pins is damaged, the text
    says so.
    """
    try:
        steps = sorted(pinned_steps(run) & set(run.checkpoint_steps()))
    except ValueError:
        return f"{run.pins.name} cannot be read"
    return _join_names([f"step {step}" for step in steps]) if steps else ""


def _find_dependents(
    home: Home, row: RunRow, kept_rows: Sequence[RunRow], known_ids: Collection[str]
) -> list[str]:
    """Return the ids of the runs, living deployments and datasets that were built on a run.

    Args:
        row: the run.
        kept_rows: all runs that are not deleted together with this one.
        known_ids: the ids of all runs.
    """
    dependent_runs = [kept_row for kept_row in kept_rows if _depends_on(home, kept_row, row)]
    return [
        *(dependent_row.run_id for dependent_row in dependent_runs),
        *_deployments_using(home, row),
        *_datasets_from(home, row, known_ids),
    ]


def _has_dependents_error(row: RunRow, dependents: Sequence[str]) -> UserError:
    """Make the error for a run that cannot be deleted because something was built on it.

    `dependents` are the ids of the runs, deployments and datasets that were built on it.
    """
    hint = "Keep it, or delete it with --force; what is built on it stays as it is."
    return _not_deletable_error(row, f"is what {_join_names(dependents)} came from", hint)


@reports_unwritable_disk
def delete_run(home: Home, run_id: str) -> Reply:
    """Remove the large files of an ended run, and return the reply about the freed space.

    Call `deletable` first: it checks what else depends on the run.

    The reply has `run_id`, `bytes` (how many were freed), `summary`, and `warnings` about links and
    about files that could not be removed. Raises UserError RUN_NOT_FOUND if `run_id` matches no run
    or more than one, RUN_STATE if the run has not ended or an open run needs it.
    """
    with Store(home) as store:
        row = store.get_run(run_id)  # `run_id` may be only the beginning of the id
        run = home.run(row.run_id)
        _require_ended(home, row)
        bytes_before = _bytes_below(run.path)
        _ensure_report(home, run)
        _mark_as_deleted(home, store, run, bytes_before)
    warnings = _remove_contents(run)
    freed = max(0, bytes_before - _bytes_below(run.path))
    summary = f"{run.id} is gone but for what was asked and what came of it; {size(freed)} free."
    return {"run_id": run.id, "bytes": freed, "summary": summary, "warnings": warnings}


def _ensure_report(home: Home, run: RunDir) -> None:
    """Write the run's report if there is none: the last chance before its files are removed."""
    if not run.report.exists():
        # A folder that lost files may not hold enough for a report.
        with contextlib.suppress(UserError, OSError, ValueError, KeyError, TypeError):
            write_report(home, run.id)


def _mark_as_deleted(home: Home, store: Store, run: RunDir, bytes_before: int) -> None:
    """Check that the run may be deleted, and write its marker deleted.json, in one transaction.

    A resume or a regrade is also queued in a transaction, which refuses if it sees the marker. If
    that transaction comes first, this one sees the queued run and refuses. So nothing is ever
    queued that needs deleted files.

    Args:
        home: the home that holds the run.
        store: the database of the home.
        run: the run.
        bytes_before: the size of the run's files in bytes, which the marker records.
    """

    def mark_deleted(row: RunRow) -> None:
        """Write the marker. Raise UserError RUN_STATE if the run is open, or an open run needs
        it."""
        _require_ended(home, row)
        # Checked again: a run that needs this one may have been queued since `deletable`.
        _require_unused(home, row, store.list_runs(_ALL_RUNS, states=OPEN))
        write_json(run.deleted, {"bytes": bytes_before})

    store.act_undisturbed(run.id, mark_deleted)


def _require_ended(home: Home, row: RunRow) -> None:
    """Raise UserError RUN_STATE if the run has not ended, or if a process of it still lives."""
    if row.state in OPEN:
        cancel = Call("cancel_run", {"run_id": row.run_id})
        advice = Hint("Cancel it, or wait until it has ended; then delete it.", cancel)
        raise _not_deletable_error(row, f"is {row.state}", advice)
    if launcher.is_alive(home.run(row.run_id)):
        raise _not_deletable_error(row, "is just ending", "Call again in a moment.")


def _require_unused(home: Home, row: RunRow, rows: Sequence[RunRow]) -> None:
    """Raise UserError RUN_STATE if a run among `rows` that has not ended needs the files of the run
    `row`."""
    open_rows = [candidate for candidate in rows if candidate.state in OPEN]
    dependent_ids = [open_row.run_id for open_row in open_rows if _depends_on(home, open_row, row)]
    if dependent_ids:
        reason = f"is needed by {_join_names(dependent_ids)}"
        cancel = Call("cancel_run", {"run_id": dependent_ids[0]})
        advice = Hint("Cancel that, or wait until it has ended.", cancel)
        raise _not_deletable_error(row, reason, advice)


def _depends_on(home: Home, dependent_row: RunRow, row: RunRow) -> bool:
    """Return whether the run `dependent_row` needs the run `row`.

    `dependent_row` does if `row` is its parent, if it trains on or evaluates the model of `row`, or
    if it scores the stored answers of `row` again.
    """
    if dependent_row.parent == row.run_id:
        return True
    config = home.run(dependent_row.run_id).find_config()
    if config is None:  # a run with a damaged config cannot read anything of another run
        return False
    refs = list(config.model_refs)
    if isinstance(config, RegradeConfig):
        refs.append(config.regrade)
    # A reference such as "sums-grpo-3@step20" names a checkpoint after the run's id.
    return row.run_id in {ref.partition("@")[0] for ref in refs}


def _deployments_using(home: Home, row: RunRow) -> list[str]:
    """Return the ids of the living deployments that serve an adapter of the run."""
    ids = []
    for deployment in deployments.living(home):
        # Adapters are served under their reference, such as "sums-grpo-3@best".
        served_runs = {name.partition("@")[0] for name in deployments.served(home, deployment)}
        if row.run_id in served_runs:
            ids.append(deployment.deployment_id)
    return ids


def _datasets_from(home: Home, row: RunRow, known_ids: Collection[str]) -> list[str]:
    """Return the env ids of the datasets that were curated from the run's answers.

    `known_ids` are the ids of all runs. They serve to distinguish a whole id from the beginning of
    one.
    """
    env_ids = []
    # A dataset is an environment version with a card, which lists where its answers came from.
    for card in sorted(home.envs.glob(f"*/*/{SOURCE}/{CARD}")):
        sources = read_object(card).get("sources") or []
        if any(_names_run(source, row.run_id, known_ids) for source in sources):
            version_folder = card.parents[1]  # the card lies in envs/<name>/<hash>/<SOURCE>/
            env_ids.append(f"{version_folder.parent.name}@{version_folder.name}")
    return env_ids


def _names_run(source: Any, run_id: str, known_ids: Collection[str]) -> bool:
    """Return whether a source on a dataset's card, such as {"id": "sums-grpo-3@step20"}, names a
    run.

    Args:
        source: the entry of the card; a value that is not an object names no run.
        run_id: the whole id of the run.
        known_ids: the ids of all runs.
    """
    if not isinstance(source, dict):
        return False
    source_id = str(source.get("id", "")).partition("@")[0]  # without the checkpoint
    if source_id == run_id:
        return True
    # A card may hold only the beginning of a run's id, as the user typed it. But a text that is the
    # whole id of another run names that other run.
    is_beginning = source_id != "" and run_id.startswith(source_id)
    return is_beginning and source_id not in known_ids


def _remove_contents(run: RunDir) -> list[str]:
    """Remove the files of a run that take disk space.

    Returns warnings about links, and about files that could not be removed. Files with evaluation
    answers are only emptied: their names still show at which steps the run was evaluated. The
    report stays, because it could not be written again.
    """
    evaluation_files = [run.evals(step) for step in run.eval_steps()]
    to_truncate = [*evaluation_files, *_answer_files(run)]
    # If the folder of evaluations is a link, the link is removed first. Otherwise the code below
    # would empty files in the target of the link, which does not belong to the run.
    links_first = [run.evals_dir] if run.evals_dir.is_symlink() else []
    warnings: list[str] = []
    for path in [*links_first, *_removable_paths(run)]:
        warnings += _remove(path)
    for path in to_truncate:
        warnings += _truncate(path)
    return warnings


def _answer_files(run: RunDir) -> list[Path]:
    """Return the existing files with answers of an evaluation, regrade (a new scoring of stored
    answers) or probe (a short sampling run), one per model. Returns [] for any other run."""
    # None if the config is damaged: then no answer files are known, but the run can be deleted.
    config = run.find_config()
    models = config.models if isinstance(config, AskingConfig) else ()
    paths = [run.model_evals(index) for index in range(len(models))]
    return [path for path in paths if path.exists()]


def _removable_paths(run: RunDir) -> list[Path]:
    """Return the files and folders that are removed completely when a run is deleted.

    They hold weights, answers, logs and curves.
    """
    folder_of_model_adapters = run.model_adapter(0).parent
    return [
        run.checkpoints,
        run.rollouts_dir,
        run.logs,
        run.start_adapter,  # the run's own copy of the adapter it continues from
        folder_of_model_adapters,
        run.sampled_adapters,
        run.metrics,
        run.events,
        run.rescored,
        run.heartbeat,
        run.pins,
        # Answers to tasks of earlier skills, before and after the training.
        run.kept("before"),
        run.kept("after"),
    ]


def _remove(path: Path) -> list[str]:
    """Remove a file, a folder or a link, but never the target of a link.

    Returns a warning if the path was a link or could not be removed; otherwise [].
    """
    warnings = _link_warnings(path)
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        return [f"{path} could not be removed and is still there"]
    return warnings


def _truncate(path: Path) -> list[str]:
    """Replace a file, or a link, by an empty file.

    Returns a warning if the path was a link or could not be replaced; otherwise [].
    """
    warnings = _link_warnings(path)
    try:
        path.parent.mkdir(exist_ok=True)
        # Writes a new file under the same name, so other hard links keep the old content.
        write_text(path, "")
    except OSError as error:
        return [f"{path} could not be emptied: {error.strerror}"]
    return warnings


def _link_warnings(path: Path) -> list[str]:
    """Return a warning that names the target of the link `path`; [] if `path` is not a link."""
    if not path.is_symlink():
        return []
    return [f"{path} was a link; what it leads to, {os.readlink(path)}, is left as it is"]


def _bytes_below(folder: Path) -> int:
    """Count the bytes that would become free if everything below a folder were removed.

    A file that has other hard links counts as 0, because removing one of its names frees nothing.
    """
    total = 0
    for path in _files(folder):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_nlink == 1:
                total += status.st_size
    return total


def _files(folder: Path) -> Iterator[Path]:
    """Yield the paths of all files below a folder, links to files included."""
    for parent, _, file_names in os.walk(folder):
        yield from (Path(parent) / name for name in file_names)


def _join_names(names: Sequence[str]) -> str:
    """Join names for a sentence: "a, b", or if there are many "a, b, c, d, e and 2 others".

    At most `_MAX_NAMES` names are written out.
    """
    text = ", ".join(names[:_MAX_NAMES])
    if len(names) <= _MAX_NAMES:
        return text
    return f"{text} and {counted(len(names) - _MAX_NAMES, 'other')}"


def _not_deletable_error(row: RunRow, reason: str, hint: str | Hint) -> UserError:
    """Make the error for a run that may not be deleted.

    The message is the run's id and `reason`, such as "is running"; `hint` says what to do.
    """
    return UserError("RUN_STATE", f"{row.run_id} {reason}", hint=hint, field="run_id")

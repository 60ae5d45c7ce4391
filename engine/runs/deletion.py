"""Runs thrown away: what stands against it, what goes, what stays.

The row and the small files that say what was tried and what came of it stay: an id is never given
twice, hours that were spent stay spent, and how often held-out tasks were used to choose is still
counted. What takes room goes: checkpoints, answers, curves, logs.
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
from engine.home.database import tells_of_the_disk
from engine.home.rows import OPEN, RunRow, taken_as
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.processes import deployments, launcher
from engine.records.run_config import AskingConfig, RegradeConfig

_SHOWN = 5


def deletable(home: Home, refs: Sequence[str], force: bool = False) -> tuple[list[str], list[str]]:
    """The ids of runs that may be deleted together, and what to say about it.

    Raises UserError RUN_NOT_FOUND, and RUN_STATE for a run that is open or that an open run needs,
    without `force` also for one that something in the home is built on.
    """
    launcher.reap(home)
    with Store(home) as store:
        rows = [store.get_run(ref) for ref in refs]
        every = store.list_runs(1_000_000)
    chosen = list({row.run_id: row for row in rows}.values())
    ids = {row.run_id for row in every}
    others = [row for row in every if row not in chosen]
    pairs = zip(refs, rows, strict=True)
    warnings = [warning for ref, row in pairs for warning in taken_as("run", ref, row.run_id)]
    for row in chosen:
        _require_ended(home, row)
        _require_unneeded(home, row, others)
        built = [other.run_id for other in others if _built_on(home, other, row)]
        built += _served(home, row) + _datasets(home, row, ids)
        if built and not force:
            hint = "Keep it, or delete it with --force; what is built on it stays as it is."
            raise _refused(row, f"is what {_some(built)} came from", hint)
        if built:
            warnings.append(f"{_some(built)} came from {row.run_id}")
    return [row.run_id for row in chosen], warnings


@tells_of_the_disk
def delete_run(home: Home, run_id: str) -> Reply:
    """Free the room that an ended run takes; `deletable` says whether it should be.

    Returns `run_id`, `bytes` freed and `warnings` of what could not be removed or is elsewhere.
    Raises UserError RUN_NOT_FOUND or RUN_STATE.
    """
    with Store(home) as store:
        run = home.run(store.get_run(run_id).run_id)
        _require_ended(home, store.get_run(run.id))
        before = _held(run.path)
        if not run.report.exists():
            with contextlib.suppress(UserError, OSError, ValueError, KeyError, TypeError):
                write_report(home, run.id)  # a folder that lost files may have none to tell

        def mark(row: RunRow) -> None:
            _require_ended(home, row)
            # Since `deletable` looked, somebody may have asked for what is read from it.
            _require_unneeded(home, row, store.list_runs(1_000_000, states=OPEN))
            write_json(run.deleted, {"bytes": before})

        # A resume or a regrade checks the marker in its transaction: it comes before this one,
        # which then refuses, or after it, and is refused.
        store.holding(run.id, mark)
    warnings = _empty(run)
    freed = max(0, before - _held(run.path))
    summary = f"{run.id} is gone but for what was asked and what came of it; {size(freed)} free."
    return {"run_id": run.id, "bytes": freed, "summary": summary, "warnings": warnings}


def _require_ended(home: Home, row: RunRow) -> None:
    if row.state in OPEN:
        cancel = Call("cancel_run", {"run_id": row.run_id})
        move = Hint("Cancel it, or wait until it has ended; then delete it.", cancel)
        raise _refused(row, f"is {row.state}", move)
    if launcher.is_alive(home.run(row.run_id)):
        raise _refused(row, "is just ending", "Call again in a moment.")


def _require_unneeded(home: Home, row: RunRow, others: Sequence[RunRow]) -> None:
    users = [other for other in others if other.state in OPEN and _built_on(home, other, row)]
    if users:
        needed = f"is needed by {_some([other.run_id for other in users])}"
        cancel = Call("cancel_run", {"run_id": users[0].run_id})
        raise _refused(row, needed, Hint("Cancel that, or wait until it has ended.", cancel))


def _built_on(home: Home, other: RunRow, row: RunRow) -> bool:
    """Whether a run continues, evaluates, regrades or names another as its parent."""
    if other.parent == row.run_id:
        return True
    config = home.run(other.run_id).find_config()
    if config is None:  # one whose config is damaged builds on nothing it could read
        return False
    refs = [*config.model_refs, *([config.regrade] if isinstance(config, RegradeConfig) else [])]
    return row.run_id in {ref.partition("@")[0] for ref in refs}


def _served(home: Home, row: RunRow) -> list[str]:
    """The living deployments that answer with the run's adapter."""
    return [
        deployment.deployment_id
        for deployment in deployments.living(home)
        if any(
            name.partition("@")[0] == row.run_id for name in deployments.served(home, deployment)
        )
    ]


def _datasets(home: Home, row: RunRow, known: Collection[str]) -> list[str]:
    """The datasets curated from the run's answers."""

    def of_it(source: Any) -> bool:
        ref = str(source.get("id", "") if isinstance(source, dict) else "").partition("@")[0]
        # A source may have been named by the beginning of its id.
        return ref == row.run_id or bool(ref and ref not in known and row.run_id.startswith(ref))

    return [
        f"{card.parents[2].name}@{card.parents[1].name}"
        for card in sorted(home.envs.glob(f"*/*/{SOURCE}/{CARD}"))
        if any(map(of_it, read_object(card).get("sources") or []))
    ]


def _empty(run: RunDir) -> list[str]:
    """Take away what takes room; what to say about links and about what could not be removed.

    An evaluation leaves its name, and the report, which nothing could write again, stays.
    """
    names = [run.evals(step) for step in run.eval_steps()]
    config = run.find_config()  # a run with a damaged config can be deleted too
    models = config.models if isinstance(config, AskingConfig) else ()
    answers = [run.model_evals(index) for index in range(len(models))]
    names += [path for path in answers if path.exists()]
    gone = [run.checkpoints, run.rollouts_dir, run.logs, run.start_adapter]
    gone += [run.model_adapter(0).parent, run.sampled_adapters]
    gone += [run.metrics, run.events, run.rescored, run.kept("before"), run.kept("after")]
    # A folder of evaluations that is a link goes first: what it leads to is not the run's.
    linked = [run.evals_dir] if run.evals_dir.is_symlink() else []
    warnings = [warning for path in (*linked, *gone) for warning in _remove(path)]
    for path in names:
        warnings += _emptied(path)
    return warnings


def _remove(path: Path) -> list[str]:
    """Remove a file, a folder or a link, never what a link leads to; what to say about it."""
    warnings = _led_elsewhere(path)
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return (
        [f"{path} could not be removed and is still there"] if os.path.lexists(path) else warnings
    )


def _emptied(path: Path) -> list[str]:
    """Put an empty file in the place of a file or a link; what to say about it."""
    warnings = _led_elsewhere(path)
    try:
        path.parent.mkdir(exist_ok=True)
        write_text(path, "")  # by its name: other links to the same file keep what is in it
    except OSError as error:
        return [f"{path} could not be emptied: {error.strerror}"]
    return warnings


def _led_elsewhere(path: Path) -> list[str]:
    if not path.is_symlink():
        return []
    return [f"{path} was a link; what it leads to, {os.readlink(path)}, is left as it is"]


def _held(folder: Path) -> int:
    """Bytes on the disk below a folder; a file that others link to as well is not freed."""
    held = 0
    for path in _files(folder):
        with contextlib.suppress(OSError):
            about = path.lstat()
            held += about.st_size if about.st_nlink == 1 else 0
    return held


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in names)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown + (f" and {counted(len(names) - _SHOWN, 'other')}" * (len(names) > _SHOWN))


def _refused(row: RunRow, what: str, hint: str | Hint) -> UserError:
    return UserError("RUN_STATE", f"{row.run_id} {what}", hint=hint, field="run_id")

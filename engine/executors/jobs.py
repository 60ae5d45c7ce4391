"""Runs on the other machine, called over a connection (engine/executors/far_side.py).

A job is a run of an ordinary home over there, below the root of the connection: its row, its
folder, its supervisor and its queue are those of any run. Beside them stand `launch.json`, which
says what it was started as, and the lease, without whose renewal its supervisor ends it.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from engine.core import hardware
from engine.core.files import JsonObject, read_object, write_json, write_text
from engine.home.rows import OPEN, TERMINAL, NewRun, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher, limits
from engine.machine.processes.local_executor import package_versions

# What the last look of this connection showed of each run: only what changed since is sent.
_seen: dict[str, dict[str, list[int]]] = {}


def home_at(root: str, home_id: str) -> Home:
    """The home over here that belongs to the home `home_id` of the other side."""
    return Home.locate(Path(root) / "homes" / home_id)


def describe(root: str) -> JsonObject:
    """The hardware, and the versions of what trains here."""
    return {"hardware": asdict(hardware.detect(Path(root))), "packages": dict(package_versions())}


def prepare(root: str, home_id: str, config_toml: str, envs: list[JsonObject]) -> JsonObject:
    """Make the home ready for a run: its config.toml, and the rows of environments whose folders
    are put."""
    home = home_at(root, home_id)
    write_text(home.config_file, config_toml)
    with Store(home) as store:
        for env in envs:
            if not store.find_env(f"{env['name']}@{env['hash']}"):
                store.add_env(env["name"], env["hash"], kind=env["kind"], info=env["info"])
    return {}


def start(
    root: str,
    home_id: str,
    run_id: str,
    launch: int,
    row: JsonObject,
    lease_s: float,
    secrets: Mapping[str, str],
) -> JsonObject:
    """Queue the run whose folder was put, as launch `launch`, and start what can start.

    The same launch again changes nothing; so does an older one, which is stale. `row` holds what
    the run's row needs beside its id.
    """
    home = home_at(root, home_id)
    run = home.run(run_id)
    with _alone(home), Store(home) as store:
        known = launch_of(run)
        if known > launch:
            return {}
        limits.renew_lease(run, lease_s)
        # The launch is noted before its row exists: a row that another process starts meanwhile is
        # never taken for one of an earlier launch.
        if known < launch:
            store.forget_run(run_id)  # of an earlier launch; its folder was replaced
            write_json(run.far("launch"), {"launch": launch})
        if store.find_run(run_id) is None:
            store.place_run(NewRun(**row), run_id)
    os.environ.update(secrets)  # whoever starts the supervisor passes them on, as in any home
    os.environ["HONESMITH_HOME"] = str(home.root)
    forget_changes(run_id)  # whoever starts it has seen none of its files yet
    launcher.reap(home)
    return {}


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    """Context manager: no other connection starts or removes a run of this home meanwhile."""
    home.root.mkdir(parents=True, exist_ok=True)
    folder = os.open(home.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def launch_of(run: RunDir) -> int:
    """What the run's folder over here was started as; 0 where nothing was."""
    return _number_in(run.far("launch"))


def _number_in(record: Path) -> int:
    """The number of a launch in a file; 0 where there is none."""
    number = read_object(record).get("launch", 0)
    return number if isinstance(number, int) else 0


def look(root: str, home_id: str, run_id: str, launch: int, lease_s: float) -> JsonObject:
    """Renew the lease of a run and tell what became of it, and which of its files changed since the
    last look of this connection: path -> [bytes, inode, time of change]."""
    home = home_at(root, home_id)
    run = home.run(run_id)
    if launch_of(run) != launch:
        return {"life": "gone", "launch": launch_of(run)}
    limits.renew_lease(run, lease_s)
    launcher.reap(home)
    with Store(home) as store:
        row = store.find_run(run_id)
    if row is None:
        return {"life": "gone", "launch": launch}
    life = _life(run, row)  # before the files are listed: of an ended run all of them are
    return {
        "life": life,
        "launch": launch,
        "state": row.state,
        "device": row.device,
        "attempt": row.attempt,
        "spent_s": 3600 * launcher.spent_hours(home, row) / max(1, row.gpus),
        "end": end_of(row) if row.state in TERMINAL else None,
        **changes_of(run),
    }


def changes_of(run: RunDir) -> JsonObject:
    """Which of a run's files changed since the last look of this connection, those that are gone,
    and the name of the best checkpoint."""
    files, best = files_of(run)
    before = _seen.setdefault(run.id, {})
    changed = {path: facts for path, facts in files.items() if before.get(path) != facts}
    removed = [path for path in before if path not in files]
    _seen[run.id] = files
    return {"changed": changed, "removed": removed, "best": best}


def forget_changes(run_id: str) -> None:
    """Whoever asks about a run next has seen none of its files yet."""
    _seen.pop(run_id, None)


def _life(run: RunDir, row: RunRow) -> str:
    """Whether it waits, runs or has ended. One whose processes still end counts as running."""
    if row.state in TERMINAL:
        return "running" if launcher.is_alive(run) else "exited"
    return "pending" if row.state in ("queued", "interrupted") else "running"


def end_of(row: RunRow) -> JsonObject:
    """How a run ended, from its row."""
    return {
        "state": row.state,
        "reason_kind": row.reason_kind,
        "reason": row.reason,
        "hint": row.hint.to_json(),
        "verdict": row.verdict,
    }


def files_of(run: RunDir) -> tuple[dict[str, list[int]], str]:
    """Every file of the run's folder, links left out, and the name of its best checkpoint."""
    files: dict[str, list[int]] = {}
    for folder, folders, names in os.walk(run.path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            try:
                status = path.lstat()
            except FileNotFoundError:  # removed meanwhile
                continue
            if path.is_symlink() or not path.is_file():
                continue
            key = str(path.relative_to(run.path))
            files[key] = [status.st_size, status.st_ino, status.st_mtime_ns]
    best = run.resolve_checkpoint("best")
    return files, best.name if best else ""


def stop(root: str, home_id: str, run_id: str, launch: int, reason: str) -> JsonObject:
    """Ask a run to save and end."""
    home = home_at(root, home_id)
    run = home.run(run_id)
    if launch_of(run) != launch:
        return {}
    values = {"reason_kind": "cancelled", "reason": reason}
    with Store(home) as store:
        waiting = {"queued", "interrupted"}
        if not store.set_state(run_id, "cancelled", only_from=waiting, ended=time.time(), **values):
            store.set_state(run_id, "stopping", only_from={"preparing", "running"}, **values)
    return {}


def reap(root: str, home_id: str, run_id: str, launch: int) -> JsonObject:
    """Remove an ended run of this launch or an earlier one; one that lives stays, and so do the
    files of a newer launch, even before that is started. Answers whether nothing of them is left.
    """
    home = home_at(root, home_id)
    run = home.run(run_id)
    with _alone(home), Store(home) as store:
        # Asked before the launch is read: a folder that is put there meanwhile is a newer launch's.
        was_there = run.path.exists()
        newest = max(launch_of(run), _number_in(run.far("coming")))
        if newest > launch or launcher.is_alive(run):
            return {"removed": newest > launch}
        store.forget_run(run_id)
        if was_there:
            shutil.rmtree(run.path, ignore_errors=True)
    forget_changes(run_id)
    return {"removed": True}


def list_owned(root: str, home_id: str) -> JsonObject:
    """Every run that was put here by the home `home_id`, with its launch and whether it lives."""
    home = home_at(root, home_id)
    launcher.reap(home)
    with Store(home) as store:
        rows = store.list_runs(limit=100_000)
    owned = [
        {
            "run_id": row.run_id,
            "launch": launch_of(home.run(row.run_id)),
            "life": _life(home.run(row.run_id), row),
            "state": row.state,
            "device": row.device if row.state in OPEN else "",
        }
        for row in rows
    ]
    return {"owned": owned}


def launch(root: str, home_id: str, run_id: str) -> JsonObject:
    """As what a run was started here; 0 where it was not."""
    return {"launch": launch_of(home_at(root, home_id).run(run_id))}


CALLS: Mapping[str, Callable[..., JsonObject]] = {
    "describe": describe,
    "prepare": prepare,
    "start": start,
    "look": look,
    "stop": stop,
    "reap": reap,
    "launch": launch,
    "list_owned": list_owned,
}

"""Runs on a host: these functions are called there, over a connection (engine/executors/
far_side.py).

A job is a run of an ordinary home on the host, below the root of the connection: its row, its
folder, its supervisor and its queue are those of any run. Beside them stand `launch.json` and a
lease. The machine that the run belongs to counts its starts ("launches") from 1, and `launch.json`
says which of them this is. The supervisor ends the run if the lease is not renewed in time.
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
from engine.core.files import UNFINISHED, JsonObject, read_object, write_json, write_text
from engine.home.rows import OPEN, TERMINAL, NewRun, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.machine.processes import launcher, limits
from engine.machine.processes.local_executor import package_versions

# The files of each run as this connection was told last, by run id: only changes are sent.
_told_files: dict[str, dict[str, list[int]]] = {}


def home_at(root: str, home_id: str) -> Home:
    """Return the home on this host that holds the runs of the home `home_id` of another machine."""
    return Home.locate(Path(root) / "homes" / home_id)


def describe(root: str) -> JsonObject:
    """Return the hardware of this host, and the versions of the packages that training needs."""
    return {"hardware": asdict(hardware.detect(Path(root))), "packages": dict(package_versions())}


def prepare(root: str, home_id: str, config_toml: str, envs: list[JsonObject]) -> JsonObject:
    """Make the home on this host ready for a run: write its config.toml, and add the rows of
    environments whose folders were sent already.

    Args:
        config_toml: the content of config.toml.
        envs: the rows: name, hash, kind and info of each version of an environment.
    """
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
    """Queue a run whose folder was sent before, and start what can start.

    Args:
        launch: which start of the run this is. If the same one was started before, nothing changes;
            neither does it if a later one was, because then this call came too late.
        row: the columns of the run's row beside its id.
        lease_s: seconds for which the run may go on without another word.
        secrets: environment variables that the run gets.
    """
    home = home_at(root, home_id)
    run = home.run(run_id)
    with _locked(home), Store(home) as store:
        present_launch = launch_of(run)
        if present_launch > launch:
            return {}
        limits.renew_lease(run, lease_s)
        # The launch is noted before its row exists, so that a row that another process starts at
        # the same time is never taken for one of an earlier launch.
        if present_launch < launch:
            store.forget_run(run_id)  # of an earlier launch; its folder was replaced
            write_json(run.far("launch"), {"launch": launch})
        if store.find_run(run_id) is None:
            store.place_run(NewRun(**row), run_id)
    os.environ.update(secrets)  # the supervisor inherits them from this process, as in any home
    os.environ["HONESMITH_HOME"] = str(home.root)
    forget_changes(run_id)  # the side that starts it has been told of none of its files yet
    launcher.reap(home)
    return {}


@contextmanager
def _locked(home: Home) -> Iterator[None]:
    """Hold the lock of a home, during which no other connection starts or removes a run of it. The
    lock is on the home's folder itself."""
    home.root.mkdir(parents=True, exist_ok=True)
    folder = os.open(home.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def launch_of(run: RunDir) -> int:
    """Return the number of the launch that was started in the run's folder on this host; 0 if none
    was."""
    return _read_launch(run.far("launch"))


def _read_launch(file: Path) -> int:
    """Return the number of a launch that a JSON file holds; 0 if there is no such file or no
    number in it."""
    number = read_object(file).get("launch", 0)
    return number if isinstance(number, int) else 0


def look(root: str, home_id: str, run_id: str, launch: int, lease_s: float) -> JsonObject:
    """Renew the lease of a run for `lease_s` seconds and return what became of it.

    "life" is pending, running, exited, or gone (this host has nothing of that launch). The answer
    also says which of the run's files have changed since the last call on this connection: path ->
    [bytes, inode, time of change].
    """
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
    # Asked before the files are listed: if the run has ended by then, the list has all its files.
    life = _life(run, row)
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
    """Return which of a run's files have "changed" since the last call on this connection, which
    were "removed", and the name of the "best" checkpoint ("" if there is none)."""
    files, best = files_of(run)
    before = _told_files.setdefault(run.id, {})
    changed = {path: facts for path, facts in files.items() if before.get(path) != facts}
    removed = [path for path in before if path not in files]
    _told_files[run.id] = files
    return {"changed": changed, "removed": removed, "best": best}


def forget_changes(run_id: str) -> None:
    """Forget which files of a run this connection was told of, so that the next call of
    `changes_of` lists all of them."""
    _told_files.pop(run_id, None)


def _life(run: RunDir, row: RunRow) -> str:
    """Return whether a run is "pending", "running" or "exited". A run whose state is final but
    whose processes are still ending counts as running."""
    if row.state in TERMINAL:
        return "running" if launcher.is_alive(run) else "exited"
    return "pending" if row.state in ("queued", "interrupted") else "running"


def end_of(row: RunRow) -> JsonObject:
    """Return how a run ended, from its row, as the other side reads it (`orders.end_of`)."""
    return {
        "state": row.state,
        "reason_kind": row.reason_kind,
        "reason": row.reason,
        "hint": row.hint.to_json(),
        "verdict": row.verdict,
    }


def files_of(run: RunDir) -> tuple[dict[str, list[int]], str]:
    """Return ({path in the run's folder: [bytes, inode, time of change in ns]}, the name of the
    best checkpoint or ""). Links, hidden folders and files that are still being written to take the
    place of others are left out: such a file has another name in a moment."""
    files: dict[str, list[int]] = {}
    for folder, subfolders, names in os.walk(run.path):
        # Changed in place: that is how os.walk is told where to go on.
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            if name.startswith(".") and name.endswith(UNFINISHED):
                continue
            path = Path(folder, name)
            try:
                status = path.lstat()
            except FileNotFoundError:  # removed since the folder was listed
                continue
            if path.is_symlink() or not path.is_file():
                continue
            path_in_run = str(path.relative_to(run.path))
            files[path_in_run] = [status.st_size, status.st_ino, status.st_mtime_ns]
    best = run.resolve_checkpoint("best")
    return files, best.name if best else ""


def stop(root: str, home_id: str, run_id: str, launch: int, reason: str) -> JsonObject:
    """Ask a run to save and end, for `reason`. A run that still waits is cancelled at once. If
    another launch than `launch` is here, nothing is done."""
    home = home_at(root, home_id)
    run = home.run(run_id)
    if launch_of(run) != launch:
        return {}
    values = {"reason_kind": "cancelled", "reason": reason}
    with Store(home) as store:
        waiting = {"queued", "interrupted"}
        was_waiting = store.set_state(
            run_id, "cancelled", only_from=waiting, ended=time.time(), **values
        )
        if not was_waiting:
            store.set_state(run_id, "stopping", only_from={"preparing", "running"}, **values)
    return {}


def reap(root: str, home_id: str, run_id: str, launch: int) -> JsonObject:
    """Remove what an ended run of this launch, or of an earlier one, has left on this host.

    A run whose processes live stays, and so do the files of a later launch, even before that one is
    started. Returns in "removed" whether nothing of this and earlier launches is left.
    """
    home = home_at(root, home_id)
    run = home.run(run_id)
    with _locked(home), Store(home) as store:
        # Asked before the launch is read: a folder that is sent in between is a later launch's.
        was_there = run.path.exists()
        newest = max(launch_of(run), _read_launch(run.far("coming")))
        if newest > launch or launcher.is_alive(run):
            return {"removed": newest > launch}
        store.forget_run(run_id)
        if was_there:
            shutil.rmtree(run.path, ignore_errors=True)
    forget_changes(run_id)
    return {"removed": True}


def list_owned(root: str, home_id: str) -> JsonObject:
    """Return in "owned" every run that the home `home_id` has put on this host: its id, its launch,
    whether it lives, its state, and the device that it holds ("" for none)."""
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
    """Return in "launch" the number of the launch that was started here; 0 if the run was not."""
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

"""Starting runs, telling whether they live, and taking up those that died without a word.

There is no daemon: whoever changes what is free (a submit, a finishing supervisor, a starting
server) calls `start_queued`, and whoever touches the home calls `reap`. Both are safe to call from
any number of processes at once: a run's lock is taken inside the transaction that leases it, and
the supervisor inherits that lock, so it is never free between the decision and the start.

The supervisor imports this module, so it stays free of everything heavy.
"""

import errno
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import is_locked, read_json, take_lock
from engine.home.progress import write_status
from engine.home.rows import RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.processes import outcome, programs

LOCK_FD = "HONESMITH_LOCK_FD"  # the run's lock, inherited by the supervisor
_CLAIM_S = 0.05  # long enough to outlast a process that only asks whether the lock is held


def is_alive(run: RunDir) -> bool:
    """Whether a supervisor or trainer of this run lives; by its lock, never by a process id."""
    return is_locked(run.lock)


def trainer_command(home: Home, algorithm: str) -> list[str]:
    """What starts a run's trainer, before the run's folder. Regrading loads no model and needs no
    torch.

    Raises UserError NO_TORCH.
    """
    if algorithm == "regrade":
        return [sys.executable, "-P", *programs.command("regrader")]
    return [worker_python(home), "-P", *programs.command("trainer")]


def worker_python(home: Home) -> str:
    """The interpreter workers run with: this one if it has torch, else the home's own.

    Raises UserError NO_TORCH when neither exists.
    """
    if programs.trains_without_torch() or importlib.util.find_spec("torch") is not None:
        return sys.executable
    if home.train_python.is_file():
        return str(home.train_python)
    raise UserError(
        "NO_TORCH",
        f"{sys.executable} has no torch and {home.train_venv} does not exist",
        hint="Run `honesmith setup` once (or install honesmith[train]); then call again.",
        retryable=True,
    )


def require_quantizer(home: Home, quantization: str) -> None:
    """4-bit weights (`quantization` nf4) need a library where workers run.

    Raises UserError SETTING_INVALID or NO_TORCH.
    """
    if quantization != "nf4" or programs.trains_without_torch():
        return
    python = worker_python(home)
    if python == sys.executable:
        installed = importlib.util.find_spec("bitsandbytes") is not None
    else:
        installed = any(Path(python).parent.parent.glob("lib/python*/site-packages/bitsandbytes"))
    if not installed:
        raise UserError(
            "SETTING_INVALID",
            f'quantization = "nf4", but bitsandbytes is not installed for {python}',
            hint=f"Run `{python} -m pip install 'bitsandbytes>=0.48,<1'` (the extra "
            "honesmith[nf4]), or leave quantization out.",
            field="settings.quantization",
        )


def spawn_detached(
    argv: Sequence[str],
    cwd: Path,
    log: Path,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> int:
    """Start a process that outlives this one: own session, no terminal, output to `log`."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=dict(env) if env is not None else None,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            pass_fds=tuple(pass_fds),
        )
    # Someone has to collect its exit status, or it stays a zombie as long as this process lives.
    threading.Thread(target=process.wait, name=f"wait-{process.pid}", daemon=True).start()
    return process.pid


def start_queued(home: Home) -> list[str]:
    """Start queued runs while devices are free; returns the ids this call started."""
    started: list[str] = []
    with Store(home) as store:
        if not store.queue():
            return started
        # Asking the driver takes a while: only where there is something to start.
        from engine.core import hardware  # noqa: PLC0415

        devices = hardware.devices()
        while True:
            locks: dict[str, int] = {}
            try:
                row = store.lease_next(devices, lambda row, locks=locks: _claim(home, row, locks))
                if row is None:
                    return started
                if _start(home, store, row, locks[row.run_id]):
                    started.append(row.run_id)
            finally:
                for lock in locks.values():
                    os.close(lock)


def missing_secrets(run: RunDir) -> list[str]:
    """Names of the secrets the run's environment needs and this process does not have.

    None of a run whose config is damaged: the queue goes on, and its trainer says what is wrong.
    """
    config = run.find_config()
    if config is None:
        return []
    try:
        names = read_json(Path(config.env_dir) / "env.json").get("secrets") or []
    except (OSError, ValueError, AttributeError):
        return []
    return [str(name) for name in names if not os.environ.get(str(name))]


def reap(home: Home) -> list[str]:
    """Take up every run whose supervisor and trainer died without a word; then start what waits.

    Such a run is interrupted and queued again, `MAX_CONTINUATIONS` times at most, then it is
    failed. Returns the ids of the runs whose state changed.
    """
    changed = []
    with Store(home) as store:
        suspects = ("preparing", "running", "stopping", "interrupted")
        for row in store.list_runs(limit=10_000, states=suspects):
            run = home.run(row.run_id)
            lock = _lock_of_dead(run)
            if lock is None:
                continue
            try:
                row = store.get_run(row.run_id)  # it may have ended while we looked
                if row.state in suspects:
                    _settle(store, run, row)
                    changed.append(row.run_id)
                    write_status(run, store.get_run(row.run_id))
            except (OSError, UserError) as error:
                if not _full(error):  # whoever looks is answered; the next one settles it
                    raise
            finally:
                os.close(lock)
        waiting = bool(store.queue())
    if waiting:
        try:
            start_queued(home)
        except (OSError, UserError) as error:
            if not _full(error):
                raise
    return changed


def _full(error: OSError | UserError) -> bool:
    """Whether the home could not be written: full, or for reading alone."""
    if isinstance(error, OSError):
        return error.errno in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT)
    read_only = "readonly" in str(error.__cause__)  # as SQLite says it
    return error.code == "DISK_FULL" or read_only


def _lock_of_dead(run: RunDir) -> int | None:
    try:
        return take_lock(run.lock)
    except FileNotFoundError:  # the run's folder was deleted by hand: make room for its lock
        run.create()
        return take_lock(run.lock)
    except OSError as error:
        if _full(error):  # nothing can be taken up now
            return None
        raise


def _claim(home: Home, row: RunRow, locks: dict[str, int]) -> bool:
    run = home.run(row.run_id)
    if missing_secrets(run):  # a process that has them will start it
        return False
    run.create()
    lock = take_lock(run.lock, wait_s=_CLAIM_S)
    if lock is None:  # the end of an earlier attempt is still going on
        return False
    os.truncate(lock, 0)  # what is in it is the time an earlier attempt took
    locks[row.run_id] = lock
    return True


def _start(home: Home, store: Store, row: RunRow, lock: int) -> bool:
    """Start the supervisor of a run with the lock it holds; False where the machine refuses."""
    run = home.run(row.run_id)
    env = {**os.environ, LOCK_FD: str(lock), "HONESMITH_HOME": str(home.root)}
    argv = [sys.executable, "-P", *programs.command("supervisor"), str(run.path)]
    try:
        spawn_detached(argv, run.path, run.supervisor_log, env, pass_fds=(lock,))
    except OSError as error:
        end = outcome.abandon(
            run,
            row,
            "infra",
            f"the supervisor could not be started: {error}",
            outcome.resume_hint(run).after("Free memory, processes or disk."),
        )
        outcome.apply(store, run, row, end)
        write_status(run, store.get_run(row.run_id))
        return False
    return True


def _settle(store: Store, run: RunDir, row: RunRow) -> None:
    """Decide about a run that nobody runs. The caller holds its lock."""
    end = outcome.recorded(run, row.attempt)
    if end is not None and row.state != "interrupted":
        outcome.apply(store, run, row, end)
        return
    elapsed = elapsed_of_dead(run)
    if row.state == "stopping":  # an end was wanted and has come
        wanted = outcome.decide(run, row, status=-9, elapsed_s=elapsed)
        outcome.apply(store, run, row, wanted)
        return
    spent = row.spent_hours
    if row.state != "interrupted":
        spent += elapsed / 3600
        store.set_state(
            row.run_id, "interrupted", only_from={row.state}, spent_hours=spent, device=""
        )
        outcome.note_event(
            run, "interrupted", "supervisor and trainer are gone", attempt=row.attempt
        )
    if row.continuations >= outcome.MAX_CONTINUATIONS:
        store.set_state(
            row.run_id,
            "failed",
            only_from={"interrupted"},
            ended=time.time(),
            reason_kind="interrupted",
            reason=f"interrupted {row.continuations + 1} times and not continued any more",
            hint=outcome.resume_hint(run).after("Find out what ends processes on this machine."),
            verdict="unknown",
        )
        return
    store.set_state(
        row.run_id,
        "queued",
        only_from={"interrupted"},
        attempt=row.attempt + 1,
        continuations=row.continuations + 1,
    )


def elapsed_of_dead(run: RunDir) -> float:
    """Seconds the last supervisor had counted when it died; it keeps them in its lock file."""
    try:
        return max(0.0, float(json.loads(run.lock.read_text())["elapsed_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0

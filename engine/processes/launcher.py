"""Starting runs, telling whether they live, and settling those that died without a word.

There is no daemon. Whatever changes which devices are free (a submit, a finishing supervisor, a
starting server) calls `start_queued`; whatever reads the home calls `reap`. Any number of processes
may call both at once: a run's lock is taken inside the transaction that leases it a device, and the
supervisor inherits that lock, so it is never free between the decision and the start.

The supervisor imports this module, so it imports nothing heavy.
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
_CLAIM_S = 0.05  # seconds; a process that only tests the lock holds it for less


def is_alive(run: RunDir) -> bool:
    """Whether a supervisor or trainer of this run lives: by its lock, never by a process id."""
    return is_locked(run.lock)


def trainer_command(home: Home, algorithm: str) -> list[str]:
    """The command that starts a run's trainer; the run's folder is to be added as its last
    argument.

    Raises UserError NO_TORCH, except for a regrade, which loads no model.
    """
    if algorithm == "regrade":
        return [sys.executable, "-P", *programs.command("regrader")]
    return [worker_python(home), "-P", *programs.command("trainer")]


def worker_python(home: Home) -> str:
    """The interpreter that workers run with: this one if it has torch, else that of the home's
    training environment.

    Raises UserError NO_TORCH where neither exists.
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
    """Check that workers have bitsandbytes where weights shall have 4 bits (`quantization` =
    "nf4").

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
    """Start a process that outlives this one: own session, no terminal, output appended to `log`.

    `env` replaces the environment variables, None keeps them; `pass_fds` are inherited. Returns its
    process id. Raises OSError where it cannot be started.
    """
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
    # Without this thread it would stay a zombie, once ended, as long as this process lives.
    threading.Thread(target=process.wait, name=f"wait-{process.pid}", daemon=True).start()
    return process.pid


def start_queued(home: Home) -> list[str]:
    """Start queued runs while devices are free; returns the ids of the runs it started."""
    started: list[str] = []
    with Store(home) as store:
        if not store.queue():
            return started
        # Imported late: asking the driver takes a while, and mostly nothing is queued.
        from engine.core import hardware  # noqa: PLC0415

        devices = hardware.devices()
        while True:
            locks: dict[str, int] = {}  # filled by `_claim`, which the lease calls
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
    """Names of the secrets that the run's environment needs and this process does not have.

    Empty also where the run's config or its environment cannot be read: the run is started, and its
    trainer reports the fault.
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
    """Settle every run whose supervisor and trainer died without a word, then start what is queued.

    Such a run is queued again, `MAX_CONTINUATIONS` times at most, then it fails. A run that was
    stopping, or whose end was recorded, gets that end. Returns the ids of runs that were settled. A
    home that cannot be written is left as it is.
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
                # The caller only wants to read; a later call can settle the run.
                if not _cannot_write(error):
                    raise
            finally:
                os.close(lock)
        waiting = bool(store.queue())
    if waiting:
        try:
            start_queued(home)
        except (OSError, UserError) as error:
            if not _cannot_write(error):
                raise
    return changed


def _cannot_write(error: OSError | UserError) -> bool:
    """Whether the error means that the home cannot be written: full, or read-only."""
    if isinstance(error, OSError):
        return error.errno in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT)
    read_only = "readonly" in str(error.__cause__)  # SQLite's own wording
    return error.code == "DISK_FULL" or read_only


def _lock_of_dead(run: RunDir) -> int | None:
    """The lock of a run that nobody runs, taken; None where it is held, or cannot be taken now.

    It cannot be taken in a home that cannot be written. Raises OSError for other faults.
    """
    try:
        return take_lock(run.lock)
    except FileNotFoundError:  # the run's folder was deleted by hand
        run.create()
        return take_lock(run.lock)
    except OSError as error:
        if _cannot_write(error):  # nothing can be settled now
            return None
        raise


def _claim(home: Home, row: RunRow, locks: dict[str, int]) -> bool:
    """Take the lock of a queued run and add it to `locks`, by the run's id.

    Returns False where the run cannot start here now: secrets are missing, or its last attempt is
    still ending.
    """
    run = home.run(row.run_id)
    if missing_secrets(run):  # it waits for a process that has them
        return False
    run.create()
    lock = take_lock(run.lock, wait_s=_CLAIM_S)
    if lock is None:  # an earlier attempt is still ending
        return False
    os.truncate(lock, 0)  # it holds the seconds that an earlier attempt took
    locks[row.run_id] = lock
    return True


def _start(home: Home, store: Store, row: RunRow, lock: int) -> bool:
    """Start the supervisor of a leased run, which inherits `lock`.

    Returns False where the machine refuses the process; the run has failed then.
    """
    run = home.run(row.run_id)
    env = {**os.environ, LOCK_FD: str(lock), "HONESMITH_HOME": str(home.root)}
    argv = [sys.executable, "-P", *programs.command("supervisor"), str(run.path)]
    try:
        spawn_detached(argv, run.path, run.supervisor_log, env, pass_fds=(lock,))
    except OSError as error:
        failure = outcome.abandon(
            run,
            row,
            "infra",
            f"the supervisor could not be started: {error}",
            outcome.resume_hint(run).after("Free memory, processes or disk."),
        )
        outcome.apply(store, run, row, failure)
        write_status(run, store.get_run(row.run_id))
        return False
    return True


def _settle(store: Store, run: RunDir, row: RunRow) -> None:
    """Bring a run that nobody runs to its next state; the caller holds its lock.

    That is its recorded end, or the end it was asked for; otherwise it is queued again, or fails
    after too many interruptions.
    """
    recorded_end = outcome.recorded(run, row.attempt)
    if recorded_end is not None and row.state != "interrupted":
        outcome.apply(store, run, row, recorded_end)
        return
    elapsed = elapsed_of_dead(run)
    if row.state == "stopping":  # it was asked to end, and it has
        # Whatever ended it left no exit status; -9 stands for that.
        stopped_end = outcome.decide(run, row, status=-9, elapsed_s=elapsed)
        outcome.apply(store, run, row, stopped_end)
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
    """Seconds that the last supervisor had counted when it died; 0 where it wrote none."""
    try:
        return max(0.0, float(json.loads(run.lock.read_text())["elapsed_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0

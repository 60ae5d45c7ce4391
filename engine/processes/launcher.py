"""Starts queued runs, tells which runs live, and settles those whose processes died without a
record.

There is no daemon. Whatever changes which devices are free (a submit, a finishing supervisor, a
starting server) calls `start_queued`; whatever reads the home calls `reap`. Any number of processes
may call both at once: a run's lock is taken inside the transaction that gives it a device, and the
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
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.errors import UserError
from engine.core.files import is_locked, take_lock
from engine.home.rows import HOLDS_DEVICE, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.home.user_config import PREFIX, key_of
from engine.pace.progress import write_status
from engine.processes import deployments, device_shares, outcome, programs, waiting
from envs.config.problem import EnvProblem
from envs.config.settings import read_settings

if TYPE_CHECKING:
    from engine.core.hardware import Device, Hardware

# The environment variable with the descriptor of the run's lock, which the supervisor inherits.
LOCK_FD = "HONESMITH_LOCK_FD"
_CLAIM_S = 0.05  # seconds to wait for a lock; a process that only tests it holds it for less
# The states of a run whose processes should live, or that is to be queued again.
_UNSETTLED = ("preparing", "running", "stopping", "interrupted")


def is_alive(run: RunDir) -> bool:
    """Whether a supervisor or trainer of this run lives.

    The run's lock tells this; a process id could belong to another process by now.
    """
    return is_locked(run.lock)


def trainer_command(
    home: Home, algorithm: str, gpus: int = 1, *, is_elsewhere: bool = False
) -> list[str]:
    """Return the command that starts a run's trainer; the caller appends the run's folder.

    The algorithm "regrade" and a run without a device (`gpus` is 0) load no model and need no
    torch; nor does a run on another machine. For others, raises UserError NO_TORCH if no
    interpreter has torch.
    """
    if is_elsewhere:
        return [sys.executable, "-P", *programs.command("attendant")]
    if algorithm == "regrade":
        return [sys.executable, "-P", *programs.command("regrader")]
    if gpus == 0 and algorithm == "prompt":
        return [sys.executable, "-P", *programs.command("prompter")]
    if gpus == 0:  # the run only asks models behind a URL
        return [sys.executable, "-P", *programs.command("asker")]
    return [worker_python(home), "-P", *programs.command("trainer")]


def worker_python(home: Home) -> str:
    """Return the interpreter that workers run with.

    It is the present one if that has torch (or if a test has replaced trainers by scripts without
    torch), else that of the home's training environment. Raises UserError NO_TORCH if there is
    neither.
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
    """Check that workers have bitsandbytes if `quantization` is "nf4" (4-bit weights).

    Nothing is checked for any other `quantization`, or if a test has replaced the workers. Raises
    UserError SETTING_INVALID if bitsandbytes is missing, NO_TORCH if there is no interpreter for
    workers.
    """
    if quantization != "nf4" or programs.trains_without_torch():
        return
    python = worker_python(home)
    if python == sys.executable:
        installed = importlib.util.find_spec("bitsandbytes") is not None
    else:  # another interpreter: its folder is searched, which is faster than running it
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
    """Start a process that outlives this one; return its process id.

    The process has a session of its own and no terminal.

    Args:
        argv: the command.
        cwd: the folder it runs in.
        log: the file that its output is appended to.
        env: its environment variables; None for those of this process.
        pass_fds: file descriptors that it inherits.

    Raises OSError if it cannot be started.
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
    # The thread waits for the process, which would otherwise stay a zombie until this one ends.
    threading.Thread(target=process.wait, name=f"wait-{process.pid}", daemon=True).start()
    return process.pid


def start_queued(home: Home) -> list[str]:
    """Start queued runs while devices are free; return the ids of the runs that were started.

    Runs that still wait for the model of another run are left in the queue.
    """
    started_ids: list[str] = []
    home = home.whole  # the queue is that of all
    with Store(home) as store:
        waiting.release_waiting(home, store)
        if all(row.waits_for for row in store.queue()):
            return started_ids
        # Imported late: asking the driver takes a while, and usually nothing is queued.
        from engine.core import hardware  # noqa: PLC0415

        machine = hardware.detect(home.root)
        while True:
            locks: dict[str, int] = {}  # run id -> descriptor of its lock
            try:
                row = _lease_next(home, store, machine, locks)
                if row is None:
                    return started_ids
                if _start(home, store, row, locks[row.run_id]):
                    started_ids.append(row.run_id)
            finally:
                for lock in locks.values():  # a supervisor that was started has its own copy
                    os.close(lock)


def _lease_next(
    home: Home, store: Store, machine: "Hardware", locks: dict[str, int]
) -> RunRow | None:
    """Give the oldest queued run free devices of the machine, take its lock, and return its row.

    The lock is added to `locks` (run id -> descriptor). Returns None if no run can start now.
    """

    def choose(row: RunRow, free_ids: Sequence[str]) -> str:
        """Return the ids of the devices that a run gets; "" if none has room for it."""
        promised = device_shares.promised_bytes(home, store, machine)
        return devices_for(home.run(row.run_id), machine, free_ids, row.gpus, promised)

    return store.lease_next(
        [device.id for device in machine.devices],
        claim=lambda row: _claim(home, row, locks),
        choose=choose,
        can_start=lambda row: not missing_secrets(home.run(row.run_id)),
        runs_per_device=device_shares.runs_per_device(home, machine),
        elsewhere={host.compute: host.runs for host in home.user_config().hosts.values()},
    )


def devices_for(
    run: RunDir,
    machine: "Hardware",
    free_ids: Sequence[str],
    gpus: int = 1,
    promised: Counter[str] | None = None,
) -> str:
    """Return the ids of the devices that a run gets, separated by commas; "" if it has to wait for
    memory.

    On a machine with GPUs these are the GPUs with the most free memory. Several are of one model if
    possible, because the slowest GPU determines how long a step takes. If a chosen GPU has less
    free memory than the run's minimum, the run waits, except if waiting cannot help (no GPU here is
    large enough; the run then reports that itself) or if deployments live (the supervisor stops
    idle ones).

    Args:
        run: the run.
        machine: the hardware of this machine.
        free_ids: ids of the devices that may hold one more run.
        gpus: how many devices the run needs.
        promised: device id -> the bytes that the runs on it were planned with (device_shares.py);
            None if no run holds a device.
    """
    promised = promised or Counter()
    free = [device for device in machine.devices if device.id in free_ids]
    free = device_shares.with_room(run, free, promised)
    count = min(gpus, len(machine.devices))
    if not free or (len(free) < count and any(promised.values())):
        return ""
    # The devices with the most room first; equal ones in the machine's order.
    free.sort(key=lambda device: promised[device.id] - device.memory_free)
    chosen = _alike(free, min(count, len(free)))
    if chosen[0].kind == "cpu":
        return free_ids[0]
    return ",".join(d.id for d in chosen) if _may_start_on(run, machine, chosen) else ""


def _alike(devices: Sequence["Device"], count: int) -> Sequence["Device"]:
    """Return the first `count` devices of one model, or the first `count` of all if no model has so
    many."""
    for device in devices:
        same = [other for other in devices if other.name == device.name][:count]
        if len(same) == count:
            return same
    return devices[:count]


def _may_start_on(run: RunDir, machine: "Hardware", gpus: Sequence["Device"]) -> bool:
    """Whether a run can start on these free GPUs now.

    It can if they have its minimum of free memory, if waiting would not help, or if deployments
    live, of which idle ones can be stopped.
    """
    config = run.find_config()
    if config is None or not config.least_memory:
        return True
    fitting = [gpu for gpu in machine.devices if gpu.memory_total >= config.least_memory]
    has_room = all(gpu.memory_free >= config.least_memory for gpu in gpus)
    waiting_helps = len(fitting) >= len(gpus)  # enough GPUs are large enough
    return has_room or not waiting_helps or bool(deployments.living(run.home))


def awaited_memory(run: RunDir) -> str:
    """Return why a queued run waits although a device is free: it needs several devices, or more
    memory than is free. "" if it waits for neither."""
    # Imported late: asking the driver takes a while.
    from engine.core import hardware  # noqa: PLC0415

    machine = hardware.detect(run.home.root)
    config = run.find_config()
    with Store(run.home) as store:
        rows = store.list_runs(limit=1000, states=HOLDS_DEVICE)
        gpus = next((row.gpus for row in store.queue() if row.run_id == run.id), 1)
        promised = device_shares.promised_bytes(run.home, store, machine)
    holders = Counter(device for row in rows for device in row.devices)
    most_runs = device_shares.runs_per_device(run.home, machine)
    free = [device for device in machine.devices if holders[device.id] < most_runs]
    wanted = min(gpus, len(machine.devices))
    if wanted > 1 and len(free) < wanted:
        return f"it waits for {wanted} devices: {len(free)} are free, and kept for it"
    free_ids = [device.id for device in free]
    if config is None or not free or devices_for(run, machine, free_ids, gpus, promised):
        return ""
    free_bytes = max(
        min(device.memory_free, device.memory_total - promised[device.id]) for device in free
    )
    # Beside other runs it gets only what it was planned with; alone its minimum is enough.
    needed = config.planned_memory if any(promised.values()) else config.least_memory
    return (
        f"it waits for memory: it needs {needed / 1e9:.1f} GB at least, and other "
        f"processes leave {free_bytes / 1e9:.1f} GB"
    )


def missing_secrets(run: RunDir) -> list[str]:
    """Return the names of secrets that a run's environment, teacher or endpoints need and this
    process does not have.

    A config or an environment that cannot be read counts as needing none: the run is then started
    anyway, and its trainer reports what is wrong.
    """
    # Imported here, not at the top: these load pydantic, which a supervisor must not.
    from engine.records.env_version import EnvVersion  # noqa: PLC0415
    from engine.records.record import DamagedRecord  # noqa: PLC0415
    from engine.records.run_config import (  # noqa: PLC0415
        DistillConfig,
        EndpointTeacher,
        EvaluateConfig,
        PromptConfig,
    )

    config = run.find_config()
    if config is None:
        return []
    try:
        names = list(EnvVersion.read(Path(config.env_dir) / "env.json").secrets)
    except (OSError, DamagedRecord):
        names = []
    missing = [name for name in names if not os.environ.get(name)]
    key_names = _keys_of_endpoints(run.home, Path(config.env_dir) / "source")
    if isinstance(config, EvaluateConfig | PromptConfig):
        key_names |= {endpoint.key_env for endpoint in config.endpoints.values()}
    if isinstance(config, DistillConfig) and isinstance(config.teacher, EndpointTeacher):
        key_names.add(config.teacher.key_env)
    return missing + sorted(name for name in key_names - {""} if not key_of(run.home.root, name))


def _keys_of_endpoints(home: Home, source: Path) -> set[str]:
    """Return the names of the keys of the endpoints that an environment may ask.

    `source` is the environment's folder. Endpoints that config.toml lacks are left out.
    """
    try:
        names = [ref.removeprefix(PREFIX) for ref in read_settings(source).endpoints]
        known = home.user_config().endpoints if names else {}
    except (EnvProblem, UserError):  # the trainer reports it
        return set()
    return {known[name].key_env for name in names if name in known}


def reap(home: Home) -> list[str]:
    """Settle every run whose supervisor and trainer died, then start queued runs.

    Such a run is queued again, or fails if that has happened MAX_CONTINUATIONS times already. A run
    that was stopping, or whose end was recorded, gets that end. In a home that cannot be written,
    nothing is changed. Returns the ids of the runs that were settled.
    """
    home = home.whole
    settled_ids = []
    with Store(home) as store:
        for row in store.list_runs(limit=10_000, states=_UNSETTLED):
            if _settle_if_dead(store, home.run(row.run_id)):
                settled_ids.append(row.run_id)
        has_queued_runs = bool(store.queue())
    if has_queued_runs:
        try:
            start_queued(home)
        except (OSError, UserError) as error:
            if not _cannot_write(error):
                raise
    return settled_ids


def _settle_if_dead(store: Store, run: RunDir) -> bool:
    """Settle a run if its supervisor and trainer died. Return whether it was settled."""
    lock = _lock_of_dead(run)
    if lock is None:
        return False
    was_settled = False
    try:
        row = store.get_run(run.id)  # another process may have settled it before we had the lock
        if row.state in _UNSETTLED:
            _settle(store, run, row)
            was_settled = True
            write_status(run, store.get_run(run.id))
    except (OSError, UserError) as error:
        # The caller only wants to read; a later call can settle the run.
        if not _cannot_write(error):
            raise
    finally:
        os.close(lock)
    return was_settled


def _cannot_write(error: OSError | UserError) -> bool:
    """Whether an error means that the home cannot be written, because it is full or read-only."""
    if isinstance(error, OSError):
        return error.errno in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT)
    read_only = "readonly" in str(error.__cause__)  # SQLite's own wording
    return error.code == "DISK_FULL" or read_only


def _lock_of_dead(run: RunDir) -> int | None:
    """Take the lock of a run and return its descriptor.

    Returns None if a living process holds the lock, or if the home cannot be written, because then
    no lock can be taken. Raises OSError for other errors.
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
    """Take the lock of a queued run and add it to `locks` (run id -> descriptor of the lock).

    Returns False if the run cannot start here now, because secrets are missing or its last attempt
    is still ending.
    """
    run = home.run(row.run_id)
    if missing_secrets(run):  # it waits for a process that has them
        return False
    run.create()  # the lock needs the run's folder, which may have been deleted by hand
    lock = take_lock(run.lock, wait_s=_CLAIM_S)
    if lock is None:  # an earlier attempt is still ending
        return False
    # The lock file holds the seconds of an earlier attempt; this attempt starts at none.
    os.truncate(lock, 0)
    locks[row.run_id] = lock
    return True


def _start(home: Home, store: Store, row: RunRow, lock: int) -> bool:
    """Start the supervisor of a run that has its device; the supervisor inherits `lock`.

    Returns False if the machine cannot start a process; the run is then recorded as failed.
    """
    run = home.run(row.run_id)
    env = {**os.environ, LOCK_FD: str(lock), "HONESMITH_HOME": str(home.root)}
    env |= _endpoint_keys(run)
    argv = [sys.executable, "-P", *programs.command("supervisor"), str(run.path)]
    try:
        spawn_detached(argv, run.path, run.supervisor_log, env, pass_fds=(lock,))
    except OSError as error:
        outcome.apply(store, run, row, _not_started(run, row, error))
        write_status(run, store.get_run(row.run_id))
        return False
    return True


def _endpoint_keys(run: RunDir) -> dict[str, str]:
    """Return name -> value of the keys for the endpoints that a run asks.

    They are read here and passed on as environment variables, because a file `.env` that this
    process finds may not be found from the run's folder.
    """
    from engine.records.run_config import (  # noqa: PLC0415 - it loads pydantic
        EvaluateConfig,
        PromptConfig,
    )

    config = run.find_config()
    if not isinstance(config, EvaluateConfig | PromptConfig):
        return {}
    names = {endpoint.key_env for endpoint in config.endpoints.values()} - {""}
    return {name: key_of(run.home.root, name) for name in names}


def _not_started(run: RunDir, row: RunRow, error: OSError) -> outcome.Outcome:
    """Return the outcome of an attempt whose supervisor could not be started because of `error`."""
    return outcome.abandon(
        run,
        row,
        kind="infra",
        reason=f"the supervisor could not be started: {error}",
        hint=outcome.resume_hint(run).after("Free memory, processes or disk."),
    )


def _settle(store: Store, run: RunDir, row: RunRow) -> None:
    """Bring a run whose processes are gone to its next state; the caller holds its lock.

    1. If the end of this attempt was recorded, the run gets that end.
    2. If the run was told to stop, it gets the end that follows from the stop.
    3. Otherwise it was interrupted: it is queued again, or fails after MAX_CONTINUATIONS times.
    """
    if row.state == "interrupted":
        # An earlier call began step 3 and did not finish it. Finish it now, whatever the files say.
        _continue_interrupted(store, run, row)
        return
    recorded_end = outcome.recorded(run, row.attempt)
    if recorded_end is not None:
        outcome.apply(store, run, row, recorded_end)
        return
    elapsed_s = seconds_in_lock_file(run)
    if row.state == "stopping":  # it was asked to end, and it has
        # Nobody waited for the exit status; -9 stands for killed by SIGKILL.
        stopped_end = outcome.decide(run, row, status=-9, elapsed_s=elapsed_s)
        outcome.apply(store, run, row, stopped_end)
        return
    _interrupt(store, run, row, elapsed_s)
    _continue_interrupted(store, run, row)


def _interrupt(store: Store, run: RunDir, row: RunRow, elapsed_s: float) -> None:
    """Record that the run's attempt was interrupted after `elapsed_s` seconds, and free its device.

    Does nothing if the run's state has changed since `row` was read.
    """
    store.set_state(
        row.run_id,
        "interrupted",
        only_from={row.state},
        spent_hours=row.spent_hours + row.device_hours(elapsed_s),
        device="",
    )
    outcome.note_event(run, "interrupted", "supervisor and trainer are gone", attempt=row.attempt)


def _continue_interrupted(store: Store, run: RunDir, row: RunRow) -> None:
    """Queue an interrupted run again, or let it fail if that has happened MAX_CONTINUATIONS
    times."""
    if row.continuations >= outcome.MAX_CONTINUATIONS:
        store.set_state(
            row.run_id,
            "failed",
            only_from={"interrupted"},
            ended=time.time(),
            reason_kind="interrupted",
            # + 1: the present interruption, after which the run is not continued.
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


def spent_hours(home: Home, row: RunRow) -> float:
    """Return the device hours that a run has taken so far, including those of its current
    attempt."""
    if row.state not in HOLDS_DEVICE:
        return row.spent_hours
    return row.spent_hours + row.device_hours(seconds_in_lock_file(home.run(row.run_id)))


def seconds_in_lock_file(run: RunDir) -> float:
    """Return the seconds that the run's last attempt has taken; 0 if the lock file holds none.

    The supervisor writes them into the run's lock file at every poll.
    """
    try:
        return max(0.0, float(json.loads(run.lock.read_text())["elapsed_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0

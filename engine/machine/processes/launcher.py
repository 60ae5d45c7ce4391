"""Starts queued runs, tells which runs live, and settles those whose processes died without a
record.

There is no daemon. Whatever changes which devices are free (a submit, a finishing supervisor, a
starting server) calls `start_queued`; whatever reads the home calls `reap`. Any number of processes
may call both at once: a run's lock is taken inside the transaction that gives it a device, and the
supervisor inherits that lock, so it is never free between the decision and the start.

The supervisor imports this module, so it imports nothing heavy.
"""

import contextlib
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.errors import UserError
from engine.home.rows import TERMINAL, RunRow
from engine.home.run_dir import Home, RunDir
from engine.home.store import Store
from engine.home.user_config import PREFIX, key_of
from engine.machine.pace.progress import write_status
from engine.machine.processes import deployments, device_shares, outcome, programs, waiting
from engine.machine.processes.local_executor import (
    LOCK_FD,
    UNSETTLED,
    LocalExecutor,
    cannot_write,
    is_alive,
    seconds_in_lock_file,
    spawn_detached,
    spent_hours,
)
from engine.machine.processes.seam import Handle
from envs.config.problem import EnvProblem
from envs.config.settings import read_settings

if TYPE_CHECKING:
    from engine.core.hardware import Device, Hardware

__all__ = [
    "LOCK_FD",
    "awaited_host",
    "awaited_memory",
    "devices_for",
    "end_elsewhere",
    "is_alive",
    "missing_secrets",
    "reap",
    "require_quantizer",
    "seconds_in_lock_file",
    "spawn_detached",
    "spent_hours",
    "start_queued",
    "trainer_command",
    "worker_python",
]


def trainer_command(
    home: Home, algorithm: str, gpus: int = 1, *, is_elsewhere: bool = False
) -> list[str]:
    """Return the command that starts a run's trainer; the caller appends the run's folder.

    The algorithm "regrade" and a run without a device (`gpus` is 0) load no model and need no
    torch; nor does a run on another machine (`is_elsewhere`), which is only looked after here.

    Raises UserError NO_TORCH if the run needs torch and no interpreter has it.
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
    if programs.trainer_is_replaced() or importlib.util.find_spec("torch") is not None:
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
    if quantization != "nf4" or programs.trainer_is_replaced():
        return
    python = worker_python(home)
    if python == sys.executable:
        is_installed = importlib.util.find_spec("bitsandbytes") is not None
    else:  # another interpreter: its folder is searched, which is faster than running it
        venv = Path(python).parent.parent
        is_installed = any(venv.glob("lib/python*/site-packages/bitsandbytes"))
    if not is_installed:
        raise UserError(
            "SETTING_INVALID",
            f'quantization = "nf4", but bitsandbytes is not installed for {python}',
            hint=f"Run `{python} -m pip install 'bitsandbytes>=0.48,<1'` (the extra "
            "honesmith[nf4]), or leave quantization out.",
            field="settings.quantization",
        )


def start_queued(home: Home, place: LocalExecutor | None = None) -> list[str]:
    """Start queued runs while devices are free; return the ids of the runs that were started.

    Runs that still wait for the model of another run are left in the queue. `place` is the executor
    that starts them, over the same home; None for a new one of this machine.
    """
    started_ids: list[str] = []
    home = home.whole  # whoever calls this, the runs of all owners are started
    with Store(home) as store:
        waiting.release_waiting(home, store)
        if not store.has_ready():
            return started_ids
        place = place or LocalExecutor(home, store)
        machine = place.machine()
        passed_over: set[str] = set()
        while True:
            try:
                row = _lease_next(place, store, machine, passed_over)
                if row is None:
                    return started_ids
                if _start(place, store, row):
                    started_ids.append(row.run_id)
            finally:
                place.release()  # the locks of runs that were claimed and not started


def _lease_next(
    place: LocalExecutor, store: Store, machine: "Hardware", passed_over: set[str]
) -> RunRow | None:
    """Give the oldest queued run free devices of the machine, claim it, and return its row.

    Runs that cannot start are added to `passed_over` (run ids), and are not looked at again: while
    this process starts others, nothing becomes free. Returns None if no run can start now.
    """
    home = place.home
    # Runs that another machine queued here and has not asked for in time; they fail below.
    lapsed: list[RunRow] = []
    runs_per_device = device_shares.runs_per_device(home, machine)

    def choose(row: RunRow, free_ids: Sequence[str]) -> str:
        """Return the ids of the devices that a run gets; "" if none has room for it."""
        if row.run_id in passed_over:
            return ""
        promised = None  # if a device takes one run only, a free one is promised to nobody
        if runs_per_device > 1:
            promised = device_shares.promised_bytes(home, store, machine)
        devices = devices_for(home.run(row.run_id), machine, free_ids, row.gpus, promised)
        if not devices:
            passed_over.add(row.run_id)
        return devices

    def can_start(row: RunRow) -> bool:
        """Return whether a run could start once enough devices are free, so that they are kept for
        it."""
        run = home.run(row.run_id)
        return not missing_secrets(run) and not waiting.why_lease_lapsed(run)

    def claim(row: RunRow) -> bool:
        """Claim a run, if that was not tried before; return whether it was claimed."""
        if row.run_id in passed_over:
            return False
        is_claimed = False
        if waiting.why_lease_lapsed(home.run(row.run_id)):
            lapsed.append(row)
        else:
            is_claimed = _claim(place, row)
        if not is_claimed:
            passed_over.add(row.run_id)
        return is_claimed

    leased = store.lease_next(
        [device.id for device in machine.devices],
        claim=claim,
        choose=choose,
        can_start=can_start,
        runs_per_device=runs_per_device,
        elsewhere={host.compute: host.runs for host in home.user_config().hosts.values()},
    )
    for row in lapsed:
        waiting.end_lapsed(home, store, row)
    return leased


def _claim(place: LocalExecutor, row: RunRow) -> bool:
    """Claim a queued run, and return whether that succeeded: False if it cannot start now, because
    this process lacks secrets or its last attempt is still ending."""
    run = place.home.run(row.run_id)
    if missing_secrets(run):  # it waits for a process that has them
        return False
    return place.claim(run)


def _start(place: LocalExecutor, store: Store, row: RunRow) -> bool:
    """Start a run that has its device, and return whether it was started.

    If the machine cannot start a process, the run is recorded as failed, and False is returned.
    """
    run = place.home.run(row.run_id)
    try:
        place.start(run, place.handle(row))
    except OSError as error:
        outcome.apply(store, run, row, _start_failed_outcome(run, row, error))
        write_status(run, store.get_run(row.run_id))
        return False
    return True


def end_elsewhere(run: RunDir) -> None:
    """Start a process that ends what an ended run has left on another machine.

    Nothing is done if nothing is left there, or if the process that looks after the run lives and
    will do it.
    """
    handle = Handle.read(run)
    if handle is None or handle.phase == "ended" or is_alive(run):
        return
    command = trainer_command(run.home, algorithm="", is_elsewhere=True)
    # OSError: no process can be started. Then the next connection ends the job, or its lease does.
    with contextlib.suppress(OSError):
        spawn_detached([*command, str(run.path), "--tidy"], run.path, run.supervisor_log)


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
    among = frozenset(free_ids)
    free_devices = [device for device in machine.devices if device.id in among]
    free_devices = device_shares.with_room(run, free_devices, promised)
    device_count = min(gpus, len(machine.devices))
    is_shared = any(promised.values())  # whether runs hold devices of this machine
    if not free_devices or (len(free_devices) < device_count and is_shared):
        return ""
    # The devices with the most room first; equal ones in the machine's order.
    free_devices.sort(key=lambda device: promised[device.id] - device.memory_free)
    chosen = _first_of_one_model(free_devices, min(device_count, len(free_devices)))
    if chosen[0].kind == "cpu":
        return free_ids[0]
    if not _may_start_on(run, machine, chosen):
        return ""
    return ",".join(device.id for device in chosen)


def _first_of_one_model(devices: Sequence["Device"], count: int) -> Sequence["Device"]:
    """Return the first `count` devices of one model (of equal product names), or the first `count`
    of all devices if no model has so many."""
    devices_of_model: dict[str, list[Device]] = {}
    for device in devices:
        devices_of_model.setdefault(device.name, []).append(device)
    for same_devices in devices_of_model.values():
        if len(same_devices) >= count:
            return same_devices[:count]
    return devices[:count]


def _may_start_on(run: RunDir, machine: "Hardware", gpus: Sequence["Device"]) -> bool:
    """Return whether a run can start on these free GPUs now.

    It can if they have its minimum of free memory, if waiting would not help, or if deployments
    live, of which idle ones can be stopped.
    """
    config = run.find_config()
    if config is None or not config.least_memory:  # its minimum is not known
        return True
    large_enough = [gpu for gpu in machine.devices if gpu.memory_total >= config.least_memory]
    has_room = all(gpu.memory_free >= config.least_memory for gpu in gpus)
    waiting_helps = len(large_enough) >= len(gpus)
    return has_room or not waiting_helps or bool(deployments.living(run.home))


def awaited_memory(run: RunDir) -> str:
    """Say why a queued run waits although a device is free: it needs several devices, or more
    memory than is free. Returns "" if it waits for neither."""
    # Imported late: asking the driver takes a while.
    from engine.core import hardware  # noqa: PLC0415

    machine = hardware.detect(run.home.root)
    config = run.find_config()
    with Store(run.home) as store:
        runs_on_device = store.runs_on_devices()
        queued_gpus = {row.run_id: row.gpus for row in store.queue()}
        gpus = queued_gpus.get(run.id, 1)  # a run that is not queued any more counts as 1
        promised = device_shares.promised_bytes(run.home, store, machine)
    most_runs = device_shares.runs_per_device(run.home, machine)
    free_devices = [device for device in machine.devices if runs_on_device[device.id] < most_runs]
    device_count = min(gpus, len(machine.devices))
    if device_count > 1 and len(free_devices) < device_count:
        return f"it waits for {device_count} devices: {len(free_devices)} are free, and kept for it"
    free_ids = [device.id for device in free_devices]
    if config is None or not free_devices or devices_for(run, machine, free_ids, gpus, promised):
        return ""
    free_bytes = max(
        min(device.memory_free, device.memory_total - promised[device.id])
        for device in free_devices
    )
    # Beside other runs it gets only what it was planned with; alone its minimum is enough.
    needed_bytes = config.planned_memory if any(promised.values()) else config.least_memory
    return (
        f"it waits for memory: it needs {needed_bytes / 1e9:.1f} GB at least, and other "
        f"processes leave {free_bytes / 1e9:.1f} GB"
    )


def awaited_host(home: Home, row: RunRow) -> str:
    """Say why a queued run for another machine waits, and what ends that; "" if that machine has
    room for it."""
    host_of_compute = {host.compute: host for host in home.user_config().hosts.values()}
    host = host_of_compute.get(row.compute)  # None if config.toml lacks it
    name = row.compute.partition(":")[2]  # "box" for "ssh:box"
    if host is None:
        return (
            f"it waits for {row.compute}, which {home.config_file.name} does not name any more: "
            f"add that again (honesmith hosts add {name}), or cancel the run and submit it for "
            "another place"
        )
    with Store(home.whole) as store:
        run_count = store.runs_on_devices()[row.compute]
    if run_count < host.runs:
        return ""
    return (
        f"it waits for {row.compute}, which has {run_count} of at most {host.runs} runs: one of "
        f"them has to end, or runs of [hosts.{name}] has to be higher"
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
    # Names of variables that hold the keys of endpoints; "" for an endpoint without a key.
    key_names = _keys_of_endpoints(run.home, Path(config.env_dir) / "source")
    if isinstance(config, EvaluateConfig | PromptConfig):
        key_names |= {endpoint.key_env for endpoint in config.endpoints.values()}
    if isinstance(config, DistillConfig) and isinstance(config.teacher, EndpointTeacher):
        key_names.add(config.teacher.key_env)
    unset_keys = [name for name in key_names - {""} if not key_of(run.home.root, name)]
    return missing + sorted(unset_keys)


def _keys_of_endpoints(home: Home, source: Path) -> set[str]:
    """Return the names of the variables with the keys of the endpoints (models behind a URL) that
    an environment may ask; "" stands for an endpoint that needs no key.

    `source` is the environment's folder. Endpoints that config.toml lacks are left out.
    """
    try:
        names = [ref.removeprefix(PREFIX) for ref in read_settings(source).endpoints]
        endpoints = home.user_config().endpoints if names else {}
    except (EnvProblem, UserError):  # the trainer reports it
        return set()
    return {endpoints[name].key_env for name in names if name in endpoints}


def reap(home: Home, place: LocalExecutor | None = None) -> list[str]:
    """Settle every run whose supervisor and trainer died, then start queued runs.

    Such a run is queued again, or fails if that has happened MAX_CONTINUATIONS times without a new
    checkpoint. A run that was stopping, or whose end was recorded, gets that end. In a home that
    cannot be written, nothing is changed. Returns the ids of the runs that were settled. `place` is
    the executor that settles and starts them; None for a new one of this machine.
    """
    home = home.whole
    settled_ids = []
    with Store(home) as store:
        executor = place or LocalExecutor(home, store)
        for row in store.list_runs(limit=10_000, states=UNSETTLED):
            run = home.run(row.run_id)
            if executor.settle(run):
                settled_ids.append(row.run_id)
                if row.is_elsewhere and store.get_run(run.id).state in TERMINAL:
                    # Its supervisor would have told the other machine, and died before it did.
                    end_elsewhere(run)
        has_queued_runs = store.has_queued()
    if has_queued_runs:
        try:
            start_queued(home, place)
        except (OSError, UserError) as error:
            if not cannot_write(error):
                raise
    return settled_ids


def _start_failed_outcome(run: RunDir, row: RunRow, error: OSError) -> outcome.Outcome:
    """Return the outcome of an attempt whose supervisor could not be started because of `error`."""
    return outcome.abandon(
        run,
        row,
        kind="infra",
        reason=f"the supervisor could not be started: {error}",
        hint=outcome.resume_hint(run).after("Free memory, processes or disk."),
    )

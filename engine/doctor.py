"""Checks what is wrong with this machine. Each finding has its remedy.

Checks only look: nothing is repaired, installed or left running.
"""

import importlib.metadata
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.format import counted
from engine.core.hints import Hint, hint_of
from engine.core.reply import Reply
from engine.environments import registry
from engine.home import recovery
from engine.home.rows import HOLDS_DEVICE, OPEN
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.machine.fast_paths.catalogue import FAST_PATHS
from engine.machine.fast_paths.examine import examine_device
from engine.machine.fast_paths.results import PathResult, all_results
from engine.machine.install import venvs
from engine.machine.processes import launcher
from envs.config.problem import EnvProblem
from envs.host.process import isolation_here
from envs.isolation.sandbox import LIMITS

Status = Literal["pass", "warn", "fail"]
GB = 1_000_000_000
_ENOUGH_DISK = 5 * GB  # free space for the checkpoints of a few runs
_LEAST_DISK = GB  # with less free space a run would soon fail
_TORCH_S = 120.0  # loading torch from a cold disk may take a minute
_MOST_FAULTS = 5  # damaged config.json files that one finding lists
KERNELS = "HONESMITH_KERNELS"  # engine/worker/ops/fused_ops.py reads it
# flock and a write-ahead log are unsafe or unknown on these.
NETWORK_FILESYSTEMS = ("nfs", "cifs", "smb", "lustre", "glusterfs", "ceph", "9p", "fuse.sshfs")
# Imports torch, because a library that it needs may be missing. Of the others only the version is
# read: they are plain Python, and importing them would take seconds.
VERSIONS = """
import torch
from importlib.metadata import PackageNotFoundError, version
version("peft")
try:
    liger = version("liger-kernel")
except PackageNotFoundError:
    liger = ""
print(torch.__version__, version("transformers"), liger)
"""


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        name: what was checked.
        detail: what was seen.
        fix: what to do about it; "" if nothing is to be done.
    """

    name: str
    status: Status
    detail: str
    fix: str | Hint = ""


def examine(
    home: Home,
    mounts: Path = Path("/proc/mounts"),
    report_check: Callable[[Reply], None] = lambda _: None,
) -> Reply:
    """Make every check on the home and this machine.

    Returns a `summary`, the number of findings that `failed`, and all findings in `checks`.

    Args:
        mounts: the file that lists the mounted file systems.
        report_check: called with each finding as soon as it is known, in the form that it has in
            `checks`.
    """
    findings: list[Finding] = []
    checks: list[Reply] = []
    for check in (*CHECKS, partial(filesystem, mounts=mounts)):
        for finding in _findings_of(check, home):
            reply = _as_reply(finding)
            findings.append(finding)
            checks.append(reply)
            report_check(reply)
    failed_count = sum(finding.status == "fail" for finding in findings)
    return {"summary": _summary(findings), "failed": failed_count, "checks": checks}


def examine_fast_paths(home: Home, report_check: Callable[[Reply], None] = lambda _: None) -> Reply:
    """Try every fast path (faster way to compute) on each device of this machine, and store which
    work; runs leave out the others. Takes about a minute per device, and more if vLLM is installed.

    `report_check` is called with each finding as soon as it is known. Returns what `examine`
    returns. Raises UserError: DEVICE_BUSY while a run holds a device, NO_TORCH if no interpreter
    has torch, DEVICE_UNUSABLE if a device cannot be used.
    """
    _refuse_while_held(home)
    findings: list[Finding] = []

    def add_finding(finding: Finding) -> None:
        """Store a finding and report it."""
        findings.append(finding)
        report_check(_as_reply(finding))

    devices = hardware.detect(home.root).devices
    gpus = [device for device in devices if device.kind == "cuda"]
    # Device name -> results that hold for all devices of that name.
    shared_results: dict[str, list[PathResult]] = {}

    def add_result(result: PathResult) -> None:
        """Store the result of one fast path as a finding, and report it."""
        add_finding(_finding_of_path(result))

    for device in devices:
        if device.kind == "cpu":
            add_finding(
                Finding("device", "warn", f"{device.name}: no GPU", "What a CPU has is tried.")
            )
        results = examine_device(
            home,
            device,
            report=add_result,
            all_gpus=gpus,
            known_results=shared_results.get(device.name, ()),
        )
        # `once`: one trial of the path holds for all devices with the same name.
        shared_results[device.name] = [path for path in results.paths if FAST_PATHS[path.name].once]
    return {
        "summary": _summary_of_paths(findings),
        "failed": sum(finding.status == "fail" for finding in findings),
        "checks": [_as_reply(finding) for finding in findings],
    }


def _refuse_while_held(home: Home) -> None:
    """Raise UserError DEVICE_BUSY while a run holds a device: it would falsify measured times."""
    with Store(home) as store:
        holding = store.list_runs(limit=1, states=HOLDS_DEVICE)
    if holding:
        raise UserError(
            "DEVICE_BUSY",
            f"{holding[0].run_id} holds a device, so nothing can be timed",
            hint=f"Wait for it (honesmith wait {holding[0].run_id}) and call again.",
            retryable=True,
        )


def _finding_of_path(result: PathResult) -> Finding:
    """Turn the result of trying a fast path (a faster way to compute) into a finding.

    A path that is switched off is only a warning, because runs work without it.
    """
    if result.state == "on":
        measurements = []
        if result.speedup is not None:
            measurements.append(f"{result.speedup:.1f} times as fast as the plain way")
        if result.difference is not None:
            measurements.append(
                f"differs by {result.difference:.0e} ({result.allowed:.0e} is rounding)"
            )
        return Finding(result.name, "pass", f"{_title_of_path(result)}: {', '.join(measurements)}")
    if result.state == "skipped":
        return Finding(result.name, "pass", f"{_title_of_path(result)}: not tried: {result.reason}")
    instead = FAST_PATHS[result.name].without  # what a worker does without the path, in words
    return Finding(
        result.name,
        "warn",
        f"{_title_of_path(result)}: switched off: {result.reason}",
        f"Runs on this device do without it: {instead}.",
    )


def _title_of_path(result: PathResult) -> str:
    """Return the name of the fast path in a few words."""
    return FAST_PATHS[result.name].title


def _summary_of_paths(findings: Sequence[Finding]) -> str:
    """Say in one sentence how many of the fast paths (faster ways to compute) are switched off.

    Findings that are not about a fast path, such as a missing GPU, are not counted.
    """
    paths = [finding for finding in findings if finding.name in FAST_PATHS]
    off_count = sum(finding.status == "warn" for finding in paths)
    if off_count:
        return f"{off_count} of {counted(len(paths), 'fast path')} switched off; runs do without."
    return f"All {counted(len(paths), 'fast path')} that can be tried here work."


def _summary(findings: Sequence[Finding]) -> str:
    """Say in one sentence how many findings failed; if none did, how many are warnings."""
    failed_count = sum(finding.status == "fail" for finding in findings)
    if failed_count:
        return f"{failed_count} of {counted(len(findings), 'check')} failed."
    warned_count = sum(finding.status == "warn" for finding in findings)
    if warned_count:
        return f"Ready to train; {counted(warned_count, 'warning')}."
    return "Ready to train."


def _as_reply(finding: Finding) -> Reply:
    """Return a finding as a JSON object for the reply, without empty fields."""
    fields = {
        "name": finding.name,
        "status": finding.status,
        "detail": finding.detail,
        **hint_of(finding.fix).as_fields("fix"),
    }
    return {name: value for name, value in fields.items() if value}


# Each check below is a function that takes the home and yields findings. If it raises, the failure
# is reported under the function's name.


def python(home: Home) -> Iterator[Finding]:
    """Check that this Python is new enough, 3.11 at least.

    `home` is not used: every check takes it, so that one loop can call them all.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    status: Status = "pass" if sys.version_info >= (3, 11) else "fail"
    yield Finding("python", status, f"{version} at {sys.executable}", "Use Python 3.11 or newer.")


def sdk(home: Home) -> Iterator[Finding]:
    """Check that the installed version of the MCP SDK is one that this server supports.

    `home` is not used: every check takes it, so that one loop can call them all.
    """
    version = importlib.metadata.version("mcp")
    numbers = tuple(int(number) for number in version.split(".")[:2])  # major and minor version
    status: Status = "pass" if (2, 3) <= numbers < (3, 0) else "fail"
    yield Finding("mcp", status, version, "pip install 'mcp[cli]>=2.3,<3'")


def storage(home: Home) -> Iterator[Finding]:
    """Check that the disk of the home has room, and that other users cannot read the home."""
    free_bytes = shutil.disk_usage(home.root).free
    status: Status = "fail"
    if free_bytes > _ENOUGH_DISK:
        status = "pass"
    elif free_bytes > _LEAST_DISK:
        status = "warn"
    detail = f"{home.root}, {free_bytes / GB:.1f} GB free"
    yield Finding("home", status, detail, "Free some space or move HONESMITH_HOME.")
    others_mode = home.root.stat().st_mode & 0o077  # the permissions of group and others
    if others_mode:
        yield Finding(
            "home mode", "warn", "others on this machine may read it", f"chmod 700 {home.root}"
        )


def filesystem(home: Home, mounts: Path) -> Iterator[Finding]:
    """Check that the home lies on a local file system: locks and the database cannot be trusted on
    a network file system. Yields nothing if the list of mounts cannot be read.

    Args:
        mounts: a file with a line for each mount: device, mount point, kind of file system.
    """
    try:
        lines = mounts.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    kind = _kind_of_filesystem(lines, str(home.root.resolve()))
    if kind.startswith(NETWORK_FILESYSTEMS):
        yield Finding(
            "filesystem",
            "fail",
            f"the home lies on {kind}, where locks cannot be trusted",
            "Point HONESMITH_HOME at a local disk.",
        )
    else:
        yield Finding("filesystem", "pass", kind)


def _kind_of_filesystem(mounts: Sequence[str], folder: str) -> str:
    """Return the kind of the file system that holds `folder`, such as "ext4"; "unknown" if no mount
    holds it.

    Args:
        mounts: a line for each mount: device, mount point, kind of file system.
    """
    longest_point, kind = "", "unknown"
    for line in mounts:
        fields = line.split()
        if len(fields) < 3:  # not a line about a mount
            continue
        point, point_kind = fields[1], fields[2]
        prefix = point if point == "/" else f"{point}/"
        holds_folder = folder == point or folder.startswith(prefix)
        # Mounts are nested: the one with the longest path above the folder holds it.
        if holds_folder and len(point) > len(longest_point):
            longest_point, kind = point, point_kind
    return kind


def database(home: Home) -> Iterator[Finding]:
    """Check that the database is intact.

    Warns if it was damaged once and was made again from the run folders. Raises UserError if it is
    damaged and cannot be mended now.
    """
    with Store(home) as store:
        store.check()
        count = len(store.list_runs(limit=1000))  # enough to show that rows can be read
    detail = f"intact, {counted(count, 'run')}, SQLite {sqlite3.sqlite_version}"
    # The copies of earlier databases that were found damaged.
    damaged_names = [path.name for path in home.damaged_databases()]
    if damaged_names:
        yield Finding(
            "database",
            "warn",
            f"{detail}; found damaged before and made again from the run folders "
            f"({', '.join(damaged_names)})",
            "Look for what harms files on this disk; then delete what was kept.",
        )
    else:
        yield Finding("database", "pass", detail)


def configuration(home: Home) -> Iterator[Finding]:
    """Check that config.toml is valid, or missing. Raises UserError if it is invalid."""
    home.user_config()
    detail = "valid" if home.config_file.exists() else "not written"
    yield Finding("config.toml", "pass", detail)


def isolation(home: Home) -> Iterator[Finding]:
    """Check how user code is confined on this machine, and what cannot be prevented here. A
    confined process is run to find out."""
    try:
        confinement = isolation_here(registry.sandbox_of(home))
    except EnvProblem as problem:
        yield Finding("isolation", "fail", problem.message, problem.hint)
        return
    detail = f"{confinement.level}: {', '.join(confinement.holds)}"
    if confinement.gaps:
        detail += f"; not prevented: {'; '.join(confinement.gaps)}"
    # The levels from the weakest to the strongest: limits, no-namespaces, full. `_findings_of`
    # removes the advice from a finding that passes.
    advice = (
        "Landlock, seccomp and user namespaces (Linux 6.12 or newer) hold more; "
        'sandbox = "required" in config.toml refuses to run below no-namespaces.'
    )
    status = "warn" if confinement.level == LIMITS else "pass"
    yield Finding("isolation", status, detail, advice)


def devices(home: Home) -> Iterator[Finding]:
    """List the devices of this machine; warn if there is no GPU."""
    machine = hardware.detect(home.root)
    names = ", ".join(f"{device.id} {device.name}" for device in machine.devices)
    if machine.device.kind == "cpu":  # `device` is the one that runs are planned for
        yield Finding(
            "devices",
            "warn",
            f"{names}; no GPU, {counted(machine.cores, 'core')}, {machine.ram_total / GB:.0f} GB",
            "Small models (pebble) train well here; larger ones need an NVIDIA GPU.",
        )
    else:
        yield Finding("devices", "pass", names)


def training(home: Home) -> Iterator[Finding]:
    """Check that there is an interpreter that can load torch, and tell which kernels it would train
    with.

    torch is loaded in a process of its own, because this process must stay without it.
    """
    interpreter = launcher.worker_python(home)
    process = subprocess.run(
        [interpreter, "-P", "-c", VERSIONS],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=_TORCH_S,
        check=False,
    )
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or ["no output"]
        # The last line of a traceback is the error itself; it may be very long.
        yield Finding("training", "fail", lines[-1][:300], "honesmith setup --again")
        return
    # VERSIONS prints these; the third is missing if Liger is not installed.
    torch, transformers, *optional = process.stdout.split()
    liger = optional[0] if optional else ""
    yield Finding("training", "pass", f"torch {torch}, transformers {transformers}")
    machine = hardware.detect(home.root)
    yield Finding("kernels", "pass", _kernels_in_words(machine, liger))
    if machine.device.kind != "cpu":
        yield _gpu_finding(Path(interpreter), machine.device)
        yield from _compiler_finding(liger)


def _compiler_finding(liger: str) -> Iterator[Finding]:
    """Yield a warning if Triton, which compiles Liger's kernels when they are first used, finds no
    C compiler.

    `liger` is the version of Liger; "" if it is not installed.
    """
    compilers = ("gcc", "clang", "cc")
    has_compiler = bool(os.environ.get("CC")) or any(shutil.which(name) for name in compilers)
    if liger and not has_compiler:
        yield Finding(
            "compiler",
            "warn",
            "no C compiler is on PATH: Triton cannot build Liger's kernels, torch's own are used",
            "Install gcc (Debian, Ubuntu: apt-get install gcc), then honesmith doctor --gpu.",
        )


def _gpu_finding(interpreter: Path, gpu: hardware.Device) -> Finding:
    """Check that torch computes on the GPU, by multiplying two numbers there.

    `gpu` is the device to try. `interpreter` is the Python that has torch.
    """
    complaint = venvs.complaint(interpreter, venvs.GPU_PROOF, _TORCH_S)  # None: the proof worked
    gpu_and_driver = f"{gpu.id} {gpu.name}, {hardware.driver()}"
    if complaint is None:
        return Finding("gpu", "pass", f"{gpu_and_driver}: torch computes on it")
    fix = "Install a driver that serves this CUDA (580 or newer for CUDA 13), or a torch for the "
    fix += "driver's CUDA: honesmith setup --again"
    return Finding("gpu", "fail", f"{complaint}; {gpu_and_driver}", fix)


def _kernels_in_words(machine: hardware.Hardware, liger: str) -> str:
    """Say which kernels would compute the operations between matrix products in our own forward
    pass.

    A trial decides whether a model gets Liger's kernels: they must give the same numbers as torch.

    Args:
        liger: the version of the Liger kernels, which the extra `gpu` installs; "" for none.
    """
    chosen = os.environ.get(KERNELS, "")  # the user's choice; "" leaves it to us
    if machine.device.kind == "cpu" or chosen == "torch":
        return "torch"
    if chosen == "compiled":
        return "torch, compiled for long runs"
    if liger:
        return f"liger {liger}, where a model's trial finds torch's numbers; else torch"
    return "torch; the extra gpu brings Liger's, one launch where torch makes several"


def fast_paths(home: Home) -> Iterator[Finding]:
    """List the fast paths (faster ways to compute) that were switched off on the devices of this
    home, because they do not work there.

    Only the newest results of each device count. Yields nothing if no device was tried.
    """
    seen_devices = set()
    for results in all_results(home):  # the newest first
        device = results.identity["device"]
        if device in seen_devices:
            continue
        seen_devices.add(device)
        if results.off:  # name of a fast path -> why it is switched off
            reasons = "; ".join(f"{name}: {reason}" for name, reason in results.off.items())
            yield Finding(
                "fast paths",
                "warn",
                f"switched off on {device}: {reasons}",
                "After a change of driver or libraries: honesmith doctor --gpu tries again.",
            )
        else:
            yield Finding("fast paths", "pass", f"{len(results.paths)} tried on {device}")


def tools(home: Home) -> Iterator[Finding]:
    """Check that npx and uv are on PATH. Only the inspector `mcp dev` needs them.

    `home` is not used: every check takes it, so that one loop can call them all.
    """
    missing = [name for name in ("npx", "uv") if shutil.which(name) is None]
    if missing:
        yield Finding(
            "inspector",
            "warn",
            f"`mcp dev` needs {' and '.join(missing)} on PATH; nothing else does",
            "pip install uv; Node.js 20 or newer brings npx",
        )
    else:
        yield Finding("inspector", "pass", "npx and uv are there")


def processes_of_runs(home: Home) -> Iterator[Finding]:
    """Check that every run that holds a device has a living process.

    Of the runs that have not ended, the newest 50 are read; the finding "N open" counts only these.
    Also yields a warning for each of the last three failed runs, with its remedy.
    """
    with Store(home) as store:
        open_runs = store.list_runs(limit=50, states=OPEN)
        failed_runs = store.list_runs(limit=3, states=("failed",))
    abandoned = [
        row.run_id
        for row in open_runs
        if row.state in HOLDS_DEVICE and not launcher.is_alive(home.run(row.run_id))
    ]
    if abandoned:
        yield Finding(
            "runs",
            "warn",
            f"nobody carries on {', '.join(abandoned)}",
            "honesmith status",
        )
    else:
        yield Finding("runs", "pass", f"{len(open_runs)} open")
    for row in failed_runs:
        detail = f"{row.run_id} failed ({row.reason_kind}): {row.reason}"
        yield Finding("last failures", "warn", detail[:400], row.hint)  # a reason may quote a log


def run_files(home: Home) -> Iterator[Finding]:
    """Check that the config.json of every run can be read.

    If the database were lost, a run with a damaged config.json could not be listed again.
    """
    faults = recovery.damaged_configs(home)  # a text for each damaged file
    if not faults:
        yield Finding("run files", "pass", "every config.json can be read")
        return
    listed = "; ".join(faults[:_MOST_FAULTS])
    if len(faults) > _MOST_FAULTS:
        listed += f"; and {counted(len(faults) - _MOST_FAULTS, 'other')}"
    yield Finding(
        "run files",
        "warn",
        f"{listed}. Estimates learn nothing from such a run, and where the database is made again "
        "from the run folders it has no row",
        "Put the file back from a copy, or delete the run's folder.",
    )


Check = Callable[[Home], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (
    python,
    sdk,
    storage,
    database,
    configuration,
    isolation,
    devices,
    training,
    fast_paths,
    tools,
    processes_of_runs,
    run_files,
)


def _findings_of(check: Check, home: Home) -> list[Finding]:
    """Make a check and return its findings. The fix is removed from findings that passed.

    A check that raises becomes one failed finding, named after the check's function.
    """
    # `filesystem` is a `partial` and the only check without a name. In tests a check may be a
    # lambda, whose name is "<lambda>".
    name = getattr(check, "__name__", "filesystem").strip("<>")
    try:
        findings = list(check(home))
    except UserError as error:
        return [Finding(name, "fail", error.message, error.advice)]
    # OSError: a file or a program is missing. SubprocessError: a program took too long. ValueError:
    # a file or an output has another form than expected.
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [Finding(name, "fail", f"{type(error).__name__}: {error}")]
    for index, finding in enumerate(findings):
        if finding.status == "pass":
            findings[index] = replace(finding, fix="")
    return findings

"""The sandbox around user code: which layers hold on this machine, found by trying to get out.

The floor, everywhere: an own process, scrubbed variables, limits. On top of it, where the kernel
has them, Landlock and seccomp (level `no-namespaces`), and around those namespaces (level `full`).
A level is what the self-test inside found, never what a version promises.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from envs.config.problem import EnvProblem
from envs.config.settings import Limits
from envs.isolation import confine, kernel, landlock, packages, seccomp

FULL, NO_NAMESPACES, LIMITS = "full", "no-namespaces", "limits"
CANARY = "canary"

# What an interpreter and its libraries read; nothing here is private to a user.
_SYSTEM = (
    "/usr /lib /lib32 /lib64 /bin /sbin /nix/store /gnu/store"
    " /etc/ld.so.cache /etc/ld.so.conf /etc/ld.so.conf.d /etc/localtime /etc/timezone"
    " /etc/ssl /etc/pki /etc/ca-certificates /etc/crypto-policies"
    " /etc/resolv.conf /etc/hosts /etc/nsswitch.conf /etc/host.conf /etc/gai.conf"
    " /etc/services /etc/protocols /etc/passwd /etc/group /etc/mime.types /etc/alternatives"
    " /etc/os-release /etc/debian_version /etc/lsb-release /etc/redhat-release"
    " /etc/fedora-release /sys/devices/system/cpu"
).split()
# Without a /proc of its own: what says nothing of other processes.
_PROC = (
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/loadavg",
    "/proc/uptime",
    "/proc/version",
    "/proc/filesystems",
    "/proc/sys/vm/overcommit_memory",
)
_HERE = str(Path(__file__).resolve().parents[1])
_AF_UNIX, _AF_INET = 1, 2
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True)
class Sandbox:
    """What the owner of this machine wants around user code.

    Args:
        mode: `auto` takes what works, `required` refuses to run below `no-namespaces`, `off` is
            the floor alone.
        allow_root: whether user code may run as root with nothing but limits around it.
        hidden: folders that no environment may read, such as the home.
    """

    mode: str = "auto"
    allow_root: bool = False
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reach:
    """What a process may reach beside the system's files and its own box.

    Args:
        readable: folders and files to read and run.
        writable: folders to write in.
        ports: the only TCP ports to connect to; empty: what its limits say of the network.
    """

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()


@dataclass(frozen=True)
class Held:
    """What confines user code in this process: its level, the measures in force, the gaps."""

    level: str
    holds: tuple[str, ...]
    gaps: tuple[str, ...]

    def __str__(self) -> str:
        """In words, the level first."""
        return f"{self.level}: {', '.join(self.holds)}"


def interpreter_folders(more: Iterable[str] = ()) -> tuple[str, ...]:
    """What this interpreter, its packages and libraries need to read beside the system's files.

    Args:
        more: folders of packages that are not on its path yet.
    """
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    folders = {os.path.realpath(path) for path in (*prefixes, *packages.on_path(), *more)}
    folders.update(_library_folders())
    return tuple(sorted(folders))


def _library_folders() -> set[str]:
    folders = set(filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        folders.update(
            os.path.dirname(path) for line in maps if ".so" in (path := line[73:].strip())
        )
    return {os.path.realpath(path) for path in folders if path.startswith("/")}


def close(
    limits: Limits,
    sandbox: Sandbox,
    box: Path,
    uid: int | None,
    spaces: str,
    offline: bool,
    reach: Reach,
) -> Held:
    """Confines this process by every measure that works here, then tests whether it can get out.

    Args:
        uid: the uid to drop to, None to stay.
        spaces: whose namespaces this process is in: "", "own" or "bubblewrap".
        offline: whether its network namespace is empty.
        reach: what it needs beside the system's files and `box`.
    """
    holds = ["own process", "clean environment", *confine.apply(limits, uid, spaces != "")]
    if sandbox.mode == "off":
        holds.append("no network" if offline else "network open")
        return Held(LIMITS, tuple(holds), ('config.toml says sandbox = "off"',))
    kernel.drop_capabilities()
    own_proc = spaces != "" and _fresh_proc()
    readable = _readable(box, own_proc, reach.readable)
    shared = ["/dev/shm"] if spaces == "own" and own_proc else []
    writable = [str(box / "work"), *_DEVICES, *shared, *reach.writable]
    abi, filtered, gaps = 0, False, []
    with contextlib.suppress(OSError):
        abi = landlock.restrict(readable, writable, limits.network, reach.ports)
    with contextlib.suppress(OSError):
        apart = uid is not None or spaces != "" or abi >= landlock.HOLDS_SIGNALS
        seccomp.install(
            network=limits.network, signals=apart, truncate=abi >= landlock.HOLDS_TRUNCATION
        )
        filtered = True
    out = escapes(box, limits.network, sandbox.hidden)
    if abi and not {"read", "write"} & out:
        holds.append(f"own files alone (Landlock {abi})")
    else:
        abi = 0
        whose = "of this user" if uid is None else "that everybody may read"
        gaps.append(f"files {whose} can be reached")
    if filtered and "socket" not in out:
        holds.append("system calls filtered")
    else:
        filtered = False
        gaps.append("no system call is refused" + ("" if offline else ", the network is open"))
    if spaces:
        holds.append("own namespaces" + (" (bubblewrap)" if spaces == "bubblewrap" else ""))
    holds.append("no network" if offline or (filtered and not limits.network) else "network open")
    gaps += [f"{folder} can be read" for folder in sandbox.hidden if folder in out]
    boxed = abi and filtered and not out
    level = (FULL if spaces else NO_NAMESPACES) if boxed else LIMITS
    return Held(level, tuple(holds), (*gaps, *_gaps(box, uid, spaces)))


def _gaps(box: Path, uid: int | None, spaces: str) -> Iterator[str]:
    """What this platform cannot prevent, whatever the other layers hold, in words."""
    if not spaces:
        yield "what user code started outlives a warden that is killed itself"
    if not _bounded(box):
        yield "how much its files take together is not limited"
    if uid is None and not _read_only():
        yield "modes and times of this user's other files can be changed"
    if os.geteuid() == 0:
        yield "user code runs as root, without its powers; its processes are not counted"


def refusal(held: Held, sandbox: Sandbox) -> EnvProblem | None:
    """Why user code must not start in this process, None where it may."""
    lacking = "; ".join(held.gaps)
    if sandbox.mode == "required" and held.level == LIMITS:
        return EnvProblem(
            "ENV_SANDBOX",
            f'config.toml says sandbox = "required", and here user code is held by limits alone: '
            f"{lacking}",
            hint="Use a kernel with Landlock and seccomp (Linux 5.13 or newer, x86_64 or "
            'aarch64), or set sandbox = "auto" in config.toml.',
        )
    if os.geteuid() == 0 and held.level == LIMITS and not sandbox.allow_root:
        return EnvProblem(
            "ENV_SANDBOX",
            f"user code would run as root with limits alone: {lacking}",
            hint="Run the server as an ordinary user, or set allow_root = true in config.toml "
            "where nothing on this machine is worth protecting.",
        )
    return None


def escapes(box: Path, network: bool, hidden: Iterable[str] = ()) -> set[str]:
    """What user code in this process could do: read, write, socket, and what of `hidden` it could
    list. All of it is tried."""
    out = set()
    with contextlib.suppress(OSError), open(box / CANARY, "rb"):
        out.add("read")
    with contextlib.suppress(OSError), open(box / "escaped", "xb"):
        out.add("write")
    # Some versions of Landlock look at neither; a file that cannot be read is cut all the same.
    for access in (os.O_RDONLY, 3):
        with contextlib.suppress(OSError):
            os.close(os.open(box / CANARY, access | os.O_TRUNC))
            out.add("write")
    for family in (_AF_UNIX,) if network else (_AF_UNIX, _AF_INET):
        if (made := kernel.libc().socket(family, 1, 0)) >= 0:
            os.close(made)
            out.add("socket")
    for folder in hidden:
        with contextlib.suppress(OSError):
            os.listdir(folder)
            out.add(folder)
    return out


def _readable(box: Path, own_proc: bool, wanted: Iterable[str]) -> list[str]:
    needed = [path for path in wanted if Path(path) not in box.parents]
    proc = ("/proc",) if own_proc else _PROC
    certificates = [os.environ["SSL_CERT_FILE"]] if os.environ.get("SSL_CERT_FILE") else []
    return [*_SYSTEM, *needed, *proc, *certificates, _HERE, str(box / "source")]


def _bounded(box: Path) -> bool:
    """Whether the folder for files is a file system of its own."""
    with contextlib.suppress(OSError):
        return os.stat(box / "work").st_dev != os.stat(box).st_dev
    return False


def _read_only() -> bool:
    return bool(os.statvfs("/").f_flag & os.ST_RDONLY)


def _fresh_proc() -> bool:
    """Whether /proc shows the processes of our own namespace alone."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self") == str(os.getpid())
    return False


def inside(folder: str) -> tuple[list[str], list[str]]:
    """(paths to read, paths to write) of a second box inside this one, which writes `folder`."""
    return [*_SYSTEM, *interpreter_folders(), *_PROC, _HERE], [folder, *_DEVICES]

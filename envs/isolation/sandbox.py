"""The sandbox around user code: which layers hold on this machine, found by trying to break out.

User code always has a process of its own, scrubbed environment variables and limits (level
`limits`). If the kernel supports them, Landlock and seccomp are added (level `no-namespaces`), and
namespaces around those (level `full`). The level is what the self-test inside has shown, never what
a kernel version promises.
"""

import contextlib
import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from envs.config.problem import EnvProblem
from envs.config.settings import Limits
from envs.isolation import confine, kernel, landlock, packages, seccomp

FULL, NO_NAMESPACES, LIMITS = "full", "no-namespaces", "limits"
# The gap of a process that should reach its gateway alone.
OPEN_NETWORK = "the machine's network can be reached, not the gateway or its own server alone"
CANARY = "canary"  # the file with which the self-test tries whether it can reach the box

# Files that an interpreter and its libraries read; none of them is private to a user.
_SYSTEM = (
    "/usr /lib /lib32 /lib64 /bin /sbin /nix/store /gnu/store"
    " /etc/ld.so.cache /etc/ld.so.conf /etc/ld.so.conf.d /etc/localtime /etc/timezone"
    " /etc/ssl /etc/pki /etc/ca-certificates /etc/crypto-policies"
    " /etc/resolv.conf /etc/hosts /etc/nsswitch.conf /etc/host.conf /etc/gai.conf"
    " /etc/services /etc/protocols /etc/passwd /etc/group /etc/mime.types /etc/alternatives"
    " /etc/os-release /etc/debian_version /etc/lsb-release /etc/redhat-release"
    " /etc/fedora-release /sys/devices/system/cpu"
).split()
# Readable for a process without a /proc of its own: these say nothing about other processes.
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
_ENVS = str(Path(__file__).resolve().parents[1])  # the folder of the package `envs`
_AF_UNIX, _AF_INET = 1, 2
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True)
class Sandbox:
    """The isolation of user code that the owner of this machine wants.

    Args:
        mode: `auto` uses every layer that works, `required` refuses to run below the level
            `no-namespaces`, `off` sets the limits alone.
        allow_root: whether user code may run as root with nothing but limits around it.
        hidden: folders that no environment may read, such as the home folder of Honesmith.
    """

    mode: str = "auto"
    allow_root: bool = False
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reach:
    """What a process may reach besides the system's files and its own box (its private folder).

    Without a network by its limits, a process can connect only to its gateway and its own server,
    over TCP.

    Args:
        readable: folders and files to read and run.
        writable: folders to write in.
        ports: the only TCP ports to connect to; if empty, the network setting of its limits
            decides.
        serves: whether it starts a server on loopback for its own use.
        gateway: the port of the trainer's HTTP server for rollouts, 0 for none.
        server: the port of its own server, on which it may also listen, 0 for none.
        rooms: paths right below "/" at which it finds empty folders of its own. They need
            namespaces; without them it finds what the machine has there.
    """

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    serves: bool = False
    gateway: int = 0
    server: int = 0
    rooms: tuple[str, ...] = ()

    @property
    def own_ports(self) -> tuple[int, ...]:
        """The ports of its gateway and its server: those it may connect to even without a
        network."""
        return tuple(port for port in (self.gateway, self.server) if port)


@dataclass(frozen=True)
class Confinement:
    """How user code in this process is confined.

    Attributes:
        level: FULL, NO_NAMESPACES or LIMITS, as the self-test has shown.
        holds: the measures in force, in words.
        gaps: what user code can still do, in words.
    """

    level: str
    holds: tuple[str, ...]
    gaps: tuple[str, ...]

    def __str__(self) -> str:
        """Return one line for a person, the level and the measures: "limits: own process"."""
        return f"{self.level}: {', '.join(self.holds)}"


def interpreter_folders(package_folders: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the folders that a process of this interpreter must be able to read besides system
    files.

    These are the folders of the interpreter, its packages and its shared libraries, as sorted real
    paths.

    Args:
        package_folders: folders of packages that are not on `sys.path` yet.
    """
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    paths = (*prefixes, *packages.folders_on_path(), *package_folders)
    folders = {os.path.realpath(path) for path in paths}
    folders.update(_library_folders())
    return tuple(sorted(folders))


def _library_folders() -> set[str]:
    """Return the folders of shared libraries, as real paths: those in LD_LIBRARY_PATH and those of
    the libraries that this process has loaded."""
    folders = set(os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    # In a line of /proc/self/maps the path of the mapped file begins at column 73.
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            path = line[73:].strip()
            if ".so" in path:
                folders.add(os.path.dirname(path))
    # Entries of LD_LIBRARY_PATH that are relative or empty are left out.
    return {os.path.realpath(path) for path in folders if path.startswith("/")}


def confine_process(
    limits: Limits,
    sandbox: Sandbox,
    box: Path,
    uid: int | None,
    spaces: str,
    offline: bool,
    reach: Reach,
) -> Confinement:
    """Confine this process for good by every measure that works on this machine.

    Afterwards a self-test tries what must now be impossible; a measure counts only if this attempt
    fails. Returns the level, the measures that hold and the gaps that remain.

    There are three cases of network: `limits.network` allows the machine's; without it nothing can
    be reached; or, if `reach` names a gateway or a server of its own, only their ports.

    Args:
        limits: the resources the process may use.
        sandbox: the isolation that the owner wants. `mode` "off" sets the limits alone.
        box: the private folder of this process: `source` may be read, `work` written, and `canary`
            must stay out of reach.
        uid: the uid to change to; None keeps the present user.
        spaces: who made the namespaces that this process is in: "" for none, "own" or "bubblewrap".
        offline: whether its network namespace is empty.
        reach: what else it needs besides the system's files and `box`.
    """
    holds = ["own process", "clean environment"]  # the measures in force, in words
    # The kernel limits processes per user; inside namespaces it counts only the processes there.
    has_namespaces = spaces != ""
    holds += confine.apply(limits, uid, counted_apart=has_namespaces)
    if sandbox.mode == "off":  # the owner wants no more than limits
        holds.append("no network" if offline else "network open")
        return Confinement(LIMITS, tuple(holds), ('config.toml says sandbox = "off"',))
    kernel.drop_capabilities()
    abi, has_filter = _restrict(limits, box, uid, spaces, reach)
    has_own_ports_only = bool(reach.own_ports) and not limits.network
    may_make_sockets = limits.network or has_own_ports_only
    escaped = escapes(box, may_make_sockets, sandbox.hidden)
    if has_own_ports_only and not offline and _can_connect_elsewhere():
        escaped.add("network")
    test = _SelfTest(abi, has_filter, escaped)
    holds += _measures(test, spaces)
    holds.append(_network_in_words(test, limits, offline, reach))
    gaps = _gaps_of_self_test(test, sandbox.hidden, uid, offline)
    gaps += _gaps_beside_filters(box, uid, spaces)
    return Confinement(_level(test, spaces), tuple(holds), tuple(gaps))


def _network_in_words(test: "_SelfTest", limits: Limits, offline: bool, reach: Reach) -> str:
    """Return in words which network user code has: none, its own ports alone, or "network open".

    `offline` says whether the network namespace of the process is empty. Without one, only the
    seccomp filter keeps a process from the network, by refusing sockets.
    """
    if limits.network:
        return "no network" if offline else "network open"
    if reach.own_ports:
        return "network open" if "network" in test.escaped else _ports_in_words(reach)
    return "no network" if offline or test.calls_refused else "network open"


def _ports_in_words(reach: Reach) -> str:
    """Return the measure on the network of a process that can reach only its gateway and its own
    server, e.g. "no network but the gateway"."""
    allowed = []
    if reach.gateway:
        allowed.append("the gateway")
    if reach.server:
        allowed.append("its own server")
    return f"no network but {' and '.join(allowed)}"


@dataclass(frozen=True)
class _SelfTest:
    """The result of the self-test; a measure counts only if the test could not get around it.

    Attributes:
        abi: the version of Landlock in force, 0 for none.
        has_filter: whether the seccomp filter was installed.
        escaped: what user code could still do, as returned by `escapes`.
    """

    abi: int
    has_filter: bool
    escaped: set[str]

    @property
    def files_confined(self) -> bool:
        """Whether Landlock keeps this process from files that it has no right to."""
        return self.abi > 0 and self.escaped.isdisjoint({"read", "write"})

    @property
    def calls_refused(self) -> bool:
        """Whether the seccomp filter is installed and refuses system calls."""
        return self.has_filter and "socket" not in self.escaped


def _measures(test: _SelfTest, spaces: str) -> list[str]:
    """Return in words the measures in force besides the limits.

    `spaces` says who made the namespaces of this process: "" for none, "own" or "bubblewrap".
    """
    measures = []
    if test.files_confined:
        measures.append(f"own files alone (Landlock {test.abi})")
    if test.calls_refused:
        measures.append("system calls filtered")
    if spaces == "bubblewrap":
        measures.append("own namespaces (bubblewrap)")
    elif spaces:
        measures.append("own namespaces")
    return measures


def _level(test: _SelfTest, spaces: str) -> str:
    """Return how far user code is confined: FULL, NO_NAMESPACES or LIMITS (the least).

    `spaces` is "" if the process is in no namespaces.
    """
    # Anything in `escaped` lowers the level, e.g. a hidden folder that can be read.
    has_both_layers = test.files_confined and test.calls_refused
    if not has_both_layers or test.escaped:
        return LIMITS
    return FULL if spaces else NO_NAMESPACES


def _gaps_of_self_test(
    test: _SelfTest, hidden: Iterable[str], uid: int | None, offline: bool
) -> list[str]:
    """Return in words the gaps that the self-test has shown: what user code can still do.

    Args:
        test: the result of the self-test.
        hidden: folders that must not be readable; those in `test.escaped` were readable.
        uid: the uid this process changed to, None if it kept its user.
        offline: whether its network namespace is empty.
    """
    gaps = []
    if not test.files_confined:
        gaps.append(_files_gap_text(uid))
    if not test.calls_refused:
        gaps.append(_calls_gap_text(offline))
    if "network" in test.escaped:
        gaps.append(OPEN_NETWORK)
    gaps += [f"{folder} can be read" for folder in hidden if folder in test.escaped]
    return gaps


def _files_gap_text(uid: int | None) -> str:
    """Return in words the gap of a sandbox in which Landlock does not confine files.

    `uid` is the one that the process changed to, None if it kept its user.
    """
    readers = "of this user" if uid is None else "that everybody may read"
    return f"files {readers} can be reached"


def _calls_gap_text(offline: bool) -> str:
    """Return in words the gap of a sandbox in which no system call is refused.

    `offline`: whether the process has an empty network namespace, so that it has no network anyway.
    """
    gap = "no system call is refused"
    return gap if offline else f"{gap}, the network is open"


def _restrict(
    limits: Limits, box: Path, uid: int | None, spaces: str, reach: Reach
) -> tuple[int, bool]:
    """Restrict this process's files by Landlock and its system calls by seccomp, for good.

    Args:
        limits: what the process may use; only its `network` matters here.
        box: its private folder.
        uid: the uid it changed to, None if it kept its user.
        spaces: who made its namespaces: "" for none, "own" or "bubblewrap".
        reach: what it needs besides the system's files and `box`.

    Returns (the version of Landlock, 0 if this kernel has none; whether the seccomp filter could be
    installed).
    """
    abi = _restrict_files(limits, box, spaces, reach)
    # The filter need not refuse signals if something else protects other processes from them: a
    # uid of its own, namespaces or Landlock.
    signals_confined = uid is not None or spaces != "" or abi >= landlock.HOLDS_SIGNALS
    has_ports = bool(reach.own_ports)
    has_filter = False
    with contextlib.suppress(OSError):  # this kernel or machine has none: the self-test shows it
        seccomp.install(
            network=limits.network or has_ports,
            tcp_alone=has_ports and not limits.network,
            signals=signals_confined,
            truncate=abi >= landlock.HOLDS_TRUNCATION,
        )
        has_filter = True
    return abi, has_filter


def _restrict_files(limits: Limits, box: Path, spaces: str, reach: Reach) -> int:
    """Restrict the files and ports of this process by Landlock, for good.

    The process may then use the system's files, `box` (its private folder), what `reach` lists, and
    a network if `limits` allow one. `spaces` says who made its namespaces, "" for none. Returns the
    version of Landlock, 0 if this kernel has none.
    """
    has_own_proc = spaces != "" and _has_own_proc()
    readable = _readable_paths(box, has_own_proc, reach.readable)
    # In namespaces of our own, /dev/shm is private if the kernel allowed its mount. A private /proc
    # shows that it did, because /proc is mounted after /dev/shm.
    shared_memory = ["/dev/shm"] if spaces == "own" and has_own_proc else []
    writable = [str(box / "work"), *_DEVICES, *shared_memory, *reach.writable]
    writable += reach.rooms if spaces == "own" else ()
    network, ports = limits.network, reach.ports
    if reach.own_ports and not network:  # TCP stays allowed, to these ports alone
        network, ports = True, reach.own_ports
    with contextlib.suppress(OSError):  # this kernel has no Landlock
        return landlock.restrict(readable, writable, network, ports, listen=reach.server)
    return 0


def _gaps_beside_filters(box: Path, uid: int | None, spaces: str) -> Iterator[str]:
    """Yield in words what user code can still do even if Landlock and seccomp hold.

    Args:
        box: the private folder of this process.
        uid: the uid that this process changed to, None if it kept its user.
        spaces: who made its namespaces, "" for none.
    """
    if not spaces:
        yield "what user code started outlives a warden that is killed itself"
    if not _has_bounded_files(box):
        yield "how much its files take together is not limited"
    if uid is None and not _root_is_read_only():
        yield "modes and times of this user's other files can be changed"
    if os.geteuid() == 0:
        yield "user code runs as root, without its powers; its processes are not counted"


def refusal(confinement: Confinement, sandbox: Sandbox) -> EnvProblem | None:
    """Return an EnvProblem ENV_SANDBOX that says why user code must not start here; None if it may.

    User code may start wherever Landlock and seccomp confine it. If only limits do (level LIMITS),
    it must not start if the owner of the machine requires more, nor as root unless the owner allows
    that.

    Args:
        confinement: how this process is confined.
        sandbox: what the owner of the machine requires and allows.
    """
    if confinement.level != LIMITS:
        return None
    gaps_text = "; ".join(confinement.gaps)
    if sandbox.mode == "required":
        return EnvProblem(
            "ENV_SANDBOX",
            f'config.toml says sandbox = "required", and here user code is held by limits alone: '
            f"{gaps_text}",
            hint="Use a kernel with Landlock and seccomp (Linux 5.13 or newer, x86_64 or "
            'aarch64), or set sandbox = "auto" in config.toml.',
        )
    if os.geteuid() == 0 and not sandbox.allow_root:
        return EnvProblem(
            "ENV_SANDBOX",
            f"user code would run as root with limits alone: {gaps_text}",
            hint="Run the server as an ordinary user, or set allow_root = true in config.toml "
            "where nothing on this machine is worth protecting.",
        )
    return None


def escapes(box: Path, network: bool, hidden: Iterable[str] = ()) -> set[str]:
    """Try what user code in this process must not be able to do, and return what succeeded.

    The result may hold "read" and "write" (of files it has no right to), "socket" (a socket could
    be made), and folders of `hidden` that could be listed. It is empty if nothing succeeded.

    Args:
        box: the folder with the file CANARY, which must be out of reach.
        network: whether internet sockets are allowed; then they are not tried.
        hidden: folders that must not be readable.
    """
    escaped = set()
    # OSError: the attempt was refused, as it should be.
    with contextlib.suppress(OSError), open(box / CANARY, "rb"):
        escaped.add("read")
    if _can_write(box):
        escaped.add("write")
    forbidden_families = [_AF_UNIX]
    if not network:
        forbidden_families.append(_AF_INET)
    if _can_make_socket(forbidden_families):
        escaped.add("socket")
    for folder in hidden:
        with contextlib.suppress(OSError):
            os.listdir(folder)
            escaped.add(folder)
    return escaped


def _can_write(box: Path) -> bool:
    """Whether this process can make a file in the folder `box` or truncate the file CANARY there.

    In a working sandbox both are impossible. It tries, so a file that it could make stays there.
    """
    succeeded = False
    with contextlib.suppress(OSError), open(box / "escaped", "xb"):
        succeeded = True
    # Two ways to truncate a file without opening it for writing, which some versions of Landlock
    # do not check. Access mode 3 allows neither reading nor writing.
    for access in (os.O_RDONLY, 3):
        with contextlib.suppress(OSError):
            os.close(os.open(box / CANARY, access | os.O_TRUNC))
            succeeded = True
    return succeeded


def _can_make_socket(families: Iterable[int]) -> bool:
    """Whether this process can make a socket of any of these address families."""
    succeeded = False
    for family in families:
        descriptor = kernel.libc().socket(family, 1, 0)  # 1: SOCK_STREAM
        if descriptor >= 0:
            os.close(descriptor)
            succeeded = True
    return succeeded


def _can_connect_elsewhere() -> bool:
    """Whether this process may connect to a TCP port of the machine other than its gateway.

    It tries port 1, where most likely nothing listens: a sandbox that refuses gives EACCES or
    EPERM, a closed port another error.
    """
    library = kernel.libc()
    descriptor = library.socket(_AF_INET, 1, 0)  # 1: SOCK_STREAM
    if descriptor < 0:
        return False
    try:
        # struct sockaddr_in: the family, port 1, 127.0.0.1.
        address = struct.pack("=HBB4B8x", _AF_INET, 0, 1, 127, 0, 0, 1)
        if library.connect(descriptor, address, len(address)) == 0:
            return True
        return ctypes.get_errno() not in (errno.EACCES, errno.EPERM)
    finally:
        os.close(descriptor)


def _readable_paths(box: Path, has_own_proc: bool, further: Iterable[str]) -> list[str]:
    """Return the paths that this process may read:

    - the system's files, and the harmless part of /proc
    - the file in the environment variable SSL_CERT_FILE
    - the package `envs`, and the folder `source` in `box`
    - the paths in `further`

    Args:
        box: the private folder of this process.
        has_own_proc: whether /proc shows only processes of the sandbox, so that all of it may be
            read.
        further: paths to add; folders above `box` are left out, because they would open all of
            `box`.
    """
    outside_box = [path for path in further if Path(path) not in box.parents]
    proc = ("/proc",) if has_own_proc else _PROC
    certificate_file = os.environ.get("SSL_CERT_FILE")
    certificates = [certificate_file] if certificate_file else []
    return [*_SYSTEM, *outside_box, *proc, *certificates, _ENVS, str(box / "source")]


def _has_bounded_files(box: Path) -> bool:
    """Whether `work` in `box` is a file system of its own, whose size limits the files in it; False
    if that cannot be seen."""
    with contextlib.suppress(OSError):
        work_device, box_device = os.stat(box / "work").st_dev, os.stat(box).st_dev
        return work_device != box_device
    return False


def _root_is_read_only() -> bool:
    """Whether the root file system is mounted read-only for this process."""
    return bool(os.statvfs("/").f_flag & os.ST_RDONLY)


def _has_own_proc() -> bool:
    """Whether /proc belongs to this process's own namespace and so shows no processes outside."""
    # In the /proc of an outer namespace this process has another pid.
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self") == str(os.getpid())
    return False


def nested_paths(folder: str) -> tuple[list[str], list[str]]:
    """Return the paths that code in a nested sandbox may use, as (paths to read, paths to write).

    A nested sandbox is started by code that is already in the sandbox. Code in it may read the
    system's files, the interpreter and the package `envs`, and write only to `folder` and to
    devices such as /dev/null.
    """
    readable = [*_SYSTEM, *interpreter_folders(), *_PROC, _ENVS]
    return readable, [folder, *_DEVICES]

"""Namespaces: user code sees no process, network or message queue but its own, and a file system
that is read-only outside its folder. Whatever it starts ends with the first process of its own.

Root may have them, an ordinary user where the kernel gives user namespaces to everyone, and where
only bubblewrap may have them, that is started around the parent of user code.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from envs.config.adapters import SERVER_PORT
from envs.isolation import kernel

_BWRAP_SECONDS = 5.0
_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_FILES = 50_000  # that an environment may have at once
_ALWAYS = kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def enter(network: bool) -> bool:
    """Put the future children of this process, and as far as possible itself, into new namespaces.

    The process must have a single thread. Returns False if the kernel does not allow it; then
    nothing has changed.

    Args:
        network: True keeps the machine's network; False gives them an empty one.
    """
    flags = _ALWAYS | (0 if network else kernel.CLONE_NEWNET)
    if os.geteuid() != 0:
        # A forked process tries first, because this takes several steps: if only the first worked
        # here, this process would be stuck in a user namespace in which its own uid is unknown.
        return _can_enter_as_user(flags) and _enter_as_user(flags)
    with contextlib.suppress(OSError):
        kernel.unshare(flags)
        return True
    return False


def _can_enter_as_user(flags: int) -> bool:
    """Whether `_enter_as_user` succeeds. A forked process tries, so that this one stays as it
    is."""
    pid = os.fork()
    if pid == 0:
        # The forked process must end here whatever happens, or it would go on as our caller.
        with contextlib.suppress(BaseException):
            os._exit(0 if _enter_as_user(flags) else 1)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    return status == 0


def _enter_as_user(flags: int) -> bool:
    """Enter new namespaces as an ordinary user, through a user namespace with this user alone.

    Returns False if the kernel refuses one of the steps; earlier steps are not undone.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        kernel.unshare(flags | kernel.CLONE_NEWUSER)
        # Each map says "number inside, number outside, how many". The kernel accepts the map of
        # groups only after "deny".
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
    except OSError:
        return False
    return True


def raise_loopback(control: int) -> None:
    """Switch on the loopback interface of a network namespace, which begins switched off. Does
    nothing where it is on already.

    Args:
        control: descriptor of any internet socket in that namespace.

    Raises OSError if the kernel does not allow it.
    """
    # struct ifreq has 40 bytes: 16 of the name, then the flags, two bytes, and 22 others.
    name = b"lo".ljust(16, b"\0")
    state = fcntl.ioctl(control, _GET_FLAGS, name + bytes(24))
    (flags,) = struct.unpack_from("=H", state, 16)
    if not flags & _IS_UP:
        fcntl.ioctl(control, _SET_FLAGS, name + struct.pack("=H22x", flags | _IS_UP))


def port_for_server() -> int:
    """A TCP port of loopback on which nothing listens, in the network namespace of this process;
    the variable SERVER_PORT has it from now on.

    Raises OSError if there is no loopback here.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        if kernel.LINUX:
            raise_loopback(listener.fileno())
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    os.environ[SERVER_PORT] = str(port)
    return port


def bwrap(network: bool) -> list[str]:
    """The command line to put before another command, which bubblewrap then starts in namespaces.

    [] if bubblewrap is missing or does not work here. All files stay accessible, because Landlock
    restricts those.

    Args:
        network: whether the command keeps the machine's network.
    """
    program = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    if program is None:
        return []
    command = [program, "--unshare-all", "--die-with-parent", "--dev-bind", "/", "/"]
    if network:
        command.append("--share-net")
    command += ["--proc", "/proc", "--"]
    import subprocess  # noqa: PLC0415 - rarely needed, and doubles the start of an env process

    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        trial = subprocess.run(
            [*command, "/bin/true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_BWRAP_SECONDS,
            check=False,
        )
        if trial.returncode == 0:
            return command
    return []


def first_process(
    box: str,
    uid: int,
    room_mb: int,
    status: int,
    run_child: Callable[[], None],
    writable: Iterable[str] = (),
) -> NoReturn:
    """Be the first process of the namespaces, and never return.

    This process forks a child that calls `run_child`, and collects orphans until that child ends.
    Then it writes the child's exit status to `status` and exits, so that the kernel ends everything
    else in the namespaces.

    Args:
        box: the private folder; it stays writable, and its folder `work` is put into memory.
        uid: the owner of `work`.
        room_mb: MiB that the files in `work` may take together; those in /dev/shm may take as much
            again.
        status: descriptor for the exit status: as text, the number that os.waitpid gives.
        run_child: what the child does.
        writable: further folders that stay writable.
    """
    kernel.die_with_parent()
    _mount_files(box, uid, room_mb, writable)
    pid = os.fork()
    if pid == 0:
        run_child()
        os._exit(0)
    while True:
        with contextlib.suppress(InterruptedError):
            ended_pid, exit_status = os.wait()
            if ended_pid == pid:
                os.write(status, str(exit_status).encode())
                os._exit(0)


def _mount_files(box: str, uid: int, room_mb: int, writable: Iterable[str]) -> None:
    """Mount the file system as user code sees it.

    - Everything is read-only except `box` and `writable`.
    - The folder `work` in `box` and /dev/shm are in memory, with `room_mb` MiB each.
    - /proc shows the processes of this namespace.

    At the first step that the kernel refuses, the rest is left out without an error; the self-test
    of the sandbox tells what that leaves open.

    Args:
        box: the private folder of the env process.
        uid: the owner of `work`.
        writable: further folders.
    """
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.CLONE_NEWNS)
        # This mounts nothing; it keeps the mounts made from here on in this namespace.
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        _make_read_only_except((box, *writable))
        no_programs = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        size = f"size={room_mb}m,nr_inodes={_FILES}"
        owned_by_uid = f"mode=755,uid={uid},gid={uid},{size}"
        # Programs may be started from `work`, and from nowhere else that user code can write.
        no_devices = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("tmpfs", f"{box}/work", "tmpfs", no_devices, owned_by_uid)
        kernel.mount("tmpfs", "/dev/shm", "tmpfs", no_programs, f"mode=1777,{size}")
        kernel.mount("proc", "/proc", "proc", no_programs)


def _make_read_only_except(writable: Sequence[str]) -> None:
    """Make the whole file system read-only in this namespace, except these folders."""
    # A folder mounted on itself is a mount of its own, which can stay writable.
    for folder in writable:
        kernel.mount(folder, folder, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.set_read_only("/", is_read_only=True, recursive=True)
    for folder in writable:
        kernel.set_read_only(folder, is_read_only=False, recursive=False)

"""Namespaces: user code sees no process, network or message queue but its own, and a file system
that is read-only outside its folder. Whatever it starts ends with the first process of its own.

Root may have them, an ordinary user where the kernel gives user namespaces to everyone, and where
only bubblewrap may have them, that is started around the parent of user code.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from typing import NoReturn

from envs.isolation import kernel

_BWRAP_SECONDS = 5.0
_FILES = 50_000  # that an environment may have at once
_ALWAYS = kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def enter(network: bool) -> bool:
    """Puts the future children of this process (and itself, where possible) into new namespaces.

    False where that is not allowed; nothing has changed then. The process must have one thread.

    Args:
        network: whether the network stays the machine's.
    """
    flags = _ALWAYS | (0 if network else kernel.CLONE_NEWNET)
    if os.geteuid() != 0:
        # Half of it could work and leave a process that nobody knows: tried by another one first.
        return _works(flags) and _enter_as_user(flags)
    with contextlib.suppress(OSError):
        kernel.unshare(flags)
        return True
    return False


def _works(flags: int) -> bool:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os._exit(0 if _enter_as_user(flags) else 1)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def _enter_as_user(flags: int) -> bool:
    """As the owner of a user namespace in which only this user exists."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        kernel.unshare(flags | kernel.CLONE_NEWUSER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
    except OSError:
        return False
    return True


def bwrap(network: bool) -> list[str]:
    """The command that starts another one in the namespaces, [] where bubblewrap is missing or
    does not start. Files stay as they are: Landlock holds those."""
    program = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    if program is None:
        return []
    command = [program, "--unshare-all", "--die-with-parent", "--dev-bind", "/", "/"]
    command += ["--share-net"] if network else []
    command += ["--proc", "/proc", "--"]
    import subprocess  # noqa: PLC0415 - half of the start of an env process, and rarely needed

    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        tried = subprocess.run(
            [*command, "/bin/true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_BWRAP_SECONDS,
            check=False,
        )
        if tried.returncode == 0:
            return command
    return []


def first_process(
    box: str,
    uid: int,
    room_mb: int,
    status: int,
    work: Callable[[], None],
    writable: Iterable[str] = (),
) -> NoReturn:
    """The life of the first process of the namespaces: it forks `work`, collects orphans, writes
    how `work` ended to the descriptor `status` (as os.waitpid gives it), and takes all with it.

    Args:
        box: the one folder that stays writable; its folder `work` is in memory from now on.
        uid: who owns that one.
        room_mb: what its files may take together, and those of a private /dev/shm, in MiB.
        writable: further folders that stay writable, where they are.
    """
    kernel.die_with_parent()
    _arrange(box, uid, room_mb, writable)
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    while True:
        with contextlib.suppress(InterruptedError):
            ended, how = os.wait()
            if ended == pid:
                os.write(status, str(how).encode())
                os._exit(0)


def _arrange(box: str, uid: int, room_mb: int, writable: Iterable[str]) -> None:
    """The file system as user code sees it. What the kernel refuses stays as it was; what that
    leaves open is found by the self-test."""
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        for folder in (box, *writable):
            kernel.mount(folder, folder, None, kernel.MS_BIND | kernel.MS_REC)
        kernel.set_read_only("/", on=True, below=True)
        for folder in (box, *writable):
            kernel.set_read_only(folder, on=False, below=False)
        safe = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        size = f"size={room_mb}m,nr_inodes={_FILES}"
        owned = f"mode=755,uid={uid},gid={uid},{size}"
        kernel.mount("tmpfs", f"{box}/work", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, owned)
        kernel.mount("tmpfs", "/dev/shm", "tmpfs", safe, f"mode=1777,{size}")
        kernel.mount("proc", "/proc", "proc", safe)

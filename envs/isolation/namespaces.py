"""Namespaces: user code sees only its own processes, network and message queues, and a file system
that is read-only outside its folder. Whatever it starts ends with the first process inside.

Root may make namespaces; an ordinary user may if the kernel offers user namespaces to everyone. If
only the program bubblewrap may, the parent of user code is started through bubblewrap.
"""

import contextlib
import errno
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
BACKLOG = 64  # how many connections of user code may wait to be accepted
_GET_FLAGS, _SET_FLAGS, _IS_UP = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_FILES = 50_000  # how many files an environment may have at once
BOX_INSIDE = "/honesmith"  # where a process with rooms finds its private folder
ROOMS_SAID = "HONESMITH_ROOMS"  # the variable that names its rooms, with ":" between them
_ALWAYS = kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def enter(network: bool) -> bool:
    """Put the future children of this process, and as far as possible this process, into new
    namespaces.

    The process must have a single thread. Returns False, and changes nothing, if the kernel
    refuses.

    Args:
        network: True keeps the machine's network; False gives the namespaces an empty one.
    """
    flags = _ALWAYS
    if not network:
        flags |= kernel.CLONE_NEWNET
    if os.geteuid() != 0:
        # A forked process tries first, because this takes several steps: if only the first worked
        # here, this process would be stuck in a user namespace in which its own uid is unknown.
        return _can_enter_as_user(flags) and _enter_as_user(flags)
    with contextlib.suppress(OSError):
        kernel.unshare(flags)
        return True
    return False


def _can_enter_as_user(flags: int) -> bool:
    """Whether `_enter_as_user` would succeed. A forked process tries it, so that this one stays
    unchanged."""
    pid = os.fork()
    if pid == 0:
        # The forked process must end here whatever happens, or it would return to our caller too.
        with contextlib.suppress(BaseException):
            os._exit(0 if _enter_as_user(flags) else 1)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    return status == 0


def _enter_as_user(flags: int) -> bool:
    """Enter new namespaces as an ordinary user, through a user namespace that holds only this user.

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
    """Switch on the loopback interface of a network namespace (new namespaces have it off).

    Does nothing if the interface is on already.

    Args:
        control: descriptor of any internet socket in that namespace.

    Raises OSError if the kernel refuses.
    """
    # struct ifreq has 40 bytes: the name (16), the flags (2) and 22 others.
    name = b"lo".ljust(16, b"\0")
    state = fcntl.ioctl(control, _GET_FLAGS, name + bytes(24))
    (flags,) = struct.unpack_from("=H", state, 16)
    if not flags & _IS_UP:
        fcntl.ioctl(control, _SET_FLAGS, name + struct.pack("=H22x", flags | _IS_UP))


def port_for_server() -> int:
    """Find a free TCP port on loopback in the network namespace of this process.

    The port is returned, and also put into the environment variable SERVER_PORT, where the server
    program reads it. Nothing holds the port until that program listens. Raises OSError if there is
    no loopback here.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        if kernel.LINUX:
            raise_loopback(listener.fileno())
        listener.bind(("127.0.0.1", 0))  # 0: any free port
        port = int(listener.getsockname()[1])
    os.environ[SERVER_PORT] = str(port)
    return port


def hand_over_listener(gateway: int) -> int:
    """Listen on loopback for user code, hand the socket to the client, and return the port.

    `gateway` is the descriptor of the socket through which it goes to the client; it is closed.
    Raises OSError if that is not possible here.
    """
    with (
        socket.socket(fileno=gateway) as client,
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener,
    ):
        if kernel.LINUX:
            raise_loopback(listener.fileno())
        listener.bind(("127.0.0.1", 0))  # 0: any free port
        listener.listen(BACKLOG)
        port = int(listener.getsockname()[1])
        socket.send_fds(client, [b"."], [listener.fileno()])  # a descriptor needs a byte with it
        return port


def bwrap(network: bool) -> list[str]:
    """Return the beginning of a command line (program and arguments) that starts another command
    inside namespaces made by bubblewrap.

    The caller appends that command. Returns [] if bubblewrap is missing or does not work here. All
    files stay accessible, because Landlock restricts those.

    Args:
        network: whether the command keeps the machine's network.
    """
    program = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    if program is None:
        return []
    command = [program, "--unshare-all", "--die-with-parent", "--dev-bind", "/", "/"]
    if network:
        command.append("--share-net")
    command += ["--proc", "/proc", "--"]  # behind "--" stands the other command
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
    rooms: Sequence[str] = (),
) -> NoReturn:
    """Act as the first process of the namespaces (pid 1); never return.

    This process forks a child that calls `run_child`, and reaps orphaned processes until that child
    ends. Then it writes the child's exit status to `status` and exits, so that the kernel ends
    everything else in the namespaces.

    Args:
        box: the private folder; it stays writable, and its folder `work` becomes a file system in
            memory.
        uid: the owner of `work`.
        room_mb: MiB that the files in `work` may take together; those in /dev/shm may take as much
            again.
        status: descriptor to write the exit status to: as text, the number that os.waitpid gives.
        run_child: what the child does.
        writable: further folders that stay writable.
        rooms: paths right below "/" at which the child finds empty folders of its own, whatever the
            machine has there; with them `box` is at BOX_INSIDE.

    With `rooms`, raises OSError if they cannot be made.
    """
    kernel.die_with_parent()
    is_private = _mount_files(box, uid, room_mb, writable)
    if rooms:
        if not is_private:  # the rooms would be mounted for the whole machine
            raise OSError(errno.EPERM, "no mounts of its own")
        _enter_rooms(box, uid, rooms)
    child_pid = os.fork()
    if child_pid == 0:
        run_child()
        os._exit(0)
    while True:
        with contextlib.suppress(InterruptedError):
            ended_pid, exit_status = os.wait()  # an orphan may end before the child
            if ended_pid == child_pid:
                os.write(status, str(exit_status).encode())
                os._exit(0)


def _mount_files(box: str, uid: int, room_mb: int, writable: Iterable[str]) -> bool:
    """Mount the file system as user code sees it. Returns whether what is mounted stays in this
    namespace.

    - Everything is read-only except `box` and `writable`.
    - The folder `work` in `box` and /dev/shm are in memory, with `room_mb` MiB each.
    - /proc shows the processes of this namespace.

    If the kernel refuses a step, the later ones are skipped without an error; the self-test of the
    sandbox finds the gaps that this leaves.

    Args:
        box: the private folder of the env process.
        uid: the owner of `work`.
        room_mb: the size of each file system in memory, in MiB.
        writable: further folders that stay writable.
    """
    is_private = False
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.CLONE_NEWNS)
        # This mounts nothing; it keeps the mounts made from here on in this namespace.
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        is_private = True
        _make_read_only_except((box, *writable))
        no_programs = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        size = f"size={room_mb}m,nr_inodes={_FILES}"
        owned_by_uid = f"mode=755,uid={uid},gid={uid},{size}"
        # `work` lacks MS_NOEXEC: it is the only writable folder whose programs may be started.
        no_devices = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("tmpfs", f"{box}/work", "tmpfs", no_devices, owned_by_uid)
        kernel.mount("tmpfs", "/dev/shm", "tmpfs", no_programs, f"mode=1777,{size}")
        kernel.mount("proc", "/proc", "proc", no_programs)
    return is_private


def _make_read_only_except(writable: Sequence[str]) -> None:
    """Make the whole file system read-only in this namespace, except these folders."""
    # A folder mounted on itself is a mount of its own, which can stay writable.
    for folder in writable:
        kernel.mount(folder, folder, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.set_read_only("/", is_read_only=True, recursive=True)
    for folder in writable:
        kernel.set_read_only(folder, is_read_only=False, recursive=False)


def rooms_for(wanted: Sequence[str], needed: Iterable[str]) -> tuple[str, ...]:
    """Return those of the paths in `wanted` that can be rooms: all but the ones that would hide a
    folder in `needed`, such as /tmp where the interpreter is below it."""
    real_paths = {os.path.realpath(path) for path in needed}
    return tuple(
        room for room in wanted if not any(path.startswith(f"{room}/") for path in real_paths)
    )


def _enter_rooms(box: str, uid: int, rooms: Sequence[str]) -> None:
    """Give this process and its children another root folder: everything of the present one, and
    the rooms.

    The rooms are in `work` of `box`, so they share its limit on size; `uid` owns them. `box` itself
    is at BOX_INSIDE. The new root is read-only. Raises OSError if the kernel refuses a step.
    """
    root = f"{box}/root"
    os.mkdir(root)
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    hidden = {path.lstrip("/") for path in (*rooms, BOX_INSIDE)}
    for entry in sorted(os.scandir("/"), key=lambda each: each.name):
        if entry.name not in hidden:
            _show_again(entry, f"{root}/{entry.name}")
    for room in rooms:
        folder = f"{box}/work/rooms{room}"
        os.makedirs(folder)
        os.chown(folder, uid, -1)  # the group stays
        _bind(folder, root + room)
    _bind(box, root + BOX_INSIDE)
    _bind(f"{box}/work", f"{root}{BOX_INSIDE}/work")
    kernel.set_read_only(root, is_read_only=True, recursive=False)
    os.chroot(root)
    os.chdir("/")


def _show_again(entry: "os.DirEntry[str]", target: str) -> None:
    """Make an entry of the root folder visible at `target`: a link as a link, a folder with
    everything that is mounted in it. Files are left out."""
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)
    elif entry.is_dir():
        os.mkdir(target)
        kernel.mount(entry.path, target, None, kernel.MS_BIND | kernel.MS_REC)


def _bind(folder: str, target: str) -> None:
    """Mount a folder at `target` as well, which is made if it is not there; without what is mounted
    in it."""
    os.makedirs(target, exist_ok=True)
    kernel.mount(folder, target, None, kernel.MS_BIND)

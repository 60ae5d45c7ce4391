"""The floor of isolation for user code: limits, another uid and no network where that is possible.

Everything here acts on the calling process and is used between fork and the import of user code.
"""

import contextlib
import os
import pwd
import random
import resource
from pathlib import Path

from envs.config.settings import Limits
from envs.isolation import kernel

UIDS = range(60100, 64900)  # free on every common distribution, and mapped in most containers
TRIES = 20
OURS = 2  # the parent and the first process of its namespaces, which are this user's too
SHARED_UID_HEADROOM = 256  # other programs of this user come and go while the env process lives


def cut_network() -> bool:
    """Moves this process into an empty network namespace; only root can."""
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.CLONE_NEWNET)
        return True
    return False


def spare_uid(needed: list[str], box: Path) -> int | None:
    """A uid that no account and no process has, for which `needed` can be read; root only.

    Folders below a private one (an interpreter in /root, an environment's packages in the home)
    are shown to it in a mount namespace of its own, in which nothing else of the private one is.
    `box` is the private folder it will own; it has to be within its reach.
    """
    if os.geteuid() != 0 or not kernel.LINUX or not _may_change_uid():
        return None
    folders = {Path(path).resolve() for path in needed}
    folders = {path for path in folders if path.is_dir()}
    open_already = _reachable(box) and all(map(_open_to_all, folders))
    if not open_already and not _show(folders, box):
        return None
    taken = _uids_in_use()
    for uid in random.SystemRandom().sample(UIDS, TRIES):
        if uid not in taken and not _has_account(uid):
            return uid
    return None


def apply(limits: Limits, uid: int | None, apart: bool = False) -> list[str]:
    """Sets limits and drops to `uid`. Returns what holds from now on, in words.

    Args:
        apart: the kernel counts this user's processes here apart from those elsewhere.
    """
    held = []
    memory = limits.memory_mb << 20
    if _set(resource.RLIMIT_AS, memory):
        held.append(f"memory {limits.memory_mb} MB")
    if _set(resource.RLIMIT_FSIZE, limits.file_mb << 20):
        held.append(f"files {limits.file_mb} MB")
    _set(resource.RLIMIT_NOFILE, limits.open_files)
    _set(resource.RLIMIT_CORE, 0)
    if uid is not None:
        _set(resource.RLIMIT_NPROC, limits.processes)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        held += [f"processes {limits.processes}", "own uid"]
    elif os.geteuid() != 0 and apart:
        if _set(resource.RLIMIT_NPROC, limits.processes + OURS):
            held.append(f"processes {limits.processes}")
    elif os.geteuid() != 0:
        # The kernel counts every process of the user, not only ours.
        room = _tasks_of_user() + max(limits.processes, SHARED_UID_HEADROOM)
        if _set(resource.RLIMIT_NPROC, room):
            held.append(f"processes {room} with the user's own")
    if kernel.forbid_new_privileges():
        held.append("no new privileges")
    return held


def _set(which: int, value: int) -> bool:
    _, hard = resource.getrlimit(which)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(which, (bound, bound))
    except (ValueError, OSError):  # macOS refuses some of them
        return False
    return True


def _show(folders: set[Path], box: Path) -> bool:
    """Makes `folders` and `box` reachable below private folders: an empty file system in which
    only they are mounted covers each private ancestor. False where that is not allowed."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
    except OSError:
        return False
    hidden = sorted(path for path in {*folders, box} if not _reachable(path))
    hidden = [path for path in hidden if not any(up in hidden for up in path.parents)]
    held = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in hidden}
    covered: list[Path] = []
    try:
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        covers = {p for path in hidden for p in path.parents if not p.stat().st_mode & 0o001}
        for cover in sorted(covers):
            if not any(done in cover.parents for done in covered):
                kernel.mount("tmpfs", str(cover), "tmpfs", kernel.MS_NOSUID, "mode=755,size=1m")
                covered.append(cover)
        for path, fd in held.items():
            path.mkdir(parents=True, exist_ok=True)
            kernel.mount(f"/proc/self/fd/{fd}", str(path), None, kernel.MS_BIND | kernel.MS_REC)
        if _reachable(box) and all(map(_open_to_all, folders)):
            covered.clear()  # they stay
            return True
        return False
    except OSError:
        return False
    finally:
        for fd in held.values():
            os.close(fd)
        for cover in reversed(covered):  # what failed half way leaves no trace
            kernel.libc().umount2(os.fsencode(cover), kernel.MNT_DETACH)


def _open_to_all(folder: Path) -> bool:
    """Whether any user may reach and read it."""
    return _reachable(folder) and folder.stat().st_mode & 0o005 == 0o005


def _reachable(path: Path) -> bool:
    """Whether any user may pass through all folders above it."""
    return all(parent.stat().st_mode & 0o001 for parent in path.parents)


def _may_change_uid() -> bool:
    """Whether root has the capabilities CHOWN, SETGID and SETUID; a container may have taken
    them."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as status:
        held = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
        return all(held >> bit & 1 for bit in (0, 6, 7))
    return False


def _has_account(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _uids_in_use() -> set[int]:
    uids = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                uids.add(entry.stat().st_uid)
    return uids


def _tasks_of_user() -> int:
    if not kernel.LINUX:
        return 0
    count, uid = 0, os.getuid()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count

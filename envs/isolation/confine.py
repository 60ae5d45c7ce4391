"""The lowest level of isolation for user code: limits, and if possible another uid and no network.

Everything here acts on the calling process and is used between fork and the import of user code.
"""

import contextlib
import os
import pwd
import random
import resource
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from envs.config.settings import Limits
from envs.isolation import kernel

UIDS = range(60100, 64900)  # free on every common distribution, and mapped in most containers
TRIES = 20  # how many random uids are tried; nearly all of the range is free
# The parent of user code and the first process of the namespaces: they belong to this user too.
PROCESSES_OF_SANDBOX = 2
# Spare processes: other programs of this user come and go while the env process lives.
SHARED_UID_HEADROOM = 256


def cut_network() -> bool:
    """Move this process into an empty network namespace.

    Returns True if that worked, False for an ordinary user or if the kernel refuses.
    """
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.CLONE_NEWNET)
        return True
    return False


def spare_uid(needed_folders: list[str], box: Path) -> int | None:
    """Find a uid for user code that no account and no process has. None means: keep the present
    user.

    A needed folder may be inside a folder that others may not enter, e.g. an interpreter in /root.
    Then this process gets a mount namespace in which the needed folder can be read by every uid,
    while all else in the folder around it (/root) is hidden.

    The present user is kept if:

    - this process is not root's, is not on Linux, or may not change its uid
    - the folders cannot be made readable
    - none of `TRIES` random uids is free

    Args:
        needed_folders: folders that user code has to read; those that do not exist are ignored.
        box: the private folder that the uid will own; the uid must be able to reach it.
    """
    if os.geteuid() != 0 or not kernel.LINUX or not _may_change_uid():
        return None
    real_paths = {Path(path).resolve() for path in needed_folders}
    folders = {path for path in real_paths if path.is_dir()}
    every_uid_can_read = _is_exposed(folders, box)
    if not every_uid_can_read:
        # This puts the process into a mount namespace, unless it fails.
        every_uid_can_read = _make_reachable(folders, box)
    if not every_uid_can_read:
        return None
    used_uids = _uids_in_use()
    # At random, so that two processes that start at once hardly ever take the same one.
    for uid in random.SystemRandom().sample(UIDS, TRIES):
        if uid not in used_uids and not _has_account(uid):
            return uid
    return None


def apply(limits: Limits, uid: int | None, counted_apart: bool = False) -> list[str]:
    """Limit the resources of this process and change to `uid`, both for good.

    Returns the measures now in force, in words, e.g. ["memory 2048 MB", "own uid"]. A limit that
    the system refuses is left out.

    Args:
        uid: the uid to change to; None keeps the present user.
        counted_apart: True if this process is in a user namespace, where the kernel counts only
            this user's processes inside it, so that the limit on processes can be tight.
    """
    measures = _limit_sizes(limits)
    if uid is not None:
        # This comes before the change of uid, which takes root's rights away.
        _set_limit(resource.RLIMIT_NPROC, limits.processes)
        os.setgroups([])  # leave all of root's groups
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        measures += [f"processes {limits.processes}", "own uid"]
    elif os.geteuid() != 0:  # the kernel does not limit the processes of root
        measures += _limit_processes(limits, counted_apart)
    if kernel.forbid_new_privileges():
        measures.append("no new privileges")
    return measures


def _limit_sizes(limits: Limits) -> list[str]:
    """Limit memory, file sizes, open files and core dumps of this process.

    Returns in words which of the limits on memory and file sizes are now in force.
    """
    measures = []
    if _set_limit(resource.RLIMIT_AS, limits.memory_mb << 20):
        measures.append(f"memory {limits.memory_mb} MB")
    if _set_limit(resource.RLIMIT_FSIZE, limits.file_mb << 20):
        measures.append(f"files {limits.file_mb} MB")
    _set_limit(resource.RLIMIT_NOFILE, limits.open_files)
    _set_limit(resource.RLIMIT_CORE, 0)
    return measures


def _limit_processes(limits: Limits, counted_apart: bool) -> list[str]:
    """Limit how many processes this user may have. Returns [the limit in words], or [] if it could
    not be set.

    `counted_apart`: whether the kernel counts only the user's processes inside the namespaces of
    this process.
    """
    if counted_apart:
        # Two more, for the processes inside the namespaces that are not user code.
        allowed_threads = limits.processes + PROCESSES_OF_SANDBOX
        words = f"processes {limits.processes}"
    else:
        # The kernel counts every thread of the user, so the threads that already run are added.
        # SHARED_UID_HEADROOM: room for the user's other programs, which come and go.
        allowed_threads = _threads_of_user() + max(limits.processes, SHARED_UID_HEADROOM)
        words = f"processes {allowed_threads} with the user's own"
    return [words] if _set_limit(resource.RLIMIT_NPROC, allowed_threads) else []


def _set_limit(resource_id: int, value: int) -> bool:
    """Set this process's soft and hard limit of a resource to `value`, or to the present hard limit
    if that is lower.

    `resource_id` is a constant of the module `resource`, such as RLIMIT_AS. Returns False if the
    system refuses.
    """
    _, hard_limit = resource.getrlimit(resource_id)
    new_limit = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
    try:
        resource.setrlimit(resource_id, (new_limit, new_limit))
    except (ValueError, OSError):  # macOS refuses some of them
        return False
    return True


def _make_reachable(folders: set[Path], box: Path) -> bool:
    """Make `folders` and `box` reachable for every uid, by a new mount namespace of this process.

    Each private folder above them is covered by an empty file system, in which only `folders` and
    `box` are mounted again. Returns False, with the mounts undone, if the kernel refuses or if a
    folder still cannot be reached.
    """
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
    except OSError:
        return False
    unreachable = _outermost(path for path in {*folders, box} if not _reachable(path))
    # Descriptors opened before the cover is mounted still lead to the folders below it.
    descriptors = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in unreachable}
    covered: list[Path] = []
    is_exposed = False
    try:
        # This mounts nothing; it keeps the mounts made from here on in this namespace.
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        _cover_private_parents(unreachable, covered)
        _mount_again(descriptors)
        is_exposed = _is_exposed(folders, box)
    except OSError:
        pass  # is_exposed stays False: the mounts so far are undone below
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
        if not is_exposed:
            _uncover(covered)
    return is_exposed


def _uncover(covered: Sequence[Path]) -> None:
    """Unmount the empty file systems that cover these folders, in the reverse order of mounting."""
    for folder in reversed(covered):
        kernel.libc().umount2(os.fsencode(folder), kernel.MNT_DETACH)


def _mount_again(descriptors: Mapping[Path, int]) -> None:
    """Mount folders that were covered at their paths again.

    `descriptors` maps each path to a descriptor of the folder, opened before it was covered.
    """
    for path, descriptor in descriptors.items():
        path.mkdir(parents=True, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{descriptor}", str(path), None, kernel.MS_BIND | kernel.MS_REC)


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that are not inside another of `paths`, sorted."""
    ordered = sorted(paths)
    outermost = []
    for path in ordered:
        is_inside_another = any(parent in ordered for parent in path.parents)
        if not is_inside_another:
            outermost.append(path)
    return outermost


def _cover_private_parents(paths: Iterable[Path], covered: list[Path]) -> None:
    """Mount an empty file system over each private folder above `paths`.

    A folder is private if other users may not enter it; all users may enter the cover. The cover
    hides everything in the folder, so the caller then mounts `paths` again inside it.

    Each covered folder is appended to `covered`, so that the caller can undo the mounts after an
    error. Raises OSError if the kernel refuses a mount.
    """
    enter_bit = 0o001  # "x" for others, in the mode of a folder
    parents = {parent for path in paths for parent in path.parents}
    private_folders = [parent for parent in parents if not parent.stat().st_mode & enter_bit]
    for private in sorted(private_folders):  # outer ones first
        # A folder below a covered one is hidden already.
        is_hidden = any(outer in private.parents for outer in covered)
        if not is_hidden:
            kernel.mount("tmpfs", str(private), "tmpfs", kernel.MS_NOSUID, "mode=755,size=1m")
            covered.append(private)


def _is_exposed(folders: Iterable[Path], box: Path) -> bool:
    """Whether every uid can reach `box`, and can reach and read `folders`.

    `box` need not be readable for all, because the uid of user code will own it.
    """
    return _reachable(box) and all(_open_to_all(folder) for folder in folders)


def _open_to_all(folder: Path) -> bool:
    """Whether any user may reach the folder and read it (permission bits r and x for others)."""
    read_and_enter = 0o005  # "r-x" for others
    return _reachable(folder) and folder.stat().st_mode & read_and_enter == read_and_enter


def _reachable(path: Path) -> bool:
    """Whether any user may pass through all folders above `path` (permission bit x for others)."""
    enter_bit = 0o001  # "x" for others
    return all(parent.stat().st_mode & enter_bit for parent in path.parents)


def _may_change_uid() -> bool:
    """Whether this process, which is root's, has the capabilities CHOWN, SETGID and SETUID.

    A container may have removed them. Returns False if /proc cannot be read.
    """
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8") as status:
        # A set of bits as a hexadecimal number: one bit for each capability in force.
        for line in status:
            if line.startswith("CapEff"):
                capabilities = int(line.split()[1], 16)
                needed = (1 << 0) | (1 << 6) | (1 << 7)  # CHOWN, SETGID, SETUID
                return capabilities & needed == needed
    return False


def _has_account(uid: int) -> bool:
    """Whether this machine has an account with the uid."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _uids_in_use() -> set[int]:
    """Return the uids of all processes that are visible in /proc."""
    uids = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():  # the folder of a process
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                uids.add(entry.stat().st_uid)
    return uids


def _threads_of_user() -> int:
    """Return how many threads this user has in all processes of the machine; 0 if this is not
    Linux.

    Processes that end meanwhile are skipped.
    """
    if not kernel.LINUX:
        return 0
    thread_count, uid = 0, os.getuid()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():  # the folder of a process
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    thread_count += len(os.listdir(f"/proc/{entry.name}/task"))
    return thread_count

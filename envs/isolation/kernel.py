"""Calls to the Linux kernel that the standard library does not offer, and their constants.

All options of `prctl` are here. Other system call numbers are in `syscalls.py` and `landlock.py`,
beside the code that uses them. Standard library only.
"""

import ctypes
import errno
import functools
import os
import signal
import struct
import sys

LINUX = sys.platform.startswith("linux")
MACHINE = os.uname().machine  # x86_64 and aarch64 are known to envs/isolation/seccomp.py
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_CAPBSET_DROP = 24
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_SETATTR = 442  # the same number on every machine, like all calls since Linux 5.0
_CAPABILITY_VERSION = 0x20080522
_CAPABILITIES = 64  # no kernel can have more: they are bits of two 32-bit words


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library of this process, loaded once. After a failed call of one of its
    functions `ctypes.get_errno()` gives the error."""
    return ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: object) -> int:
    """Make the system call `number` and return its result, which is 0 or more.

    Args:
        number: the number that the call has on this machine.
        arguments: ints, which are passed as C longs, or ctypes values, which are passed as they
            are.

    Raises:
        OSError: the call failed; ENOSYS if this is not Linux.
    """
    if not LINUX:
        raise OSError(errno.ENOSYS, f"no system call {number} here")
    c_arguments = [
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    ]
    result = libc().syscall(ctypes.c_long(number), *c_arguments)
    if result < 0:
        raise _last_error(f"system call {number}")
    return result


def _prctl(option: int, value: int, pointer: object = 0) -> bool:
    """Set an option of this process by prctl(2).

    Returns whether the kernel accepted it; always False if this is not Linux.
    """
    if not LINUX:
        return False
    return libc().prctl(option, ctypes.c_ulong(value), pointer, 0, 0) == 0


def die_with_parent() -> bool:
    """Ask the kernel to kill this process when the thread that forked it ends.

    The request survives an exec, so it can be made between fork and exec. Returns False if the
    kernel cannot do that.
    """
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> bool:
    """Make this process the parent of any descendant whose own parent ends.

    Returns False if the kernel cannot do that.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> bool:
    """Prevent programs that are started from now on from gaining rights, e.g. by setuid bits.

    Seccomp and Landlock require this. Returns False if the kernel cannot do it.
    """
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_seccomp_filter(program: bytes) -> None:
    """Install a filter that the kernel runs before each system call of this process, for good.

    Future children of the process inherit the filter.

    Args:
        program: classic BPF instructions of 8 bytes each, as the kernel reads them.

    Raises:
        OSError: the kernel refuses the program or has no seccomp.
    """
    instructions = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, and (after padding) a pointer to the first.
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    if not _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header)):
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


def unshare(flags: int) -> None:
    """Move this process into new namespaces, one for each CLONE_NEW bit in `flags`.

    Raises OSError if the process may not do that, with ENOSYS if this is not Linux.
    """
    if not LINUX:
        raise OSError(errno.ENOSYS, "unshare: not on this system")
    if libc().unshare(flags) != 0:
        raise _last_error("unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Mount `source` on `target`, as mount(2) does.

    Args:
        source: the file system, or the folder for a bind mount.
        target: the folder to mount on.
        kind: the type of file system, e.g. "tmpfs"; None if `flags` need none (a bind mount).
        flags: MS bits.
        data: options of that file system, e.g. "size=1m"; None for none.

    Raises:
        OSError: the kernel refuses it.
    """
    c_kind = None if kind is None else os.fsencode(kind)
    c_data = None if data is None else os.fsencode(data)
    c_flags = ctypes.c_ulong(flags)
    if libc().mount(os.fsencode(source), os.fsencode(target), c_kind, c_flags, c_data) != 0:
        raise _last_error(f"mount {target}")


def set_read_only(path: str, is_read_only: bool, recursive: bool) -> None:
    """Make the mount at `path` read-only, or writable again if `is_read_only` is False.

    Args:
        recursive: whether to change all mounts below `path` too.

    Raises:
        OSError: the kernel refuses it, or is older than 5.12 and has no such call.
    """
    # struct mount_attr is four 64-bit numbers: attributes to set, attributes to clear, and two that
    # are not used here. Attribute 1 is read-only.
    to_set, to_clear = (1, 0) if is_read_only else (0, 1)
    attributes = (ctypes.c_uint64 * 4)(to_set, to_clear, 0, 0)
    mount_point = ctypes.c_char_p(os.fsencode(path))
    flags = _AT_RECURSIVE if recursive else 0
    # The last argument is the size of the struct in bytes.
    call(_MOUNT_SETATTR, _AT_FDCWD, mount_point, flags, ctypes.byref(attributes), 32)


def drop_capabilities() -> None:
    """Give up all capabilities for good: the rights that root has beyond those of other users.

    The user's own files stay accessible. Does nothing if this is not Linux. Raises OSError if the
    kernel refuses.
    """
    if not LINUX:
        return
    for capability in range(_CAPABILITIES):
        if not _prctl(_PR_CAPBSET_DROP, capability):
            break  # this kernel has no more, or the process may not drop them
    # capset(2): a header (version, 0 for this process) and six words of zeros, for none.
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    if libc().capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise _last_error("capset")


def _last_error(action: str) -> OSError:
    """Return the OSError for the last failed call into the C library.

    `action` names the call in the message, e.g. "unshare: Operation not permitted".
    """
    number = ctypes.get_errno()
    return OSError(number, f"{action}: {os.strerror(number)}")

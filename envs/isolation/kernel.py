"""Calls to the Linux kernel that the standard library does not have, and their numbers.

The one place that knows options of `prctl`; system calls by number stand beside their only users,
`syscalls.py` and `landlock.py`. Standard library only.
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
_MOUNT_SETATTR = 442  # one number on every machine, like all calls since 5.0
_CAPABILITY_VERSION = 0x20080522
_CAPABILITIES = 64


@functools.cache
def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: object) -> int:
    """The result of a system call, by its number. Raises OSError."""
    if not LINUX:
        raise OSError(errno.ENOSYS, f"no system call {number} here")
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc().syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise _failed(f"system call {number}")
    return result


def _prctl(option: int, value: int, more: object = 0) -> bool:
    """Whether the kernel accepted it; False where there is no prctl."""
    return LINUX and libc().prctl(option, ctypes.c_ulong(value), more, 0, 0) == 0


def die_with_parent() -> bool:
    """Lets the kernel kill this process when the thread that forked it ends; False where it cannot.

    It survives an exec, so it can be called between fork and exec.
    """
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> bool:
    """Orphaned descendants become children of this process; False where that cannot be."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> bool:
    """No program started from here on gains rights (setuid); seccomp and Landlock require this."""
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def set_seccomp_filter(program: bytes) -> None:
    """Runs a classic BPF `program` before each system call of this process and its children.

    Raises OSError where the kernel refuses it.
    """
    instructions = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions of 8 bytes each, and a pointer to the first.
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    if not _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(header)):
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


def unshare(flags: int) -> None:
    """Raises OSError where this process may not."""
    if not LINUX or libc().unshare(flags) != 0:
        raise _failed("unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Raises OSError."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    if libc().mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]) != 0:
        raise _failed(f"mount {target}")


def set_read_only(path: str, on: bool, below: bool) -> None:
    """Makes a mount, and with `below` all mounts in it, read-only or writable. Raises OSError."""
    values = (1, 0) if on else (0, 1)
    attributes = (ctypes.c_uint64 * 4)(*values, 0, 0)
    mount_point = ctypes.c_char_p(os.fsencode(path))
    flags = _AT_RECURSIVE if below else 0
    call(_MOUNT_SETATTR, _AT_FDCWD, mount_point, flags, ctypes.byref(attributes), 32)


def drop_capabilities() -> None:
    """Gives up what root may do beyond other users, for good; its files stay its own."""
    if not LINUX:
        return
    for capability in range(_CAPABILITIES):
        if not _prctl(_PR_CAPBSET_DROP, capability):
            break  # the last one of this kernel, or none to drop
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    if libc().capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise _failed("capset")


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")

"""seccomp: system calls that user code never needs and an attack does are refused.

A classic BPF program that the kernel runs before each call of this process and its children, for
good. Refused calls fail with EPERM, so that a program can go on; a call made as another kind of
machine (32 bit on 64) ends the process.
"""

import ctypes
import os
import struct

from envs.isolation import kernel

_PR_SET_SECCOMP, _FILTER = 22, 2
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _AND, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH = 0, 4  # offsets in seccomp_data
_WHOLE = 0xFFFFFFFF
_Lines = list[tuple[int, int, int, int]]
_X32 = 0x40000000  # a second set of numbers on x86_64
_NEW_NAMESPACES = 0x7E020080
_THREAD = 0x00010000
_INTERNET = (2, 10)  # IPv4, IPv6
_UNIX, _STREAM, _TYPE = 1, 1, 0xF  # a socket's family, its type, and where its type stands
_CUT, _ACCESS, _READ, _NEITHER = 0o1000, 3, 0, 3  # O_TRUNC, O_ACCMODE and two ways to open
_OWNERS = (8, 10, 15)  # of fcntl: who gets a file's signals and which, F_SETOWN and the like
_OWNERS_BY_IOCTL = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP

# The same on every machine.
_COMMON = {
    "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435,
    "mount_setattr": 442, "openat2": 437,
}  # fmt: skip
_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS = {
    "x86_64": _COMMON | {
        "socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311,
        "kcmp": 312, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166,
        "pivot_root": 155, "chroot": 161, "bpf": 321, "keyctl": 250, "add_key": 248,
        "request_key": 249, "userfaultfd": 323, "perf_event_open": 298, "init_module": 175,
        "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "swapon": 167, "swapoff": 168,
        "reboot": 169, "acct": 163, "quotactl": 179, "settimeofday": 164, "clock_settime": 227,
        "clock_adjtime": 305, "adjtimex": 159, "sethostname": 170, "setdomainname": 171,
        "syslog": 103, "vhangup": 153, "fanotify_init": 300, "shmget": 29, "shmat": 30,
        "semget": 64, "msgget": 68, "mq_open": 240, "iopl": 172, "ioperm": 173,
        "modify_ldt": 154, "uselib": 134, "ustat": 136, "truncate": 76, "clone": 56,
        "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "kill": 62, "tkill": 200,
        "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "tgkill": 234, "socketpair": 53,
        "prlimit64": 302, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144,
        "sched_setaffinity": 203, "sched_setattr": 314, "ioprio_set": 251, "migrate_pages": 256,
        "move_pages": 279, "fcntl": 72, "ioctl": 16, "open": 2, "openat": 257, "creat": 85,
        "shmctl": 31, "semop": 65, "semctl": 66, "semtimedop": 220, "msgsnd": 69, "msgrcv": 70,
        "msgctl": 71, "mq_unlink": 241,
    },
    "aarch64": _COMMON | {
        "socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
        "kcmp": 272, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41,
        "chroot": 51, "bpf": 280, "keyctl": 219, "add_key": 217, "request_key": 218,
        "userfaultfd": 282, "perf_event_open": 241, "init_module": 105, "finit_module": 273,
        "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "swapon": 224, "swapoff": 225,
        "reboot": 142, "acct": 89, "quotactl": 60, "settimeofday": 170, "clock_settime": 112,
        "clock_adjtime": 266, "adjtimex": 171, "sethostname": 161, "setdomainname": 162,
        "syslog": 116, "vhangup": 58, "fanotify_init": 262, "shmget": 194, "shmat": 196,
        "semget": 190, "msgget": 186, "mq_open": 180, "truncate": 45, "clone": 220,
        "execve": 221, "execveat": 281, "kill": 129, "tkill": 130, "rt_sigqueueinfo": 138,
        "rt_tgsigqueueinfo": 240, "tgkill": 131, "socketpair": 199, "prlimit64": 261,
        "setpriority": 140, "sched_setparam": 118, "sched_setscheduler": 119,
        "sched_setaffinity": 122, "sched_setattr": 274, "ioprio_set": 30, "migrate_pages": 238,
        "move_pages": 239, "fcntl": 25, "ioctl": 29, "openat": 56, "shmctl": 195, "semop": 193,
        "semctl": 191, "semtimedop": 192, "msgsnd": 189, "msgrcv": 188, "msgctl": 187,
        "mq_unlink": 181,
    },
}  # fmt: skip
# What changes another process, by what its arguments must be to mean the caller: position, value.
_OWN = {
    **dict.fromkeys(
        ("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity",
         "sched_setattr", "migrate_pages", "move_pages"),
        ((0, 0),),
    ),
    "setpriority": ((0, 0), (1, 0)),  # of a process; 0 means all of them where it is of a user
    "ioprio_set": ((0, 1), (1, 0)),
}  # fmt: skip
_CUTS = {"open": 1, "openat": 2}  # and the position of their flags
_JUDGED = (
    "socket", "socketpair", "clone", "clone3", "tgkill", "fcntl", "ioctl", "openat2", *_CUTS, *_OWN
)  # fmt: skip
_SIGNALS = ("kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
_PROCESSES = ("fork", "vfork", "execve", "execveat")
_OTHERWISE_HELD = {*_JUDGED, *_SIGNALS, *_PROCESSES, "pidfd_open", "truncate", "creat"}


def install(
    *, network: bool = False, signals: bool = True, processes: bool = True, truncate: bool = True
) -> None:
    """Refuses, from now on and in every child.

    Args:
        network: internet sockets are left; otherwise no socket can be made at all (pairs of
            streams can).
        signals: whether signals may be sent; False where nothing else keeps them from others,
            and then only this process may send any, and to itself.
        processes: whether processes and other programs may be started; threads always may.
        truncate: whether files may be cut without opening them to write; False where Landlock
            does not know of it.

    Raises OSError where the kernel or the machine has none; it needs `no_new_privs`.
    """
    if not kernel.LINUX or kernel.MACHINE not in _ARCHES:
        raise OSError(_ENOSYS, f"no table of system calls for {kernel.MACHINE}")
    code = program(kernel.MACHINE, network, signals, processes, truncate, os.getpid())
    held = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    if not kernel.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.c_char_p(head)):
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


def program(
    machine: str, network: bool, signals: bool, processes: bool, truncate: bool, own: int
) -> bytes:
    """The filter for `machine` (x86_64, aarch64) as the kernel reads it, for the process `own`."""
    numbers = _NUMBERS[machine]
    refused = {number for name, number in numbers.items() if name not in _OTHERWISE_HELD}
    refused |= {numbers[name] for name in _SIGNALS if not signals}
    refused |= {numbers[name] for name in _PROCESSES if not processes and name in numbers}
    if not signals:
        refused.add(numbers["pidfd_open"])
    if not truncate:
        refused |= {numbers[name] for name in ("truncate", "creat") if name in numbers}
    lines = [
        (_LOAD, 0, 0, _ARCH),
        (_JEQ, 1, 0, _ARCHES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_JGE, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    for number in sorted(refused):
        lines += [(_JEQ, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    # Its flags lie in memory, where no filter can look; libraries fall back to clone.
    lines += [(_JEQ, 0, 1, numbers["clone3"]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    lines += _socket(numbers["socket"], network) + _clone(numbers["clone"], processes)
    # A pair of datagram sockets sends to any other by its path.
    lines += _only(numbers["socketpair"], (0, _WHOLE, _UNIX), (1, _TYPE, _STREAM))
    for name, wanted in _OWN.items():
        lines += _only(numbers[name], *((at, _WHOLE, value) for at, value in wanted))
    if not signals:
        lines += _only(numbers["tgkill"], (0, _WHOLE, own))
        lines += _never(numbers["fcntl"], _OWNERS) + _never(numbers["ioctl"], _OWNERS_BY_IOCTL)
    if not truncate:
        for name, position in _CUTS.items():
            lines += _cut(numbers[name], position) if name in numbers else []
        lines += [(_JEQ, 0, 1, numbers["openat2"]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _argument(position: int) -> tuple[int, int, int, int]:
    """Loads the low half of one; all that are looked at are of 32 bits."""
    return (_LOAD, 0, 0, 16 + 8 * position)


def _judged(number: int, body: _Lines) -> _Lines:
    """What `body` says to this call; it has to end in a verdict."""
    return [(_JEQ, 0, len(body), number), *body]


def _only(number: int, *wanted: tuple[int, int, int]) -> _Lines:
    """Refused unless each argument, by position, mask and value, is as wanted."""
    body: _Lines = []
    for position, mask, value in wanted:
        body += [_argument(position), (_AND, 0, 0, mask), (_JEQ, 1, 0, value)]
        body.append((_RETURN, 0, 0, _ERRNO | _EPERM))
    return _judged(number, [*body, (_RETURN, 0, 0, _ALLOW)])


def _never(number: int, values: tuple[int, ...]) -> _Lines:
    """Refused where argument 1 is one of `values`."""
    body = [_argument(1)]
    for value in values:
        body += [(_JEQ, 0, 1, value), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    return _judged(number, [*body, (_RETURN, 0, 0, _ALLOW)])


def _cut(number: int, position: int) -> _Lines:
    """Refused where the flags cut a file that they do not open to write."""
    body = [
        _argument(position),
        (_JSET, 0, 3, _CUT),
        (_AND, 0, 0, _ACCESS),
        (_JEQ, 2, 0, _READ),
        (_JEQ, 1, 0, _NEITHER),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]
    return _judged(number, body)


def _socket(number: int, network: bool) -> _Lines:
    if not network:
        return _judged(number, [(_RETURN, 0, 0, _ERRNO | _EPERM)])
    return _judged(
        number,
        [
            _argument(0),
            (_JEQ, 2, 0, _INTERNET[0]),
            (_JEQ, 1, 0, _INTERNET[1]),
            (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT),
            (_RETURN, 0, 0, _ALLOW),
        ],
    )


def _clone(number: int, processes: bool) -> _Lines:
    """No new namespaces; without `processes` threads alone. Flags are argument 0 on both."""
    body = [_argument(0), (_JSET, 1, 0, _NEW_NAMESPACES)]
    body.append((_RETURN, 0, 0, _ALLOW) if processes else (_JSET, 1, 0, _THREAD))
    body.append((_RETURN, 0, 0, _ERRNO | _EPERM))
    return _judged(number, body if processes else [*body, (_RETURN, 0, 0, _ALLOW)])

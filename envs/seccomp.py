"""seccomp: system calls that user code never needs and an attack does are refused.

A classic BPF program that the kernel runs before each call of this process and its children, for
good. Refused calls fail with EPERM, so that a program can go on; a call made as another kind of
machine (32 bit on 64) ends the process.
"""

import ctypes
import struct

from envs import kernel

_PR_SET_SECCOMP, _FILTER = 22, 2
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # offsets in seccomp_data; the low half of argument 0
_X32 = 0x40000000  # a second set of numbers on x86_64
_NEW_NAMESPACES = 0x7E020080
_THREAD = 0x00010000
_INTERNET = (2, 10)  # IPv4, IPv6

# The same on every machine.
_COMMON = {
    "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435,
    "mount_setattr": 442,
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
        "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
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
        "rt_tgsigqueueinfo": 240,
    },
}  # fmt: skip
_JUDGED = ("socket", "clone", "clone3")  # by their arguments
_SIGNALS = ("kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
_PROCESSES = ("fork", "vfork", "execve", "execveat")
_OTHERWISE_HELD = {*_JUDGED, *_SIGNALS, *_PROCESSES, "pidfd_open", "truncate"}


def install(
    *, network: bool = False, signals: bool = True, processes: bool = True, truncate: bool = True
) -> None:
    """Refuses, from now on and in every child.

    Args:
        network: internet sockets are left; otherwise no socket can be made at all (pairs can).
        signals: whether signals may be sent; False where nothing else keeps them from others.
        processes: whether processes and other programs may be started; threads always may.
        truncate: whether files may be cut by name; False where Landlock does not know of it.

    Raises OSError where the kernel or the machine has none; it needs `no_new_privs`.
    """
    if not kernel.LINUX or kernel.MACHINE not in _ARCHES:
        raise OSError(_ENOSYS, f"no table of system calls for {kernel.MACHINE}")
    code = program(kernel.MACHINE, network, signals, processes, truncate)
    held = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    if not kernel.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.c_char_p(head)):
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


def program(machine: str, network: bool, signals: bool, processes: bool, truncate: bool) -> bytes:
    """The filter for `machine` (x86_64, aarch64) as the kernel reads it."""
    numbers = _NUMBERS[machine]
    refused = {number for name, number in numbers.items() if name not in _OTHERWISE_HELD}
    refused |= {numbers[name] for name in _SIGNALS if not signals}
    refused |= {numbers[name] for name in _PROCESSES if not processes and name in numbers}
    if not signals:
        refused.add(numbers["pidfd_open"])
    if not truncate:
        refused.add(numbers["truncate"])
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
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _socket(number: int, network: bool) -> list[tuple[int, int, int, int]]:
    if not network:
        return [(_JEQ, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    return [
        (_JEQ, 0, 5, number),
        (_LOAD, 0, 0, _ARGUMENT),
        (_JEQ, 2, 0, _INTERNET[0]),
        (_JEQ, 1, 0, _INTERNET[1]),
        (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _clone(number: int, processes: bool) -> list[tuple[int, int, int, int]]:
    """No new namespaces; without `processes` threads alone. Flags are argument 0 on both."""
    lines = [
        (_JEQ, 0, 4, number),
        (_LOAD, 0, 0, _ARGUMENT),
        (_JSET, 1, 0, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _ALLOW) if processes else (_JSET, 1, 0, _THREAD),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]
    return lines if processes else [*lines, (_RETURN, 0, 0, _ALLOW)]

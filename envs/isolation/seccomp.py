"""seccomp: refuses system calls that an attack needs and user code does not.

The filter is a classic BPF program that the kernel runs before each system call of this process and
its children; it cannot be removed. Refused calls fail with EPERM, so that a program can go on; a
call made for another architecture (such as a 32-bit call) ends the process.
"""

import os
import struct
from collections.abc import Mapping

from envs.isolation import kernel
from envs.isolation.syscalls import AUDIT_ARCH, NUMBERS

_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _AND, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data, the description of a call
_ALL_BITS = 0xFFFFFFFF
# Instructions: (operation, lines to skip if its comparison is true, lines to skip if false, value).
_Lines = list[tuple[int, int, int, int]]
_PERMIT = (_RETURN, 0, 0, _ALLOW)
_REFUSE = (_RETURN, 0, 0, _ERRNO | _EPERM)
_SAY_MISSING = (_RETURN, 0, 0, _ERRNO | _ENOSYS)  # pretends that the kernel does not have the call
_X32 = 0x40000000  # from here on x86_64 has a second set of call numbers (the x32 ABI)
_NEW_NAMESPACES = 0x7E020080  # all CLONE_NEW... flags of clone
_THREAD = 0x00010000  # the flag CLONE_THREAD
_IPV4, _IPV6 = 2, 10  # address families: AF_INET, AF_INET6
_UNIX, _STREAM, _TYPE = 1, 1, 0xF  # a socket's family, its type, and the bits that hold the type
# O_TRUNC, O_ACCMODE, O_RDONLY, and the access mode that allows neither reading nor writing.
_TRUNCATE, _ACCESS_MODE, _READ_ONLY, _NO_ACCESS = 0o1000, 3, 0, 3
_OWNERS = (8, 10, 15)  # fcntl's F_SETOWN, F_SETSIG, F_SETOWN_EX: who gets a file's signals
_OWNERS_BY_IOCTL = (0x8901, 0x8902)  # FIOSETOWN, SIOCSPGRP

# Calls that can change another process are allowed where their arguments mean the caller itself:
# (position of the argument, the value it must have).
_SELF_ONLY = {
    "prlimit64": ((0, 0),),
    "sched_setparam": ((0, 0),),
    "sched_setscheduler": ((0, 0),),
    "sched_setaffinity": ((0, 0),),
    "sched_setattr": ((0, 0),),
    "migrate_pages": ((0, 0),),
    "move_pages": ((0, 0),),
    "setpriority": ((0, 0), (1, 0)),  # PRIO_PROCESS, 0; with PRIO_USER, 0 means all its processes
    "ioprio_set": ((0, 1), (1, 0)),  # IOPRIO_WHO_PROCESS, 0
}
_OPEN_FLAGS = {"open": 1, "openat": 2}  # the position of the argument with the flags
# The same for calls that send data; below it the flag that also connects, and the TCP protocol.
_SEND_FLAGS = {"sendto": 3, "sendmsg": 2, "sendmmsg": 3}
_FAST_OPEN, _TCP = 0x20000000, 6
# Calls that are judged by their arguments.
_BY_ARGUMENTS = {
    *("socket", "socketpair", "clone", "clone3", "tgkill", "fcntl", "ioctl", "openat2"),
    *_OPEN_FLAGS,
    *_SEND_FLAGS,
    *_SELF_ONLY,
}
_SIGNALS = ("kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
_PROCESSES = ("fork", "vfork", "execve", "execveat")
_NOT_ALWAYS_REFUSED = {*_BY_ARGUMENTS, *_SIGNALS, *_PROCESSES, "pidfd_open", "truncate", "creat"}


def install(
    *,
    network: bool = False,
    tcp_alone: bool = False,
    signals: bool = True,
    processes: bool = True,
    truncate: bool = True,
) -> None:
    """Install the seccomp filter, which refuses system calls that user code does not need, on this
    process and all its future children, for good.

    Args:
        network: whether internet sockets may be made. Of other sockets only connected pairs of
            stream sockets are ever allowed.
        tcp_alone: whether internet sockets must be TCP and must `connect` before they send data, so
            that Landlock's rules for ports cannot be avoided.
        signals: whether signals may be sent. Use False if nothing else protects other processes
            from them: then they can be sent to this process only.
        processes: whether processes and other programs may be started; threads always may.
        truncate: whether files may be truncated without opening them for writing. Use False if
            Landlock does not control truncation.

    Raises:
        OSError: the kernel has no seccomp, this machine is not known, or
            `kernel.forbid_new_privileges` was not called before.
    """
    if not kernel.LINUX or kernel.MACHINE not in AUDIT_ARCH:
        raise OSError(_ENOSYS, f"no table of system calls for {kernel.MACHINE}")
    code = program(
        kernel.MACHINE,
        network=network,
        signals=signals,
        processes=processes,
        truncate=truncate,
        pid=os.getpid(),
        tcp_alone=tcp_alone,
    )
    kernel.set_seccomp_filter(code)


def program(
    machine: str,
    network: bool,
    signals: bool,
    processes: bool,
    truncate: bool,
    pid: int,
    tcp_alone: bool = False,
) -> bytes:
    """Return the seccomp filter as the kernel reads it: BPF instructions of 8 bytes each.

    Args:
        machine: x86_64 or aarch64.
        network, signals, processes, truncate: whether user code may use internet sockets, send
            signals, start processes, and truncate files that it has not opened for writing.
        pid: the process that the filter is for. If `signals` is False, it is the only one that may
            be sent signals.
        tcp_alone: whether internet sockets must be TCP and must `connect` before they send data.
    """
    numbers = NUMBERS[machine]
    refused_numbers = _refused_numbers(numbers, signals, processes, truncate)
    lines = _load_call_number(machine) + _refusals(refused_numbers)
    # clone3 keeps its flags in memory, where no filter can look. So it is made to seem missing:
    # libraries then fall back to clone. (0, 1: for any other call the next line is skipped.)
    lines += [(_JEQ, 0, 1, numbers["clone3"]), _SAY_MISSING]
    lines += _tcp_rules(numbers) if tcp_alone else _socket_rule(numbers["socket"], network)
    lines += _clone_rule(numbers["clone"], processes)
    # Only stream sockets: a datagram socket of a pair could send to any other socket by its path.
    # A condition is (position of the argument, mask of its bits, value).
    lines += _allow_only(numbers["socketpair"], (0, _ALL_BITS, _UNIX), (1, _TYPE, _STREAM))
    lines += _rules_of_own_process(numbers)
    if not signals:
        lines += _signal_rules(numbers, pid)
    if not truncate:
        lines += _truncation_rules(numbers)
    lines.append(_PERMIT)
    return b"".join(struct.pack("=HBBI", *line) for line in lines)  # struct sock_filter


def _load_call_number(machine: str) -> _Lines:
    """Return instructions that load the number of the system call, for the instructions after them.

    A call for another architecture than that of `machine` ends the process.
    """
    # Each instruction: operation, lines to skip if the comparison is true, if it is false, value.
    lines = [
        (_LOAD, 0, 0, _ARCH),  # the architecture of the call
        (_JEQ, 1, 0, AUDIT_ARCH[machine]),  # if equal, the next line is skipped
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),  # the number of the call
    ]
    if machine == "x86_64":  # its second set of call numbers would avoid the rules that follow
        lines += [(_JGE, 0, 1, _X32), _REFUSE]
    return lines


def _rules_of_own_process(numbers: Mapping[str, int]) -> _Lines:
    """Return instructions that allow the calls in `_SELF_ONLY` only if their arguments mean the
    calling process. `numbers` maps each call to its number on this machine."""
    lines: _Lines = []
    for name, required_values in _SELF_ONLY.items():
        # A condition: (position of the argument, mask of its bits, value).
        conditions = [(position, _ALL_BITS, value) for position, value in required_values]
        lines += _allow_only(numbers[name], *conditions)
    return lines


def _signal_rules(numbers: Mapping[str, int], pid: int) -> _Lines:
    """Return instructions that allow signals only to the process `pid` (that of the filter).

    tgkill is allowed with that target alone, and no file may be told to send signals to a process.
    `numbers` maps each call to its number on this machine. Other calls that send signals are in
    `_refused_numbers`, because they are refused whatever their arguments.
    """
    return [
        # A condition: (position of the argument, mask of its bits, value).
        *_allow_only(numbers["tgkill"], (0, _ALL_BITS, pid)),
        # With these operations the kernel itself would later send signals to another process.
        *_refuse_values(numbers["fcntl"], _OWNERS),
        *_refuse_values(numbers["ioctl"], _OWNERS_BY_IOCTL),
    ]


def _truncation_rules(numbers: Mapping[str, int]) -> _Lines:
    """Return instructions that refuse to truncate a file that is not opened for writing.

    `numbers` maps each call to its number on this machine.
    """
    lines: _Lines = []
    for name, position in _OPEN_FLAGS.items():
        if name in numbers:  # aarch64 has no `open`
            lines += _refuse_truncation(numbers[name], position)
    # openat2 keeps its flags in memory, where no filter can look. So it is made to seem missing:
    # libraries then use openat. (0, 1: for a call other than openat2 _SAY_MISSING is skipped.)
    return [*lines, (_JEQ, 0, 1, numbers["openat2"]), _SAY_MISSING]


def _refused_numbers(
    numbers: Mapping[str, int], signals: bool, processes: bool, truncate: bool
) -> set[int]:
    """Return the numbers of the calls that are refused whatever their arguments.

    Args:
        numbers: maps each call that the machine has to its number.
        signals, processes, truncate: whether user code may send signals, start processes, and
            truncate files that it has not opened for writing.
    """
    # The table of numbers holds only calls that some rule of the filter is about.
    refused = {name for name in numbers if name not in _NOT_ALWAYS_REFUSED}
    if not signals:
        refused.update(_SIGNALS, ["pidfd_open"])  # signals can also be sent through a pidfd
    if not processes:
        refused.update(_PROCESSES)
    if not truncate:
        refused.update(["truncate", "creat"])  # both truncate the file at a path
    return {numbers[name] for name in refused if name in numbers}


def _refusals(refused_numbers: set[int]) -> _Lines:
    """Return instructions that refuse the system calls with these numbers, whatever their
    arguments."""
    lines: _Lines = []
    for number in sorted(refused_numbers):
        lines += [(_JEQ, 0, 1, number), _REFUSE]  # 0, 1: for any other call `_REFUSE` is skipped
    return lines


def _load_argument(position: int) -> tuple[int, int, int, int]:
    """Return the instruction that loads the low 32 bits of argument `position` (from 0) of a call.

    Every value that this filter compares fits into 32 bits.
    """
    # In struct seccomp_data the arguments begin at byte 16 and take 8 bytes each.
    return (_LOAD, 0, 0, 16 + 8 * position)


def _for_call(number: int, body: _Lines) -> _Lines:
    """Return instructions that run `body` for the system call `number` and skip it for other calls.

    Every path through `body` must end with a return, or the instructions after it would run too.
    """
    return [(_JEQ, 0, len(body), number), *body]


def _allow_only(number: int, *conditions: tuple[int, int, int]) -> _Lines:
    """Return instructions that allow the call `number` only if all `conditions` hold, else EPERM.

    A condition is (position of the argument, mask, value): the argument's bits under the mask must
    equal the value.
    """
    body: _Lines = []
    for position, mask, value in conditions:
        body += [_load_argument(position), (_AND, 0, 0, mask)]
        body += [(_JEQ, 1, 0, value), _REFUSE]  # 1, 0: if equal, the refusal is skipped
    return _for_call(number, [*body, _PERMIT])


def _refuse_values(number: int, values: tuple[int, ...]) -> _Lines:
    """Return instructions that refuse the call `number` if its second argument is one of `values`,
    and allow it otherwise. The second argument of fcntl and ioctl is the operation."""
    body = [_load_argument(1)]
    for value in values:
        body += [(_JEQ, 0, 1, value), _REFUSE]  # 0, 1: if not equal, the refusal is skipped
    return _for_call(number, [*body, _PERMIT])


def _refuse_truncation(number: int, position: int) -> _Lines:
    """Return instructions that refuse to truncate a file that is not opened for writing.

    `number` is an open call, `position` that of its argument with the flags.
    """
    # Each line: operation, lines to skip if it is true, lines to skip if it is false, value.
    # A call without the flag O_TRUNC, or with access for writing, ends at _PERMIT.
    body = [
        _load_argument(position),  # the flags
        (_JSET, 0, 3, _TRUNCATE),  # without O_TRUNC: to _PERMIT
        (_AND, 0, 0, _ACCESS_MODE),
        (_JEQ, 2, 0, _READ_ONLY),  # to _REFUSE
        (_JEQ, 1, 0, _NO_ACCESS),  # to _REFUSE
        _PERMIT,
        _REFUSE,
    ]
    return _for_call(number, body)


def _socket_rule(number: int, network: bool) -> _Lines:
    """Return instructions for the call `number`, which makes sockets.

    If `network` is True, only IPv4 and IPv6 sockets are allowed; if False, none.
    """
    if not network:
        return _for_call(number, [_REFUSE])
    # Each line: operation, lines to skip if it is true, lines to skip if it is false, value.
    return _for_call(
        number,
        [
            _load_argument(0),  # the address family
            (_JEQ, 2, 0, _IPV4),  # both lead to _PERMIT
            (_JEQ, 1, 0, _IPV6),
            (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT),
            _PERMIT,
        ],
    )


def _tcp_rules(numbers: Mapping[str, int]) -> _Lines:
    """Return instructions that allow only TCP sockets over IPv4 and IPv6, without TCP Fast Open.

    Fast Open sends data with the first packet and so reaches a port without `connect`, the call in
    which Landlock checks the port. `numbers` maps each call to its number on this machine.
    """
    # Each line: operation, lines to skip if it is true, lines to skip if it is false, value.
    body = [
        _load_argument(0),  # the address family
        (_JEQ, 2, 0, _IPV4),  # both lead past the refusal
        (_JEQ, 1, 0, _IPV6),
        (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT),
        _load_argument(1),  # the type, in its lowest bits
        (_AND, 0, 0, _TYPE),
        (_JEQ, 1, 0, _STREAM),
        _REFUSE,
        _load_argument(2),  # the protocol; 0 is the default for the type, here TCP
        (_JEQ, 2, 0, 0),
        (_JEQ, 1, 0, _TCP),
        _REFUSE,
        _PERMIT,
    ]
    lines = _for_call(numbers["socket"], body)
    for name, position in _SEND_FLAGS.items():
        # With the flag _REFUSE follows, without it this one line is skipped.
        body = [_load_argument(position), (_JSET, 0, 1, _FAST_OPEN), _REFUSE, _PERMIT]
        lines += _for_call(numbers[name], body)
    return lines


def _clone_rule(number: int, processes: bool) -> _Lines:
    """Return instructions for the call `number`, clone, which makes processes and threads.

    New namespaces are refused; if `processes` is False, everything but threads is.
    """
    # The flags are argument 0 on both machines. Each line: operation (_JSET: whether one of the
    # bits is set), lines to skip if it is true, lines to skip if it is false, value. For a new
    # namespace one line is skipped, which in both cases below leads to _REFUSE.
    body = [_load_argument(0), (_JSET, 1, 0, _NEW_NAMESPACES)]
    if processes:
        body += [_PERMIT, _REFUSE]
    else:
        body += [(_JSET, 1, 0, _THREAD), _REFUSE, _PERMIT]
    return _for_call(number, body)

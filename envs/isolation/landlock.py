"""Landlock: which files, ports and processes this process and its children may reach.

A process gives the kernel a list of what is allowed (a ruleset). That needs no privilege and cannot
be undone. What can be restricted depends on the kernel's version of Landlock (the ABI): 2 adds
moves between folders, 3 truncation, 4 TCP, 5 device control, 6 signals and abstract sockets. A rule
for a folder applies to everything in it.
"""

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from envs.isolation import kernel

HOLDS_TRUNCATION, HOLDS_SIGNALS = 3, 6  # the first ABI that can restrict truncation, or signals
# System calls: make a ruleset, add a rule, restrict this process by a ruleset.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1  # a flag: _CREATE returns the ABI and makes no ruleset
_BENEATH = 1  # the type of a rule for a folder or file
_EXECUTE, _WRITE, _READ, _LIST = 1, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_RIGHTS_OF_VERSION_1 = (1 << 13) - 1  # all file rights of ABI 1
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_PORT = 2  # the type of a rule for a TCP port
_TCP, _CONNECT = 0b11, 0b10  # the rights to listen and connect; only to connect
_SCOPES = 0b11  # forbids abstract sockets and signals to processes outside
# The rights that make sense for a file that is not a folder.
_ON_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL


def abi() -> int:
    """Return the version of Landlock (the ABI) in this kernel; 0 if Landlock is missing or switched
    off."""
    if not kernel.LINUX:
        return 0
    with contextlib.suppress(OSError):
        return kernel.call(_CREATE, 0, 0, _VERSION)  # makes no ruleset: returns the version
    return 0


def restrict(
    readable: Iterable[str],
    writable: Iterable[str],
    network: bool,
    ports: Iterable[int] = (),
    listen: int = 0,
) -> int:
    """Restrict this process and its future children, for good.

    They may use only these paths, may use TCP only if `network` is True, and cannot send signals to
    processes outside. What this kernel's version of Landlock (its ABI) does not support stays
    unrestricted.

    Args:
        readable: folders and files to read and run; those that are missing are left out.
        writable: folders and files to read, write, make and remove in.
        network: whether TCP stays allowed.
        ports: if `network` is True, the only TCP ports to connect to; empty for all ports.
        listen: one of `ports` that it may also listen on; 0 for none.

    Returns the ABI, which tells the caller what is restricted.

    Raises:
        OSError: the kernel has no Landlock, or `forbid_new_privileges` was not called before.
    """
    version = kernel.call(_CREATE, 0, 0, _VERSION)  # asks for the version, makes no ruleset
    file_rights = _file_rights(version)
    # If True, the ruleset leaves TCP alone; if False, it refuses all TCP except by rules for ports.
    any_port_allowed = network and not ports
    ruleset = _new_ruleset(version, file_rights, any_port_allowed)
    try:
        for path in readable:
            _allow(ruleset, path, file_rights & (_EXECUTE | _READ | _LIST))
        for path in writable:  # everything but making devices and sockets
            _allow(ruleset, path, file_rights & ~(_MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK))
        if network and version >= 4:  # earlier versions know no TCP
            for port in ports:
                _allow_port(ruleset, port, _TCP if port == listen else _CONNECT)
        kernel.call(_RESTRICT, ruleset, 0)  # 0: no flags
    finally:
        os.close(ruleset)
    return version


def _file_rights(version: int) -> int:
    """Return the rights on files that this version of Landlock knows, as bits.

    Each version knows all rights of the versions before: 2 adds moves between folders, 3
    truncation, 5 control of devices.
    """
    rights = _RIGHTS_OF_VERSION_1
    if version >= 2:
        rights |= _REFER
    if version >= 3:
        rights |= _TRUNCATE
    if version >= 5:
        rights |= _IOCTL
    return rights


def _new_ruleset(version: int, file_rights: int, any_port_allowed: bool) -> int:
    """Make a ruleset and return its descriptor.

    Until rules are added, the ruleset refuses `file_rights` on every file, all TCP (unless
    `any_port_allowed`) and signals to processes outside, as far as this version supports these.
    """
    # The fields of struct landlock_ruleset_attr; a right that is not listed there stays allowed.
    fields = [file_rights]
    if version >= 4:  # the first version that supports TCP
        fields.append(0 if any_port_allowed else _TCP)
    if version >= 6:  # the first version that supports signals
        fields.append(_SCOPES)
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    return kernel.call(_CREATE, ctypes.c_char_p(attributes), len(attributes), 0)


def _allow_port(ruleset: int, port: int, rights: int) -> None:
    """Add a rule to `ruleset`, a descriptor, that allows `rights` (bits: listen, connect) on a TCP
    port."""
    rule = struct.pack("=QQ", rights, port)  # struct landlock_net_port_attr
    kernel.call(_ADD, ruleset, _PORT, ctypes.c_char_p(rule), 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Add a rule to `ruleset`, a descriptor, that allows `rights` (bits) on a file, or on a folder
    and everything in it.

    A path that does not exist, or that this user cannot reach, is skipped.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # nothing there, or nothing this user can reach
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _ON_FILES  # the kernel refuses a rule for a file with rights of folders
        rule = struct.pack("=Qi", rights, descriptor)  # struct landlock_path_beneath_attr
        kernel.call(_ADD, ruleset, _BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(descriptor)

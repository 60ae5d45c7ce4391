"""The filter of system calls, read as the kernel reads it, on both machines it is written for."""

import struct

import pytest

from envs import seccomp
from envs.seccomp import _ARCHES, _NUMBERS

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
CLONE_THREAD, CLONE_NEWUSER, CLONE_NEWNET = 0x00010000, 0x10000000, 0x40000000
MACHINES = sorted(_ARCHES)
ORDINARY = {"x86_64": (0, 1, 9, 53, 202, 257), "aarch64": (63, 64, 222, 199, 98, 56)}
LOOSE = {"network": True, "signals": True, "processes": True, "truncate": True}


def verdict(machine: str, name: str | int, first: int = 0, arch: int = 0, **how: bool) -> int:
    """What the filter says to one call with `first` as its first argument."""
    number = _NUMBERS[machine][name] if isinstance(name, str) else name
    data = struct.pack("IIQ6Q", number, arch or _ARCHES[machine], 0, first, 0, 0, 0, 0, 0)
    code = seccomp.program(machine, **(LOOSE | how))
    lines = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    at = value = 0
    while True:
        kind, jump, other, k = lines[at]
        at += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("I", data, k)
        elif kind == 0x06:
            return k
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[kind]
            at += jump if holds else other


@pytest.mark.parametrize("machine", MACHINES)
def test_ordinary_calls_pass(machine: str):
    for number in ORDINARY[machine]:  # read, write, mmap, socketpair, futex, openat
        assert verdict(machine, number, network=False, processes=False, signals=False) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_what_an_attack_needs_is_refused(machine: str):
    for name in ("ptrace", "unshare", "mount", "bpf", "io_uring_setup", "process_vm_readv"):
        assert verdict(machine, name) == EPERM
    assert verdict(machine, "clone3") == ENOSYS
    for flags in (CLONE_NEWUSER, CLONE_NEWNET | CLONE_THREAD):
        assert verdict(machine, "clone", flags) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_sockets_are_none_or_of_the_internet(machine: str):
    assert [verdict(machine, "socket", family, network=False) for family in (1, 2, 10)] == [
        EPERM
    ] * 3
    internet = [verdict(machine, "socket", family) == ALLOW for family in (1, 2, 10, 16, 40)]
    assert internet == [False, True, True, False, False]


@pytest.mark.parametrize("machine", MACHINES)
def test_processes_signals_and_cuts_are_refused_where_asked(machine: str):
    fork = 17  # the signal at its end
    assert verdict(machine, "clone", fork) == ALLOW
    assert verdict(machine, "clone", fork, processes=False) == EPERM
    assert verdict(machine, "clone", fork | CLONE_THREAD, processes=False) == ALLOW
    assert verdict(machine, "execve", processes=False) == EPERM
    for name, how in (("kill", "signals"), ("pidfd_open", "signals"), ("truncate", "truncate")):
        assert verdict(machine, name) == ALLOW
        assert verdict(machine, name, **{how: False}) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_another_kind_of_machine_ends_the_process(machine: str):
    assert verdict(machine, "socket", arch=0x40000003) == KILL  # 32 bit
    if machine == "x86_64":
        assert verdict(machine, 0x40000000 | 41) == EPERM  # the second set of numbers

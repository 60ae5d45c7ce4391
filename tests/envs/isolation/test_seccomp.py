"""The filter of system calls, read as the kernel reads it, on both machines it is written for."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from envs.isolation import seccomp
from envs.isolation.syscalls import AUDIT_ARCH, NUMBERS

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
CLONE_THREAD, CLONE_NEWUSER, CLONE_NEWNET = 0x00010000, 0x10000000, 0x40000000
MACHINES = sorted(AUDIT_ARCH)
ORDINARY = {"x86_64": (0, 1, 9, 202, 257), "aarch64": (63, 64, 222, 98, 56)}
LOOSE = {"network": True, "signals": True, "processes": True, "truncate": True}
OWN, OTHER = 71, 72  # processes
ON_OWN = [
    "prlimit64",
    "sched_setparam",
    "sched_setscheduler",
    "sched_setaffinity",
    "sched_setattr",
    "migrate_pages",
    "move_pages",
]


def verdict(machine: str, name: str | int, *given: int, arch: int = 0, **how: bool) -> int:
    """What the filter of process OWN says to one call with these arguments, 0 after the last."""
    number = NUMBERS[machine][name] if isinstance(name, str) else name
    arguments = (*given, *[0] * (6 - len(given)))
    data = struct.pack("IIQ6Q", number, arch or AUDIT_ARCH[machine], 0, *arguments)
    code = seccomp.program(machine, **(LOOSE | how), pid=OWN)
    lines = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    at = value = 0
    while True:
        kind, jump, other, k = lines[at]
        at += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("I", data, k)
        elif kind == 0x06:
            return k
        elif kind == 0x54:
            value &= k
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[kind]
            at += jump if holds else other


@pytest.mark.parametrize("machine", MACHINES)
def test_ordinary_calls_pass(machine: str):
    for number in ORDINARY[machine]:  # read, write, mmap, futex, openat
        how = dict.fromkeys(LOOSE, False)
        assert verdict(machine, number, **how) == ALLOW


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


@pytest.mark.parametrize("machine", MACHINES)
def test_no_other_process_is_limited_or_slowed_but_the_own_one_may_be(machine: str):
    for name in ON_OWN:
        assert verdict(machine, name) == ALLOW
        assert verdict(machine, name, 1 << 32) == ALLOW  # the kernel looks at 32 bits as well
        for other in (1, OTHER, (1 << 32) - 1):
            assert verdict(machine, name, other) == EPERM
    process, group, user = 0, 1, 2
    assert verdict(machine, "setpriority", process, 0) == ALLOW
    assert verdict(machine, "setpriority", process, OTHER) == EPERM
    assert verdict(machine, "setpriority", group, 0) == EPERM
    assert verdict(machine, "setpriority", user, 0) == EPERM  # every process of the user
    process, group, user = 1, 2, 3
    assert verdict(machine, "ioprio_set", process, 0) == ALLOW
    assert verdict(machine, "ioprio_set", process, OTHER) == EPERM
    assert verdict(machine, "ioprio_set", group, 0) == EPERM
    assert verdict(machine, "ioprio_set", user, 0) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_pairs_are_of_streams(machine: str):
    closed_at_exec = 0o2000000
    for network in (True, False):
        for kind, said in ((1, ALLOW), (2, EPERM), (3, EPERM), (5, EPERM)):
            assert verdict(machine, "socketpair", 1, kind, network=network) == said
            assert verdict(machine, "socketpair", 1, kind | closed_at_exec, network=network) == said
        assert verdict(machine, "socketpair", 30, 1, network=network) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_no_file_sends_a_signal_where_none_may_be_sent(machine: str):
    for name, refused, other in (
        ("fcntl", (8, 10, 15), (1, 2, 3, 4, 9, 16)),
        ("ioctl", (0x8901, 0x8902), (0x5401, 0x5421, 0x8903)),
    ):
        for what in refused:
            assert verdict(machine, name, 5, what) == ALLOW
            assert verdict(machine, name, 5, what, signals=False) == EPERM
        assert {verdict(machine, name, 5, what, signals=False) for what in other} == {ALLOW}
    assert verdict(machine, "tgkill", OTHER, OTHER) == ALLOW
    assert verdict(machine, "tgkill", OTHER, OTHER, signals=False) == EPERM
    assert verdict(machine, "tgkill", OWN, OTHER, signals=False) == ALLOW  # how abort ends it


@pytest.mark.parametrize("machine", MACHINES)
def test_no_file_is_cut_that_is_not_opened_to_write_where_landlock_does_not_know(machine: str):
    opens = {"openat": (0, 0), "open": (0,)} if machine == "x86_64" else {"openat": (0, 0)}
    for name, before in opens.items():
        for access, said in ((0, EPERM), (1, ALLOW), (2, ALLOW), (3, EPERM)):
            cuts = access | os.O_TRUNC | os.O_CREAT
            assert verdict(machine, name, *before, cuts) == ALLOW
            assert verdict(machine, name, *before, cuts, truncate=False) == said
            assert verdict(machine, name, *before, access, truncate=False) == ALLOW
    assert verdict(machine, "openat2", truncate=False) == ENOSYS
    assert verdict(machine, "openat2") == ALLOW
    if machine == "x86_64":
        assert verdict(machine, "creat", truncate=False) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_memory_queues_and_semaphores_of_others_are_out_of_reach(machine: str):
    for kind, calls in (
        ("shm", "get at ctl"),
        ("sem", "get op ctl timedop"),
        ("msg", "get snd rcv ctl"),
        ("mq_", "open unlink"),
    ):
        for call in calls.split():
            assert verdict(machine, kind + call) == EPERM


SHUT = """
import ctypes, fcntl, os, resource, signal, socket, sys, threading
from envs.isolation import kernel, seccomp, syscalls

path, parent = sys.argv[1], os.getppid()
kernel.forbid_new_privileges()
ends = os.pipe()
seccomp.install(signals=False, truncate=False)

def refused(what, *given):
    try:
        made = what(*given)
    except PermissionError:
        return
    raise SystemExit(f"{what} {given} gave {made}")

def tgkill(pid):
    if kernel.libc().syscall(syscalls.NUMBERS[kernel.MACHINE]["tgkill"], pid, pid, 0) < 0:
        raise OSError(ctypes.get_errno(), "tgkill")

refused(resource.prlimit, parent, resource.RLIMIT_CORE, (0, 0))
refused(os.setpriority, os.PRIO_PROCESS, parent, 19)
refused(os.sched_setaffinity, parent, os.sched_getaffinity(0))
refused(os.sched_setscheduler, parent, os.SCHED_BATCH, os.sched_param(0))
refused(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)
refused(fcntl.fcntl, ends[0], fcntl.F_SETOWN, parent)
refused(fcntl.ioctl, ends[0], 0x8901, parent)
refused(tgkill, parent)
refused(os.open, path, os.O_RDONLY | os.O_TRUNC)
refused(os.open, path, 3 | os.O_TRUNC)

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.nice(1)
os.sched_setaffinity(0, os.sched_getaffinity(0))
tgkill(os.getpid())
[end.close() for end in socket.socketpair()]
fcntl.fcntl(ends[0], fcntl.F_SETFL, os.O_NONBLOCK)
open(path + "2", "w").close()
started = threading.Thread(target=print, args=("held",))
started.start()
started.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")
def test_a_kernel_refuses_them_and_python_goes_on(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("kept")
    done = subprocess.run(
        [sys.executable, "-c", SHUT, str(file)],
        cwd=Path(seccomp.__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("held\n", "")
    assert file.read_text() == "kept"

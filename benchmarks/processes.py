"""What a process and all below it used, as /proc tells it. Standard library alone."""

import os
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """A process and all below it that live."""
    pids, waiting = [], [pid]
    while waiting:
        at = waiting.pop()
        if not os.path.exists(f"/proc/{at}"):
            continue
        pids.append(at)
        try:
            tasks = os.listdir(f"/proc/{at}/task")
            for task in tasks:
                children = Path(f"/proc/{at}/task/{task}/children").read_text()
                waiting += [int(child) for child in children.split()]
        except OSError:
            continue
    return pids


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, its ended threads included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK


def peak_bytes(pid: int) -> int:
    """VmHWM: the most resident memory a process ever had."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return 0

"""What a worker asks of the C library before anything else is loaded."""

import subprocess
import sys

import pytest

# Prints the resident megabytes with 200 MB allocated, after they were freed, and after their
# release.
FREES = """
import ctypes
from engine.worker.core import runtime
runtime.prepare()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
size, sizes = 20 << 20, []
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS:"))
blocks = [libc.malloc(size) for _ in range(10)]
for block in blocks:
    libc.memset(block, 1, size)
sizes.append(resident())
for block in blocks:
    libc.free(block)
sizes.append(resident())
runtime.release_memory()
sizes.append(resident())
print(*sizes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_freed_memory_stays_with_the_process_until_it_is_released() -> None:
    output = subprocess.check_output([sys.executable, "-c", FREES], text=True)
    held, freed, released = map(int, output.split())
    assert held > 200
    assert freed > 200
    assert released < held - 150

"""Settings that libraries read from the environment while they are loaded (so `prepare` comes
before every other import), and memory that the C library holds on to."""

import contextlib
import ctypes
import os
import sys

DEFAULTS = {
    # libgomp's default makes threads wait busily: 5 to 9 times slower as soon as cores are shared.
    "GOMP_SPINCOUNT": "10000",
    "TOKENIZERS_PARALLELISM": "false",
    # oneDNN compiles code for every size of product it meets, half a megabyte each, and by default
    # keeps a thousand of them, twice.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "48",
    "LRU_CACHE_CAPACITY": "48",
}


def prepare() -> None:
    """Set each of DEFAULTS unless the variable is set already; call before torch is imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def release_memory() -> None:
    """Return freed memory to the operating system; does nothing without glibc.

    glibc otherwise keeps freed blocks. After two phases that allocate blocks of different sizes,
    the process would hold the memory of both.
    """
    if sys.platform == "linux":
        # OSError: the C library cannot be opened; AttributeError: it is not glibc.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

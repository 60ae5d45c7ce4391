"""What libraries read from the process's variables while they are loaded: `prepare` comes first.
And what the C library keeps of freed memory."""

import contextlib
import ctypes
import os
import sys

DEFAULTS = {
    # libgomp's own spinning is 5-9 times slower as soon as the cores are shared.
    "GOMP_SPINCOUNT": "10000",
    "TOKENIZERS_PARALLELISM": "false",
    # oneDNN compiles code for every size of product it meets, half a megabyte each, and by default
    # keeps a thousand of them, twice.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "48",
    "LRU_CACHE_CAPACITY": "48",
}


def prepare() -> None:
    """Set what was left unset; before torch is imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def release_memory() -> None:
    """Give freed memory back to the system, where the C library can: between two pieces of work
    that need different sizes it would otherwise hold what both needed at most."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)

"""Settings that libraries read from the environment while they are loaded (so `prepare` comes
before every other import), and memory that the C library holds on to.

A step of training allocates and frees gigabytes. As glibc is set by default it would give much of
that back to the operating system each time, and every page would be made and zeroed anew: a tenth
of the first steps of a model with 135 million parameters.
"""

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
    # Rows of other lengths in every step would otherwise leave a GPU's memory in pieces of sizes
    # that nobody asks for again.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


# Parameters of glibc's mallopt, and the values they get. Blocks up to 32 MiB, the largest size that
# glibc allows here, come from the heap, and the heap does not shrink by itself.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MALLOC = {M_TRIM_THRESHOLD: -1, M_MMAP_THRESHOLD: 32 << 20}


def prepare() -> None:
    """Set each of DEFAULTS unless the variable is set already, and let the C library keep memory
    that is freed; call before torch is imported. `release_memory` gives that memory back."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if sys.platform == "linux":
        # OSError: the C library cannot be opened; AttributeError: it is not glibc.
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            for parameter, value in MALLOC.items():
                libc.mallopt(parameter, value)


def release_memory() -> None:
    """Return freed memory: of a GPU to its driver, for other processes there, and of the machine to
    the operating system (does nothing without glibc).

    torch keeps what it has freed of a GPU, and glibc keeps freed blocks (see MALLOC). After two
    phases that allocate blocks of different sizes, the process would hold the memory of both.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        # OSError: the C library cannot be opened; AttributeError: it is not glibc.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

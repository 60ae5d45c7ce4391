"""Settings that libraries read from environment variables while they are loaded (so `prepare` must
be called before every other import), and memory that the C library keeps.

A step of training allocates and frees gigabytes. With its defaults, glibc would return much of that
to the operating system each time, and every page would be made and zeroed anew. That took a tenth
of the first steps of a model with 135 million parameters.
"""

import contextlib
import ctypes
import os
import sys

from engine.worker.core import transformers_index

DEFAULTS = {
    # libgomp's default makes threads wait busily: 5 to 9 times slower as soon as cores are shared.
    "GOMP_SPINCOUNT": "10000",
    "TOKENIZERS_PARALLELISM": "false",
    # oneDNN compiles code of half a megabyte for every size of product. By default it keeps the
    # code of a thousand sizes, in two caches.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "48",
    "LRU_CACHE_CAPACITY": "48",
    # Every step has rows of other lengths. Without this, a GPU's memory would be divided into
    # pieces of sizes that are never asked for again.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


# Parameters of glibc's mallopt, and the values they get. Blocks up to 32 MiB, the largest size that
# glibc allows here, come from the heap, and the heap does not shrink by itself.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MALLOC = {M_TRIM_THRESHOLD: -1, M_MMAP_THRESHOLD: 32 << 20}


def prepare() -> None:
    """Set each variable of DEFAULTS that is not set yet, make the C library keep freed memory, and
    let transformers start from its kept list of classes.

    Must be called before torch and transformers are imported. `release_memory` gives freed memory
    back.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    transformers_index.install()
    if sys.platform == "linux":
        # OSError: the C library cannot be opened; AttributeError: it is not glibc.
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            for parameter, value in MALLOC.items():
                libc.mallopt(parameter, value)


def release_memory() -> None:
    """Return freed memory: a GPU's to its driver, for other processes there, and the machine's to
    the operating system (only with glibc).

    torch keeps freed GPU memory, and glibc keeps freed blocks (see MALLOC). Without this call, a
    process would keep the memory of two phases that allocate blocks of different sizes.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        # OSError: the C library cannot be opened; AttributeError: it is not glibc.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

"""What libraries read from the process's variables while they are loaded: `prepare` comes first."""

import os

DEFAULTS = {
    # libgomp's own spinning is 5-9 times slower as soon as the cores are shared.
    "GOMP_SPINCOUNT": "10000",
    "TOKENIZERS_PARALLELISM": "false",
    # oneDNN compiles code for every size of product it meets, half a megabyte each, and by default
    # keeps a thousand of them, twice.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}


def prepare() -> None:
    """Set what was left unset; before torch is imported."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)

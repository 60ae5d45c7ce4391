"""The box inside the box: what shuts in code that a model wrote, away from what scores it.

Small on purpose: it is imported anew for every answer (envs/code_tests.py).
"""

import contextlib
import os

from envs.isolation import kernel, landlock, seccomp


def close(readable: list[str], writable: list[str], keeper: int) -> None:
    """Leaves the calling process these paths, its memory and its processor: no network, no
    process, no program and no signal beyond itself. Layers that this kernel lacks are left out.

    Args:
        keeper: its parent; it ends with that one.
    """
    kernel.die_with_parent()
    if os.getppid() != keeper:
        os._exit(1)
    kernel.forbid_new_privileges()
    with contextlib.suppress(OSError):
        kernel.drop_capabilities()
    abi = 0
    with contextlib.suppress(OSError):
        abi = landlock.restrict(readable, writable, network=False)
    with contextlib.suppress(OSError):
        cuts = abi >= landlock.HOLDS_TRUNCATION
        seccomp.install(network=False, signals=False, processes=False, truncate=cuts)

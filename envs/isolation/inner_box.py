"""The box inside the box: what shuts in code that a model wrote, away from what scores it.

Small on purpose: it is imported anew for every answer (envs/code_tests.py).
"""

import contextlib
import os

from envs.isolation import kernel, landlock, seccomp


def close(readable: list[str], writable: list[str], keeper: int) -> None:
    """Confine this process for good: no network, no new process or program, no signal to others,
    and only these paths. Measures that this kernel lacks are skipped without an error.

    Args:
        readable, writable: paths it may still read, or also write.
        keeper: pid of the parent; this process ends when that one does, and at once where it has
            ended already.
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
        holds_truncation = abi >= landlock.HOLDS_TRUNCATION
        seccomp.install(network=False, signals=False, processes=False, truncate=holds_truncation)

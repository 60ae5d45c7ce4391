"""The inner sandbox: it separates code that a model wrote from the environment that scores it.

This module is small on purpose: it is imported anew for every answer (envs/code_tests.py).
"""

import contextlib
import os

from envs.isolation import kernel, landlock, seccomp


def confine_process(readable: list[str], writable: list[str], keeper: int) -> None:
    """Confine this process, which runs code that a model wrote, for good.

    Afterwards the process has no network, sees only the given paths, cannot start processes or
    programs, and cannot send signals to others. Measures that this kernel lacks are skipped without
    an error.

    Args:
        readable: paths that it may read.
        writable: paths that it may read and write.
        keeper: pid of its parent, the process that keeps time; this process ends together with it.
    """
    kernel.die_with_parent()
    if os.getppid() != keeper:  # the parent had ended before the line above took effect
        os._exit(1)
    kernel.forbid_new_privileges()
    with contextlib.suppress(OSError):
        kernel.drop_capabilities()
    abi = 0  # the version of Landlock; 0 for none
    with contextlib.suppress(OSError):
        abi = landlock.restrict(readable, writable, network=False)
    with contextlib.suppress(OSError):
        holds_truncation = abi >= landlock.HOLDS_TRUNCATION  # else seccomp has to forbid it
        seccomp.install(network=False, signals=False, processes=False, truncate=holds_truncation)


def confine_commands(readable: list[str], writable: list[str]) -> bool:
    """Confine this process, which is to become a command that a model wrote, for good.

    Afterwards the process and all that it starts have no network, see only the given paths, and
    reach no process outside by signals or tracing. They may start programs. Returns False if this
    kernel does not confine files, so that the command must not run. Raises OSError if it refuses
    the filter of system calls.

    Args:
        readable: paths that it may read.
        writable: paths that it may read and write.
    """
    kernel.forbid_new_privileges()
    with contextlib.suppress(OSError):
        kernel.drop_capabilities()
    abi = 0  # the version of Landlock; 0 for none
    with contextlib.suppress(OSError):
        abi = landlock.restrict(readable, writable, network=False)
    seccomp.install(
        network=False,
        signals=abi >= landlock.HOLDS_SIGNALS,  # else it could end the process that started it
        truncate=abi >= landlock.HOLDS_TRUNCATION,
    )
    return abi > 0

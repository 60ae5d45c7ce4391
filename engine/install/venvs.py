"""What building a virtual environment in the home takes: one builder at a time, room on the disk,
a proof that it works, and only then its place.

Which packages go in, and what happens to a half-built one, is the caller's.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import take_lock

GB = 1_000_000_000

# How commands are run: returns when one has ended well, raises CalledProcessError otherwise.
Run = Callable[[Sequence[str]], None]
# Told what is going on, a line at a time.
Say = Callable[[str], None]


def loudly(argv: Sequence[str]) -> None:
    """Run a command with its output on our stderr: stdout may be a protocol."""
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())


def silently(line: str) -> None:
    """Tell nobody."""


def aside(folder: Path) -> Path:
    """Where the environment is built that will be `folder`."""
    return folder.with_name(folder.name + ".building")


def python_of(folder: Path) -> Path:
    """The interpreter of the environment in `folder`."""
    return folder / "bin" / "python"


def take_place(folder: Path) -> None:
    """What was built aside becomes `folder`, in place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    aside(folder).rename(folder)


@contextlib.contextmanager
def alone(lock: Path, command: str) -> Iterator[None]:
    """Inside, no other `command` builds. Raises UserError RUN_STATE while one does."""
    held = take_lock(lock)
    if held is None:
        raise UserError(
            "RUN_STATE",
            f"another `{command}` is at work in this home",
            hint="Wait for it to finish.",
            retryable=True,
        )
    try:
        yield
    finally:
        os.close(held)


def require_space(folder: Path, needed: int) -> None:
    """Raises UserError DISK_FULL when fewer than `needed` bytes are free where `folder` is."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            "DISK_FULL",
            f"{free / GB:.1f} GB are free at {folder} and about {needed / GB:.0f} are needed",
            hint="Free some space, or point HONESMITH_HOME at another volume.",
        )


def torch_backend(device: str) -> list[str]:
    """uv's options for the build of torch that a machine with `device` can use."""
    return ["--torch-backend", "cpu" if device == "cpu" else "auto"]


def complaint(python: Path, proof: str, patience_s: float) -> str | None:
    """What `python` last said when it could not run the code `proof`; None when it could.

    Raises subprocess.TimeoutExpired after `patience_s` seconds.
    """
    done = subprocess.run(
        [str(python), "-P", "-c", proof],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=patience_s,
        check=False,
    )
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]

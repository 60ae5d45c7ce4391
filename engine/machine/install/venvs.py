"""The steps of building a virtual environment in the home: one builder at a time, enough disk
space, a proof that the environment works, and only then moving it to its place.

The caller decides which packages the environment gets and what happens to a half-built one.
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
_COMPLAINT_CHARS = 300  # how much of an error's last line is reported

# Code that exits with a sentence if torch cannot compute on the GPU. It tries a matrix product in
# the number format in which models are trained there.
GPU_PROOF = """
import torch
if not torch.cuda.is_available():
    raise SystemExit(f"torch {torch.__version__} (CUDA {torch.version.cuda}) can use no GPU here")
native = torch.cuda.get_device_capability()[0] >= 8
ones = torch.ones(64, 64, dtype=torch.bfloat16 if native else torch.float32, device="cuda")
if float((ones @ ones).float().sum()) != 64.0**3:
    raise SystemExit(f"a product on {torch.cuda.get_device_name()} is wrong")
"""

# Runs a command; raises CalledProcessError if it fails.
Run = Callable[[Sequence[str]], None]
# Called with each line that reports progress.
Say = Callable[[str], None]


def run_on_stderr(argv: Sequence[str]) -> None:
    """Run a command with its output on our stderr, because stdout may carry a protocol."""
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())


def ignore_line(line: str) -> None:
    """Do nothing: a `Say` for callers that want no progress reports."""


def build_folder(folder: Path) -> Path:
    """Return the folder next to `folder` in which its environment is built, to be moved to `folder`
    later."""
    return folder.with_name(folder.name + ".building")


def python_of(folder: Path) -> Path:
    """Return the path of the interpreter of the environment in `folder`."""
    return folder / "bin" / "python"


def take_place(folder: Path) -> None:
    """Move the environment from `build_folder(folder)` to `folder`, replacing what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    build_folder(folder).rename(folder)


@contextlib.contextmanager
def only_builder(lock: Path, command: str) -> Iterator[None]:
    """Context manager: hold the file lock `lock`, so that only one process builds at a time.

    Raises UserError RUN_STATE if another process holds the lock; `command`, e.g. "honesmith setup",
    names in the message what that process runs.
    """
    descriptor = take_lock(lock)
    if descriptor is None:
        raise UserError(
            "RUN_STATE",
            f"another `{command}` is at work in this home",
            hint="Wait for it to finish.",
            retryable=True,
        )
    try:
        yield
    finally:
        os.close(descriptor)


def require_space(folder: Path, needed: int) -> None:
    """Raise UserError DISK_FULL if fewer than `needed` bytes are free on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            "DISK_FULL",
            f"{free / GB:.1f} GB are free at {folder} and about {needed / GB:.0f} are needed",
            hint="Free some space, or point HONESMITH_HOME at another volume.",
        )


def torch_backend(device: str) -> list[str]:
    """Return the options of uv, the package installer, that choose the right build of torch.

    `device` is "cpu" or the kind of GPU.
    """
    return ["--torch-backend", "cpu" if device == "cpu" else "auto"]


def complaint(python: Path, proof: str, patience_s: float) -> str | None:
    """Run the Python code `proof` with the interpreter `python`, to test a virtual environment;
    return the last line of its error, or None if it worked.

    For example "ModuleNotFoundError: No module named 'torch'". Raises subprocess.TimeoutExpired
    after `patience_s` seconds.
    """
    process = subprocess.run(
        [str(python), "-P", "-c", proof],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=patience_s,
        check=False,
    )
    if process.returncode == 0:
        return None
    error_lines = process.stderr.strip().splitlines() or ["it said nothing"]
    return error_lines[-1][:_COMPLAINT_CHARS]

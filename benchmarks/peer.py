"""The process that runs TRL: its virtual environment, and a line of JSON each way. No torch."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / ".bench"
TRL = "1.16.0"
TORCH = "torch>=2.11,<2.14"  # as pyproject.toml: an open bound pulls a CUDA build of gigabytes
SHARED = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")
# For parity.py, which loads our worker there.
ENGINE = ("httpx", "psutil", "pydantic", "platformdirs")


class NoPeer(Exception):
    """The peer's environment cannot be had here; the text says what is missing."""


class PeerFailed(Exception):
    """The peer could not do what was asked; the text is its traceback."""


def requirements(*, with_vllm: bool = False) -> list[str]:
    """What the peer's environment holds: what both sides use, in the versions we have; with vLLM in
    the versions that fit each other."""
    if with_vllm:
        return [f"trl[vllm]=={TRL}", "peft", "accelerate", "datasets"]
    pinned = []
    for name in SHARED + ENGINE:
        try:
            pinned.append(f"{name}=={version(name).partition('+')[0]}")
        except PackageNotFoundError:
            pinned.append(TORCH if name == "torch" else name)
    return [f"trl=={TRL}", "accelerate", "datasets", *pinned]


def ensure_venv(
    folder: Path = BENCH / "venv",
    wheels: Path | None = None,
    *,
    with_vllm: bool = False,
    limit_s: float | None = None,
) -> Path:
    """The interpreter of the peer's environment, built when missing or for other versions.

    Args:
        wheels: install from the wheels in this folder alone, and what Python itself has: often a
            torch for the GPU, where the folder holds one for a CPU.
        with_vllm: with vLLM beside TRL.
        limit_s: seconds that installing may take; None for any.

    Raises NoPeer where it cannot be built, or not in time.
    """
    python, stamp = folder / "bin" / "python", folder / "requirements.json"
    wanted = requirements(with_vllm=with_vllm)
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted and python.is_file():
        return python
    print(f"building {folder} with {' '.join(wanted)}", file=sys.stderr, flush=True)
    stamp.unlink(missing_ok=True)
    if wheels:  # made anew, because the wheels may not hold what replaces its other versions
        shared = ["--clear", "--system-site-packages"]
        _run([sys.executable, "-m", "venv", *shared, str(folder)], limit_s)
    elif not python.is_file():
        _run([sys.executable, "-m", "venv", str(folder)], limit_s)
    source = ["--no-index", "--find-links", str(wheels)] if wheels else []
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    _run([*pip, *source, *wanted], limit_s)
    stamp.write_text(json.dumps(wanted))
    return python


def _run(command: list[str], limit_s: float | None) -> None:
    """Run a command. Raises NoPeer with its last error, or where it takes longer than `limit_s`
    seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoPeer(f"{type(error).__name__}: {error}"[:200]) from error
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines() or ["it said nothing"]
        errors = [line for line in said if line.startswith("ERROR")]
        raise NoPeer((errors or said)[-1][:200])


class Peer:
    """A running `trl_side`; `ask` blocks until it has answered."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log
        self.versions: dict[str, str] = self._answer()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises PeerFailed with the traceback."""
        assert self._process.stdin is not None
        with tempfile.TemporaryDirectory(prefix="peer-") as scratch:
            self._process.stdin.write(json.dumps({"scratch": scratch, **request}) + "\n")
            self._process.stdin.flush()
            answer = self._answer()
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def kill(self) -> None:
        """End it at once with all it started; who waits for an answer gets PeerFailed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"the peer ended: {self._log.read_text('utf-8', 'replace')[-2000:]}")
        return json.loads(line)


@contextmanager
def running(python: Path, log: Path, path: str = "") -> Iterator[Peer]:
    """A peer until the block ends.

    Args:
        path: more folders for its PYTHONPATH.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), path]))}
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [str(python), "-m", "benchmarks.trl_side"],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        yield Peer(process, log)
    finally:
        for stream in (process.stdin, process.stdout):
            _close(stream)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _close(stream: TextIO | Any) -> None:
    if stream is not None:
        stream.close()

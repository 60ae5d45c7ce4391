"""`honesmith setup`: the training environment of a light install, in the home.

The server and the command line need no torch; workers do. This builds a virtual environment with
what our own package metadata lists under `train`, for CPU or CUDA as the machine has, and lets it
import this very installation, so that server and worker never differ in version.
"""

import importlib.metadata
import re
import shutil
import subprocess
import venv
from pathlib import Path

import engine
from engine.core import hardware
from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.install import venvs
from engine.install.venvs import GB, Run, Say, loudly, silently

NEEDED = {"cpu": 3 * GB, "gpu": 12 * GB}
PROOF = "import torch, transformers, peft; print(torch.__version__, torch.cuda.is_available())"
IMPORT_S = 300


def requirements(extra: str = "train") -> list[str]:
    """What the package needs, base and `extra`, as its metadata says.

    Raises UserError NO_TORCH when this is no installed package, so nothing says what it needs.
    """
    try:
        lines = importlib.metadata.requires("honesmith") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            "NO_TORCH",
            "honesmith runs from its sources and is not installed, so its needs are unknown",
            hint="Install it: pip install -e '.[train]' in the folder of pyproject.toml.",
        ) from error
    wanted = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        named = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if named is None or named.group(1) == extra:
            wanted.append(requirement.strip())
    return wanted


def setup(
    home: Home, *, again: bool = False, say: Say = silently, run: Run = loudly, proof: str = PROOF
) -> dict[str, object]:
    """Build the training environment unless a working one is there.

    Args:
        home: where it goes; it is complete or absent.
        again: build it anew.
        say: told what is going on, a line at a time.
        run: how commands are run; default: with their output on this process's stderr.
        proof: code the new environment must be able to run.

    Raises UserError DISK_FULL, RUN_STATE (another set-up is going on) or NO_TORCH (the
    installation failed; what was there before stays).
    """
    with venvs.alone(home.cache / "setup.lock", "honesmith setup"):
        if not again and works(home.train_python, proof):
            say("The training environment works; --again builds it anew.")
            return _reply(home, "It was there and works.")
        return _build(home, say, run, proof)


def works(python: Path, proof: str = PROOF) -> bool:
    """Whether `python` exists and can run `proof`; importing torch takes seconds."""
    return python.is_file() and venvs.complaint(python, proof, IMPORT_S) is None


def _build(home: Home, say: Say, run: Run, proof: str) -> dict[str, object]:
    """Build the training environment beside its final place, try it, and put it there."""
    device = hardware.detect(home.root).device.kind
    venvs.require_space(home.root, NEEDED["cpu" if device == "cpu" else "gpu"])
    wanted = requirements()
    aside = venvs.aside(home.train_venv)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        say(f"Building the training environment for {device} in {home.train_venv}")
        uv = shutil.which("uv")
        venv.create(aside, with_pip=uv is None, symlinks=True)
        python = venvs.python_of(aside)
        _install(python, wanted, uv, device, run, say)
        _let_it_import_us(python)
        say("Checking it")
        if not works(python, proof):
            raise UserError(
                "NO_TORCH",
                "the new environment cannot import torch, transformers and peft",
                hint=f"Try: {python} -c {proof.split(';')[0]!r}",
            )
        venvs.take_place(home.train_venv)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return _reply(home, f"Built for {device}.")


def _install(
    python: Path, wanted: list[str], uv: str | None, device: str, run: Run, say: Say
) -> None:
    """Install `wanted`, torch in the build this machine can use."""
    if uv:
        argv = [uv, "pip", "install", "--python", str(python), *wanted]
        try:
            run([*argv, *venvs.torch_backend(device)])
            return
        except subprocess.CalledProcessError:
            say("The torch build for this machine cannot be had; taking the index's own.")
    else:
        if device == "cpu":
            say("Without uv, pip takes the index's default torch: it may be a large CUDA build.")
        argv = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *wanted]
    try:
        run(argv)
    except subprocess.CalledProcessError as error:
        raise UserError(
            "NO_TORCH",
            f"installing the training packages failed with exit status {error.returncode}",
            hint="The lines above say why; call `honesmith setup` again when it is mended.",
            retryable=True,
        ) from error


def _let_it_import_us(python: Path) -> None:
    """Put this installation on the new environment's path, after its own packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    ours = Path(str(engine.__file__)).resolve().parent.parent
    (Path(done.stdout.strip()) / "honesmith.pth").write_text(f"{ours}\n", encoding="utf-8")


def _reply(home: Home, how: str) -> dict[str, object]:
    return {
        "summary": f"The training environment is {home.train_venv}. {how}",
        "python": str(home.train_python),
    }

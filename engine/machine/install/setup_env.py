"""`honesmith setup`: the training environment, in the home, for installations without torch.

The server and the command line need no torch; workers do. This module builds a virtual environment
with the packages that our own metadata lists under `train` and `gguf`, for CPU or CUDA as the
machine has. That environment imports this very installation of honesmith, so that server and worker
never differ in version.
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
from engine.machine.install import venvs
from engine.machine.install.venvs import GB, Run, Say, ignore_line, run_on_stderr

# How many free bytes building the environment takes.
NEEDED = {"cpu": 3 * GB, "gpu": 12 * GB}
PROOF = (
    "import torch, transformers, peft, gguf; print(torch.__version__, torch.cuda.is_available())"
)
EXTRAS = ("train", "gguf", "prompt")  # what workers and the importer of GGUF files need
# For machines with a GPU: fused kernels, which do in one launch what torch does in several, and
# 4-bit weights.
GPU_EXTRAS = ("gpu", "nf4")
IMPORT_S = 300  # time limit of the proof in seconds


def requirements(*extras: str) -> list[str]:
    """Return the requirements of honesmith itself and of its `extras`, from its package metadata.

    Raises UserError NO_TORCH if honesmith is not an installed package and so has no metadata.
    """
    try:
        lines = importlib.metadata.requires("honesmith") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            "NO_TORCH",
            "honesmith runs from its sources and is not installed, so its needs are unknown",
            hint="Install it: pip install -e '.[train]' in the folder of pyproject.toml.",
        ) from error
    needed = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        # Metadata lists a requirement of an extra as: torch>=2.5; extra == "train".
        extra_of_line = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if extra_of_line is None or extra_of_line.group(1) in extras:
            needed.append(requirement.strip())
    return needed


def setup(
    home: Home,
    *,
    again: bool = False,
    say: Say = ignore_line,
    run: Run = run_on_stderr,
    proof: str | None = None,
) -> dict[str, object]:
    """Build the training environment unless a working one exists; return `summary` and `python`.

    Args:
        home: the data folder of Honesmith.
        again: whether to build it anew in any case.
        say: called with each line that reports progress.
        run: runs a command; by default with its output on this process's stderr.
        proof: code that the new environment must be able to run; by default the imports of a worker
            and, if the machine has a GPU, a product on it.

    Raises UserError DISK_FULL, RUN_STATE if another set-up is under way, or NO_TORCH if the
    installation fails; an earlier environment then stays.
    """
    if proof is None:
        on_gpu = hardware.detect(home.root).device.kind != "cpu"
        proof = PROOF + venvs.GPU_PROOF if on_gpu else PROOF
    with venvs.only_builder(home.cache / "setup.lock", "honesmith setup"):
        if not again and works(home.train_python, proof):
            say("The training environment works; --again builds it anew.")
            return _reply(home, "It was there and works.")
        return _build(home, say, run, proof)


def works(python: Path, proof: str = PROOF) -> bool:
    """Return whether the interpreter `python` exists and can run the code `proof`.

    This takes seconds, because the default proof imports torch.
    """
    return python.is_file() and venvs.complaint(python, proof, IMPORT_S) is None


def _build(home: Home, say: Say, run: Run, proof: str) -> dict[str, object]:
    """Build the training environment next to its final place, test it by running the code `proof`,
    and move it there.

    Returns the reply of `setup`. Raises UserError DISK_FULL if there is too little space, NO_TORCH
    if installing or testing fails.
    """
    device = hardware.detect(home.root).device.kind
    is_cpu = device == "cpu"
    venvs.require_space(home.root, NEEDED["cpu" if is_cpu else "gpu"])
    extras = EXTRAS if is_cpu else (*EXTRAS, *GPU_EXTRAS)
    packages = requirements(*extras)
    build_folder = venvs.build_folder(home.train_venv)
    shutil.rmtree(build_folder, ignore_errors=True)
    try:
        say(f"Building the training environment for {device} in {home.train_venv}")
        python = _create(build_folder, packages, device, run, say)
        say("Checking it")
        _prove(python, proof)
        venvs.take_place(home.train_venv)
    finally:
        shutil.rmtree(build_folder, ignore_errors=True)
    return _reply(home, f"Built for {device}.")


def _create(folder: Path, packages: list[str], device: str, run: Run, say: Say) -> Path:
    """Create a virtual environment in `folder` with the packages and this installation of
    honesmith; return its interpreter.

    Raises UserError NO_TORCH if the installation fails.
    """
    uv = shutil.which("uv")
    venv.create(folder, with_pip=uv is None, symlinks=True)  # uv installs without pip
    python = venvs.python_of(folder)
    _install(python, packages, uv, device, run, say)
    _make_honesmith_importable(python)
    return python


def _prove(python: Path, proof: str) -> None:
    """Raise UserError NO_TORCH if the new environment's `python` cannot run the code `proof`."""
    complaint = venvs.complaint(python, proof, IMPORT_S)
    if complaint is not None:
        raise UserError(
            "NO_TORCH",
            f"the new environment does not work: {complaint} ({hardware.driver()})",
            hint=f"Try: {python} -c {PROOF.split(';')[0]!r}. Where torch sees no GPU, its driver "
            "must serve the CUDA that torch is built for: 580 or newer for CUDA 13.",
        )


def _install(
    python: Path, packages: list[str], uv: str | None, device: str, run: Run, say: Say
) -> None:
    """Install the packages, with the build of torch that this machine can use.

    Args:
        python: the interpreter of the environment to install into.
        packages: requirements, as in requirements.txt.
        uv: path of uv; None to use pip. If uv fails, it is tried once more with the index's default
            torch.
        device: "cpu", or the kind of GPU.
        run: runs a command.
        say: called with each line that reports progress.

    Raises UserError NO_TORCH if the installation fails.
    """
    if uv:
        command = [uv, "pip", "install", "--python", str(python), *packages]
        try:
            run([*command, *venvs.torch_backend(device)])
            return
        except subprocess.CalledProcessError:
            say("The torch build for this machine cannot be had; taking the index's own.")
    else:
        if device == "cpu":
            say("Without uv, pip takes the index's default torch: it may be a large CUDA build.")
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *packages]
    try:
        run(command)
    except subprocess.CalledProcessError as error:
        raise UserError(
            "NO_TORCH",
            f"installing the training packages failed with exit status {error.returncode}",
            hint="The lines above say why; call `honesmith setup` again when it is mended.",
            retryable=True,
        ) from error


def _make_honesmith_importable(python: Path) -> None:
    """Put this installation of honesmith on the path of the interpreter `python`.

    So workers run the same version of honesmith as the server. The packages of the environment
    itself come before it on the path.
    """
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    our_folder = Path(str(engine.__file__)).resolve().parent.parent  # holds engine/ and envs/
    (Path(answer.stdout.strip()) / "honesmith.pth").write_text(f"{our_folder}\n", encoding="utf-8")


def _reply(home: Home, what_happened: str) -> dict[str, object]:
    """Return the reply of `setup`; `what_happened` is a sentence, e.g. "Built for cpu."."""
    return {
        "summary": f"The training environment is {home.train_venv}. {what_happened}",
        "python": str(home.train_python),
    }

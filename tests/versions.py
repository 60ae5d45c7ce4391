"""`make versions`: the suite on the meta device and a core of the worker's tests, with the lowest
and the highest torch and transformers that pyproject.toml allows.

Each pair of versions gets an environment of its own in `.versions/`, which is kept; builds of torch
for GPUs take 5 GB each. A pair that the package index does not have is named and left out.

    python tests/versions.py [--only torch-2.11]
"""

import argparse
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".versions"
TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
TESTS = (
    "tests/engine/worker/test_training_meta.py",
    "tests/engine/models/sizing/test_layers.py",
    "tests/engine/worker/ops/test_attention.py",
    "tests/engine/worker/ops/test_kernels.py",
    "tests/engine/worker/network/test_hub_cache.py",
    "tests/engine/worker/network/test_hub_cache_steps.py",
    "tests/engine/worker/network/test_hub_network.py",
    "tests/engine/worker/network/test_hub_network_sampling.py",
    "tests/engine/worker/network/test_network.py",
)


@dataclass(frozen=True)
class Pair:
    """Versions that are tried together.

    Attributes:
        torch: a minor version, such as "2.11".
        transformers: "lowest" or "highest"; wanted: what pip is asked for.
    """

    torch: str
    transformers: str
    wanted: str

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-transformers-{self.transformers}"


def requirements(extra: str) -> dict[str, Requirement]:
    """The requirements of an extra of pyproject.toml, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    parsed = [Requirement(text) for text in project["optional-dependencies"][extra]]
    return {requirement.name: requirement for requirement in parsed}


def bounds(requirement: Requirement) -> tuple[Version, Version]:
    """The lowest version allowed, and the first that is too high."""
    by_operator = {each.operator: Version(each.version) for each in requirement.specifier}
    return by_operator[">="], by_operator["<"]


def pairs() -> Iterator[Pair]:
    """Every minor version of torch; transformers at the same end of its bounds, and at both ends
    with the newest torch."""
    train = requirements("train")
    low, high = bounds(train["torch"])
    minors = [f"{low.major}.{minor}" for minor in range(low.minor, high.minor)]
    lowest = f"transformers=={bounds(train['transformers'])[0]}"
    highest = str(train["transformers"])
    for minor in minors:
        if minor in (minors[0], minors[-1]):
            yield Pair(minor, "lowest", lowest)
        if minor != minors[0]:
            yield Pair(minor, "highest", highest)


def python_of(pair: Pair) -> Path | None:
    """The interpreter of the pair's environment, which is built if it is not there; None if pip
    finds no such versions."""
    folder = FOLDER / pair.name
    python, stamp = folder / "bin/python", folder / ".complete"
    if stamp.exists():
        return python
    if not python.exists():
        venv.create(folder, with_pip=True)
    tools = [str(each) for name, each in requirements("dev").items() if name in TOOLS]
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = [f"torch=={pair.torch}.*", pair.wanted, *tools, "-e", f"{ROOT}[train]"]
    done = subprocess.run([*command, *wanted], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        print(f"  cannot be had: {(errors or ['pip failed'])[-1]}", flush=True)
        shutil.rmtree(folder)
        return None
    stamp.touch()
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the beginning of a pair's name")
    only = parser.parse_args().only
    outcomes: dict[str, str] = {}
    for pair in pairs():
        if not pair.name.startswith(only):
            continue
        print(f"{pair.name}:", flush=True)
        python = python_of(pair)
        if python is None:
            outcomes[pair.name] = "cannot be had"
            continue
        show = "import torch, transformers; print('  torch', torch.__version__, 'transformers', "
        subprocess.run([str(python), "-c", f"{show}transformers.__version__)"], check=True)
        failed = subprocess.run([str(python), "-m", "pytest", *TESTS], cwd=ROOT).returncode
        outcomes[pair.name] = "failed" if failed else "passed"
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}")
    return int("failed" in outcomes.values() or "passed" not in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())

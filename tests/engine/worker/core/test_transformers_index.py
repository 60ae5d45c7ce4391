"""The list of transformers' classes is made once per installation, and is the one it makes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import import_utils

from engine.worker.core import transformers_index

ROOT = Path(__file__).parents[4]
PACKAGE = {
    "__init__.py": """
        from pathlib import Path
        from .utils.import_utils import define_import_structure
        ALL = define_import_structure(Path(__file__).parent / "models", prefix="models")
        """,
    "models/__init__.py": """
        from ..utils.import_utils import define_import_structure
        OWN = define_import_structure(__file__)
        """,
    "models/tiny/__init__.py": """
        from ...utils.import_utils import define_import_structure
        OWN = define_import_structure(__file__)
        """,
    "utils/__init__.py": "",
    "utils/import_utils.py": """
        def define_import_structure(module_path, prefix=None):
            print("listed", end=" ")
            name = "configuration_tiny" if "tiny" in str(module_path) else "tiny.configuration_tiny"
            name = f"{prefix}.{name}" if prefix else name
            return {frozenset({"torch"}): {name: {"TinyConfig", "TinyModel"}}}
        """,
}
PROGRAM = """
from engine.worker.core import transformers_index
transformers_index.install()
transformers_index.install()
import transformers, transformers.models
names = {"TinyConfig", "TinyModel"}
own = {frozenset({"torch"}): {"tiny.configuration_tiny": names}}
of_all = {frozenset({"torch"}): {"models.tiny.configuration_tiny": names}}
print("|", transformers.ALL == of_all, transformers.models.OWN == own)
"""


def imported(site: Path) -> str:
    """What the program prints: "listed" for each list made, then whether both are right."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A small package called transformers in a folder site-packages."""
    return package_in(tmp_path / "site-packages")


def package_in(site: Path) -> Path:
    for name, text in PACKAGE.items():
        path = site / "transformers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        path.write_text("\n".join(line.removeprefix("        ") for line in lines) + "\n")
    return site


def test_it_is_made_at_the_first_import_and_read_at_the_next(installed: Path):
    assert imported(installed) == "listed | True True"
    assert imported(installed) == "| True True"


@pytest.mark.parametrize("damage", ["", "{}", '{"folder": [1, 2], "structure": []}', "[3]"])
def test_a_damaged_file_or_one_of_another_installation_is_made_anew(installed: Path, damage: str):
    imported(installed)
    file = installed / "transformers" / "__pycache__" / transformers_index.FILE
    file.write_text(damage)
    assert imported(installed) == "listed | True True"
    assert imported(installed) == "| True True"


def test_another_release_is_listed_anew(installed: Path):
    imported(installed)
    code = installed / "transformers" / "__init__.py"
    os.utime(code, ns=(1, 1))
    assert imported(installed) == "listed | True True"


def test_nothing_is_kept_of_a_package_that_may_be_edited_in_place(tmp_path: Path):
    site = package_in(tmp_path / "src")
    for _ in range(2):
        assert imported(site) == "listed listed | True True"
    assert not (site / "transformers" / "__pycache__" / transformers_index.FILE).exists()


@pytest.mark.timeout(30)
def test_what_is_read_is_what_transformers_lists_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    models = Path(import_utils.__file__).parents[1] / "models"
    monkeypatch.setattr(transformers_index, "_file", lambda models: tmp_path / "kept.json")
    own = import_utils.spread_import_structure(
        import_utils.create_import_structure_from_path(models)
    )
    assert transformers_index.read_list(models) is None
    transformers_index.write_list(models, own)
    assert transformers_index.read_list(models) == own and len(own) > 1

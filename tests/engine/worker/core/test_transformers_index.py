"""The list of transformers' classes is made once per installation, and is the one it makes."""

import os
import subprocess
import sys
import textwrap
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
    caches = str(site.parent / "caches")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(site), str(ROOT))),
            "XDG_CACHE_HOME": caches,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def kept_files(site: Path) -> list[Path]:
    return list((site.parent / "caches" / "honesmith").iterdir())


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with a small package called transformers."""
    site = tmp_path / "site-packages"
    for name, text in PACKAGE.items():
        path = site / "transformers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return site


def test_it_is_made_at_the_first_import_and_read_at_the_next(installed: Path):
    assert imported(installed) == "listed | True True"
    assert imported(installed) == "| True True"


@pytest.mark.parametrize("damage", ["", "{}", '{"state": "", "structure": []}', "[3]"])
def test_a_damaged_file_is_made_anew(installed: Path, damage: str):
    imported(installed)
    (file,) = kept_files(installed)
    file.write_text(damage)
    assert imported(installed) == "listed | True True"
    assert imported(installed) == "| True True"


@pytest.mark.parametrize(
    "name", ["__init__.py", "models/tiny/__init__.py", "utils/import_utils.py"]
)
def test_a_file_that_changed_is_listed_anew(installed: Path, name: str):
    imported(installed)
    os.utime(installed / "transformers" / name, ns=(1, 1))
    assert imported(installed) == "listed | True True"


def test_a_file_that_came_later_is_listed_too(installed: Path):
    imported(installed)
    (installed / "transformers" / "models" / "tiny" / "modeling_tiny.py").write_text("")
    assert imported(installed) == "listed | True True"
    assert imported(installed) == "| True True"


def test_where_nothing_can_be_kept_it_is_made_once_for_each_process(installed: Path):
    (installed.parent / "caches").write_text("no folder")
    for _ in range(2):
        assert imported(installed) == "listed | True True"


def test_a_full_disk_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    transformers_index.write_list(tmp_path / "kept" / "list.json", "s", {frozenset(): {}})
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.timeout(30)
def test_what_is_read_is_what_transformers_lists_itself(tmp_path: Path):
    models = Path(import_utils.__file__).parents[1] / "models"
    own = import_utils.spread_import_structure(
        import_utils.create_import_structure_from_path(models)
    )
    file, state = tmp_path / "kept.json", transformers_index.state_of(models)
    assert state and transformers_index.read_list(file, state) is None
    transformers_index.write_list(file, state, own)
    assert transformers_index.read_list(file, state) == own and len(own) > 1
    assert transformers_index.read_list(file, "another") is None

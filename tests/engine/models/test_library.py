"""Models of a home: imported once, whole or not at all, and out of strangers' sight."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import gguf_files
import psutil
import pytest
from stand_ins import stand_in

from engine.core.errors import UserError
from engine.home.run_dir import Home
from engine.machine.processes import launcher
from engine.models import catalog, library

pytestmark = pytest.mark.timeout(60)

IMPORT = """
import sys
from pathlib import Path
from engine.home.run_dir import Home
from engine.models import catalog
print(catalog.resolve_model(Home(Path(sys.argv[1])), sys.argv[2]).base_path)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return gguf_files.write_random(tmp_path / "tiny.gguf")


def asks(home: Home, file: Path) -> "subprocess.Popen[str]":
    """Another process that names the file as a model."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", IMPORT, str(home.root), str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def folders(home: Home) -> list[str]:
    """What lies among the models, hidden ones too."""
    found = [path.name for path in home.models.iterdir() if path.name != ".gguf"]
    hidden = home.models / ".gguf"
    return sorted(found + ([path.name for path in hidden.iterdir()] if hidden.is_dir() else []))


def test_a_gguf_file_is_a_model_by_its_path_and_imported_once(home: Home, file: Path):
    model = catalog.resolve_model(home, str(file))
    assert (model.kind, model.base_ref, model.facts.layers) == ("path", str(file), 2)
    weights = model.base_path / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert catalog.resolve_model(home, str(file)).base_path == model.base_path
    assert weights.stat().st_mtime_ns == before


def test_a_file_that_changes_is_imported_anew(home: Home, file: Path):
    first = catalog.resolve_model(home, str(file)).base_path
    gguf_files.write_random(file, facts=gguf_files.config(num_hidden_layers=1))
    second = catalog.resolve_model(home, str(file))
    assert second.base_path != first and second.facts.layers == 1
    assert catalog.resolve_model(home, str(second.base_path)).facts.layers == 1


def test_a_link_names_the_file_it_leads_to(home: Home, file: Path, tmp_path: Path):
    (tmp_path / "link.gguf").symlink_to(file)
    linked = catalog.resolve_model(home, str(tmp_path / "link.gguf"))
    assert linked.base_ref == str(file)
    assert linked.base_path == catalog.resolve_model(home, str(file)).base_path


def test_processes_that_name_it_at_once_share_one_import(home: Home, file: Path):
    processes = [asks(home, file) for _ in range(4)]
    answers = [process.communicate(timeout=50) for process in processes]
    assert {process.returncode for process in processes} == {0}, answers
    assert len({out for out, _ in answers}) == 1
    assert len(folders(home)) == 1


@pytest.mark.parametrize("moment", ["", "tokenizer.json", "model.safetensors"])
def test_an_import_that_is_killed_leaves_nothing_and_the_next_one_succeeds(
    home: Home, tmp_path: Path, moment: str
):
    # Large enough that its weights take a moment.
    facts = gguf_files.config(num_hidden_layers=60)
    file = gguf_files.write_random(tmp_path / "x.gguf", facts=facts)
    process = asks(home, file)
    importer = _importer_of(file)
    whole = library.import_folder(home, file)
    while moment and process.poll() is None and not _being_written(whole, moment).exists():
        pass
    with contextlib.suppress(psutil.NoSuchProcess):  # it was quicker
        importer.kill()
    _, error = process.communicate(timeout=50)
    if process.returncode:
        assert "the import was ended" in error
        assert not whole.exists()
    assert catalog.resolve_model(home, str(file)).facts.layers == 60
    assert folders(home) == [whole.name]


def _being_written(folder: Path, name: str) -> Path:
    return folder.with_name(f".{folder.name}.aside") / name


def _importer_of(file: Path) -> psutil.Process:
    """The process that imports the file; waits for it."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "engine.models.gguf.importer" in command and str(file) in command:
                return process
    pytest.fail("no process imports the file")


def test_a_refused_file_leaves_nothing_and_says_why_each_time(home: Home, tmp_path: Path):
    file = gguf_files.write_random(tmp_path / "x.gguf", leave_out=("tokenizer.chat_template",))
    for _ in range(2):
        with pytest.raises(UserError, match=r"x\.gguf cannot be imported: .* no chat template"):
            catalog.resolve_model(home, str(file))
    assert folders(home) == []


def test_a_model_is_added_by_file_listed_described_and_removed(home: Home, file: Path):
    said: list[str] = []
    reply = library.add(home, str(file), "mine", said.append)
    assert reply["model"] == "mine" and "already" not in reply["summary"] and said
    assert library.names(home) == ["mine"]
    assert "already" in library.add(home, str(file), "mine")["summary"]
    [listed] = [model for model in catalog.usable_models(home) if model.kind == "home"]
    assert listed.ref == "mine" and str(file) in str(listed.origin)
    file.unlink()  # it is the home's own copy
    assert catalog.describe(home, "mine")["params"] == listed.params
    library.remove(home, "mine")
    assert library.names(home) == [] and folders(home) == []


@pytest.mark.parametrize("name", ["../x", "UPPER", "", ".hidden", "a" * 70])
def test_a_name_that_could_lead_elsewhere_is_refused(home: Home, tmp_path: Path, name: str):
    file = gguf_files.write_random(tmp_path / (name[:8].replace("/", "_") + "É.gguf"))
    with pytest.raises(UserError) as caught:
        library.add(home, str(file), name)
    assert caught.value.code == "BAD_ARGUMENT"
    assert not home.models.exists()


def test_what_is_no_model_of_this_home_cannot_be_added_or_removed(home: Home):
    for call in (lambda: library.add(home, "nothing"), lambda: library.remove(home, "nothing")):
        with pytest.raises(UserError) as caught:
            call()
        assert caught.value.code == "MODEL_NOT_FOUND" and caught.value.hint


def test_a_full_disk_is_said_before_anything_starts(
    home: Home, file: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 1000))
    with pytest.raises(UserError) as caught:
        catalog.resolve_model(home, str(file))
    assert caught.value.code == "DISK_FULL" and "are needed" in caught.value.message


@pytest.mark.parametrize("own_python", [True, False])
def test_a_missing_package_is_named_with_the_command_that_brings_it(
    home: Home, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_python: bool
):
    script = tmp_path / "without.py"
    script.write_text(
        "import sys\nsys.modules['gguf'] = None\nfrom engine.models.gguf import importer\n"
        "sys.exit(importer.main(*sys.argv[1:5]))\n"
    )
    stand_in(monkeypatch, gguf_importer=script)
    if not own_python:
        home.train_python.parent.mkdir(parents=True)
        home.train_python.symlink_to(sys.executable)
        monkeypatch.setattr(launcher, "worker_python", lambda home: str(home.train_python))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with pytest.raises(UserError, match="the package gguf is not installed") as caught:
        catalog.resolve_model(home, str(file))
    expected = f"{sys.executable} -m pip install 'gguf" if own_python else "`honesmith setup`"
    assert expected in str(caught.value.hint)


def test_without_torch_the_set_up_is_named(home: Home, file: Path, monkeypatch: pytest.MonkeyPatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "torch" else real(name, *more),
    )
    with pytest.raises(UserError) as caught:
        catalog.resolve_model(home, str(file))
    assert caught.value.code == "NO_TORCH" and "honesmith setup" in str(caught.value.hint)


def test_a_stranger_learns_nothing_about_files(
    home: Home, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file that is there but was not imported, one that is not, and one that is no model."""
    (tmp_path / "bad.gguf").write_bytes(b"no")
    monkeypatch.chdir(tmp_path)
    messages = set()
    for ref in ("tiny.gguf", "none.gguf", "bad.gguf", "./tiny.gguf", "a/b.gguf"):
        with pytest.raises(UserError) as caught:
            catalog.check_in_sight(home, ref)
        messages.add((caught.value.message.replace(ref, "REF"), str(caught.value.hint)))
    assert len(messages) == 1
    assert not home.models.exists()
    catalog.resolve_model(home, "tiny.gguf")  # its owner
    catalog.check_in_sight(home, "tiny.gguf")

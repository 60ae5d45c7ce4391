"""A host made ready, and what its packages are."""

import importlib.metadata

import pytest

from engine.core.errors import UserError
from engine.executors import hosts
from engine.executors.attending import host_setup
from engine.home.run_dir import Home


def test_the_packages_over_there_have_the_versions_of_this_side():
    lines = host_setup.pinned("train")
    names = [line.partition("=")[0] for line in lines]
    assert len(names) == len(set(names))
    torch = importlib.metadata.version("torch").partition("+")[0]
    assert f"torch=={torch}" in lines  # without the name of its build
    assert f"transformers=={importlib.metadata.version('transformers')}" in lines
    assert {"pydantic", "tokenizers", "safetensors", "numpy"} <= set(names)
    assert not [name for name in names if name.startswith("nvidia") and name != "nvidia-ml-py"]


def test_a_host_that_nobody_added_is_not_set_up(home: Home):
    with pytest.raises(UserError, match="no host 'box'"):
        host_setup.set_up(home, "box")


@pytest.mark.machines
@pytest.mark.timeout(60)
def test_a_machine_without_what_training_needs_is_refused_with_what_it_said(home, sshd, tmp_path):
    python = tmp_path / "python-there"
    python.write_text('#!/bin/sh\nexec python3 -S "$@"\n')
    python.chmod(0o700)
    hosts.add_host(home, "box", {"ssh": "box", "python": str(python)})
    with pytest.raises(UserError, match="No module named") as error:
        host_setup.set_up(home, "box")
    assert error.value.code == "HOST_UNUSABLE"


@pytest.mark.machines
@pytest.mark.timeout(60)
def test_a_host_is_wiped_and_forgotten(box):
    assert box.far_root.is_dir()
    host_setup.wipe(box.home, "box")
    hosts.remove_host(box.home, "box")
    assert not box.far_root.exists()
    assert not hosts.facts_file(box.home, "box").exists()

"""What SkyPilot is told of a cluster."""

import pytest

from engine.executors.sky.task import interpreter, task_of
from engine.home.user_config import Host


@pytest.mark.parametrize(
    ("folder", "place"),
    [(".honesmith-host", "$HOME/.honesmith-host"), ("/data/honesmith", "/data/honesmith")],
)
def test_the_environment_is_built_where_its_interpreter_is_looked_for(folder: str, place: str):
    host = Host("rented", "", "sky", folder=folder)
    setup = task_of("hs-one", host, "ssh-ed25519 AAAA", ["torch==2.13.0"], 60.0)["setup"]
    assert f'venv="{place}/venv"' in setup and f'mkdir -p "{place}"' in setup
    assert interpreter(host) == f"{folder}/venv/bin/python"
    assert "setup" not in task_of("hs-one", host, "ssh-ed25519 AAAA", [], 60.0)

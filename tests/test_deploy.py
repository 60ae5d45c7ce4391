"""The service file and the container's recipes: what they start exists, and systemd can read it."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from mcp_server.cli.main import app

ROOT = Path(__file__).parents[1]
UNIT = (ROOT / "deploy/honesmith.service").read_text("utf-8")
RECIPE = (ROOT / "deploy/Containerfile").read_text("utf-8")
SERVE = {option for param in get_command(app).commands["serve"].params for option in param.opts}


def started(line: str) -> list[str]:
    """The options of `honesmith serve` in a command line."""
    words = shlex.split(line)
    assert words[words.index("serve") - 1].endswith("honesmith")
    return [word for word in words if word.startswith("--")]


def test_what_the_unit_and_the_recipe_start_are_options_of_serve():
    (unit,) = re.findall(r"^ExecStart=(.+)$", UNIT, re.MULTILINE)
    (recipe,) = re.findall(r'exec (honesmith serve .+)"\]$', RECIPE, re.MULTILINE)
    for line in (unit, recipe.replace("\\", "")):
        assert started(line) and set(started(line)) <= SERVE, line


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_systemd_reads_the_unit_without_a_word(tmp_path: Path):
    honesmith = Path(sys.executable).with_name("honesmith")
    unit = tmp_path / "honesmith.service"
    unit.write_text(UNIT.replace("/opt/honesmith/bin/honesmith", str(honesmith)))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_restart_of_the_server_leaves_runs_alone_and_their_walls_stand():
    assert "\nKillMode=process\n" in UNIT
    for taken_away in ("RestrictNamespaces", "SystemCallFilter", "PrivateDevices"):
        assert f"\n{taken_away}=" not in UNIT


def test_the_recipe_copies_what_exists_and_compose_builds_it():
    for line in re.findall(r"^COPY (.+)$", RECIPE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text("utf-8"))
    service = compose["services"]["honesmith"]
    assert (ROOT / "deploy" / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    (port,) = service["ports"]
    assert port.startswith("127.0.0.1:"), "without encryption it listens on loopback alone"
    volume, _, folder = service["volumes"][0].partition(":")
    assert volume in compose["volumes"] and f"HONESMITH_HOME={folder} " in RECIPE

"""What launches of a run leave over there, over a connection without ssh."""

import sys
from pathlib import Path

import pytest
from run_configs import train_config

from engine.core.files import write_json
from engine.executors.ssh import HERE, Link
from engine.executors.ssh_executor import SshExecutor
from engine.home.run_dir import Home
from engine.home.user_config import Host
from engine.machine.processes.seam import Handle
from engine.models import catalog

pytestmark = pytest.mark.timeout(60)


def test_a_late_removal_of_an_older_launch_leaves_what_a_newer_one_has_sent(
    home: Home, env: str, tmp_path: Path
):
    run = home.run("far-1")
    run.create()
    run.metrics.write_text("{}\n")
    base = {"ref": "pebble", "path": str(catalog.BUILTIN["pebble"])}
    write_json(run.config, train_config(run.id, base=base) | {"env_id": env})
    older, newer = (Handle("ssh:box", launch, "starting") for launch in (1, 2))
    with Link(HERE, str(tmp_path / "honesmith"), sys.executable) as link:
        there = SshExecutor(home, Host("box", "box"), link)
        there.send(run, run.read_config(), newer)  # pyright: ignore[reportArgumentType]
        folder = tmp_path / "honesmith" / there.folder(run, newer)
        there.reap(run, older)
        assert {"config.json", "metrics.jsonl"} <= {path.name for path in folder.iterdir()}
        there.reap(run, newer)
        assert not folder.exists()

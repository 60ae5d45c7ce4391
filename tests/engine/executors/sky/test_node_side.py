"""The job of a rented machine: who is let in, and when it ends."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.executors.sky import node_side


def job(home: Path, **variables: str) -> subprocess.Popen[str]:
    values = {"HOME": str(home), "USER": "sky", "HONESMITH_ROOT": ".honesmith-host"}
    values |= {"HONESMITH_KEY": "ssh-ed25519 AAAA honesmith", "HONESMITH_LOOK_S": "0.05"}
    values |= {"HONESMITH_LEASE_S": "3600", "HONESMITH_MOST_S": "3600"} | variables
    values["HONESMITH_SSH_FOLDER"] = str(home / "ssh")
    return subprocess.Popen(
        [sys.executable, "-I", node_side.__file__],
        env=values,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(name="there")
def home_there(tmp_path: Path) -> Path:
    (tmp_path / "ssh").mkdir()
    (tmp_path / "ssh" / "ssh_host_ed25519_key.pub").write_text("ssh-ed25519 BBBB root@node\n")
    return tmp_path


def test_it_says_who_the_machine_is_and_lets_us_in_once(there):
    for _ in range(2):
        said, _ = job(there, HONESMITH_MOST_S="0").communicate(timeout=30)
        assert said.splitlines()[:2] == [
            "honesmith-node key ssh-ed25519 BBBB",
            "honesmith-node user sky",
        ]
        assert "hours of this cluster are over" in said
    authorized = there / ".ssh" / "authorized_keys"
    assert authorized.read_text() == "ssh-ed25519 AAAA honesmith\n"
    assert authorized.stat().st_mode & 0o777 == 0o600


def test_a_second_job_ends_with_the_first(there):
    root = there / ".honesmith-host"
    root.mkdir()
    (root / "began").write_text(repr(time.time() - 7200))
    said, _ = job(there).communicate(timeout=30)
    assert "hours of this cluster are over" in said


def test_it_ends_when_no_run_was_given_a_word_for_its_lease(there, monkeypatch: Any):
    lease = there / ".honesmith-host" / "homes" / "a" / "runs" / "r" / "lease.json"
    lease.parent.mkdir(parents=True)
    lease.touch()
    long_ago = time.time() - 4000
    root = str(there / ".honesmith-host")
    assert node_side.last_word(root, long_ago) == lease.stat().st_mtime
    os.utime(lease, (long_ago, long_ago))
    assert node_side.last_word(root, long_ago - 10) == pytest.approx(long_ago)
    (there / ".honesmith-host" / "began").write_text(repr(long_ago))
    said, _ = job(there, HONESMITH_LEASE_S="3000", HONESMITH_MOST_S="9999").communicate(timeout=30)
    assert "nobody gave a word for as long as the lease" in said

"""A real sshd on loopback, for one test, with its own keys, and a `ssh` that knows it."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SSHD = shutil.which("sshd") or next(
    (str(p) for p in (Path("/usr/sbin/sshd"), Path("/usr/local/sbin/sshd")) if p.exists()), ""
)
WHY_NOT = "" if SSHD and shutil.which("ssh") and shutil.which("ssh-keygen") else "no sshd here"


class LoopbackSshd:
    """An sshd that lets the user of the test in with one key, into an empty home folder.

    `bin` is to come first on PATH: its `ssh` reads a config of its own, in which `box` is this
    machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "over-there"
        self.bin = folder / "bin"
        self.port = free_port()
        for each in (folder, self.home, self.bin):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("host_key", "user_key"):
            keygen(folder / name)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        (folder / "known_hosts").write_text(
            f"[127.0.0.1]:{self.port} {public(folder / 'host_key')}"
        )
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\nUsePAM no\nStrictModes no\nPidFile none\n"
            f"PermitRootLogin prohibit-password\nMaxStartups 100\nSetEnv HOME={self.home}\n"
        )
        (folder / "ssh_config").write_text(
            f"Host box\n  HostName 127.0.0.1\n  Port {self.port}\n"
            f"  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
        )
        wrapper = self.bin / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        wrapper.chmod(0o700)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Listen; returns when a connection is taken."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(
                mode=0o755, exist_ok=True
            )  # where it locks up what it does not trust
        log = (self.folder / "sshd.log").open("ab")
        command = [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, stdout=log)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.01)
        raise AssertionError((self.folder / "sshd.log").read_text())

    def stop(self) -> None:
        """Listen no more; connections that stand go on."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)
            self.process = None

    def change_host_key(self) -> None:
        """Be another machine than the one that is known."""
        self.stop()
        (self.folder / "host_key").unlink()
        keygen(self.folder / "host_key")
        self.start()


@pytest.fixture
def sshd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackSshd]:
    """An sshd that is `box` for every ssh that this test starts."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    server = LoopbackSshd(tmp_path / "sshd")
    monkeypatch.setenv("PATH", f"{server.bin}:{os.environ['PATH']}")
    yield server
    server.stop()


def python_there(script: Path, **programs: Path) -> Path:
    """Write an interpreter for the other side whose programs are scripts without torch."""
    texts = json.dumps({kind: str(path) for kind, path in programs.items()})
    script.write_text(
        f"#!/bin/sh\nexport HONESMITH_TEST_PROGRAMS='{texts}' HONESMITH_STOP_GRACE_S=0.2\n"
        f'exec {sys.executable} "$@"\n'
    )
    script.chmod(0o700)
    return script


def keygen(path: Path) -> None:
    """Make a key pair."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)


def public(path: Path) -> str:
    """The public half of a key."""
    return path.with_name(path.name + ".pub").read_text()


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

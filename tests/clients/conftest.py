"""Real clients in environments of their own, a project to point them at, and no way out."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import envs
from engine.home.run_dir import Home
from mcp_server.cli.client_config import Launch, serve_argv, write_entry

EXAMPLE = Path(str(envs.__file__)).parent / "examples" / "arithmetic"
_PLACE = Path(__file__).parent / "install.py"
_SPEC = importlib.util.spec_from_file_location("clients_install", _PLACE)
assert _SPEC is not None and _SPEC.loader is not None
_INSTALL = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_INSTALL)

MUST = {"claude", "codex", "inspector", "conformance"}


@dataclass(frozen=True)
class Project:
    """A folder with an environment and every agent's entry for the server, as `init` writes it.

    Attributes:
        person: an empty folder that a client takes for its user's home.
    """

    folder: Path
    home: Home
    person: Path

    @property
    def argv(self) -> list[str]:
        """The command that starts the server over stdio."""
        return list(serve_argv(self.folder, self.home.root))

    def run(
        self, argv: list[str], within_s: float = 60, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a client in the project.

        Of this process's variables it gets PATH alone, and `more` besides.
        """
        # An address on which nothing listens: a client that wants to call home cannot.
        nowhere = "http://127.0.0.1:9"
        variables = {
            "PATH": f"{_INSTALL.node_folder()}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.person),
            "TMPDIR": str(self.person),
            "LANG": "C.UTF-8",
            "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "10000"),
            "HTTP_PROXY": nowhere,
            "HTTPS_PROXY": nowhere,
            "NO_PROXY": "127.0.0.1,localhost",
        }
        return subprocess.run(
            argv,
            cwd=self.folder,
            env=variables | more,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
        )


@pytest.fixture
def project(home: Home, tmp_path: Path) -> Project:
    folder = tmp_path / "project"
    shutil.copytree(EXAMPLE, folder / "arithmetic")
    for agent in ("claude", "codex"):
        write_entry(folder, agent, Launch(argv=serve_argv(folder, home.root)))
    person = tmp_path / "person"
    person.mkdir()
    return Project(folder, home, person)


@pytest.fixture
def installed() -> Callable[[str], Path]:
    """The folder of a client by its name; a test of one that is not to be had says why."""

    def find(name: str) -> Path:
        (wanted,) = (item for item in _INSTALL.WANTED if item.name == name)
        done, failed = wanted.folder / _INSTALL.DONE, wanted.folder / _INSTALL.FAILED
        if done.exists() and done.read_text("utf-8") == wanted.spelt:
            return wanted.folder
        why = failed.read_text("utf-8") if failed.exists() else "run `make clients`, not pytest"
        if name in MUST:
            pytest.fail(f"{wanted.spelt}: {why}")
        pytest.skip(f"{wanted.spelt}: {why}")

    return find

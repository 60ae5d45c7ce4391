"""Environments of others that attack: what holds for our own holds for theirs, and for the server
that they may start, as root and as an ordinary user, at every level of isolation."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_env_attacks import (
    CALLS,
    HERE,
    NAMED,
    PLACES,
    ROOT,
    SECRET,
    UID,
    WHO,
    attacks,
    furnish,
    interpreter,
    program,
)

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="the layers above the floor are Linux's"),
]

LIMITS = {"memory_mb": 1024, "processes": 40, "file_mb": 64, "call_seconds": 20.0}
TOML = """
[adapter]
kind = "openenv"
server = ["python3", "server.py"]
size = 1
"""
SERVER = """
import os
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""
# In the place of the package's client: an action is an attack, done where foreign code runs.
CLIENT = """
import json, types
import environment

class GenericEnvClient:
    def __init__(self, base_url):
        pass
    def sync(self):
        return self
    connect = close = lambda self: None
    def reset(self, **_):
        return types.SimpleNamespace(observation={}, reward=None, done=False)
    def step(self, action):
        order = json.loads(action["message"])
        environment.ATTACKS[order["attack"]](**order["with"])
        return types.SimpleNamespace(observation={}, reward=1.0, done=True)
"""
ROWS = ("a3 ", "a23", "a25", "a4 ", "a5 signal", "a5 trace")
NETWORK = "network can be reached"  # the gap where nothing confines which port is connected to
OPEN = dict.fromkeys(("a4 tcp", "a4 listen", "a4 metadata service"), (NETWORK, CALLS))
NOBODY = {"pid": 0, "tcp": 0, "udp": 0, "path": "", "abstract": "", "letters": "", "memory": 0}


def chosen(victim: dict[str, Any], stage: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        name: attack
        for name, attack in attacks(victim, stage).items()
        if name.startswith(ROWS) and "model" not in name
    }


@pytest.fixture(scope="module")
def stage() -> Iterator[Path]:
    """A folder any user can reach, with our package, the attacks and the foreign environment."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("changing the uid and powers of a client needs root and setpriv")
    folder = Path(tempfile.mkdtemp(prefix="attacked-"))
    try:
        folder.chmod(0o755)
        shutil.copytree(ROOT / "envs", folder / "envs", ignore=shutil.ignore_patterns("__py*"))
        shutil.copytree(HERE, folder / "tests" / "faults" / "attacks")
        foreign = folder / "foreign"
        (foreign / "openenv" / "core").mkdir(parents=True)
        (foreign / "environment.toml").write_text(TOML)
        (foreign / "server.py").write_text(SERVER)
        (foreign / "openenv" / "core" / "generic_client.py").write_text(CLIENT)
        shutil.copy(HERE / "environment.py", foreign / "environment.py")
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module", params=PLACES, ids=lambda p: "-".join((p[0], p[1], *p[2])))
def place(request: pytest.FixtureRequest, stage: Path) -> tuple[str, dict[str, Any]]:
    """All attacks, run once: the level expected, what came of them by name."""
    who, level, refused = request.param
    if "unshare" in refused and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    python, own = interpreter(), stage / "own"
    uid = UID if who == "user" else 0
    furnish(own, uid)
    victim = subprocess.Popen(
        [*WHO["user" if uid else "root"], python, "-I", str(program(stage, "victim")), str(own)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        assert victim.stdout is not None
        listed = chosen(json.loads(victim.stdout.readline()), stage)
        order = {
            "env": str(stage / "foreign"),
            "attacks": list(listed.values()),
            "limits": LIMITS,
            "sandbox": {"hidden": [str(own / "kept")], "allow_root": True},
            "refused": refused,
        }
        said = played(stage, python, who, order)
        assert victim.poll() is None, "an attack ended the victim"
    finally:
        victim.kill()
        victim.communicate()
    said["by_name"] = dict(zip(listed, said["scores"], strict=True))
    return level, said


def played(stage: Path, python: str, who: str, order: dict[str, Any]) -> dict[str, Any]:
    """What the client says of its attacks."""
    done = subprocess.run(
        [*WHO[who], python, "-I", "-B", str(program(stage, "adapter_client")), json.dumps(order)],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": os.defpath, "HOME": str(stage / "own"), "SERVER_SECRET": SECRET},
        timeout=230,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert said["problem"] is None, said["problem"]
    return said


def test_a29_its_own_server_is_all_that_it_reaches(place: tuple[str, dict[str, Any]]):
    level, said = place
    if level != "limits" and said["level"] == level:
        assert "no network but its own server" in said["holds"]
        errors = [said["by_name"][name]["error"] for name in OPEN]
        assert None not in errors


@pytest.mark.parametrize("name", list(chosen(NOBODY, Path("/"))))
def test_every_attack_of_theirs_is_stopped_or_the_gap_is_named(
    place: tuple[str, dict[str, Any]], name: str
):
    score = place[1]["by_name"][name]
    if score["error"] is None:
        gaps = "; ".join(place[1]["gaps"])
        named = (*NAMED.get(name, ()), *OPEN.get(name, ()))
        assert any(words in gaps for words in named), f"{name} is not named in: {gaps}"


def test_nothing_secret_comes_back(place: tuple[str, dict[str, Any]]):
    assert SECRET not in json.dumps(place[1])

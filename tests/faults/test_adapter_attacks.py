"""Environments of others that attack: what holds for our own holds for every foreign format, for
the servers that they start and for programs that ask the gateway, as root and as an ordinary user,
at every level of isolation."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verifiers_stand_in import PACKAGE

from envs.config.adapters import KINDS
from tests.faults.attacks.foreign import foreign_formats
from tests.faults.test_env_attacks import (
    CALLS,
    NAMED,
    PLACES,
    SECRET,
    UID,
    WHO,
    attacks,
    furnish,
    interpreter,
    open_to_all,
    program,
)

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="the layers above the floor are Linux's"),
]

LIMITS = {"memory_mb": 1024, "processes": 40, "file_mb": 64, "call_seconds": 20.0}
FORMATS = foreign_formats(PACKAGE)
ROWS = ("a3 ", "a23", "a25", "a4 ", "a5 signal", "a5 trace")
# What shows that the others were stopped by the box and did not just fail to start.
PROOF, ALLOWED = "prove that this code runs", "list the own folder"
# Of programs, which take a box for each attack: one of each kind.
FEW = (
    PROOF,
    ALLOWED,
    "a3 server token",
    "a3 own variables",
    "a3 server variables",
    "a3 write our package",
    "a3 cut a file that is read",
    "a23 write .mcp.json",
    "a25 root of the process",
    "a25 the loader",
    "a25 a program in memory",
    "a4 tcp",
    "a4 udp",
    "a4 listen",
    "a4 metadata service",
    "a4 path socket",
    "a4 abstract socket",
    "a5 signal the client",
    "a5 trace the server",
)
NETWORK = "network can be reached"  # the gap where nothing confines which port is connected to
OPEN = dict.fromkeys(("a4 tcp", "a4 listen", "a4 metadata service"), (NETWORK, CALLS))
# What the system says to an attack that it stops, and what is said of a process that it ends.
STOPPED = (
    "PermissionError",
    "OSError",
    "ProcessLookupError",
    "FileNotFoundError",
    "ConnectionRefusedError",
)
NOBODY = {"pid": 0, "tcp": 0, "udp": 0, "path": "", "abstract": "", "letters": "", "memory": 0}


def chosen(victim: dict[str, Any], stage: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """The attacks by name, a proof that they run, and what anybody may do."""
    return {
        PROOF: ("prove", {"number": 14}),
        ALLOWED: ("list_folder", {"path": "."}),
        **{
            name: attack
            for name, attack in attacks(victim, stage).items()
            if name.startswith(ROWS) and "model" not in name
        },
    }


@pytest.fixture(scope="module")
def stage() -> Iterator[Path]:
    """A folder any user can reach, with our package, the attacks and the foreign environment."""
    with open_to_all() as folder:
        for number, form in enumerate(FORMATS.values()):
            form.write(folder / f"foreign{number}")
        yield folder


@pytest.fixture(scope="module", params=PLACES, ids=lambda p: "-".join((p[0], p[1], *p[2])))
def place(request: pytest.FixtureRequest, stage: Path) -> tuple[str, dict[str, Any]]:
    """All attacks of every format, run once: the level expected, what came of them by format."""
    who, level, refused = request.param
    if "unshare" in refused and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    python, own = interpreter(), stage / "own"
    uid = UID if who == "user" else 0
    said_by: dict[str, Any] = {}
    who_owns = WHO["user" if uid else "root"]
    for number, (name, form) in enumerate(FORMATS.items()):
        furnish(own, uid)
        victim = subprocess.Popen(  # a new one for each format: its letter box fills up
            [
                *who_owns,
                python,
                "-I",
                str(program(stage, "victim")),
                str(own),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        try:
            assert victim.stdout is not None
            every = chosen(json.loads(victim.stdout.readline()), stage)
            listed = {k: v for k, v in every.items() if form.played != "program" or k in FEW}
            order = {
                "env": str(stage / f"foreign{number}"),
                "played": form.played,
                "attacks": list(listed.values()),
                "limits": LIMITS,
                "sandbox": {"hidden": [str(own / "kept")], "allow_root": True},
                "refused": refused,
            }
            said_by[name] = played(stage, python, who, order)
            said_by[name]["by_name"] = dict(zip(listed, said_by[name]["scores"], strict=True))
            assert victim.poll() is None, f"an attack of {name} ended the victim"
        finally:
            victim.kill()
            victim.communicate()
    return level, said_by


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


def test_every_format_is_attacked():
    # Code of a Harbor task runs in a box inside alone: tests/envs/sandboxes/test_local.py.
    assert {*KINDS, "a command"} - {"harbor"} <= FORMATS.keys()
    assert set(FEW) <= chosen(NOBODY, Path("/")).keys()


@pytest.mark.parametrize("form", [name for name in FORMATS if name.startswith("openenv")])
def test_a29_its_own_server_is_all_that_it_reaches(place: tuple[str, dict[str, Any]], form: str):
    level, said = place[0], place[1][form]
    if level == "limits":
        pytest.skip("nothing confines the network here, which is named as a gap")
    assert said["level"] == level
    assert "no network but its own server" in said["holds"]
    for name in OPEN:
        error = said["by_name"][name]["error"]
        assert error is not None and any(word in error for word in STOPPED), f"{name}: {error}"


@pytest.mark.parametrize("form", FORMATS)
def test_every_attack_of_theirs_is_stopped_or_the_gap_is_named(
    place: tuple[str, dict[str, Any]], form: str
):
    said = place[1][form]
    gaps = "; ".join(said["gaps"])
    assert "proof 42" in said["by_name"][PROOF]["error"]
    assert said["by_name"][ALLOWED]["error"] is None
    for name, score in said["by_name"].items():
        if name in (PROOF, ALLOWED):
            continue
        if score["error"] is None:
            named = (*NAMED.get(name, ()), *OPEN.get(name, ()))
            assert any(words in gaps for words in named), f"{name} is not named in: {gaps}"
        else:  # the system stopped the attack: nothing else went wrong on the way to it
            words = ("KeyError",) if name == "a3 own variables" else STOPPED
            assert any(word in score["error"] for word in words), f"{name}: {score['error']}"


def test_nothing_secret_comes_back(place: tuple[str, dict[str, Any]]):
    assert SECRET not in json.dumps(place[1])

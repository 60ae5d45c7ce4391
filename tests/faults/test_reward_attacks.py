"""A program whose reward is a file (A24): one that was there before counts for nothing, and one
that a daemon writes again comes too late, as root and as an ordinary user, at every level."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_env_attacks import PLACES, WHO, interpreter, open_to_all, program

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="the layers above the floor are Linux's"),
]

DAEMON_S = 5
# It leaves its session and its parent, ignores signals, and writes for as long as it lives. The
# program waits for its first write, so that the daemon is known to be at work.
DAEMON = f"""
import os, signal, time
os.mkdir("out")
begun, tell = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
        deadline = time.time() + {DAEMON_S}
        open("out/other", "w").write("1")
        os.write(tell, b"1")
        while time.time() < deadline:
            time.sleep(0.2)
            open("out/reward.json", "w").write("1")
    os._exit(0)
os.read(begun, 1)
assert os.path.exists("out/other")
open("out/reward.json", "w").write("0.25")
"""
PROGRAMS = {
    "a file that was there before": "pass\n",
    "a daemon that writes it again": DAEMON,
    "a file of its own": 'import os; os.mkdir("out"); open("out/reward.json", "w").write("0.5")\n',
}


@pytest.fixture(scope="module")
def stage() -> Iterator[Path]:
    """A folder any user can reach, with our package, the client and an environment for each."""
    with open_to_all() as folder:
        for number, script in enumerate(PROGRAMS.values()):
            source = folder / f"program{number}"
            source.mkdir()
            (source / "agent.py").write_text(script)
        before = folder / "program0" / "out"
        before.mkdir()
        (before / "reward.json").write_text("1")
        yield folder


@pytest.fixture(scope="module", params=PLACES, ids=lambda p: "-".join((p[0], p[1], *p[2])))
def replies(request: pytest.FixtureRequest, stage: Path) -> dict[str, dict[str, Any]]:
    """What each program earned, by its name in PROGRAMS."""
    who, _, refused = request.param
    if "unshare" in refused and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    folders = [str(stage / f"program{number}") for number in range(len(PROGRAMS))]
    order = json.dumps({"folders": folders, "refused": refused})
    done = subprocess.run(
        [*WHO[who], interpreter(), "-I", "-B", str(program(stage, "reward_client")), order],
        capture_output=True,
        text=True,
        cwd="/",
        env={"PATH": os.defpath, "HOME": str(stage / "own")},
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(PROGRAMS, json.loads(done.stdout), strict=True))


def test_a24_a_reward_file_that_was_there_before_earns_nothing(replies: dict[str, dict[str, Any]]):
    reply = replies["a file that was there before"]
    assert reply["reward"] == 0.0
    assert str(reply["error"]).startswith("the program wrote no out/reward.json")


def test_a24_a_daemon_is_dead_before_the_reward_is_read(replies: dict[str, dict[str, Any]]):
    reply = replies["a daemon that writes it again"]
    assert (reply["reward"], reply["error"]) == (0.25, None)
    assert reply["took_s"] < DAEMON_S  # nobody waited until it ended by itself


def test_a_reward_file_of_the_program_counts(replies: dict[str, dict[str, Any]]):
    reply = replies["a file of its own"]
    assert (reply["reward"], reply["error"]) == (0.5, None)

"""Rooms: folders of its own that user code finds at paths right below the root."""

import json
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest
from harbor_play import boxed, write_folder

from envs.config.settings import Limits, Rollout
from envs.host.command import Commands
from envs.isolation import namespaces
from envs.isolation.namespaces import rooms_for
from envs.isolation.sandbox import Sandbox


def test_a_room_that_would_hide_what_is_needed_is_left_out(tmp_path: Path):
    wanted = ("/app", "/tmp", "/usr")
    assert rooms_for(wanted, ["/tmp/venv/lib", "/opt/x"]) == ("/app", "/usr")
    assert rooms_for(wanted, ["/application", "/tmpfile"]) == wanted
    link = tmp_path / "link"
    link.symlink_to("/usr/lib")
    assert "/usr" not in rooms_for(wanted, [str(link)])


# A program that says what it finds.
LOOK = """
import json, os

def tried(act, *arguments):
    try:
        return act(*arguments)
    except OSError as error:
        return type(error).__name__

def write(path):
    with open(path, "w") as file:
        file.write("x")
    return "written"

print(json.dumps({
    "rooms": {room: os.listdir(room) for room in ("/app", "/tests", "/logs", "/solution")},
    "app": tried(write, "/app/x"),
    "root": tried(write, "/x"),
    "usr": tried(write, "/usr/x"),
    "box": tried(write, "/honesmith/x"),
    "canary": tried(write, "/honesmith/canary"),
    "chroot": tried(os.chroot, "/app"),
    "folder": os.getcwd(),
    "said": os.environ["HONESMITH_ROOMS"].split(":")[:3],
}))
"""


@boxed
@pytest.mark.timeout(20)
def test_the_rooms_are_empty_and_writable_and_the_rest_is_as_closed_as_ever(tmp_path: Path):
    folder = write_folder(tmp_path / "env")
    (folder / "look.py").write_text(LOOK)
    rollout = Rollout(("python3", "look.py"), reward="stdout")
    commands = Commands(folder, rollout, sys.executable, Limits(), {}, None, Sandbox())
    with closing(commands.start()) as run:
        run.begin({"id": "a", "prompt": []}, {})  # type: ignore[typeddict-item]
        ending = run.wait()
    assert ending.output, ending
    seen = json.loads(ending.output)
    assert seen["rooms"] == {"/app": [], "/tests": [], "/logs": [], "/solution": []}
    assert (seen["app"], seen["folder"]) == ("written", "/honesmith/work/rollout")
    assert {seen[place] for place in ("root", "usr", "box", "canary", "chroot")} <= {
        "PermissionError",
        "OSError",
    }
    assert seen["said"] == ["/app", "/tests", "/logs"] and not Path("/app/x").exists()


def test_no_rooms_are_made_where_mounts_would_reach_the_whole_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "work").mkdir()
    entered = Mock()
    monkeypatch.setattr(namespaces.kernel, "die_with_parent", Mock())
    monkeypatch.setattr(namespaces.kernel, "unshare", Mock(side_effect=OSError(1, "no")))
    monkeypatch.setattr(namespaces, "_enter_rooms", entered)
    with pytest.raises(OSError, match="no mounts of its own"):
        namespaces.first_process(
            str(tmp_path), 0, 16, status=1, run_child=Mock(), writable=(), rooms=("/app",)
        )
    entered.assert_not_called()

"""Landlock as kernels of every version speak it: this one accepts what the older ones know."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs.isolation import landlock

ROOT = Path(__file__).parents[3]
NEWEST = 7
CODE = """
import os, sys
sys.path.insert(0, {root!r})
from envs.isolation import kernel, landlock
plain = kernel.call
def older(number, *arguments):
    return {abi} if number == 444 and arguments[-1] == 1 else plain(number, *arguments)
kernel.call = older
kernel.forbid_new_privileges()
assert landlock.restrict([{read!r}], [{write!r}, "/dev/null"], network=False) == {abi}
def tried(do):
    try:
        do()
    except OSError as error:
        return type(error).__name__
    return "worked"
print(tried(lambda: open({read!r} + "/file").close()))
print(tried(lambda: open({read!r} + "/new", "w").close()))
print(tried(lambda: open({write!r} + "/new", "w").close()))
print(tried(lambda: os.mkfifo({write!r} + "/fifo")))
print(tried(lambda: open("/dev/null", "w").close()))
print(tried(lambda: open({other!r} + "/file").close()))
print(tried(lambda: os.truncate({other!r} + "/file", 0)))
"""


@pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")
@pytest.mark.parametrize("abi", range(1, NEWEST + 1))
def test_every_version_holds_what_it_knows(abi: int, tmp_path: Path):
    if abi > landlock.abi():
        pytest.skip(f"this kernel speaks {landlock.abi()}")
    folders = {name: tmp_path / name for name in ("read", "write", "other")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "file").write_text("x")
    names = {name: str(folder) for name, folder in folders.items()}
    code = CODE.format(root=str(ROOT), abi=abi, **names)
    done = subprocess.run(
        [sys.executable, "-B", "-c", code], capture_output=True, text=True, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    refused = "PermissionError"
    cut = refused if abi >= landlock.HOLDS_TRUNCATION else "worked"
    assert done.stdout.split() == ["worked", refused, "worked", "worked", "worked", refused, cut]


@pytest.mark.skipif(landlock.abi() == 0, reason="this kernel has no Landlock")
def test_what_is_missing_is_left_out(tmp_path: Path):
    pid = os.fork()
    if pid == 0:
        try:
            from envs.isolation import kernel

            kernel.forbid_new_privileges()
            landlock.restrict(["/no/such/folder", str(tmp_path)], [], network=True)
            os.listdir(tmp_path)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0

"""A container in a few lines, for stand-ins of Docker and of sandbox clouds: processes and files of
its own, made with unshare and nsenter; everything but its working folders is this machine's."""

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

FOLDERS = ("app", "tests", "logs", "solution", "tmp")
# Makes the root: the machine's top folders, and empty ones for the tasks.
ROOT = """
root=$1
mount -t tmpfs none "$root"
for path in /*; do
  name=${path#/}
  case " app tests logs solution tmp " in *" $name "*) continue;; esac
  if [ -L "$path" ]; then ln -s "$(readlink "$path")" "$root/$name"
  elif [ -d "$path" ]; then mkdir "$root/$name"; mount --rbind "$path" "$root/$name"; fi
done
for name in app tests logs solution tmp; do mkdir -m 777 "$root/$name"; done
mount -t proc proc "$root/proc"
echo up
exec chroot "$root" sleep 600
"""


def possible() -> bool:
    """Whether this machine lets us make one."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    trial = ["unshare", "-r", "-m", "-p", "-f", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def first_process(unshare: int) -> str:
    """Wait until the first process of a container is in its root, and return its pid. Until then a
    command that is run in it would be one of this machine."""
    first = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0]
    deadline = time.monotonic() + 10
    while not Path(f"/proc/{first}/cmdline").read_bytes().startswith(b"sleep\0"):
        assert time.monotonic() < deadline
    return first


class MiniContainer:
    """A running container; `close` ends it.

    Args:
        folder: an empty folder of its own.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            ["unshare", "-r", "-m", "-p", "-f", "--kill-child", "sh", "-c", ROOT, "sh", folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"
        self.first = first_process(self.process.pid)

    def run(
        self, text: str, variables: Mapping[str, str] | None = None, data: bytes = b""
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run a command line by sh in it."""
        enter = [
            "nsenter",
            "-t",
            self.first,
            "-U",
            "-m",
            "-p",
            "-r",
            "-w",
            "--preserve-credentials",
        ]
        settings = [f"{name}={value}" for name, value in (variables or {}).items()]
        return subprocess.run(
            [*enter, "env", *settings, "sh", "-c", text],
            input=data,
            capture_output=True,
            timeout=60,
            check=False,
        )

    def close(self) -> None:
        """End it with all that runs in it."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

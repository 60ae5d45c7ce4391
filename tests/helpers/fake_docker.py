"""A stand-in for the command line of docker: `run`, `exec`, `inspect`, `restart` and `rm`, each
container made as in mini_container.py. Its folder is $FAKE_DOCKER; every call is a line of the
file `calls`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from mini_container import FOLDERS, ROOT, first_process

IN_APP = ("sh", "-c", 'cd /app && exec "$@"', "sh")  # the working folder that its images name
HOME = Path(os.environ["FAKE_DOCKER"])


def start(name: str) -> None:
    """Start a container; what is in its folders comes from `<name>.files`, so that it stays."""
    root, files = HOME / name, HOME / f"{name}.files"
    root.mkdir(exist_ok=True)
    for each in FOLDERS:
        (files / each).mkdir(parents=True, exist_ok=True)
    binds = "\n".join(f'mount --bind "{files}/{each}" "$root/{each}"' for each in FOLDERS)
    script = ROOT.replace("echo up", f"{binds}\necho up")
    command = ["unshare", "-r", "-m", "-p", "-f", "--kill-child", "sh", "-c", script, "sh", root]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    (HOME / f"{name}.pid").write_text(f"{process.pid} {first_process(process.pid)}")


def stop(name: str) -> None:
    """End a container."""
    file = HOME / f"{name}.pid"
    if file.exists():
        os.kill(int(file.read_text().split()[0]), signal.SIGKILL)
        file.unlink()


def main() -> None:
    verb, *rest = sys.argv[1:]
    with open(HOME / "calls", "a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    if verb == "run":
        image = rest[rest.index("-c") - 1]
        if image == "missing":
            sys.exit("docker: Error response from daemon: no such image")
        name = rest[rest.index("--name") + 1]
        start(name)
        if image == "slow":
            signal.pause()
        print("0123abcd")
    elif verb == "exec":
        settings: list[str] = []
        data = None if "--interactive" in rest[:1] else subprocess.DEVNULL
        while rest[0].startswith("--"):
            option = rest.pop(0)
            if option == "--env":
                settings.append(rest.pop(0))
        name = rest.pop(0)
        if not (HOME / f"{name}.pid").exists():
            sys.exit("Error response from daemon: no such container")
        first = (HOME / f"{name}.pid").read_text().split()[1]
        enter = ["nsenter", "-t", first, "-U", "-m", "-p", "-r", "-w", "--preserve-credentials"]
        # In a process of its own: where this one is killed, it still waits for what it started.
        done = subprocess.run([*enter, "env", *settings, *IN_APP, *rest], stdin=data, check=False)
        sys.exit(128 - done.returncode if done.returncode < 0 else done.returncode)
    elif verb == "inspect":
        print("true" if (HOME / f"{rest[-1]}.pid").exists() else "false")
    elif verb == "restart":
        if not (HOME / f"{rest[-1]}.pid").exists():
            sys.exit("Error response from daemon: no such container")
        stop(rest[-1])
        start(rest[-1])
    elif verb == "rm":
        stop(rest[-1])


if __name__ == "__main__":
    main()

"""The one job of a rented cluster, sent as text: it lets us in, and is the dead man's switch.

While it runs, SkyPilot takes the cluster for busy; a few minutes after it has ended, SkyPilot gives
the cluster back. It ends when no run here was given a word for as long as its lease, or when the
cluster's hours are over. It imports the standard library alone, of Python 3.8 on.
"""

import contextlib
import glob
import os
import sys
import time

LOOK_S = float(os.environ.get("HONESMITH_LOOK_S", "10"))
SAVE_S = 900.0  # that a run whose lease is over may take to save and end


def say(text: str) -> None:
    """Write a line into the job's log, which is read at the other side."""
    sys.stdout.write("honesmith-node" + text + "\n")
    sys.stdout.flush()


def let_in(key: str) -> None:
    """Let whoever holds this key in over ssh."""
    folder = os.path.expanduser("~/.ssh")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, "authorized_keys")
    have = ""
    if os.path.exists(path):
        with open(path) as file:
            have = file.read()
    if key.strip() not in have:
        with open(path, "a") as file:
            file.write(("" if have.endswith("\n") or not have else "\n") + key.strip() + "\n")
        os.chmod(path, 0o600)


def host_keys() -> list:
    """The public host keys of this machine."""
    folder = os.environ.get("HONESMITH_SSH_FOLDER", "/etc/ssh")
    keys = []
    for path in sorted(glob.glob(os.path.join(folder, "ssh_host_*_key.pub"))):
        with open(path) as file:
            keys.append(" ".join(file.read().split()[:2]))
    return keys


def began_at(root: str) -> float:
    """When the first job of this cluster began, by this machine's clock: a second one, of a launch
    that was said twice, ends with it."""
    os.makedirs(root, mode=0o700, exist_ok=True)
    path = os.path.join(root, "began")
    with contextlib.suppress(FileExistsError), open(path, "x") as file:
        file.write(repr(time.time()))
    with open(path) as file:
        return float(file.read() or time.time())


def last_word(root: str, began: float) -> float:
    """When a run here was given a word last, by this machine's clock."""
    leases = glob.glob(os.path.join(root, "homes", "*", "runs", "*", "lease.json"))
    times = [began]
    for lease in leases:
        try:
            times.append(os.stat(lease).st_mtime)
        except OSError:  # removed meanwhile
            continue
    return max(times)


def main() -> int:
    """Until the cluster is to end; returns the exit status of the job."""
    root = os.path.expanduser(os.path.join("~", os.environ["HONESMITH_ROOT"]))
    lease_s = float(os.environ["HONESMITH_LEASE_S"])
    most_s = float(os.environ["HONESMITH_MOST_S"])
    let_in(os.environ["HONESMITH_KEY"])
    for key in host_keys():
        say(" key " + key)
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or "root"
    say(" user " + user)
    began = began_at(root)
    while time.time() < began + most_s:
        if time.time() - last_word(root, began) > lease_s + SAVE_S:
            say(": nobody gave a word for as long as the lease")
            return 0
        time.sleep(LOOK_S)
    say(": the hours of this cluster are over")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The one job of a rented cluster, sent as text. It lets this program in over ssh, and sees to it
that the cluster is given back even if nobody can be reached.

While it runs, SkyPilot takes the cluster for busy; a few minutes after it has ended, SkyPilot gives
the cluster back. It ends when no run here was given a word for as long as its lease, or when the
cluster's hours are over. It imports the standard library alone, of Python 3.8 on.
"""

import contextlib
import glob
import os
import sys
import time

LOOK_S = float(os.environ.get("HONESMITH_LOOK_S", "10"))  # seconds between two looks
SAVE_S = 900.0  # seconds that a run whose lease is over may take to save and end


def say(text: str) -> None:
    """Write a line into the job's log, which the machine that rents the cluster reads. It begins
    with a word by which that machine knows it."""
    sys.stdout.write("honesmith-node" + text + "\n")
    sys.stdout.flush()


def let_in(key: str) -> None:
    """Add the public key `key` to those that ssh lets in to this user's account, unless it is among
    them already."""
    folder = os.path.expanduser("~/.ssh")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, "authorized_keys")
    present = ""
    if os.path.exists(path):
        with open(path) as file:
            present = file.read()
    if key.strip() not in present:
        ends_line = present.endswith("\n") or not present
        with open(path, "a") as file:
            file.write(("" if ends_line else "\n") + key.strip() + "\n")
        os.chmod(path, 0o600)


def host_keys() -> list:
    """Return the public host keys of this machine, each as "TYPE KEY" without its comment."""
    folder = os.environ.get("HONESMITH_SSH_FOLDER", "/etc/ssh")
    keys = []
    for path in sorted(glob.glob(os.path.join(folder, "ssh_host_*_key.pub"))):
        with open(path) as file:
            keys.append(" ".join(file.read().split()[:2]))
    return keys


def began_at(root: str) -> float:
    """Return when the first job of this cluster began, in seconds since the epoch by this machine's
    clock. The first job writes that into a file in the folder `root`. So a second job, which a
    repeated request to launch the cluster makes, does not prolong its hours."""
    os.makedirs(root, mode=0o700, exist_ok=True)
    path = os.path.join(root, "began")
    # "x": fails if the file exists.
    with contextlib.suppress(FileExistsError), open(path, "x") as file:
        file.write(repr(time.time()))
    with open(path) as file:
        return float(file.read() or time.time())  # empty: the other job is just writing it


def last_word(root: str, began: float) -> float:
    """Return when the lease of a run on this machine was renewed last, in seconds since the epoch
    by this machine's clock; `began` if there was none. `root` is the folder with the runs."""
    leases = glob.glob(os.path.join(root, "homes", "*", "runs", "*", "lease.json"))
    times = [began]
    for lease in leases:
        try:
            times.append(os.stat(lease).st_mtime)
        except OSError:  # removed since it was listed
            continue
    return max(times)


def main() -> int:
    """Let this program in over ssh, and wait until the cluster is to end: when no lease was renewed
    for too long, or its hours are over. Returns the exit status of the job."""
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

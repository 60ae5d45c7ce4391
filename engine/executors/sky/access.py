"""The way into a cluster over ssh: a key pair of this home, and what the cluster's job says of it.

The host key is the one that the cluster's own job prints into its log, which comes through the API
server: whoever answers in the machine's place is refused. No key of SkyPilot's is taken.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.core.errors import UserError
from engine.core.files import take_lock, write_text
from engine.executors.sky.pickled import Address
from engine.executors.ssh import HostRefused
from engine.home.run_dir import Home
from engine.home.user_config import Host, key_of

_LOCK_S = 10.0  # seconds to wait for another process that makes the key
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # the codes of a terminal for colours
_KEY = re.compile(
    r"honesmith-node key ((?:ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(?:256|384|521)) "
    r"[A-Za-z0-9+/]{40,2000}={0,3})\s*$",
    re.MULTILINE,
)
_USER = re.compile(r"honesmith-node user ([A-Za-z_][A-Za-z0-9_.-]{0,63})\s*$", re.MULTILINE)
_MOST_KEYS = 8


@dataclass(frozen=True)
class Access:
    """How the machine of a cluster is entered over ssh.

    Attributes:
        destination: the machine as ssh takes it: USER@ADDRESS.
        options: options of ssh, each `Name=value`.
    """

    destination: str
    options: Sequence[str]


def own_key(home: Home) -> tuple[Path, str]:
    """Return the key pair with which this home enters what it rents: (the file of the private key,
    the text of the public key). The first call makes it. Raises UserError HOST_UNUSABLE if
    ssh-keygen fails."""
    path = home.hosts / "rented-key"
    if not path.exists():
        home.hosts.mkdir(mode=0o700, exist_ok=True)
        lock = take_lock(home.hosts / "rented-key.lock", wait_s=_LOCK_S)
        try:
            if not path.exists():  # another process may have made it in the meantime
                _make_key(path)
        finally:
            if lock is not None:
                os.close(lock)
    return path, path.with_name(path.name + ".pub").read_text("utf-8").strip()


def _make_key(path: Path) -> None:
    """Make a key pair: the private key in `path`, the public one beside it with the ending .pub.
    The private one appears last, so that whoever sees it finds both. Raises UserError
    HOST_UNUSABLE if ssh-keygen fails."""
    aside = path.with_name(f".{path.name}.new")
    public_aside = aside.with_name(aside.name + ".pub")
    for leftover in (aside, public_aside):  # of an earlier call that was cut off
        leftover.unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "honesmith", "-f", str(aside)]
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            "HOST_UNUSABLE",
            f"no key could be made with ssh-keygen: {error}"[:300],
            hint="Install an OpenSSH client here.",
        ) from error
    public_aside.replace(path.with_name(path.name + ".pub"))
    aside.replace(path)


def access_of(
    home: Home, cluster: str, address: Address, log: str, tunnel: Sequence[str] = ()
) -> Access | None:
    """Return how to enter the machine of a cluster over ssh. Returns None as long as the cluster's
    job has not printed the machine's host keys and user.

    Args:
        cluster: the cluster's name.
        address: where the machine answers.
        log: what the job has printed, as the API server gives it.
        tunnel: a command that carries the bytes of the connection; () for a direct one.
    """
    text = _ESCAPES.sub("", log)
    keys, users = _KEY.findall(text)[:_MOST_KEYS], _USER.findall(text)
    if not keys or not users:
        return None
    private_key, _ = own_key(home)
    known_hosts = home.hosts / "rented-hosts" / cluster
    known_hosts.parent.mkdir(mode=0o700, exist_ok=True)
    write_text(known_hosts, "".join(f"{cluster} {key}\n" for key in keys))
    options = [
        f"IdentityFile={_ssh_word(private_key)}",
        "IdentitiesOnly=yes",  # no other key of the user is tried
        f"UserKnownHostsFile={_ssh_word(known_hosts)}",
        "GlobalKnownHostsFile=/dev/null",
        f"HostKeyAlias={cluster}",  # the keys are looked up by the cluster's name
        "CheckHostIP=no",
        "UpdateHostKeys=no",
        f"Port={address.port}",
    ]
    if tunnel:
        command = shlex.join(tunnel).replace("%", "%%")  # ssh replaces %h and the like
        options.append(f"ProxyCommand={command}")
    return Access(f"{address.user or users[-1]}@{address.ip}", options)


def forget(home: Home, cluster: str) -> None:
    """Delete the host keys of a cluster that does not exist any more."""
    (home.hosts / "rented-hosts" / cluster).unlink(missing_ok=True)


def pod_tunnel(home: Home, host: str, cluster: str) -> Sequence[str]:
    """Return the command with which ssh reaches a cluster that is a pod on Kubernetes: tunnel.py,
    which goes through the API server. `host` is the name of the host in config.toml."""
    module = "engine.executors.sky.tunnel"
    return [sys.executable, "-P", "-m", module, str(home.root), host, cluster]


def _ssh_word(path: Path) -> str:
    """Write a path as the value of an option of ssh: in quotes if it has a space."""
    return f'"{path}"' if " " in str(path) else f"{path}"


def token_of(home: Home, host: Host) -> tuple[str, str]:
    """Return (the token for the API server of a host, the file or environment variable that it is
    from, for errors). Both may be "".

    Raises HostRefused if the host's table names a file that cannot be read.
    """
    sky = host.sky
    if sky.token_file:
        try:
            return Path(sky.token_file).read_text("utf-8").strip(), sky.token_file
        except (OSError, UnicodeDecodeError) as error:
            raise HostRefused(
                f"the token of {host.name} cannot be read: {error}",
                f"Put it into {sky.token_file}, readable by you alone.",
            ) from error
    return key_of(home.root, sky.token_env), sky.token_env

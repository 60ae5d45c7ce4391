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

_LOCK_S = 10.0
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_KEY = re.compile(
    r"honesmith-node key ((?:ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(?:256|384|521)) "
    r"[A-Za-z0-9+/]{40,2000}={0,3})\s*$",
    re.MULTILINE,
)
_USER = re.compile(r"honesmith-node user ([A-Za-z_][A-Za-z0-9_.-]{0,63})\s*$", re.MULTILINE)
_MOST_KEYS = 8


@dataclass(frozen=True)
class Access:
    """How a cluster is entered.

    Attributes:
        destination: as ssh takes it.
        options: of ssh, each `Name=value`.
    """

    destination: str
    options: Sequence[str]


def own_key(home: Home) -> tuple[Path, str]:
    """The private key of this home for what it rents, and its public half; made once."""
    path = home.hosts / "rented-key"
    if not path.exists():
        home.hosts.mkdir(mode=0o700, exist_ok=True)
        lock = take_lock(home.hosts / "rented-key.lock", wait_s=_LOCK_S)
        try:
            if not path.exists():
                _make_key(path)
        finally:
            if lock is not None:
                os.close(lock)
    return path, path.with_name(path.name + ".pub").read_text("utf-8").strip()


def _make_key(path: Path) -> None:
    """Make the key pair; the private half comes to its place last."""
    aside = path.with_name(f".{path.name}.new")
    for left in (aside, aside.with_name(aside.name + ".pub")):
        left.unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "honesmith", "-f", str(aside)]
    try:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            "HOST_UNUSABLE",
            f"no key could be made with ssh-keygen: {error}"[:300],
            hint="Install an OpenSSH client here.",
        ) from error
    aside.with_name(aside.name + ".pub").replace(path.with_name(path.name + ".pub"))
    aside.replace(path)


def access_of(
    home: Home, cluster: str, address: Address, log: str, tunnel: Sequence[str] = ()
) -> Access | None:
    """How to enter a cluster; None as long as its job has not said who it is.

    Args:
        log: of its job, as the API server gives it.
        tunnel: a command that carries the bytes of the connection; () for a direct one.
    """
    text = _ESCAPES.sub("", log)
    keys, users = _KEY.findall(text)[:_MOST_KEYS], _USER.findall(text)
    if not keys or not users:
        return None
    private, _ = own_key(home)
    known = home.hosts / "rented-hosts" / cluster
    known.parent.mkdir(mode=0o700, exist_ok=True)
    write_text(known, "".join(f"{cluster} {key}\n" for key in keys))
    options = [
        f"IdentityFile={_word(private)}",
        "IdentitiesOnly=yes",
        f"UserKnownHostsFile={_word(known)}",
        "GlobalKnownHostsFile=/dev/null",
        f"HostKeyAlias={cluster}",
        "CheckHostIP=no",
        "UpdateHostKeys=no",
        f"Port={address.port}",
        *([f"ProxyCommand={shlex.join(tunnel).replace('%', '%%')}"] if tunnel else []),
    ]
    return Access(f"{address.user or users[-1]}@{address.ip}", options)


def forget(home: Home, cluster: str) -> None:
    """Forget the host keys of a cluster that is gone."""
    (home.hosts / "rented-hosts" / cluster).unlink(missing_ok=True)


def pod_tunnel(home: Home, host: str, cluster: str) -> Sequence[str]:
    """The command that reaches the pod of a cluster on Kubernetes, through the API server."""
    module = "engine.executors.sky.tunnel"
    return [sys.executable, "-P", "-m", module, str(home.root), host, cluster]


def _word(path: Path) -> str:
    """A path as an option of ssh takes it."""
    return f'"{path}"' if " " in str(path) else f"{path}"


def token_of(home: Home, host: Host) -> tuple[str, str]:
    """The token of a host and where it is from, for messages; "" for none.

    Raises HostRefused where it is named and cannot be read.
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

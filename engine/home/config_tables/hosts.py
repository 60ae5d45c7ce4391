"""The tables `[hosts.NAME]` of config.toml: other machines that runs can go to.

Imported by the supervisor, which must start at once: standard library only.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.core.errors import UserError
from engine.home.config_tables.checks import NAME, VARIABLE, invalid, is_count, is_number

# Kinds of hosts, before the colon of the setting `compute`.
SSH, SLURM, RAY, SKY = "ssh", "slurm", "ray", "sky"
_DESTINATION = re.compile(r"[A-Za-z0-9_.@%:\[\]][A-Za-z0-9_.@%:\[\]-]{0,254}")
_FOLDER_NAME = r"(?!\.\.?(/|$))[A-Za-z0-9_.][A-Za-z0-9_.-]{0,99}"  # never . or ..
# Below the user's home; or a whole path whose last name says that it is ours, for it may be wiped.
_BELOW_HOME = re.compile(rf"{_FOLDER_NAME}(/{_FOLDER_NAME}){{0,9}}")
_WHOLE_PATH = re.compile(rf"(/{_FOLDER_NAME}){{1,9}}/\.?honesmith[A-Za-z0-9_.-]{{0,90}}")
# What Slurm is given: no space, so that a value stays one, and nothing that begins an option.
_WORD = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.,:&|*/+-]{0,199}")
NO_GRES = "none"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Of a Jobs API: scheme, host, port and the path before /api; no user, no key.
_ADDRESS = re.compile(r"https?://[A-Za-z0-9.\[\]:_-]{1,255}(/[A-Za-z0-9._/-]{0,200})?")
_RESOURCE = r"[A-Za-z0-9_.:/-]{1,100}=[0-9]{1,6}(\.[0-9]{1,4})?"
_RESOURCES = re.compile(rf"{_RESOURCE}(,{_RESOURCE}){{0,9}}")
_ACCELERATORS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}(:[1-9][0-9]?)?")
_INFRA = re.compile(r"[a-z0-9]{2,30}(/[A-Za-z0-9_.*:@/-]{1,200})?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,299}")


@dataclass(frozen=True)
class SlurmOptions:
    """What the jobs of a Slurm cluster ask for; "" and 0 leave a thing to the cluster.

    Attributes:
        partition, account, qos, constraint: as sbatch takes them.
        gres: the kind of device, such as "gpu" or "gpu:h100"; the run's `gpus` are its number.
            "none" for a partition without GPUs.
        time_hours: the most hours of one job; a run that needs more goes on in the next.
        cpus: cores of a job.
        memory_gb: memory of a job.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    gres: str = "gpu"
    time_hours: float = 24.0
    cpus: int = 0
    memory_gb: float = 0.0


@dataclass(frozen=True)
class RayOptions:
    """How the Jobs API of a Ray cluster is reached, and what its jobs ask for.

    Attributes:
        address: of the API as this machine reaches it, such as "http://127.0.0.1:8265".
        token_env: the variable that holds the cluster's token; "" for a cluster without one.
        on_gpu: whether jobs ask for GPUs; the run's `gpus` are their number.
        cpus: cores of a job.
        resources: what else a job asks for, such as "h100=1,rack_a=0.1".
    """

    address: str = ""
    token_env: str = ""
    on_gpu: bool = True
    cpus: int = 1
    resources: str = ""

    @property
    def amounts(self) -> dict[str, float]:
        """The amounts in `resources` by name, such as {"h100": 1.0, "rack_a": 0.1}."""
        pairs = [text.partition("=") for text in self.resources.split(",") if text]
        return {name: float(amount) for name, _, amount in pairs}


@dataclass(frozen=True)
class SkyOptions:
    """How a SkyPilot API server is reached, and what its clusters are: one for each launch.

    Attributes:
        address: of the API server as this machine reaches it: https, or loopback.
        token_env: the variable that holds the token of a service account; "" for none.
        token_file: a file with that token, whole path; "" for none.
        accelerators: devices of a cluster, such as "H100" or "H100:2"; "" for a CPU.
        infra: where to rent, as SkyPilot takes it, such as "runpod" or "k8s/context"; "" for the
            cheapest place that the server knows.
        image: what the machine starts with, as SkyPilot's image_id; "" for the usual.
        spot: whether a machine may be taken away, for less money.
        max_price: of an hour of one cluster, in dollars; nothing dearer is launched. 0 for no
            limit.
        max_hours: after which a cluster ends, whatever runs there.
        cpus, memory_gb, disk_gb: at least so much; 0 leaves it to SkyPilot.
    """

    address: str = ""
    token_env: str = ""
    token_file: str = ""
    accelerators: str = ""
    infra: str = ""
    image: str = ""
    spot: bool = False
    max_price: float = 0.0
    max_hours: float = 24.0
    cpus: int = 0
    memory_gb: float = 0.0
    disk_gb: int = 0

    @property
    def device_kind(self) -> str:
        """The name of a cluster's devices at SkyPilot, such as "H100"; "" for a CPU."""
        return self.accelerators.partition(":")[0]

    @property
    def devices(self) -> int:
        """How many devices a cluster has; 0 for a CPU."""
        kind, _, count = self.accelerators.partition(":")  # "H100" is one, "H100:2" are two
        return int(count or 1) if kind else 0


@dataclass(frozen=True)
class Host:
    """A machine that runs are put on with `compute` "KIND:NAME": one over SSH ("ssh:box"), a
    cluster of Slurm ("slurm:hpc") or Ray ("ray:pool"), or machines that are rented for each run
    through SkyPilot ("sky:rented").

    Attributes:
        name: in config.toml.
        ssh: what the `ssh` program is given: a Host of the user's ssh config, or user@address; of a
            cluster a node of it. "" for a cluster whose shared folder this machine sees itself.
        kind: "ssh", "slurm", "ray" or "sky".
        folder: where everything of ours lies over there, below the user's home, or a whole path.
            Of a cluster it is on a file system that all its nodes share.
        python: an interpreter over there that has what training needs; "" for the environment that
            `honesmith hosts setup` builds.
        runs: how many runs it takes at once.
        lease_hours: how long a run goes on over there without a word from here.
        gpu_hour_price: of one of its devices; 0 if it has none.
        failover: where its runs go on if it fails, as `compute` names that place; "" for nowhere.
        slurm, ray, sky: of a cluster, what its jobs ask for.
    """

    name: str
    ssh: str
    kind: str = SSH
    folder: str = ".honesmith-host"
    python: str = ""
    runs: int = 1
    lease_hours: float = 24.0
    gpu_hour_price: float = 0.0
    failover: str = ""
    slurm: SlurmOptions = field(default_factory=SlurmOptions)
    ray: RayOptions = field(default_factory=RayOptions)
    sky: SkyOptions = field(default_factory=SkyOptions)

    @property
    def compute(self) -> str:
        """The value of the setting `compute` that means this host, such as "ssh:box"."""
        return f"{self.kind}:{self.name}"

    @property
    def in_words(self) -> str:
        """How the host is reached, in words, such as "`ssh box`" or "`ssh hpc sbatch`"."""
        if self.kind == RAY:
            file_route = f"over `ssh {self.ssh}`" if self.ssh else f"through {self.folder} here"
            return f"Ray at {self.ray.address}, files {file_route}"
        if self.kind == SKY:
            device = self.sky.accelerators or "a CPU"
            provider = f" at {self.sky.infra}" if self.sky.infra else ""
            return f"{device}{provider}, rented for each run through SkyPilot at {self.sky.address}"
        programs = [f"ssh {self.ssh}" if self.ssh else "", "sbatch" if self.kind == SLURM else ""]
        return f"`{' '.join(program for program in programs if program)}`"

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings about how the host is reached and paid: rented machines without a limit of their
        price, and a Ray cluster over plain http. [] for most hosts."""
        if self.kind == SKY and not self.sky.max_price:
            return [
                "there is no limit of its price: --max-price names the most that an hour of one "
                "machine may cost."
            ]
        parts = urlsplit(self.ray.address)
        is_safe = parts.scheme == "https" or parts.hostname in _LOOPBACK
        if self.kind != RAY or is_safe:
            return []
        return [
            f"{self.ray.address} is another machine over plain http: whoever reaches it, or is on "
            "the way, can run code on the cluster and read its token. Better: "
            "`ssh -N -L 8265:127.0.0.1:8265 HEAD`, and http://127.0.0.1:8265 here."
        ]


# Where config.toml does not say: a cluster has a queue of its own, and each rented machine is paid.
_DEFAULTS: Mapping[str, Mapping[str, int | float]] = {
    SLURM: {"runs": 8},
    RAY: {"runs": 8},
    SKY: {"runs": 1, "lease_hours": 6.0},
}


def _matches(*patterns: re.Pattern[str]) -> Callable[[Any], bool]:
    """Return a function that takes the value of a key and returns whether it is a text which one of
    the patterns matches as a whole."""

    def is_match(value: Any) -> bool:
        """Return whether `value` is a text that one of the patterns matches as a whole."""
        return isinstance(value, str) and any(pattern.fullmatch(value) for pattern in patterns)

    return is_match


def _is_place(value: object) -> bool:
    """Return whether a value is "local", or the kind and the name of a host: "slurm:lab"."""
    if not isinstance(value, str):
        return False
    kind, _, name = value.partition(":")
    is_host = kind in (SSH, SLURM, RAY, SKY) and NAME.fullmatch(name) is not None
    return value == "local" or is_host  # `engine.home.rows.LOCAL`


_IS_WORD = (_matches(_WORD), "as sbatch takes it, without spaces")
# Of each key of [hosts.NAME]: whether it may have a value, and which it may have in words.
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "kind": (lambda value: value in (SSH, *_OPTIONS), '"ssh", "slurm", "ray" or "sky"'),
    "ssh": (_matches(_DESTINATION), "a Host of your ssh config, or user@address"),
    "folder": (
        _matches(_BELOW_HOME, _WHOLE_PATH),
        "a folder below your home over there, of letters, digits, dot, - and _, or a whole path "
        "whose last name begins with honesmith",
    ),
    "python": (
        lambda value: isinstance(value, str) and (not value or value.startswith("/")),
        "the whole path of an interpreter over there",
    ),
    "runs": (lambda value: is_count(value) and value <= 64, "a number from 1 to 64"),
    "lease_hours": (lambda value: is_number(value) and value > 0, "hours above 0"),
    "gpu_hour_price": (is_number, "a number that is 0 or more"),
    "failover": (
        _is_place,
        '"local", or the kind and the name of a host, such as "slurm:lab"',
    ),
    "partition": _IS_WORD,
    "account": _IS_WORD,
    "qos": _IS_WORD,
    "constraint": _IS_WORD,
    "gres": _IS_WORD,
    "time_hours": (lambda value: is_number(value) and value >= 0.05, "hours, at least 0.05"),
    "cpus": (is_count, "a number of cores"),
    "memory_gb": (lambda value: is_number(value) and value >= 1, "gigabytes, at least 1"),
    "address": (_matches(_ADDRESS), "the http:// or https:// address of its API"),
    "token_env": (_matches(VARIABLE), "the name of the variable that holds the token"),
    "on_gpu": (lambda value: isinstance(value, bool), "true or false"),
    "resources": (_matches(_RESOURCES), 'names and amounts, such as "h100=1,rack_a=0.1"'),
    "token_file": (
        lambda value: isinstance(value, str) and value.startswith("/"),
        "the whole path of a file that holds the token",
    ),
    "accelerators": (_matches(_ACCELERATORS), 'as SkyPilot names them, such as "H100:1"'),
    "infra": (_matches(_INFRA), 'as SkyPilot takes it, such as "runpod" or "k8s/context"'),
    "image": (_matches(_IMAGE), "an image, as SkyPilot's image_id"),
    "spot": (lambda value: isinstance(value, bool), "true or false"),
    "max_price": (lambda value: is_number(value) and value > 0, "dollars an hour, above 0"),
    "max_hours": (lambda value: is_number(value) and value >= 0.25, "hours, at least 0.25"),
    "disk_gb": (is_count, "a number of gigabytes"),
}
_OPTIONS: Mapping[str, type[SlurmOptions] | type[RayOptions] | type[SkyOptions]] = {
    SLURM: SlurmOptions,
    RAY: RayOptions,
    SKY: SkyOptions,
}
# Kind of host -> the keys of [hosts.NAME] that only this kind has.
_KEYS = {kind: [item.name for item in fields(options)] for kind, options in _OPTIONS.items()}


def read_hosts(path: Path, tables: Any) -> dict[str, Host]:
    """Check the tables `[hosts.NAME]` of the config file at `path`; return name -> host.

    Raises UserError SETTING_UNKNOWN for a key that does not exist, SETTING_INVALID for an unusable
    value.
    """
    if not isinstance(tables, dict):
        raise invalid(path, "hosts", "is no table", "Write [hosts.NAME] with its keys.")
    return {name: _read_host(path, name, table) for name, table in tables.items()}


def _read_host(path: Path, name: str, table: Any) -> Host:
    """Check one table `[hosts.NAME]`, and return its host. Raises what `read_hosts` raises."""
    if not NAME.fullmatch(name) or not isinstance(table, dict):
        hint = "Give it a name of letters, digits, dot, - and _: [hosts.NAME]."
        raise invalid(path, f"hosts.{name[:60]}", "is no table of a host", hint)
    kind = table.get("kind", SSH)
    kind_keys = _KEYS.get(kind, []) if isinstance(kind, str) else []  # keys of this kind alone
    known_keys = _known_keys(kind, kind_keys)
    for key, value in table.items():
        field_name = f"hosts.{name}.{key[:60]}"
        if key not in known_keys:
            raise _unknown_key(path, field_name, key, known_keys)
        is_allowed, in_words = _RULES[key]
        if not is_allowed(value):
            raise invalid(path, field_name, "cannot be used", f"{key} must be {in_words}.")
    if table.get("failover") == f"{kind}:{name}":
        field_name = f"hosts.{name}.failover"
        raise invalid(
            path, field_name, "is the host itself", "Name another place, or leave it out."
        )
    common_values = {key: value for key, value in table.items() if key not in kind_keys}
    if kind == SSH:
        return Host(**{"name": name, "ssh": name, **common_values})
    if kind in (RAY, SKY) and "address" not in table:
        raise invalid(path, f"hosts.{name}.address", "is missing", "Say where its API is.")
    if kind == SKY:
        _require_safe(path, f"hosts.{name}.address", table["address"])
    options = _OPTIONS[kind](**{key: value for key, value in table.items() if key in kind_keys})
    # The options stand in the field of Host that is called like the kind: `slurm`, `ray` or `sky`.
    return Host(**{"name": name, "ssh": "", **_DEFAULTS[kind], **common_values, kind: options})


def _known_keys(kind: object, kind_keys: Sequence[str]) -> list[str]:
    """Return the keys that a table of this kind of host may have.

    `kind_keys` are the keys that only this kind has.
    """
    keys_of_other_kinds = {key for keys in _KEYS.values() for key in keys} - set(kind_keys)
    if kind == SKY:  # a rented machine has no name before it is there
        keys_of_other_kinds.add("ssh")
    return [key for key in _RULES if key not in keys_of_other_kinds]


def _unknown_key(path: Path, field_name: str, key: str, known_keys: Sequence[str]) -> UserError:
    """Make the error SETTING_UNKNOWN for a key that a table of a host may not have.

    The hint lists the known keys, and names the kind of host that has `key`, if one does.
    """
    kinds_with_key = [kind for kind, keys in _KEYS.items() if key in keys]
    other_kind = f', and {key} with kind = "{kinds_with_key[0]}"' if kinds_with_key else ""
    return UserError(
        "SETTING_UNKNOWN",
        f"{path} sets {field_name}, which does not exist",
        hint=f"Known keys: {', '.join(known_keys)}{other_kind}.",
        field=field_name,
    )


def _require_safe(path: Path, field_name: str, address: str) -> None:
    """Raise UserError SETTING_INVALID for an address at which the token, and what is to be
    launched, would go over the network unencrypted.

    That is an address of another machine without https. `field_name` is the key that has the
    address, for the error.
    """
    parts = urlsplit(address)
    if parts.scheme != "https" and parts.hostname not in _LOOPBACK:
        hint = (
            "Give its https:// address; or `ssh -N -L 46580:127.0.0.1:46580 SERVER`, and "
            "http://127.0.0.1:46580 here."
        )
        raise invalid(path, field_name, "is another machine over plain http", hint)

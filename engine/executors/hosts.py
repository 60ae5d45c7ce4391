"""The other machines that this home knows: their tables in config.toml, and what was learnt.

`config.toml` says who they are ([hosts.NAME]); `hosts/NAME.json` of the home holds what the last
check found there, so that a plan can be made while the machine is not reached.
"""

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import Field, ValidationError

from engine.core.errors import UserError
from engine.core.files import take_lock, write_text
from engine.core.hardware import Device, Hardware
from engine.core.hints import Hint
from engine.executors import rented
from engine.home.rows import OPEN
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.user_config import Host, read_config
from engine.machine.processes.seam import Caps
from engine.records.record import DamagedRecord, Record

KINDS = ("ssh:", "slurm:", "ray:", "sky:")  # before the name of a host, in the setting `compute`
_LOCK_S = 5.0  # seconds to wait for another process that makes the id of the home


class DeviceFacts(Record):
    """A device over there, as engine/core/hardware.py measures it."""

    id: str
    name: str
    kind: str
    memory_total: int = Field(ge=0)
    memory_free: int = Field(ge=0)
    visible: str = ""
    bf16: bool = False


class HardwareFacts(Record):
    """The machine over there."""

    devices: list[DeviceFacts] = Field(min_length=1, max_length=64)
    cores: int = Field(ge=1)
    ram_total: int = Field(ge=0)
    ram_free: int = Field(ge=0)
    disk_free: int = Field(ge=0)
    load: float = 0.0

    def measured(self) -> Hardware:
        """As the rest of the engine takes it."""
        devices = tuple(Device(**each.model_dump()) for each in self.devices)
        return Hardware(**{**self.model_dump(), "devices": devices})


class HostFacts(Record):
    """What a check found over there.

    Attributes:
        python: the interpreter that runs what is ours.
        packages: versions of what training needs.
        checked: when, in seconds since the epoch.
        price: of an hour of one rented machine, as it was offered; 0 for what is not rented.
    """

    python: str
    hardware: HardwareFacts
    packages: dict[str, str]
    checked: float
    price: float = Field(default=0.0, ge=0)

    def capabilities(self) -> Caps:
        """As an executor answers it."""
        return Caps(self.hardware.measured(), self.packages)


def host_of(home: Home, name: str) -> Host:
    """The host `name`, or the one that a `compute` such as "ssh:box" names.

    Raises UserError HOST_NOT_FOUND, also where the host is of another kind.
    """
    hosts = home.user_config().hosts
    short = name.partition(":")[2] if name.startswith(KINDS) else name
    host = hosts.get(short)
    if host is not None and name in (short, host.compute):
        return host
    if host is not None:
        raise UserError(
            "HOST_NOT_FOUND",
            f"{short} is no host of the kind {name.partition(':')[0]}",
            hint=f"Say {host.compute}.",
            field="settings.compute",
        )
    known = f"Known: {', '.join(sorted(hosts))}." if hosts else "None is known yet."
    raise UserError(
        "HOST_NOT_FOUND",
        f"there is no host {short[:60]!r}",
        hint=f"{known} `honesmith hosts add NAME` adds a Host of your ssh config.",
        field="settings.compute",
    )


def home_id(home: Home) -> str:
    """The name of this home on other machines; made once, whoever asks for it first."""
    file = home.hosts / "home-id"
    if not file.exists():
        home.hosts.mkdir(mode=0o700, exist_ok=True)
        lock = take_lock(home.hosts / "home-id.lock", wait_s=_LOCK_S)
        try:
            if not file.exists():  # another process may have made it meanwhile
                write_text(file, secrets.token_hex(6))
        finally:
            if lock is not None:
                os.close(lock)
    return file.read_text("utf-8").strip()


def facts_file(home: Home, name: str) -> Path:
    """Where the facts about a host are kept."""
    return home.hosts / f"{name}.json"


def find_facts(home: Home, host: Host) -> HostFacts | None:
    """What the last check found; None where the host was never set up."""
    try:
        return HostFacts.read(facts_file(home, host.name))
    except (FileNotFoundError, DamagedRecord):
        return None


def facts_of(home: Home, host: Host) -> HostFacts:
    """What the last check found. Raises UserError HOST_UNUSABLE where there was none."""
    facts = find_facts(home, host)
    if facts is None:
        raise UserError(
            "HOST_UNUSABLE",
            f"the host {host.name} is not set up",
            hint=f"Run `honesmith hosts setup {host.name}` once.",
            field="settings.compute",
        )
    return facts


def note_facts(home: Home, host: Host, python: str, described: Mapping[str, object]) -> HostFacts:
    """Keep what a host says of itself. Raises UserError HOST_UNUSABLE for what makes no sense."""
    try:
        facts = HostFacts.model_validate(
            {
                "python": python,
                "hardware": described.get("hardware"),
                "packages": described.get("packages"),
                "checked": time.time(),
                "price": described.get("price", 0.0),
            }
        )
    except ValidationError as error:
        raise UserError(
            "HOST_UNUSABLE",
            f"{host.name} describes itself in no form of ours",
            hint=f"Run `honesmith hosts setup {host.name}` again.",
        ) from error
    home.hosts.mkdir(mode=0o700, exist_ok=True)
    facts.write(facts_file(home, host.name))
    return facts


def machine_of(home: Home, compute: str) -> Hardware:
    """The hardware that a run with this `compute` is planned for. Raises UserError HOST_*."""
    return facts_of(home, host_of(home, compute)).hardware.measured()


def price_of(home: Home, compute: str) -> float:
    """The price of an hour of one device where a run with this `compute` runs: what config.toml
    says, else what its last check was offered, in dollars; 0 where nobody says."""
    config = home.user_config()
    price = config.price_of(compute)
    host = config.hosts.get(compute.partition(":")[2])
    facts = find_facts(home, host) if host is not None and not price else None
    return price if facts is None else facts.price / max(1, len(facts.hardware.devices))


def add_host(home: Home, name: str, values: Mapping[str, str | int | float]) -> Host:
    """Add a table [hosts.NAME] to config.toml. Raises UserError SETTING_* or BAD_ARGUMENT."""
    if name in home.user_config().hosts:
        raise UserError(
            "BAD_ARGUMENT",
            f"there is a host {name!r} already",
            hint=f"`honesmith hosts remove {name}` takes it out.",
            field="name",
        )
    lines = [f"[hosts.{_key(name)}]", *(f"{key} = {_toml(v)}" for key, v in values.items())]
    before = home.config_file.read_text("utf-8") if home.config_file.exists() else ""
    joint = "\n" if before and not before.endswith("\n") else ""
    _replace_config(home, f"{before}{joint}" + ("\n" if before else "") + "\n".join(lines) + "\n")
    return host_of(home, name)


def remove_host(home: Home, name: str) -> None:
    """Take the table [hosts.NAME] out of config.toml, and forget what was learnt of it."""
    host_of(home, name)
    kept, is_inside = [], False
    for line in home.config_file.read_text("utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text.startswith("["):
            is_inside = text.replace(" ", "") in (f"[hosts.{name}]", f"[hosts.{_key(name)}]")
        if not is_inside:
            kept.append(line)
    _replace_config(home, "\n".join(kept).rstrip("\n") + "\n")
    if name in home.user_config().hosts:
        raise UserError(
            "SETTING_INVALID",
            f"{home.config_file} names {name} in a form that is not taken out by itself",
            hint=f"Delete the keys of hosts.{name} there by hand.",
        )
    facts_file(home, name).unlink(missing_ok=True)


def refuse_while_used(home: Home, name: str) -> None:
    """Raise UserError RUN_STATE while a run of this home is on a host, or is to go there."""
    host = host_of(home, name)
    with Store(home) as store:
        rows = store.list_runs(limit=1000, states=OPEN)
    used_by = [row.run_id for row in rows if row.compute == host.compute]
    if used_by:
        raise UserError(
            "RUN_STATE",
            f"{', '.join(used_by[:5])} is on {name}, or is to go there",
            hint="Wait for it, or cancel it first.",
        )


def _replace_config(home: Home, text: str) -> None:
    """Write config.toml, if the new text can be read. Raises UserError SETTING_*."""
    aside = home.config_file.with_name(f".{home.config_file.name}.new")
    write_text(aside, text)
    try:
        read_config(aside)
        aside.replace(home.config_file)
    finally:
        aside.unlink(missing_ok=True)


def _key(name: str) -> str:
    """A name as a key of TOML."""
    return name if name.replace("-", "").replace("_", "").isalnum() else f'"{name}"'


def _toml(value: str | int | float) -> str:
    """A value of TOML; texts have no character here that would need more."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def shown(home: Home, host: Host) -> dict[str, object]:
    """A host for a listing: what it is, and what the last check found."""
    entry: dict[str, object] = {"host": host.name, "compute": host.compute}
    others = {"slurm", "ray", "sky"} - {host.kind}
    not_shown = {"name", "python"} | others
    entry |= {key: value for key, value in asdict(host).items() if key not in not_shown}
    entry |= rented.shown(home, host.name)
    facts = find_facts(home, host)
    if facts is None:
        return entry | {"ready": False, "hint": str(Hint(f"honesmith hosts setup {host.name}"))}
    devices = [each.name for each in facts.hardware.devices]
    entry |= {"price_per_hour": facts.price} if facts.price else {}
    return entry | {"ready": True, "devices": devices, "checked": round(facts.checked)}

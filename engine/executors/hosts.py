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
from engine.core.hints import Call, Hint
from engine.executors import rented
from engine.home.rows import OPEN
from engine.home.run_dir import Home
from engine.home.store import Store
from engine.home.user_config import Host, read_config
from engine.machine.processes import deployments
from engine.machine.processes.seam import Caps
from engine.records.record import DamagedRecord, Record

KINDS = ("ssh:", "slurm:", "ray:", "sky:")  # before the name of a host, in the setting `compute`
_LOCK_S = 5.0  # seconds to wait for another process that makes the id of the home


class DeviceFacts(Record):
    """A device of a host, as engine/core/hardware.py measures it."""

    id: str
    name: str
    kind: str
    memory_total: int = Field(ge=0)
    memory_free: int = Field(ge=0)
    visible: str = ""
    bf16: bool = False


class HardwareFacts(Record):
    """The hardware of a host: its devices, cores, and bytes of memory and disk."""

    devices: list[DeviceFacts] = Field(min_length=1, max_length=64)
    cores: int = Field(ge=1)
    ram_total: int = Field(ge=0)
    ram_free: int = Field(ge=0)
    disk_free: int = Field(ge=0)
    load: float = 0.0

    def measured(self) -> Hardware:
        """Return the same facts as `Hardware`, the form in which the rest of the engine takes
        them."""
        devices = tuple(Device(**device.model_dump()) for device in self.devices)
        return Hardware(**{**self.model_dump(), "devices": devices})


class HostFacts(Record):
    """What the last check of a host learnt.

    Attributes:
        python: the interpreter there that runs this program.
        packages: versions of the packages that training needs, by name.
        checked: when it was checked, in seconds since the epoch.
        price: dollars for an hour of one rented machine, as it was offered; 0 if it is not rented.
    """

    python: str
    hardware: HardwareFacts
    packages: dict[str, str]
    checked: float
    price: float = Field(default=0.0, ge=0)

    def capabilities(self) -> Caps:
        """Return the hardware and the packages in the form in which executors answer."""
        return Caps(self.hardware.measured(), self.packages)


def host_of(home: Home, name: str) -> Host:
    """Return the host that is named by its name alone, such as "box", or as the setting `compute`
    names it, such as "ssh:box".

    Raises UserError HOST_NOT_FOUND, also if a host "box" exists but is of another kind than "ssh".
    """
    hosts = home.user_config().hosts
    kind, _, name_after_kind = name.partition(":")
    short = name_after_kind if name.startswith(KINDS) else name
    host = hosts.get(short)
    if host is not None and name in (short, host.compute):
        return host
    if host is not None:
        raise UserError(
            "HOST_NOT_FOUND",
            f"{short} is no host of the kind {kind}",
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
    """Return the id by which this home is named on other machines: 12 random hexadecimal digits.
    The first call makes it; it stays the same from then on."""
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
    """Return the path of the file that keeps what the last check of the host `name` learnt."""
    return home.hosts / f"{name}.json"


def find_facts(home: Home, host: Host) -> HostFacts | None:
    """Read what the last check of the host learnt. Returns None if the host was never set up, or
    the file is damaged."""
    try:
        return HostFacts.read(facts_file(home, host.name))
    except (FileNotFoundError, DamagedRecord):
        return None


def facts_of(home: Home, host: Host) -> HostFacts:
    """Read what the last check of the host learnt. Raises UserError HOST_UNUSABLE if there was no
    check yet."""
    facts = find_facts(home, host)
    if facts is None:
        goes_to = f" A single run that is submitted goes to {host.failover} instead."
        raise UserError(
            "HOST_UNUSABLE",
            f"the host {host.name} is not set up",
            hint=f"Run `honesmith hosts setup {host.name}` once."
            + (goes_to if host.failover else ""),
            field="settings.compute",
        )
    return facts


def note_facts(home: Home, host: Host, python: str, described: Mapping[str, object]) -> HostFacts:
    """Check and store what a host says of itself, and return it.

    Args:
        python: the interpreter there that runs this program.
        described: the host's own description: "hardware", "packages" and perhaps "price".

    Raises UserError HOST_UNUSABLE if the description has not the form that is expected.
    """
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
    """Return the hardware of the host that `compute` names, such as "ssh:box", as it was at the
    last check. Raises UserError HOST_NOT_FOUND or HOST_UNUSABLE."""
    return facts_of(home, host_of(home, compute)).hardware.measured()


def price_of(home: Home, compute: str) -> float:
    """Return the price in dollars of an hour of one device at the place `compute`, such as
    "sky:cloud". It is the price in config.toml, or else the one offered at the host's last check;
    0 if neither is known."""
    config = home.user_config()
    price = config.price_of(compute)
    host = config.hosts.get(compute.partition(":")[2])
    if price or host is None:
        return price
    facts = find_facts(home, host)
    if facts is None:
        return price
    return facts.price / max(1, len(facts.hardware.devices))  # the offer is for a whole machine


def add_host(home: Home, name: str, values: Mapping[str, str | int | float]) -> Host:
    """Add a table [hosts.NAME] with these keys and values to the end of config.toml.

    Returns the new host. Raises UserError BAD_ARGUMENT if there is such a host already, SETTING_*
    if a value is not allowed; then the file stays as it was.
    """
    if name in home.user_config().hosts:
        raise UserError(
            "BAD_ARGUMENT",
            f"there is a host {name!r} already",
            hint=f"`honesmith hosts remove {name}` takes it out.",
            field="name",
        )
    lines = [f"[hosts.{_toml_key(name)}]"]
    lines += [f"{key} = {_toml_value(value)}" for key, value in values.items()]
    table = "\n".join(lines) + "\n"
    text = home.config_file.read_text("utf-8") if home.config_file.exists() else ""
    if text:  # an empty line stands before the table
        text += "\n" if text.endswith("\n") else "\n\n"
    _replace_config(home, text + table)
    return host_of(home, name)


def remove_host(home: Home, name: str) -> None:
    """Take the table [hosts.NAME] out of config.toml, and delete what checks learnt of the host.

    Raises UserError HOST_NOT_FOUND if there is no such host, SETTING_INVALID if config.toml defines
    it in another form than a table of its own.
    """
    host_of(home, name)  # raises if there is no such host
    titles = (f"[hosts.{name}]", f"[hosts.{_toml_key(name)}]")
    remaining_lines, is_in_table = [], False
    for line in home.config_file.read_text("utf-8").splitlines():
        without_comment = line.split("#")[0].strip()
        if without_comment.startswith("["):  # here a table begins
            is_in_table = without_comment.replace(" ", "") in titles
        if not is_in_table:
            remaining_lines.append(line)
    _replace_config(home, "\n".join(remaining_lines).rstrip("\n") + "\n")
    if name in home.user_config().hosts:
        raise UserError(
            "SETTING_INVALID",
            f"{home.config_file} names {name} in a form that is not taken out by itself",
            hint=f"Delete the keys of hosts.{name} there by hand.",
        )
    facts_file(home, name).unlink(missing_ok=True)


def refuse_while_used(home: Home, name: str) -> None:
    """Raise UserError RUN_STATE if a run of this home that has not ended is on the host `name`, or
    waits to go there, or if a model is served there."""
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
    for row in deployments.living(home):
        if deployments.config_of(home.deployment(row.deployment_id)).get("compute") == host.compute:
            raise UserError(
                "RUN_STATE",
                f"{name} serves {row.base_name}",
                hint=Hint(
                    "Stop that first:",
                    Call("deploy", {"run_id": row.deployment_id, "action": "stop"}),
                ),
            )


def _replace_config(home: Home, text: str) -> None:
    """Replace config.toml by this text. Raises UserError SETTING_* if the text is no valid
    configuration; then the file stays as it was."""
    aside = home.config_file.with_name(f".{home.config_file.name}.new")
    write_text(aside, text)
    try:
        read_config(aside)
        aside.replace(home.config_file)
    finally:
        aside.unlink(missing_ok=True)


def _toml_key(name: str) -> str:
    """Write a name as a key of TOML: with quotes if it has other characters than letters, digits,
    "-" and "_"."""
    return name if name.replace("-", "").replace("_", "").isalnum() else f'"{name}"'


def _toml_value(value: str | int | float) -> str:
    """Write a value as TOML. Texts are not escaped: those of a host have no such characters."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def shown(home: Home, host: Host) -> dict[str, object]:
    """Return a host's entry for a listing: its settings, what it has rented, and what its last
    check learnt. "ready" is False if it was never set up."""
    entry: dict[str, object] = {"host": host.name, "compute": host.compute}
    other_kinds = {"slurm", "ray", "sky"} - {host.kind}  # tables that say nothing of this host
    left_out = {"name", "python"} | other_kinds
    entry |= {key: value for key, value in asdict(host).items() if key not in left_out}
    entry |= rented.shown(home, host.name)
    facts = find_facts(home, host)
    if facts is None:
        return entry | {"ready": False, "hint": str(Hint(f"honesmith hosts setup {host.name}"))}
    devices = [device.name for device in facts.hardware.devices]
    entry |= {"price_per_hour": facts.price} if facts.price else {}
    return entry | {"ready": True, "devices": devices, "checked": round(facts.checked)}

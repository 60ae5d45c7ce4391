"""What a cluster would cost, by the server's catalogue, held against the limits of the host."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from engine.core.files import JsonObject
from engine.core.hardware import Device, Hardware
from engine.executors.sky.api import SkyApi
from engine.executors.ssh import FarError
from engine.home.config_tables.hosts import SkyOptions
from engine.home.sanitize import one_line
from engine.home.user_config import Host

# Clouds whose machines are the user's own: the catalogue has no price of theirs.
_OWN = ("kubernetes", "k8s", "ssh", "slurm")
_NAMES = {"k8s": "kubernetes"}
_WITHOUT_BF16 = ("V100", "T4", "P100", "K80", "P4", "M60", "RTX6000", "RTX8000")
_GIB = 1 << 30
_MOST = 1e6  # of a number in the catalogue


@dataclass(frozen=True)
class Offer:
    """A kind of machine that can be rented.

    Attributes:
        price: of an hour of the whole machine, in dollars; 0 for one of the user's own.
        device_memory, memory: in GiB; 0 where the catalogue does not say.
    """

    cloud: str
    machine: str
    region: str
    price: float
    devices: int
    device_memory: float = 0.0
    memory: float = 0.0
    cpus: int = 0

    @property
    def in_words(self) -> str:
        """The machine, its cloud, its region and its price, for a message."""
        words = f"{self.machine} at {self.cloud}"
        if self.region:
            words += f" {self.region}"
        return f"{words} for {self.price:.2f} an hour" if self.price else words


def find_offers(api: SkyApi, sky: SkyOptions) -> list[Offer]:
    """List the machines that the server offers for a host with these options, the cheapest first.
    The list is empty for a host without accelerators, because the catalogue does not price those.

    Raises HostLost, HostRefused or FarError.
    """
    if not sky.device_kind:
        return []
    cloud, _, place = sky.infra.partition("/")  # CLOUD, CLOUD/REGION or CLOUD/REGION/ZONE
    cloud, region = _NAMES.get(cloud, cloud), place.partition("/")[0]
    rows = api.offers(sky.device_kind, [cloud] if cloud else [])
    offers = [_offer_from(row, is_spot=sky.spot) for row in rows]
    fitting = [offer for offer in offers if offer is not None and offer.devices == sky.devices]
    if region and cloud not in _OWN:  # a context of Kubernetes is no region of the catalogue
        fitting = [offer for offer in fitting if offer.region in ("", region)]
    return sorted(fitting, key=lambda offer: offer.price)


def _offer_from(row: Sequence[Any], *, is_spot: bool) -> Offer | None:
    """Make an offer from one row of the catalogue (`SkyApi.offers`). With `is_spot` its price is
    that of a spot machine, which may be taken away. Returns None for a row without a price, unless
    the machine is the user's own."""
    cloud, machine, _, devices, cpus, device_memory, memory, price, spot_price, region = row[:10]
    hourly_price = spot_price if is_spot else price
    is_own = str(cloud).lower() in _OWN
    if not _is_amount(hourly_price) and not is_own:
        return None
    return Offer(
        cloud=one_line(str(cloud), 40),
        machine=one_line(str(machine or ""), 80),
        region=one_line(str(region or ""), 60),
        price=0.0 if is_own else _amount_or_0(hourly_price),
        devices=int(_amount_or_0(devices)),
        device_memory=_amount_or_0(device_memory),
        memory=_amount_or_0(memory),
        cpus=int(_amount_or_0(cpus)),
    )


def _amount_or_0(value: object) -> float:
    """Return the number that a catalogue gives, or 0 for anything that is no usable number."""
    return float(value) if _is_amount(value) else 0.0


def _is_amount(value: object) -> TypeGuard[float]:
    """Tell whether a value of the catalogue is a number that can be counted with: not negative,
    finite and not absurdly large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and 0 <= value < _MOST


def allowed_offer(host: Host, offers: Sequence[Offer]) -> Offer | None:
    """Return the cheapest of the `offers` (sorted by price), if it is within the host's max_price.
    Returns None for a host without accelerators: only the server knows the price of its machines,
    and compares it with the limit.

    Raises FarError if nothing is offered, or everything costs more than max_price.
    """
    sky = host.sky
    if not sky.device_kind:
        return None
    where = f" at {sky.infra}" if sky.infra else ""
    if not offers:
        raise FarError(
            "HOST_UNUSABLE",
            f"the SkyPilot server lists no {sky.accelerators}{where}",
            f"`sky show-gpus` lists what there is; then change accelerators or infra of "
            f"[hosts.{host.name}].",
        )
    cheapest = offers[0]
    if sky.max_price and cheapest.price > sky.max_price:
        raise FarError(
            "HOST_UNUSABLE",
            f"the cheapest {sky.accelerators}{where} is {cheapest.in_words}, and max_price is "
            f"{sky.max_price:g}; nothing was launched",
            f"Raise max_price of [hosts.{host.name}], or name cheaper accelerators, or spot = true "
            "(a machine that may be taken away).",
        )
    return cheapest


def machine_of(offer: Offer | None, sky: SkyOptions) -> Hardware:
    """Return the hardware that a run is planned for, before a machine is rented. What the catalogue
    and the options do not say is assumed: memory, cores and disk.

    `offer` is the machine that would be rented; None for one without accelerators.
    """
    if offer is None:
        memory = int(max(sky.memory_gb, 8.0) * 1e9)
        device = Device("cpu", "a rented CPU", "cpu", memory, memory)
        cores = max(1, sky.cpus or 4)
        return Hardware((device,), cores, memory, memory, _disk_bytes(sky), 0.0)
    device_memory = int(offer.device_memory * _GIB)
    kind = sky.device_kind
    has_bf16 = not offer.machine or not kind.upper().startswith(_WITHOUT_BF16)
    devices = tuple(
        Device(f"cuda:{n}", kind, "cuda", device_memory, device_memory, str(n), bf16=has_bf16)
        for n in range(offer.devices)
    )
    ram = int((offer.memory or 32.0) * _GIB)
    cores = max(1, offer.cpus or 8)
    return Hardware(devices, cores, ram, ram, _disk_bytes(sky), 0.0)


def described(hardware: Hardware, packages: JsonObject, price: float) -> JsonObject:
    """Return the description of a host that is stored for plans (`hosts.note_facts`): its hardware,
    the versions of its packages by name, and the dollars for an hour."""
    return {"hardware": asdict(hardware), "packages": packages, "price": price}


def _disk_bytes(sky: SkyOptions) -> int:
    """Return the bytes of a rented machine's disk; 256 GB if the options do not say."""
    return int((sky.disk_gb or 256) * 1e9)

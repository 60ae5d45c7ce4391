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
        """What is rented, where, for how much."""
        what = f"{self.machine} at {self.cloud}" + (f" {self.region}" if self.region else "")
        return f"{what} for {self.price:.2f} an hour" if self.price else what


def find_offers(api: SkyApi, sky: SkyOptions) -> list[Offer]:
    """What the server lists for a host, the cheapest first; empty for a host without accelerators,
    which the catalogue does not price. Raises HostLost, HostRefused or FarError."""
    if not sky.device_kind:
        return []
    cloud, _, place = sky.infra.partition("/")
    cloud, region = _NAMES.get(cloud, cloud), place.partition("/")[0]
    rows = api.offers(sky.device_kind, [cloud] if cloud else [])
    offers = [offer for row in rows if (offer := _read(row, is_spot=sky.spot)) is not None]
    fitting = [each for each in offers if each.devices == sky.devices]
    if region and cloud not in _OWN:  # a context of Kubernetes is no region of the catalogue
        fitting = [each for each in fitting if each.region in ("", region)]
    return sorted(fitting, key=lambda each: each.price)


def _read(row: Sequence[Any], *, is_spot: bool) -> Offer | None:
    """One row of the catalogue; None for one without a price that can be counted with."""
    cloud, machine, _, devices, cpus, device_memory, memory, price, spot_price, region = row[:10]
    asked = spot_price if is_spot else price
    is_own = str(cloud).lower() in _OWN
    if not _is_amount(asked) and not is_own:
        return None
    count = devices if _is_amount(devices) else 0
    return Offer(
        cloud=one_line(str(cloud), 40),
        machine=one_line(str(machine or ""), 80),
        region=one_line(str(region or ""), 60),
        price=float(asked) if _is_amount(asked) and not is_own else 0.0,
        devices=int(count),
        device_memory=float(device_memory) if _is_amount(device_memory) else 0.0,
        memory=float(memory) if _is_amount(memory) else 0.0,
        cpus=int(cpus) if _is_amount(cpus) else 0,
    )


def _is_amount(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and 0 <= value < _MOST


def allowed_offer(host: Host, offers: Sequence[Offer]) -> Offer | None:
    """The cheapest offer within the limits of the host; None for a host without accelerators, whose
    price the server alone holds against the limit.

    Raises FarError where nothing is offered, or all of it is too dear: nothing was launched then.
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
    """The machine that a run is planned for, as far as the catalogue says."""
    if offer is None:
        memory = int(max(sky.memory_gb, 8.0) * 1e9)
        device = Device("cpu", "a rented CPU", "cpu", memory, memory)
        return Hardware((device,), max(1, sky.cpus or 4), memory, memory, _disk(sky), 0.0)
    memory = int(offer.device_memory * _GIB)
    has_bf16 = not offer.machine or not any(
        sky.device_kind.upper().startswith(name) for name in _WITHOUT_BF16
    )
    devices = tuple(
        Device(f"cuda:{n}", sky.device_kind, "cuda", memory, memory, str(n), bf16=has_bf16)
        for n in range(offer.devices)
    )
    ram = int((offer.memory or 32.0) * _GIB)
    return Hardware(devices, max(1, offer.cpus or 8), ram, ram, _disk(sky), 0.0)


def described(hardware: Hardware, packages: JsonObject, price: float) -> JsonObject:
    """What is kept of a host for plans."""
    return {"hardware": asdict(hardware), "packages": packages, "price": price}


def _disk(sky: SkyOptions) -> int:
    return int((sky.disk_gb or 256) * 1e9)

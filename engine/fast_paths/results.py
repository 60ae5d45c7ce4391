"""What trying the fast paths came to, on each device, driver and set of libraries: a file in the
home's cache."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from engine.core.files import read_object, write_json
from engine.core.hardware import Device, driver_version
from engine.home.run_dir import Home
from engine.install import vllm_env
from engine.records.record import Record

# Packages whose version may change whether a path works.
PACKAGES = (
    "honesmith",
    "torch",
    "transformers",
    "triton",
    "liger-kernel",
    "bitsandbytes",
    "flash-attn-3",
)

State = Literal["on", "off", "skipped"]


class PathResult(Record):
    """How one fast path did.

    Attributes:
        name: one of `FAST_PATHS`.
        state: "off" where it must not be used; "skipped" where it could not be tried.
        reason: why it is off or skipped; "" where it is on.
        difference: the largest distance from the plain way's numbers, relative to those; None where
            there are none.
        allowed: the largest difference that rounding explains.
        seconds, plain_seconds: of the fast and of the plain way; None where they were not timed.
    """

    name: str
    state: State
    reason: str = ""
    difference: float | None = None
    allowed: float | None = None
    seconds: float | None = None
    plain_seconds: float | None = None

    @property
    def speedup(self) -> float | None:
        """How many times faster than the plain way; None where it was not timed."""
        if self.seconds is None or self.plain_seconds is None or self.seconds == 0:
            return None
        return self.plain_seconds / self.seconds


class DeviceResults(Record):
    """How all fast paths did on one device.

    Attributes:
        identity: what the results hold for: the device's name, its driver and the packages.
        time: when they were tried, seconds since the epoch.
    """

    identity: dict[str, str]
    time: float
    paths: tuple[PathResult, ...]

    def state_of(self, name: str) -> str:
        """The state of a path; "skipped" for one that was not tried."""
        return next((path.state for path in self.paths if path.name == name), "skipped")

    def with_paths(self, paths: Sequence[PathResult]) -> "DeviceResults":
        """These results with the given ones in place of those of the same names."""
        names = {path.name for path in paths}
        kept = [path for path in self.paths if path.name not in names]
        return self.model_copy(update={"paths": (*kept, *paths)})

    @property
    def off(self) -> dict[str, str]:
        """Name and reason of each path that is switched off."""
        return {path.name: path.reason for path in self.paths if path.state == "off"}

    def is_on(self, name: str) -> bool:
        """Whether the path of this name was tried and works."""
        return any(path.name == name and path.state == "on" for path in self.paths)


def identity_of(device: Device, home: Home) -> dict[str, str]:
    """What may change whether a path works on the device: its name, its driver, the vLLM that is
    set up, and the packages of this interpreter; "" for one that is not installed."""
    facts = _outside_this_interpreter(device, home)
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = ""
    return facts


def _outside_this_interpreter(device: Device, home: Home) -> dict[str, str]:
    """The part of an identity that is the same whichever interpreter asks."""
    return {
        "device": device.name,
        "driver": driver_version() if device.kind == "cuda" else "",
        "vllm": vllm_env.version_in(home),
    }


def why_off(home: Home, device: Device, name: str) -> str:
    """Why the path `name` is switched off on the device, by the newest trial there with this driver
    and this vLLM; "" where it is not, or was not tried.

    It is asked by processes without torch, which cannot tell what else a worker has installed.
    """
    facts = _outside_this_interpreter(device, home)
    for results in all_results(home):
        if facts.items() <= results.identity.items():
            return results.off.get(name, "")
    return ""


def read_results(home: Home, identity: Mapping[str, str]) -> DeviceResults | None:
    """The results that hold for this identity; None where there are none yet.

    Raises DamagedRecord for an entry of the file that cannot be read.
    """
    entry = read_object(home.fast_paths).get(_key(identity))
    return _parsed(home, entry) if entry is not None else None


def all_results(home: Home) -> list[DeviceResults]:
    """The results of every device and set of libraries that was tried, the newest first. Raises
    DamagedRecord."""
    entries = read_object(home.fast_paths).values()
    results = [_parsed(home, entry) for entry in entries]
    return sorted(results, key=lambda result: result.time, reverse=True)


def keep_results(home: Home, results: DeviceResults) -> None:
    """Store the results in place of earlier ones of the same identity."""
    home.fast_paths.parent.mkdir(parents=True, exist_ok=True)
    stored = read_object(home.fast_paths)
    write_json(home.fast_paths, stored | {_key(results.identity): results.to_json()})


def _parsed(home: Home, entry: object) -> DeviceResults:
    """An entry of the file as a record. Raises DamagedRecord."""
    return DeviceResults.parse(json.dumps(entry), str(home.fast_paths))


def _key(identity: Mapping[str, str]) -> str:
    """The key of an identity in the file."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

"""The results of trying the fast paths (faster ways to compute), for each device, driver and set of
libraries. They are kept in a file in the home's cache."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from engine.core.files import read_object, write_json
from engine.core.hardware import Device, driver_version
from engine.home.run_dir import Home
from engine.machine.install import vllm_env
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
    """The result of trying one fast path.

    Attributes:
        name: one of `FAST_PATHS`.
        state: "on" if it works; "off" if it must not be used; "skipped" if it could not be tried.
        reason: why it is off or skipped; "" if it is on.
        difference: the largest distance from the plain way's numbers, relative to these; None if
            there are no numbers.
        allowed: the largest difference that rounding explains.
        seconds, plain_seconds: of the fast and of the plain way; None if they were not timed.
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
        """How many times as fast as the plain way the path is; None if it was not timed."""
        if self.seconds is None or self.plain_seconds is None or self.seconds == 0:
            return None
        return self.plain_seconds / self.seconds


class DeviceResults(Record):
    """The results of all fast paths on one device.

    Attributes:
        identity: what the results hold for: the device's name, its driver and the packages.
        time: when the paths were tried, in seconds since the epoch.
    """

    identity: dict[str, str]
    time: float
    paths: tuple[PathResult, ...]

    def state_of(self, name: str) -> str:
        """Return the state of a path; "skipped" if it was not tried."""
        for path in self.paths:
            if path.name == name:
                return path.state
        return "skipped"

    def with_paths(self, paths: Sequence[PathResult]) -> "DeviceResults":
        """Return a copy in which the results `paths` replace those of the same names; results with
        new names are added."""
        replaced_names = {path.name for path in paths}
        other_paths = [path for path in self.paths if path.name not in replaced_names]
        return self.model_copy(update={"paths": (*other_paths, *paths)})

    @property
    def off(self) -> dict[str, str]:
        """Name and reason of each path that is switched off."""
        return {path.name: path.reason for path in self.paths if path.state == "off"}

    def is_on(self, name: str) -> bool:
        """Return whether the path of this name was tried and works."""
        return any(path.name == name and path.state == "on" for path in self.paths)


def identity_of(device: Device, home: Home) -> dict[str, str]:
    """Return the facts that may change whether a fast path works on the device, by name.

    They are the device's name, its driver, the vLLM that is set up, and the version of each of the
    `PACKAGES` in this interpreter; "" for one that is not installed.
    """
    facts = _outside_this_interpreter(device, home)
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = ""
    return facts


def _outside_this_interpreter(device: Device, home: Home) -> dict[str, str]:
    """Return the part of a device's identity that is the same for every interpreter: the device,
    its driver, and the vLLM that is set up."""
    return {
        "device": device.name,
        "driver": driver_version() if device.kind == "cuda" else "",
        "vllm": vllm_env.version_in(home),
    }


def why_off(home: Home, device: Device, name: str) -> str:
    """Return the reason why the fast path `name` is switched off on the device, by the newest trial
    with this driver and this vLLM. Returns "" if it is not switched off, or was not tried.

    Processes without torch call this. They cannot tell which packages a worker's interpreter has,
    so trials with any packages count.
    """
    facts = _outside_this_interpreter(device, home)
    for results in all_results(home):
        if facts.items() <= results.identity.items():  # the identity includes all these facts
            return results.off.get(name, "")
    return ""


def read_results(home: Home, identity: Mapping[str, str]) -> DeviceResults | None:
    """Return the stored results that hold for this `identity` (device, driver and packages); None
    if there are none yet. Raises DamagedRecord if they cannot be read."""
    entry = read_object(home.fast_paths).get(_key(identity))
    return _parsed(home, entry) if entry is not None else None


def all_results(home: Home) -> list[DeviceResults]:
    """Return the stored results of every device and set of packages that was tried, the newest
    first. Raises DamagedRecord if one of them cannot be read."""
    entries = read_object(home.fast_paths).values()
    results = [_parsed(home, entry) for entry in entries]
    return sorted(results, key=lambda result: result.time, reverse=True)


def keep_results(home: Home, results: DeviceResults) -> None:
    """Store the results in place of earlier ones of the same identity."""
    home.fast_paths.parent.mkdir(parents=True, exist_ok=True)
    stored = read_object(home.fast_paths)
    write_json(home.fast_paths, stored | {_key(results.identity): results.to_json()})


def _parsed(home: Home, entry: object) -> DeviceResults:
    """Parse an entry of the file of results. Raises DamagedRecord if it has a wrong form."""
    return DeviceResults.parse(json.dumps(entry), str(home.fast_paths))


def _key(identity: Mapping[str, str]) -> str:
    """Return the key of an identity in the file of results: a hash, so that the key is short."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]

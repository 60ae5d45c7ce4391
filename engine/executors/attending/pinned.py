"""What training needs, in the versions of this side, so that a run elsewhere computes the same."""

import importlib.metadata
from collections.abc import Iterator, Sequence
from functools import cache

from packaging.requirements import Requirement

from engine.machine.install.setup_env import requirements


@cache  # it reads the metadata of all of them, and a lost connection is made anew often
def pinned(*extras: str) -> Sequence[str]:
    """What training needs, each package in the version that is installed here, with what those
    need. Which build of torch fits is for the other side to say, so its version alone is named."""
    wanted: dict[str, str] = {}
    for requirement in (Requirement(line) for line in requirements(*extras)):
        _pin(requirement, wanted)
    return tuple(f"{name}{version}" for name, version in sorted(wanted.items()))


def _pin(requirement: Requirement, wanted: dict[str, str]) -> None:
    """Add a package and what it needs to `wanted`; one that is not installed here keeps its
    range."""
    name = requirement.name.lower().replace("_", "-")
    if name in wanted:
        return
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        wanted[name] = str(requirement.specifier)
        return
    wanted[name] = f"=={package.version.partition('+')[0]}"
    if name == "torch":  # its build over there brings what it needs
        return
    for needed in _needs(package, requirement.extras):
        _pin(needed, wanted)


def _needs(package: importlib.metadata.Distribution, extras: set[str]) -> Iterator[Requirement]:
    """What a package needs here, with these of its extras."""
    for line in package.requires or []:
        needed = Requirement(line)
        places = [{"extra": extra} for extra in ("", *extras)]
        if needed.marker is None or any(needed.marker.evaluate(place) for place in places):
            yield needed

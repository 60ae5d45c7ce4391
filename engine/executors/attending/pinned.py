"""What training needs, in the versions of this side, so that a run elsewhere computes the same."""

import importlib.metadata
from collections.abc import Iterator, Sequence
from functools import cache

from packaging.requirements import Requirement

from engine.machine.install.setup_env import requirements


@cache  # it reads the metadata of all of them, and a lost connection is made anew often
def pinned(*extras: str) -> Sequence[str]:
    """Return requirements such as "numpy==2.1.0" for all packages that training needs with these
    `extras` of this project, and for those that they need in turn, sorted by name.

    Each has the version that is installed here. Of torch only the version is named, not the build
    (such as +cu121): which build fits depends on the host.
    """
    versions: dict[str, str] = {}
    for line in requirements(*extras):
        _pin(Requirement(line), versions)
    return tuple(f"{name}{version}" for name, version in sorted(versions.items()))


def _pin(requirement: Requirement, versions: dict[str, str]) -> None:
    """Add a package, and all packages that it needs, to `versions`: name -> "==VERSION", as it is
    installed here. A package that is not installed here keeps the range that is required."""
    name = requirement.name.lower().replace("_", "-")
    if name in versions:
        return
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        versions[name] = str(requirement.specifier)
        return
    versions[name] = f"=={package.version.partition('+')[0]}"
    if name == "torch":  # what it needs differs from build to build, so pip decides on the host
        return
    for dependency in _dependencies(package, requirement.extras):
        _pin(dependency, versions)


def _dependencies(
    package: importlib.metadata.Distribution, extras: set[str]
) -> Iterator[Requirement]:
    """Yield what a package needs on this machine, if it is installed with these of its extras."""
    for line in package.requires or []:
        dependency = Requirement(line)
        environments = [{"extra": extra} for extra in ("", *extras)]
        marker = dependency.marker  # a condition, such as: extra == "gpu"
        if marker is None or any(marker.evaluate(environment) for environment in environments):
            yield dependency

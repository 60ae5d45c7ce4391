"""Which fast paths (faster ways to compute, engine/machine/fast_paths) this process must not use.

They are set once when a worker starts, from what was tried on its device. The code that has a
faster and a plain way to compute asks here.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engine.machine.fast_paths.catalogue import FAST_PATHS

_reasons: dict[str, str] = {}


def switch_off(reasons: Mapping[str, str]) -> None:
    """Use none of these paths from now on. `reasons` maps each path's name to the reason. Names
    that this version does not know are ignored."""
    _reasons.update({name: why for name, why in reasons.items() if name in FAST_PATHS})


def is_off(name: str) -> bool:
    """Whether the path `name` must not be used. Raises KeyError if the catalogue has no path of
    that name."""
    FAST_PATHS[name]  # raises KeyError for a misspelt name
    return name in _reasons


def why_off(name: str) -> str:
    """The reason why the path `name` is switched off; "" if it is on."""
    return _reasons.get(name, "")


def reasons() -> dict[str, str]:
    """The name and reason of each path that is switched off."""
    return dict(_reasons)


@contextmanager
def without(name: str) -> Iterator[None]:
    """Switch the path `name` off inside the context, as it is on a device where it does not
    work."""
    with _restored():
        _reasons[name] = "for comparison"
        yield


@contextmanager
def everything_on() -> Iterator[None]:
    """Switch every path on inside the context, whatever was switched off before."""
    with _restored():
        _reasons.clear()
        yield


@contextmanager
def _restored() -> Iterator[None]:
    """Restore on exit the paths that were switched off on entry."""
    reasons_before = dict(_reasons)
    try:
        yield
    finally:
        _reasons.clear()
        _reasons.update(reasons_before)

"""Which fast paths (faster ways to compute, engine/machine/fast_paths) this process must not use.

They are set once when a worker starts, from what was tried on its device. The code that has a
faster and a plain way to compute asks here.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engine.machine.fast_paths.catalogue import FAST_PATHS

_reasons: dict[str, str] = {}


def switch_off(reasons: Mapping[str, str]) -> None:
    """Switch off fast paths (faster ways to compute) for the rest of this process. `reasons` maps
    each path's name to the reason. Names that this version does not know are ignored."""
    _reasons.update({name: why for name, why in reasons.items() if name in FAST_PATHS})


def is_off(name: str) -> bool:
    """Tell whether the fast path `name` (a faster way to compute) must not be used. Raises KeyError
    if the catalogue has no path of that name."""
    FAST_PATHS[name]  # raises KeyError for a misspelt name
    return name in _reasons


def why_off(name: str) -> str:
    """Return why the fast path `name` (a faster way to compute) is switched off; "" if it is on."""
    return _reasons.get(name, "")


def reasons() -> dict[str, str]:
    """Return the reason for each fast path that is switched off, by the path's name."""
    return dict(_reasons)


@contextmanager
def without(name: str) -> Iterator[None]:
    """Context manager that switches off the fast path `name`, as it is on a device where it does
    not work. On exit everything is as before."""
    with _restored():
        _reasons[name] = "for comparison"
        yield


@contextmanager
def everything_on() -> Iterator[None]:
    """Context manager that switches every fast path on, whatever was switched off before. On exit
    everything is as before."""
    with _restored():
        _reasons.clear()
        yield


@contextmanager
def _restored() -> Iterator[None]:
    """Context manager that restores on exit which paths were switched off on entry."""
    reasons_before = dict(_reasons)
    try:
        yield
    finally:
        _reasons.clear()
        _reasons.update(reasons_before)

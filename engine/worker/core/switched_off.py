"""Which fast paths (engine/fast_paths) this process must not use.

Set once when a worker starts, from what was tried on its device; read where a faster and a plain
way part.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engine.fast_paths.catalogue import FAST_PATHS

_reasons: dict[str, str] = {}


def switch_off(reasons: Mapping[str, str]) -> None:
    """Use none of these paths from now on. `reasons`: name of each, and why; a name that this
    version does not know is left out."""
    _reasons.update({name: why for name, why in reasons.items() if name in FAST_PATHS})


def is_off(name: str) -> bool:
    """Whether the path of this name must not be used. Raises KeyError for a name that is not in the
    catalogue."""
    FAST_PATHS[name]
    return name in _reasons


def why_off(name: str) -> str:
    """Why the path is switched off; "" where it is on."""
    return _reasons.get(name, "")


def reasons() -> dict[str, str]:
    """Name and reason of each path that is switched off."""
    return dict(_reasons)


@contextmanager
def without(name: str) -> Iterator[None]:
    """Context manager: the path `name` is switched off, as it is where it does not work."""
    with _restored():
        _reasons[name] = "for comparison"
        yield


@contextmanager
def everything_on() -> Iterator[None]:
    """Context manager: every path is used, whatever was switched off."""
    with _restored():
        _reasons.clear()
        yield


@contextmanager
def _restored() -> Iterator[None]:
    """Context manager: on leaving it, the same paths are switched off as on entering it."""
    reasons_before = dict(_reasons)
    try:
        yield
    finally:
        _reasons.clear()
        _reasons.update(reasons_before)

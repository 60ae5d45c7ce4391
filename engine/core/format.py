"""Numbers as people say them."""


def counted(number: int, noun: str, several: str = "") -> str:
    """A number with its noun: `1 run`, `2 runs`. `several` is the plural of a noun that takes more
    than an s, such as "entries"."""
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


def size(count: float) -> str:
    """A number of bytes in words: `1.5 GB`, `632.0 MB`, `9 kB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"


def words(hours: float) -> str:
    """A duration, given in hours, as text: "40 s", "12 min" or "3.5 h"; "1 s" at least."""
    seconds = hours * 3600
    if seconds < 90:  # 1.5 min
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:  # 1.5 h
        return f"{seconds / 60:.0f} min"
    return f"{hours:.1f} h"

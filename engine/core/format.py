"""Numbers as people say them. A share below 1 is never shown as all, nor one above 0 as none."""

from urllib.parse import urlsplit

_MOST_MORE_DIGITS = 9  # that a number near an end gets


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


def percent(share: float, digits: int = 1, unit: str = " %") -> str:
    """A share in percent, such as "41.2 %"; only 0 and 1 are shown as 0 and 100. With more digits
    where it takes them: 1,999 of 2,000 is "99.95 %"."""
    return f"{_fixed(100 * share, digits, (0.0, 100.0))}{unit}"


def whole_percent(share: float) -> str:
    """A share in whole percent within a sentence, such as "41%"; with more digits where it would be
    shown as all or none: 1,995 of 2,000 is "99.8%"."""
    return percent(share, digits=0, unit="%")


def decimal(value: float, digits: int = 3) -> str:
    """A number with `digits` digits after the point, such as "0.310". A number between 0 and 1 gets
    more of them where it would be shown as one of the two: "0.9995"."""
    return _fixed(value, digits, (0.0, 1.0))


def significant(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits, such as "0.412"; one below 1 gets more of them
    where it would be shown as 1: "0.9996"."""
    for more in range(_MOST_MORE_DIGITS):
        text = f"{value:.{digits + more}g}"
        if not (0.0 < value < 1.0 and float(text) == 1.0):
            return text
    return f"{value:.{digits}g}"


def _fixed(value: float, digits: int, ends: tuple[float, float]) -> str:
    """A number with `digits` digits after the point, or with more where it lies between the two
    `ends` and would be shown as one of them. Beyond `_MOST_MORE_DIGITS` more it is an end."""
    low, high = ends
    for more in range(_MOST_MORE_DIGITS):
        text = f"{value:.{digits + more}f}"
        if not (low < value < high and float(text) in ends):
            return text
    return f"{value:.{digits}f}"


def host_of(url: str) -> str:
    """The host of a URL, by which people know the provider; "" where it has none."""
    return urlsplit(url).hostname or ""

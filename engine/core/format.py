"""Numbers as text for people. Only an exact 0 or 1 is written as none or all of something."""

from urllib.parse import urlsplit

_MOST_MORE_DIGITS = 9  # the most extra digits for a number that would be shown as 0 or 1


def counted(number: int, noun: str, several: str = "") -> str:
    """Write a number with its noun: "1 run", "2,000 runs".

    `noun` is the singular. `several` is the plural, such as "entries"; "" means the noun and an s.
    """
    plural = several or f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def size(count: float) -> str:
    """Write a number of bytes (`count`) with a decimal unit: "1.5 GB", "632.0 MB" or "9 kB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"


def words(hours: float) -> str:
    """Write a duration of `hours` in a fitting unit: "40 s", "12 min", "3.5 h"; at least "1 s"."""
    seconds = hours * 3600
    if seconds < 90:  # 1.5 min
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:  # 1.5 h
        return f"{seconds / 60:.0f} min"
    return f"{hours:.1f} h"


def percent(share: float, digits: int = 1, unit: str = " %") -> str:
    """Write a share, from 0 to 1, in percent with `digits` digits after the point: "41.2 %".

    Only exactly 0 and 1 are written as 0 and 100: a share near them gets more digits, so 1,999 of
    2,000 is "99.95 %". `unit` is written behind the number.
    """
    return f"{_fixed(100 * share, digits, (0.0, 100.0))}{unit}"


def whole_percent(share: float) -> str:
    """Write a share, from 0 to 1, in whole percent: "41%".

    A share that would be rounded to 0 or 100 gets more digits: 1,995 of 2,000 is "99.8%".
    """
    return percent(share, digits=0, unit="%")


def decimal(value: float, digits: int = 3) -> str:
    """Write a number with `digits` digits after the point, such as "0.310".

    A number between 0 and 1 gets more digits if it would be rounded to 0 or 1, such as "0.9995".
    """
    return _fixed(value, digits, (0.0, 1.0))


def significant(value: float, digits: int = 3) -> str:
    """Write a number with `digits` significant digits, such as "0.412".

    A number below 1 gets more digits if it would be rounded to 1, such as "0.9996".
    """
    for extra_digits in range(_MOST_MORE_DIGITS):
        text = f"{value:.{digits + extra_digits}g}"
        if not (0.0 < value < 1.0 and float(text) == 1.0):
            return text
    return f"{value:.{digits}g}"


def _fixed(value: float, digits: int, ends: tuple[float, float]) -> str:
    """Write a number with `digits` digits after the point.

    A number between the two `ends` that would be rounded to one of them gets more digits, but fewer
    than `_MOST_MORE_DIGITS`; a number even closer is rounded to the end.
    """
    low, high = ends
    for extra_digits in range(_MOST_MORE_DIGITS):
        text = f"{value:.{digits + extra_digits}f}"
        if not (low < value < high and float(text) in ends):
            return text
    return f"{value:.{digits}f}"


def host_of(url: str) -> str:
    """Return the host name in a URL, by which people know a provider; "" if the URL has none."""
    return urlsplit(url).hostname or ""

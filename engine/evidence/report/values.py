"""Values as text for people."""

from engine.core.format import percent


def duration(hours: float) -> str:
    """Hours as text in a fitting unit: "40 s", "1.5 min", "3.2 h"."""
    seconds = hours * 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:  # 90 minutes
        return f"{seconds / 60:.1f} min"
    return f"{hours:.1f} h"


def value_text(value: object) -> str:
    """A setting or a number as text.

    Floats get four digits, booleans become yes or no, None and empty lists become "none". The items
    of a list are joined by commas.
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        return ", ".join(value_text(item) for item in value) or "none"
    return str(value)


def signed(value: float, is_share: bool) -> str:
    """A difference as text with its sign: "+3.1 points" for shares, "−0.2" for others."""
    if is_share:
        return f"{100 * value:+.1f} points".replace("-", "−")
    return f"{value:+.3g}".replace("-", "−")


def axis_text(value: float, is_share: bool) -> str:
    """A value as text, short enough for an axis: "12 %" for shares, else "0.5", "12k", "3e−5".

    Numbers that are no shares have a minus sign instead of a hyphen.
    """
    if is_share:
        return _percent_text(value)
    magnitude = abs(value)
    if magnitude >= 1e6 or 0 < magnitude < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        text = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    elif magnitude >= 10_000:
        text = f"{value / 1000:.3g}k"
    elif magnitude >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.3g}"
    return text.replace("-", "−")


def _percent_text(share: float) -> str:
    """A share as text, such as "12 %" or "1.5 %"."""
    # From 10 % on without decimals; 9.95 % would be rounded to 10.0.
    text = f"{100 * share:.1f}" if abs(share) < 0.0995 else percent(share, digits=0, unit="")
    return f"{text.removesuffix('.0')} %".replace("-0 %", "0 %")  # no minus before a rounded 0

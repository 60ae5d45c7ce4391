"""Values as text for people."""


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

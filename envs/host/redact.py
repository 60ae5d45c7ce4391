"""Values of secrets are taken out of everything that leaves an env process."""

import base64
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

MIN_LENGTH = 4  # shorter values occur by chance in ordinary text


class Redactor:
    """Replaces each secret's value, also base64, URL and JSON encoded, by `[secret NAME]`."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        pairs: dict[bytes, bytes] = {}
        for name, value in secrets.items():
            if len(value) < MIN_LENGTH:
                continue
            for form in _forms(value):
                pairs[form] = f"[secret {name}]".encode()
        # Longer forms first: a quoted value may contain the plain one.
        self._pairs = sorted(pairs.items(), key=lambda pair: -len(pair[0]))

    def clean(self, data: bytes) -> bytes:
        """`data` without any of the values."""
        for form, replacement in self._pairs:
            if form in data:
                data = data.replace(form, replacement)
        return data

    def clean_json(self, value: Any) -> Any:
        """A JSON value with every text in it cleaned."""
        if not self._pairs:
            return value
        if isinstance(value, str):
            return self.clean(value.encode("utf-8", "surrogatepass")).decode(
                "utf-8", "surrogatepass"
            )
        if isinstance(value, list):
            return [self.clean_json(item) for item in value]
        if isinstance(value, dict):
            return {self.clean_json(key): self.clean_json(item) for key, item in value.items()}
        return value


def _forms(value: str) -> set[bytes]:
    raw = value.encode("utf-8", "surrogateescape")
    quoted = (
        urllib.parse.quote(raw, safe=""),
        urllib.parse.quote(raw),
        urllib.parse.quote_plus(raw),
    )
    forms = {raw, *(text.encode() for text in quoted)}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False), repr(value)):
        forms.add(text[1:-1].encode("utf-8", "surrogateescape"))
    # Base64 in the middle of a longer text shifts by 0, 1 or 2 bytes; the unpadded core of each.
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + raw)
        core = encoded[(0, 2, 3)[shift] : len(encoded) - (0, 3, 2)[(len(raw) + shift) % 3]]
        if len(core) >= 2 * MIN_LENGTH:
            forms.add(core)
            forms.add(core.translate(bytes.maketrans(b"+/", b"-_")))
    return forms

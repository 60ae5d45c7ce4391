"""A stand-in for uv and pip where an environment is built."""

import subprocess
from collections.abc import Sequence


class Installer:
    """Notes the commands it is given; fails one that has one of the words in it."""

    def __init__(self, *fail: str) -> None:
        self.calls: list[list[str]] = []
        self._fail = fail

    def __call__(self, argv: Sequence[str]) -> None:
        self.calls.append(list(argv))
        if any(word in argv for word in self._fail):
            raise subprocess.CalledProcessError(2, argv)

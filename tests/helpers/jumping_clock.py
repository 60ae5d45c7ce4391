"""A wall clock that jumps, for Python processes that are started while it is followed.

libfaketime would move it under the C library too, but of short sleeps it makes errors: Python waits
until a moment of the monotonic clock, which the library sets back below zero when it has passed.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


class JumpingClock:
    """Monotonic clocks stay as they are, as on a machine whose wall clock is set.

    Args:
        file: says by how many seconds the clock is off; read anew at each look.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.jump(0.0)

    def jump(self, seconds: float) -> None:
        """Be off by so much from now on."""
        aside = self._file.with_suffix(".aside")
        aside.write_text(str(seconds))
        os.replace(aside, self._file)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Processes that are started meanwhile, and theirs, have this clock."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(Path(__file__).parent / "injected"))
            patch.setenv("HONESMITH_TEST_CLOCK", str(self._file))
            yield

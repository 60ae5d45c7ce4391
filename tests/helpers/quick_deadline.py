"""A pytest plugin of `make quick`: after QUICK_SECONDS of tests no further one starts."""

import os
import time

import pytest

_LIMIT_S = float(os.environ.get("QUICK_SECONDS", "inf"))
_began: list[float] = []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if not _began:
        _began.append(time.monotonic())
    if time.monotonic() - _began[0] > _LIMIT_S:
        pytest.skip("no time left for it here; make test runs it")

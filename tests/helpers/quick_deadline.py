"""A pytest plugin of `make quick`: no test starts after the time in QUICK_UNTIL (unix seconds)."""

import os
import time

import pytest

UNTIL = float(os.environ.get("QUICK_UNTIL", "inf"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > UNTIL:
        pytest.skip("no time left for it here; make test runs it")
